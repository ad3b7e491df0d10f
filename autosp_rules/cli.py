"""The `autosp` command: demo and train run a model on one device and across ranks and compare, inspect shows the graph.

Exit status: 0 done and equal; 1 the runs differ, or the model was refused; 2 the command cannot be run as given.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosp_rules.demo.job import Job
    from autosp_rules.demo.train import StepRow

_DEMO = {
    "vocab_size": 258,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
_INNER = ("eager", "aot_eager", "inductor")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns the exit status."""
    arguments = _parser().parse_args(argv)
    # Imported late, because torch takes seconds to import, and --help or a mistyped option do not need it.
    from autosp_rules.demo.job import JobError
    from autosp_rules.demo.launch import RankError
    from fxrewrite import FxRewriteError

    try:
        return arguments.run(arguments)
    except JobError as error:
        return _fail(str(error), 2)
    except FxRewriteError as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    except RankError as error:
        return _fail(f"{error}{_keep(error.traceback)}", 1)


def _fail(message: str, status: int) -> int:
    print(f"autosp: error: {message}", file=sys.stderr)
    return status


def _keep(traceback: str) -> str:
    """Writes a rank's traceback to a file that is kept, and returns where."""
    if not traceback:
        return ""
    with NamedTemporaryFile("w", prefix="autosp-", suffix=".log", delete=False) as file:
        file.write(traceback)
    return f" (traceback: {file.name})"


# Arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autosp", description="Exact automatic sequence parallelism for unmodified Hugging Face models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="train a small Llama on one device and across ranks, and compare")
    demo.add_argument("--ranks", type=int, default=os.environ.get("NPROC", "2"), help="processes (default: NPROC or 2)")
    demo.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    demo.set_defaults(run=_demo)

    train = commands.add_parser("train", help="the same with your own model, lengths and text")
    _add_model(train)
    train.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    train.add_argument("--inner", choices=_INNER, default="inductor", help="inner compiler (default: %(default)s)")
    train.add_argument("--text", type=Path, help="file or folder to train on (default: Python's standard library)")
    train.set_defaults(run=_train)

    inspect = commands.add_parser("inspect", help="what would be done to your model's graph; starts no ranks")
    _add_model(inspect)
    form = inspect.add_mutually_exclusive_group()
    form.add_argument("--graph", action="store_true", help="also print the rewritten graph")
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="model_type of transformers (llama, gpt2), or path of a config.json"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the configuration")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a setting of autosp, as checkpoint=full"
    )


def _job(arguments: argparse.Namespace, **more: Any) -> Job:
    from autosp_rules.config import AutoSPConfig
    from autosp_rules.demo.job import Job, JobError, parse_override
    from autosp_rules.errors import AutoSPError

    inner = {"inner": arguments.inner} if "inner" in arguments else {}
    try:
        config = AutoSPConfig(**inner, **dict(parse_override("--option", text) for text in arguments.option))
    except AutoSPError as error:
        raise JobError(f"--option: {str(error).removeprefix('autosp: ')}") from error
    return Job(
        model=arguments.model,
        overrides=dict(parse_override("--set", text) for text in arguments.set),
        seq_len=arguments.seq_len,
        batch=arguments.batch,
        ranks=arguments.ranks,
        config=config,
        **more,
    )


# Commands


def _demo(arguments: argparse.Namespace) -> int:
    from autosp_rules.demo.job import Job, text_files

    return _run(
        Job("llama", text_files(None), _DEMO, seq_len=512, batch=2, ranks=arguments.ranks, steps=arguments.steps)
    )


def _train(arguments: argparse.Namespace) -> int:
    from autosp_rules.demo.job import text_files

    return _run(_job(arguments, files=text_files(arguments.text), steps=arguments.steps))


def _inspect(arguments: argparse.Namespace) -> int:
    import torch

    from autosp_rules.backend import dry_run
    from autosp_rules.demo.job import build_config, build_model, check_sizes, is_masked, make_batch, text_files
    from fxrewrite.graph import graph_text

    job = _job(arguments, files=text_files(None))
    model_config = build_config(job.model, job.overrides)
    check_sizes(job, model_config)
    with torch.device("meta"):  # shapes only: a model of any size fits
        model = build_model(model_config)
    batch = make_batch(job, 1, masked=is_masked(model))
    inputs = {name: value.to("meta") for name, value in batch.items()}
    gm, report = dry_run(model, inputs, num_ranks=job.ranks, config=job.config)
    print(report.model_dump_json(indent=2) if arguments.json else report)
    if arguments.graph:
        print(f"\n{graph_text(gm)}")
    return 0


def _run(job: Job) -> int:
    from autosp_rules.demo.job import build_config, check_memory, check_sizes
    from autosp_rules.demo.launch import launch

    config = build_config(job.model, job.overrides)
    check_sizes(job, config)
    check_memory(job, config, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    started = time.monotonic()
    print(_describe(job, config), flush=True)
    rows, report = launch(_train_rank, job, ranks=job.ranks)
    print(f"\n{_verdict(rows)}\n\nWhat was done to the graph\n{report}\n\n{time.monotonic() - started:.0f} s")
    return 0 if all(row.is_equal for row in rows) else 1


def _train_rank(job: Job) -> tuple[list[StepRow], str]:
    """Runs one rank's part of the job; rank 0 shows progress. Returns the rows (none on other ranks) and the report."""
    import torch.distributed as dist
    from tqdm import tqdm

    from autosp_rules.backend import AutoSPBackend
    from autosp_rules.demo.train import compare

    backend = AutoSPBackend(job.config)
    rows: list[StepRow] = []
    is_hidden = None if dist.get_rank() == 0 else True  # None: where there is no terminal
    with tqdm(total=job.steps, disable=is_hidden, leave=False) as progress:
        for row in compare(job, backend, progress.set_description):
            rows.append(row)
            with progress.external_write_mode():
                print(_line(row), flush=True)
            progress.update()
    return rows, str(backend.reports[-1])


# What is printed


def _describe(job: Job, config: Any) -> str:
    from autosp_rules.demo.job import num_parameters, zero_dropout

    folder = os.path.commonpath([path.parent for path in job.files])
    settings = ", ".join(f"{name}={value!r}" for name, value in job.config.model_dump(exclude_defaults=True).items())
    lines = [
        f"model       {config.model_type}, {num_parameters(config):,} random float32 parameters{_sizes(config)}",
        f"text        {len(job.files)} files of {folder}, as bytes",
        f"batch       {job.batch} rows of {job.seq_len} tokens, {job.steps} steps of AdamW",
        f'one device  torch.compile(model, backend="{job.config.inner}")',
        f"{f'{job.ranks} ranks':<12}torch.compile(model, backend=autosp({settings})), gradients averaged",
    ]
    dropout = zero_dropout(config)
    if dropout:
        lines.append(f"dropout     set to 0, so that the runs can be compared: {', '.join(dropout)}")
    header = f"{'step':>5}{'loss, one device':>20}{f'loss, {job.ranks} ranks':>20}{'gradient difference':>24}"
    return "\n".join([*lines, "", header])


def _sizes(config: Any) -> str:
    names = {
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "key/value heads",
    }
    return "".join(f", {getattr(config, name)} {word}" for name, word in names.items() if hasattr(config, name))


def _line(row: StepRow) -> str:
    return f"{row.step:>5}{row.loss_one_device:>20.7f}{row.loss_sharded:>20.7f}{row.gradient_difference:>24.1e}"


def _verdict(rows: Sequence[StepRow]) -> str:
    from autosp_rules.demo.train import DRIFT_BOUND, GRADIENT_BOUND, LOSS_BOUND, worst

    loss, drift = worst(row.loss_difference for row in rows), worst(row.drift for row in rows)
    gradient = worst(row.gradient_difference for row in rows)
    where = next(row for row in rows if row.gradient_difference is gradient)
    differences = [
        ("gradient of a parameter, at equal weights", gradient, GRADIENT_BOUND),
        ("loss, at equal weights", loss, LOSS_BOUND),
        ("loss of the two runs, each at its own weights", drift, DRIFT_BOUND),
    ]
    verdict = "EQUAL" if all(row.is_equal for row in rows) else "NOT EQUAL"
    return "\n".join(
        [
            f"{verdict} over {len(rows)} steps; the largest relative differences are",
            *(f"  {what:<48}{value:.1e}   bound {bound:.0e}" for what, value, bound in differences),
            f"  the worst gradient is that of {where.worst_parameter}, step {where.step}",
        ]
    )
