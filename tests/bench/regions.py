"""Regional compilation beside compiling whole, on one device: a table of docs/benchmarks.md.

    python -m tests.bench.regions --layers 8 16

Both ways train the same Llama under inductor in one process of one thread; a small function is compiled before, so that
neither pays for loading inductor. Steps take turns.

    compile   seconds of CPU of the first step, forward and backward, without caches: of this process and its children
    step      median of the ratios of each round
    peak      the most bytes that forward and backward allocate at any time, above what is there before
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch._inductor import config

from fxrewrite.backends import Regions, regional
from tests.bench.measure import profiled, row
from tests.bench.ways import llama


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def measured(layers: int, hidden: int, length: int, rounds: int) -> list[str]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama(layers, hidden, 1024)).train()
    ids = torch.randint(0, 1024, (1, length))
    reports: list[Regions] = []
    steps: list[Callable[[], torch.Tensor]] = []
    cells: list[list[str]] = []
    losses: list[float] = []
    backends: dict[str, Any] = {"whole": "inductor", "once": regional("inductor", reports.append)}
    for name, backend in backends.items():
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)

        def step(compiled: Any = compiled) -> torch.Tensor:
            return compiled(input_ids=ids, labels=ids).loss

        start = cpu_seconds()
        loss = step()
        loss.backward()
        losses.append(loss.item())
        cells.append([f"{layers}", name, f"{cpu_seconds() - start:.1f}"])
        steps.append(step)
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[0]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for i, call in enumerate(steps):
            start = time.perf_counter()
            call().backward()
            seconds[i].append(time.perf_counter() - start)
    ratios = [once / whole for whole, once in zip(*seconds, strict=True)]
    peaks = [profiled(call, torch.Tensor.backward).peak for call in steps]
    for i, cell in enumerate(cells):
        cell += [f"{statistics.median(seconds[i]):.3f}", f"{statistics.median(ratios):.2f}" if i else "1.00"]
        cell += [f"{peaks[i] / 2**20:.1f}", str(reports[0]) if i else ""]
    return [row(cell) for cell in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config.force_disable_caches, config.compile_threads = True, 1
    x = torch.ones(8, requires_grad=True)
    torch.compile(lambda x: (x.sin() @ x).tanh())(x).backward()
    print(row(["layers", "compiled", "compile, CPU s", "step, s", "/ whole", "peak, MiB", "regions"]))
    print(row(["---"] * 7))
    for layers in options.layers:
        print("\n".join(measured(layers, options.hidden, options.length, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
