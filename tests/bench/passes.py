"""CPU seconds of AutoSP's own passes on a Llama, from Dynamo's graph to what the inner backend gets, by layers.

    python -m tests.bench.passes [--layers 2 8 32]

One thread; no process group is needed, and the step is not run. The length is 32,768 tokens, as a number or as a symbol
(`mark_dynamic`), so that both decide the same about what layers keep. Of each, the least of several rounds, which take
turns, in several processes: other jobs on the machine only add, and so does a process whose memory lies badly, which
takes half as long again for the same calls, in all of its rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import fx

from autosp_rules import AutoSPConfig
from autosp_rules.lengths import PLANNED_LENGTH
from autosp_rules.transform import transform
from fxrewrite.spmd import Axis
from tests.bench.measure import row
from tests.bench.ways import llama


class _MeasuredError(Exception):
    """The passes have run, and the program need not."""


def seconds(layers: int, *, symbolic: bool) -> float:
    torch._dynamo.reset()
    model = transformers.LlamaForCausalLM(llama(layers, 128, 128)).train()
    ids = torch.randint(128, (1, PLANNED_LENGTH))
    if symbolic:
        torch._dynamo.mark_dynamic(ids, 1)
    found: list[float] = []

    def stop(*_: Any) -> Any:
        raise _MeasuredError

    def passes(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        started = time.process_time()
        transform(gm, AutoSPConfig(), Axis("sp", 2))
        found.append(time.process_time() - started)
        return stop

    with contextlib.suppress(_MeasuredError):
        torch.compile(model, backend=passes, fullgraph=True)(input_ids=ids, labels=ids)
    return found[0]


def of_process(layers: Sequence[int], rounds: int) -> list[list[float]]:
    """Returns for each number of layers the least seconds of this process, static and symbolic."""
    torch.set_num_threads(1)
    for kind in (False, True):
        seconds(2, symbolic=kind)  # what is loaded and compiled once
    return [
        [
            min(least)
            for least in zip(
                *([seconds(n, symbolic=kind) for kind in (False, True)] for _ in range(rounds)), strict=True
            )
        ]
        for n in layers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(row(["layers", "static, CPU s", "symbolic, CPU s", "symbolic / static"]))
    print(row(["---"] * 4))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        each = pool.starmap(of_process, [(arguments.layers, arguments.rounds)] * arguments.processes, chunksize=1)
    for layers, found in zip(arguments.layers, zip(*each, strict=True), strict=True):
        static, symbolic = (min(some) for some in zip(*found, strict=True))
        print(row([f"{layers}", f"{static:.2f}", f"{symbolic:.2f}", f"{symbolic / static:.2f}"]))


if __name__ == "__main__":
    main()
