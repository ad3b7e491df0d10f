"""The cells of the zoo as a Markdown page."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers

from tests.zoo.measure import Cell
from tests.zoo.others import others

_GATHERED = re.compile(r"gathered: %\S+ .*?(aten::\w+|\w+::\w+).*\(([\d,]+) bytes")


def read(path: Path) -> list[Cell]:
    """The cells measured so far, in the order of their models."""
    if not path.exists():
        return []
    cells = [Cell.model_validate_json(line) for line in path.read_text().splitlines()]
    return sorted(cells, key=lambda cell: (cell.model, cell.attention != "sdpa", cell.num_ranks))


def markdown(cells: list[Cell]) -> str:
    """The page: what was measured, and for each kind of model the counts and a row for each attention."""
    today = dt.datetime.now(tz=dt.UTC).date()
    elsewhere = others()
    return "\n".join(
        [
            "# The zoo: models against one device",
            "",
            "<!-- written by `make zoo`; do not edit -->",
            "",
            f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
            f"{today}.",
            "",
            _EXPLANATION.strip(),
            "",
            *_section("Causal language models of transformers", [c for c in cells if c.model not in elsewhere]),
            *_section(
                "Encoders, encoder-decoders, images and sound, models from elsewhere",
                [c for c in cells if c.model in elsewhere],
            ),
        ]
    )


def diffusion_markdown(cells: list[Cell]) -> str:
    """The page of diffusion transformers: counts, and a row for each model."""
    rows: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.model, cell.num_ranks)):
        rows.setdefault(cell.model, []).append(cell)
    counts = Counter(map(_rank, rows.values()))
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers"))
    return "\n".join(
        [
            "# The zoo of diffusion transformers against one device",
            "",
            "<!-- written by `make zoo-diffusion`; do not edit -->",
            "",
            f"{', '.join(versions)}, Python {platform.python_version()}, {dt.datetime.now(tz=dt.UTC).date()}.",
            "",
            _DIFFUSION.strip(),
            "",
            "| | models |",
            "|---|---:|",
            *(f"| {what} | {counts[rank]} |" for rank, what in enumerate(_RANKS)),
            f"| all | {len(rows)} |",
            "",
            "| model | result, P = 2 / 3 / 4 | whole, P = 4 | sent, by hand | gathered on each rank at P = 4 |",
            "|---|---|---:|---|---|",
            *(_diffusion_row(found) for found in sorted(rows.values(), key=lambda row: (_rank(row), row[0].model))),
            "",
        ]
    )


def _diffusion_row(cells: list[Cell]) -> str:
    last = cells[-1]
    result = " / ".join(dict.fromkeys(map(_result, cells)))
    if last.status != "exact":
        return f"| {last.model} | {result} | | | |"
    sent = f"{last.forward_bytes:,}, {last.bytes_by_hand:,}"
    return f"| {last.model} | {result} | {last.whole:.1%} | {sent} | {_gathered(last)} |"


_DIFFUSION = """
Transformers of diffusers that denoise images and videos, at a tiny size with random weights, in float64 and training
mode: noisy latents, states of a text and times go in, and the loss is the mean squared error of what comes out. A batch
has two rows of 45 patches (3 frames of 3 x 5) and 7 tokens of text, of which two are padding in the second row; none of
these numbers is a multiple of 2 or 4. There are 4 heads, so that at P = 3 keys and values are gathered. The loss and
**every gradient** on P simulated ranks are compared with one device.

- *exact*: the errors of the loss / of the worst gradient, as in [zoo.md](zoo.md); `f32`: of the same graph with
  float64 in the place of the model's casts to float32 and bfloat16.
- *whole*: of the operations of matrix products, the share that every rank computes whole: embeddings of times and
  modulations, which a batch has once. At these sizes it is far larger than at those of a video.
- *sent*: bytes that a rank sends forward at P = 4, and those of Ulysses by hand: four all-to-alls in each attention
  within a sequence, which is what the plans for context parallelism that diffusers ships send, where a model has one.
  Where both differ, AutoSP also gathers text, joins it to the patches, and gathers what comes out for its loss; chunks
  have padding, as P does not divide 45.
- *gathered*: how many of which operator run on whole values on every rank, and the bytes of these values.
- *not applicable*: the model does not compile to one graph on one device, as it reads the lengths of texts, or whether
  there is an image. It runs in several graphs, and what crosses from one to the next is gathered.
"""


def mesh_markdown(cells: list[Cell], missing: Sequence[str] = ()) -> str:
    """The page of a mesh: counts, and a row for each model; `missing` are models that were not run."""
    rows = sorted(cells, key=lambda cell: (_rank([cell]), cell.model))
    counts = Counter((cell.over or "none", cell.status) for cell in rows)
    return "\n".join(
        [
            "# The zoo on a mesh: models by three parallelisms against one device",
            "",
            "<!-- written by `make zoo-mesh`; do not edit -->",
            "",
            f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
            f"{dt.datetime.now(tz=dt.UTC).date()}.",
            "",
            _MESH.strip(),
            "",
            "| mesh | result | models |",
            "|---|---|---:|",
            *(f"| {over} | {status} | {count} |" for (over, status), count in sorted(counts.items(), reverse=True)),
            *([f"| | not run | {len(missing)} |"] if missing else []),
            f"| | all | {len(rows) + len(missing)} |",
            "",
            "| model | attention | result | in shards, dp / tp | sent forward, dp / sp / tp | gathered on each rank |",
            "|---|---|---|---|---|---|",
            *(_mesh_row(cell) for cell in rows),
            *([""] if missing else []),
            *([f"Not run: {', '.join(missing)}."] if missing else []),
            "",
        ]
    )


def _mesh_row(cell: Cell) -> str:
    held = " / ".join(f"{cell.held[axis]:.0%}" if axis in cell.held else "-" for axis in ("dp", "tp"))
    sent = " / ".join(str(cell.sent.get(axis, 0)) if axis in cell.held else "-" for axis in ("dp", "sp", "tp"))
    columns = (cell.model, cell.attention, _result(cell), held, sent, _gathered(cell))
    return f"| {' | '.join(columns)} |" if cell.held else f"| {' | '.join(columns[:3])} | | | |"


def _section(title: str, cells: list[Cell]) -> list[str]:
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.model, cell.attention), []).append(cell)
    models = {model for model, _ in rows}
    best = {m: min((_rank(found) for (model, _), found in rows.items() if model == m)) for m in models}
    counts = Counter(best.values())
    return [
        f"## {title}",
        "",
        "| best of sdpa and eager | models |",
        "|---|---:|",
        *(f"| {what} | {counts[rank]} |" for rank, what in enumerate(_RANKS)),
        f"| all | {len(models)} |",
        "",
        "| model | attention | result, P = 2 / P = 4 | gathered on each rank at P = 2 |",
        "|---|---|---|---|",
        *(_row(found) for _, found in sorted(rows.items(), key=lambda row: (best[row[0][0]], row[0][0]))),
        "",
    ]


_MESH = """
Every causal language model of [zoo.md](zoo.md), at the same tiny sizes, by
`ZERO3 | AUTOSP | from_transformers(model, "tp")` on a mesh of dp=2 x sp=2 x tp=2: eight simulated ranks in one process.
Where a model ships no tensor-parallel plan, the tensor axis is left out, and the mesh has four ranks. The two ranks
along `dp` have batches of their own of two rows, parameters are at rest in shards along `dp` and `tp`, and the sequence
is cut along `sp`. The loss (the mean over `dp`) and **every gradient**, on each rank that holds it, are compared with
one device, whose loss is the mean of both batches' losses.

- *exact*: the errors of the loss / of the worst gradient, relative to their largest entries (of a gradient at least
  1e-6 of the largest of all); the bar of both is 1e-9. Where a model casts to float32, both sides cast to float64.
- *refused*: the sentence that the user reads.
- *not applicable*: the model does not build at a tiny size, does not run, or does not compile to one graph on one
  device.
- *in shards*: of the entries of the parameters that the graph reads, the share that ranks hold in shards at rest over
  each axis. Over `tp` it is what the plan of the model says: some plans shard only the head, or only experts.
- *sent forward*: collectives of the forward pass over each axis.
- *gathered*: how many of which operator run on values that are gathered over an axis, and the bytes of these values.

The attention implementation is `sdpa`, or `eager` where a model has no other.
"""

_RANKS = ("exact at every P", "wrong or failed", "refused", "not applicable")


def _rank(cells: Iterable[Cell]) -> int:
    status = {cell.status for cell in cells}
    if status == {"exact"}:
        return 0
    if status & {"wrong", "failed"}:
        return 1
    return 2 if "refused" in status else 3


_EXPLANATION = """
Every causal language model of transformers, encoders, encoder-decoders and models from elsewhere, at a tiny size with
random weights, in float64 and training mode, on token ids `[2, 16]` and labels of which the two rows count unevenly
many; no position ids, no mask; the others on what they take. The loss and **every gradient** on P simulated ranks are
compared with one device.

- *exact*: the errors of the loss / of the worst gradient, relative to their largest entries; the bars are 1e-6 and
  1e-9. `f32`: the model computes in float32 somewhere; the error is of the same graph with float64 there, as a sum
  over tokens in float32 has an error of 1e-7 on one device already.
- *refused*: the sentence that the user reads.
- *not applicable*: the model does not build at a tiny size, does not run, or does not compile to one graph on one
  device.
- *gathered*: how many of which operator run on whole values on every rank, and the bytes of these values.

One result stands for both numbers of ranks.
[zoo-mesh.md](zoo-mesh.md) has the same models on a mesh, with ZeRO-3 and tensor parallelism.
[zoo-diffusion.md](zoo-diffusion.md) has transformers of diffusers.
"""


def _row(cells: list[Cell]) -> str:
    first = cells[0]
    found = [_result(cell) for cell in cells]
    result = found[0] if len(set(found)) == 1 else " / ".join(found)
    return f"| {first.model} | {first.attention} | {result} | {_gathered(first)} |"


def _result(cell: Cell) -> str:
    if cell.status in ("exact", "wrong"):
        float32 = " f32" if cell.float32 else ""
        whole = "" if cell.sharded else ", nothing sharded"
        return f"{cell.status} {cell.loss_error:.0e} {cell.grad_error:.0e}{float32}{whole}"
    return f"{cell.status}: {cell.why}".replace("|", "\\|")


def _gathered(cell: Cell) -> str:
    count, size = Counter[str](), Counter[str]()
    for line in cell.lines:
        if found := _GATHERED.match(line):
            op, num_bytes = found[1].split("::")[1], int(found[2].replace(",", ""))
            count[op] += 1
            size[op] += num_bytes
    return ", ".join(f"{count[op]} {op} {size[op]:,}" for op, _ in size.most_common())
