"""Long context side by side: the tables of docs/benchmarks.md about training steps.

Every way of `ways.py` runs in its own gloo processes on this machine, one thread a rank, the same model and batch;
with `--alone` rank 0 runs by itself, its collectives cost nothing and nothing is counted as sent.

    steps           the ways take turns, a step each: seconds are medians, ratios the medians and quartiles of those of
                    each round, to Ulysses by hand or, without it, to the last of --ways; small ones need many --rounds
    time            forward and backward, after two steps that are not counted
    peak, saved     bytes that the allocator handed out in one step above what was there before: the most at any time,
                    and what is left behind the forward; read from torch's profiler, not estimated
    sent            bytes that collectives carried away from a rank in one step, from the same profile
    longest         the longest sequence whose step stays within a budget of peak bytes, by bisection; they are those of
                    the process, since the profiler may miss what threads of gloo free
    compile         the first step, from an empty cache, and the part of it that the way's own passes took
    layers, lengths the same for 2, 16 and 32 layers, and for three lengths of one compiled step; growth is the exponent
                    between the first and the last

    python -m tests.bench.long_context --length 8192
    python -m tests.bench.long_context --table steps --rounds 40 --ways autosp "autosp, ranks not compared"
    python -m tests.bench.long_context --table layers --ways "Ulysses by hand" "autosp, layers checkpointed"
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers

from autosp_rules.demo.launch import RankError, launch
from fxrewrite.testing import fake_mesh
from tests.bench.figures import Figures, Measured, append
from tests.bench.measure import allocate_in_pages, profiled, resident_peak, row, with_quartiles
from tests.bench.turns import Turns, run_in_turns
from tests.bench.ways import WAYS, Step, is_installed, llama


@dataclass(frozen=True)
class Setting:
    """One model and one batch [1, length]."""

    layers: int
    hidden: int
    vocab: int
    length: int
    rounds: int

    def prepared(self, way: str) -> Step:
        torch.set_num_threads(1)
        return WAYS[way](llama(self.layers, self.hidden, self.vocab))


STEPS = Setting(layers=2, hidden=256, vocab=8192, length=4096, rounds=5)
LONGEST = Setting(layers=8, hidden=128, vocab=2048, length=512, rounds=1)
DEEP = Setting(layers=2, hidden=128, vocab=512, length=256, rounds=1)
LAYERS = (2, 16, 32)
LENGTHS = (2048, 4096, 8192)
_BLOCK = 128


def _batch(setting: Setting, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(setting.vocab, (1, length), generator=generator)
    return ids, ids.clone()


def _steps(step: Step, setting: Setting, length: int) -> Iterator[float]:
    """Seconds of one step after the other, on fresh gradients."""
    while True:
        ids, labels = _batch(setting, length)
        started = time.perf_counter()
        step.run(ids, labels).backward()
        yield time.perf_counter() - started


def _profiled(step: Step, setting: Setting, length: int) -> tuple[int, int, int]:
    """Peak, saved and sent bytes of one step."""
    ids, labels = _batch(setting, length)
    found = profiled(lambda: step.run(ids, labels), lambda loss: loss.backward())
    return found.peak, found.saved, found.sent


def _train_in_turns(way: str, setting: Setting, turns: Turns) -> tuple[Figures, list[float]]:
    """The figures at the length of the setting, and the seconds of each step."""
    step = setting.prepared(way)
    steps = _steps(step, setting, setting.length)
    seconds: list[float] = []
    for number in range(turns.rounds - 1):
        with turns.take(number):
            seconds.append(next(steps))
    with turns.take(turns.rounds - 1):
        memory = _profiled(step, setting, setting.length)
    first, _, *rest = seconds
    return _figures(rest, memory, first, step), rest


def _train(way: str, setting: Setting, lengths: Sequence[int]) -> list[Figures]:
    """The figures at each length, of a step that is compiled at the first."""
    step = setting.prepared(way)
    first = next(_steps(step, setting, lengths[0]))
    found: list[Figures] = []
    for length in lengths:
        seconds = _steps(step, setting, length)
        next(seconds)
        rounds = [next(seconds) for _ in range(setting.rounds)]
        found.append(_figures(rounds, _profiled(step, setting, length), first, step))
    return found


def _figures(seconds: Sequence[float], memory: tuple[int, int, int], first: float, step: Step) -> Figures:
    peak, saved, sent = memory
    transform = step.transform_seconds()
    return Figures(
        seconds=statistics.median(seconds), peak=peak, saved=saved, sent=sent, compile=first, transform=transform
    )


def _longest(way: str, setting: Setting, budget: int) -> int:
    """The longest sequence, in steps of 128 tokens, whose peak stays within `budget` bytes."""
    allocate_in_pages()
    step = setting.prepared(way)

    def fits(blocks: int) -> bool:
        steps = _steps(step, setting, _BLOCK * blocks)
        next(steps)
        peak = torch.tensor(resident_peak(lambda: next(steps)))
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
        return peak.item() <= budget

    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _BLOCK * low


def _on_ranks(function: Any, way: str, *args: Any, ranks: int, alone: bool) -> Any:
    """What rank 0 returns of ranks that share an empty cache."""
    with TemporaryDirectory() as cache:
        if not alone:
            return launch(_with_cache, cache, function, way, *args, ranks=ranks)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_first_of, ranks, cache, function, way, *args).result()


def _first_of(ranks: int, *args: Any) -> Any:
    """Rank 0 alone: collectives return at once, with other numbers of the right shape."""
    with fake_mesh((ranks,), ("sp",)):
        return _with_cache(*args)


def _with_cache(cache: str, function: Any, *args: Any) -> Any:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return function(*args)


def _outcome(*args: Any, **where: Any) -> Any:
    """What `_on_ranks` returns, or the error that it raises."""
    try:
        return _on_ranks(*args, **where)
    except (RankError, RuntimeError) as error:
        return error


def _headline(error: Exception) -> str:
    return str(error).splitlines()[0]


@dataclass(frozen=True)
class Run:
    """Where the ways run, and the file that gets what was measured."""

    ranks: int
    alone: bool
    out: Path | None

    @property
    def where(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "alone": self.alone}

    def keep(self, table: Any, way: str, setting: Setting, **found: Any) -> None:
        model = {"layers": setting.layers, "hidden": setting.hidden, "vocab": setting.vocab, "length": setting.length}
        append(self.out, Measured(table=table, way=way, **self.where, **{**model, **found}, machine=_machine()))


def _machine() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}"


def _print_steps(setting: Setting, ways: list[str], run: Run) -> None:
    print(f"\n### {setting.layers} layers, {setting.length:,} tokens, {run.ranks} ranks\n")
    to = "Ulysses by hand" if "Ulysses by hand" in ways else ways[-1]
    ratio = f"/ {to.removeprefix('Ulysses ')}"
    head = ["way", "step, s", ratio, "peak, MiB", ratio, "saved a token and layer, x hidden"]
    print(row([*head, "sent, MiB", "compile, s", "own passes, s"]))
    print(row(["---"] * 9))
    runs = [partial(_on_ranks, _train_in_turns, way, setting, **run.where) for way in ways]
    by_way = dict(zip(ways, run_in_turns(runs, 1 if run.alone else run.ranks, setting.rounds + 3), strict=True))
    base = by_way[to]
    for way, trained in by_way.items():
        if isinstance(trained, Exception):
            print(row([way, _headline(trained), *[""] * 7]), flush=True)
            continue
        found, seconds = trained
        run.keep("steps", way, setting, figures=found)
        of_base, memory_of_base = "", ""
        if isinstance(base, tuple):
            of_base = with_quartiles([a / b for a, b in zip(seconds, base[1], strict=True)])
            memory_of_base = f"{found.peak / base[0].peak:.2f}"
        held = setting.length if way == "one device" else setting.length // run.ranks
        hidden_sizes = found.saved / 4 / held / setting.layers / setting.hidden
        cells = [way, f"{found.seconds:.2f}", of_base, f"{found.peak / 2**20:.0f}", memory_of_base]
        cells += [f"{hidden_sizes:.1f}", f"{found.sent / 2**20:.1f}", f"{found.compile:.1f}", f"{found.transform:.2f}"]
        print(row(cells), flush=True)


def _print_growth(
    table: Literal["layers", "lengths"], sizes: Sequence[int], settings: Sequence[Setting], ways: list[str], run: Run
) -> None:
    """A row for each way and size; settings are those of the sizes, or one for all of them, which are lengths then."""
    of = "tokens" if table == "lengths" else table
    print(f"\n### By {of}, {run.ranks} ranks\n")
    print(row(["way", of, "step, s", "peak, MiB", "saved, MiB", "sent, MiB", "compile, s", "own passes, s"]))
    print(row(["---"] * 8))
    for way in ways:
        found: list[Figures] = []
        for setting in settings:
            lengths = sizes if len(settings) == 1 else [setting.length]
            trained = _outcome(_train, way, setting, lengths, **run.where)
            if isinstance(trained, Exception):
                print(row([way, _headline(trained), *[""] * 6]), flush=True)
                break
            found.extend(trained)
            for length, one in zip(lengths, trained, strict=True):
                run.keep(table, way, replace(setting, length=length), figures=one)
        for size, one in zip(sizes, found, strict=False):
            cells = [f"{one.seconds:.2f}", *(f"{n / 2**20:.1f}" for n in (one.peak, one.saved, one.sent))]
            print(row([way, f"{size:,}", *cells, f"{one.compile:.1f}", f"{one.transform:.2f}"]), flush=True)
        if 1 < len(sizes) == len(found):
            first, last = found[0].model_dump(), found[-1].model_dump()
            span = math.log(sizes[-1] / sizes[0])
            grown = {name: math.log(last[name] / first[name]) / span if first[name] else None for name in first}
            print(row([way, "growth", *("" if n is None else f"{n:.2f}" for n in grown.values())]), flush=True)


def _print_longest(setting: Setting, ways: list[str], budget: int, run: Run) -> None:
    print(f"\n### The longest sequence within {budget >> 20} MiB a rank, {setting.layers} layers, {run.ranks} ranks\n")
    print(row(["way", "tokens"]))
    print(row(["---"] * 2))
    for way in ways:
        found = _outcome(_longest, way, setting, budget, **run.where)
        if not isinstance(found, Exception):
            run.keep("longest", way, replace(setting, length=found), budget=budget)
        print(row([way, _headline(found) if isinstance(found, Exception) else f"{found:,}"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ["steps", "longest", "layers", "lengths"]
    parser.add_argument("--table", choices=tables, nargs="*", default=tables[:2])
    parser.add_argument("--ways", nargs="*", default=[way for way in WAYS if is_installed(way)])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="rank 0 of --ranks, over torch's fake process group")
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON for each row, for plots.py")
    parser.add_argument("--budget", type=int, default=128, help="MiB of peak memory above weights and gradients")
    for field in fields(Setting):
        parser.add_argument(f"--{field.name}", type=int, help="of the model and batch; each table has its own")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    given = {field.name: getattr(options, field.name) for field in fields(Setting)}
    given = {name: value for name, value in given.items() if value is not None}
    print(_machine())
    run = Run(options.ranks, options.alone, options.out)
    if "steps" in options.table:
        _print_steps(replace(STEPS, **given), options.ways, run)
    if "longest" in options.table:
        _print_longest(replace(LONGEST, **given), options.ways, options.budget << 20, run)
    if "layers" in options.table:
        sizes = (options.layers,) if options.layers else LAYERS
        settings = [replace(DEEP, **{**given, "layers": layers}) for layers in sizes]
        _print_growth("layers", sizes, settings, options.ways, run)
    if "lengths" in options.table:
        _print_growth("lengths", LENGTHS, [replace(STEPS, **given)], options.ways, run)


if __name__ == "__main__":
    main()
