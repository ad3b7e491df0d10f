"""Every strategy of attention with every kind of heads, mask and length on 2, 3, 4 and 8 ranks against one device.

    python -m tests.zoo.attention                                all cells, resumed where it was stopped
    python -m tests.zoo.attention --only ring causal P=3         those that these words are in
    python -m tests.zoo.attention --table docs/attention-cells.md

A line for each cell: exact, or the reason why the strategy is refused there and the one that serves. Cells are kept as
lines of JSON in `--out`; what stands there is not measured again. Exit status 1 where a cell differs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import BaseModel

from autosp_rules import AutoSPConfig, AutoSPError
from autosp_rules.config import AttentionOption
from tests.autosp.attention_layer import Attend, Layer, LayerOnOneDevice

sdpa = F.scaled_dot_product_attention
RANKS = (2, 3, 4, 8)
LENGTHS = {"even": 24, "uneven": 13}
"""Which every P divides, and none. Of 8 ranks one has no token of 13."""
STRATEGIES: tuple[AttentionOption, ...] = ("ulysses", "gather_kv", "ring", "ring_ulysses")
HEADS = {"MHA": (4, 4), "GQA 8/2": (8, 2), "MQA 8/1": (8, 1), "6 heads": (6, 6)}
"""Query heads and those of k and v."""


def _positions(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)


def _causal(length: int) -> torch.Tensor:
    rows, columns = _positions(length)
    return rows >= columns


def _window(length: int) -> torch.Tensor:
    rows, columns = _positions(length)
    return _causal(length) & (columns > rows - 5)


def _documents(length: int) -> torch.Tensor:
    """Causal within documents, of which the two sequences pack others. [B, 1, S, S]"""
    ends = torch.tensor([[4, 15], [9, 10]])
    document = (torch.arange(length)[None, :, None] >= ends[:, None]).sum(-1)
    return _causal(length) & (document[:, None, :, None] == document[:, None, None])


def padding(length: int) -> torch.Tensor:
    """Causal, and the first keys are padding, whose own rows keep none. [B, 1, S, S]"""
    _, columns = _positions(length)
    return _causal(length) & (columns >= torch.tensor([3, 8])[:, None, None, None])


def _prefix(length: int) -> torch.Tensor:
    _, columns = _positions(length)
    return _causal(length) | (columns < 7)


def _alibi(length: int) -> torch.Tensor:
    """Half the distance to an earlier key, and a number that hides the later ones. [S, S]"""
    rows, columns = _positions(length)
    bias = (columns - rows) * torch.tensor(0.5, dtype=torch.float64)
    return torch.where(_causal(length), bias, torch.finfo(torch.float64).min)


MASKS: dict[str, Attend] = {
    "none": lambda q, k, v, **gqa: sdpa(q, k, v, scale=0.4, **gqa),
    "causal": lambda q, k, v, **gqa: sdpa(q, k, v, is_causal=True, **gqa),
    "window": lambda q, k, v, **gqa: sdpa(q, k, v, _window(q.shape[2]), **gqa),
    "documents": lambda q, k, v, **gqa: sdpa(q, k, v, _documents(q.shape[2]), **gqa),
    "padding": lambda q, k, v, **gqa: sdpa(q, k, v, padding(q.shape[2]), **gqa),
    "prefix": lambda q, k, v, **gqa: sdpa(q, k, v, _prefix(q.shape[2]), **gqa),
    "ALiBi": lambda q, k, v, **gqa: sdpa(q, k, v, _alibi(q.shape[2]), **gqa),
}


def layer(attend: Attend, heads: int, kv_heads: int) -> Layer:
    """A layer whose attention is one of `MASKS`."""
    return Layer(lambda m, x, q, k, v: attend(q, k, v, enable_gqa=heads != kv_heads), heads, kv_heads)


class Cell(BaseModel):
    """One strategy with one kind of heads, mask and length on so many ranks, and what came of it."""

    strategy: AttentionOption
    mask: str
    heads: str
    length: str
    num_ranks: int
    status: Literal["exact", "refused", "differs"] = "exact"
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.mask} {self.heads} P={self.num_ranks} {self.length}"

    def measured(self, one_device: LayerOnOneDevice) -> Cell:
        """The cell, with what came of it."""
        try:
            one_device.report(self.num_ranks, AutoSPConfig(strict=True, attention=self.strategy))
        except AutoSPError as error:
            return self.model_copy(update={"status": "refused", "why": f"{error.reason}; {error.hint}"})
        except Exception as error:  # noqa: BLE001  # whatever it is, the cell is not exact
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            return self.model_copy(update={"status": "differs", "why": why})
        return self


def cells() -> Iterator[Cell]:
    """All cells, those of one model together."""
    for mask, heads, length in itertools.product(MASKS, HEADS, LENGTHS):
        for strategy, num_ranks in itertools.product(STRATEGIES, RANKS):
            yield Cell(strategy=strategy, mask=mask, heads=heads, length=length, num_ranks=num_ranks)


def measured(todo: Sequence[Cell]) -> Iterator[Cell]:
    """The cells with what came of each; a model is captured once."""
    for (mask, heads, length), group in itertools.groupby(todo, lambda cell: (cell.mask, cell.heads, cell.length)):
        ids = torch.arange(2 * LENGTHS[length]).reshape(2, -1) * 7 % 8
        one_device = LayerOnOneDevice(layer(MASKS[mask], *HEADS[heads]), ids)
        for cell in group:
            yield cell.measured(one_device)


def read(path: Path) -> dict[str, Cell]:
    """The cells measured so far, by their names."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell.name: cell for cell in map(Cell.model_validate_json, lines)}


def markdown(found: Sequence[Cell]) -> str:
    """The page: a table with a row for each strategy and mask, and the reasons of what is refused."""
    columns = list(itertools.product(HEADS, RANKS))
    rows: dict[tuple[str, str], dict[tuple[str, int], list[Cell]]] = {}
    for cell in found:
        rows.setdefault((cell.strategy, cell.mask), {}).setdefault((cell.heads, cell.num_ranks), []).append(cell)
    reasons: dict[str, int] = {}
    table = [
        f"| {strategy} | {mask} | " + " | ".join(_entry(row.get(column, ()), reasons) for column in columns) + " |"
        for (strategy, mask), row in sorted(rows.items(), key=lambda item: STRATEGIES.index(item[0][0]))
    ]
    counts = Counter(cell.status for cell in found)
    return "\n".join(
        [
            "# Cells of attention against one device",
            "",
            "<!-- written by `make cells`; do not edit -->",
            "",
            f"torch {torch.__version__}, Python {platform.python_version()}, {dt.datetime.now(tz=dt.UTC).date()}.",
            "",
            _EXPLANATION.strip(),
            "",
            f"{len(found)} cells: {counts['exact']} exact, {counts['refused']} refused, {counts['differs']} differ.",
            "",
            "| strategy | mask | " + " | ".join(f"{heads}, P = {n}" for heads, n in columns) + " |",
            "|---|---|" + "---|" * len(columns),
            *table,
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
            "",
        ]
    )


def _entry(cells: Sequence[Cell], reasons: dict[str, int]) -> str:
    """What came of the cells of both lengths."""
    found = {
        cell.status if cell.status == "exact" else f"{cell.status} ({reasons.setdefault(cell.why, len(reasons) + 1)})"
        for cell in cells
    }
    return " / ".join(sorted(found)) or "not measured"


_EXPLANATION = """
One attention between an embedding and a loss, in float64, with 24 tokens a row, which P divides, and with 13, which it
does not: the loss and **every gradient** on P simulated ranks are compared with one device. An entry stands for both
lengths.

- *exact*: no gradient is off by more than 1e-12 of its largest entry, nor the loss by more than 1e-12.
- *refused (n)*: the n-th sentence below the table is what the user reads; it names a strategy that serves.
- Heads are those of queries / of keys and values; MHA has 4 of each, \"6 heads\" 6.
- Masks: `none`; `causal` by `is_causal`; `window` of 5 keys; packed `documents`, others in each row of the batch;
  `padding` of the first keys, whose own rows keep none; `prefix`, 7 keys that all rows read; `ALiBi`, distances
  that are added to the scores. All but `none` also hide later keys, except those of the prefix.
"""


def main() -> int:
    """Measures what is missing, then writes the table; 1 where a cell differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cells whose names have these words")
    parser.add_argument("--out", type=Path, default=Path("cells.jsonl"), help="cells measured so far [%(default)s]")
    parser.add_argument("--table", type=Path, help="file that the Markdown table is written to")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more only wait for one another at these sizes
    asked = [cell for cell in cells() if all(f" {word} " in f" {cell.name} " for word in args.only)]
    done = read(args.out)
    with args.out.open("a") as out:
        for cell in measured([cell for cell in asked if cell.name not in done]):
            done[cell.name] = cell
            out.write(cell.model_dump_json() + "\n")
            out.flush()
            print(cell.name, cell.status, cell.why, flush=True)
    found = [done[cell.name] for cell in asked]
    if args.table:
        args.table.write_text(markdown(found))
    return int(any(cell.status == "differs" for cell in found))


if __name__ == "__main__":
    sys.exit(main())
