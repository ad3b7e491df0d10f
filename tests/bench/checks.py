"""Seconds that comparing the ranks costs a call of the model of `long_context.py --table steps`.

    python -m tests.bench.checks

One process, over torch's fake process group: what is computed and sent, without the network. `due` are calls 2, 4, 8,
..., which also sum up all parameters.
"""

from __future__ import annotations

import statistics
import time

import torch
import transformers

from autosp_rules import AutoSPConfig
from autosp_rules.backend import ADVICE
from autosp_rules.transform import transform
from fxrewrite.spmd import RankChecks, axis_of, is_due
from fxrewrite.testing import fake_mesh
from tests.autosp.one_device import captured
from tests.bench.long_context import STEPS
from tests.bench.ways import llama

CALLS = 70


def main() -> None:
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM(llama(STEPS.layers, STEPS.hidden, STEPS.vocab)).train()
    ids = torch.randint(STEPS.vocab, (1, STEPS.length))
    gm, inputs = captured(model, {"input_ids": ids, "labels": ids})
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with fake_mesh((2,), ("sp",)) as mesh:
        axis = axis_of(mesh, "sp")
        placeholders = transform(gm, AutoSPConfig(), axis)[0].graph.find_nodes(op="placeholder")
        checks = RankChecks(placeholders, axis, ADVICE)
        for call in range(1, CALLS):
            started = time.perf_counter()
            checks.before(inputs)
            seconds[is_due(call) and call > 1].append(time.perf_counter() - started)
    parameters = sum(p.numel() for p in model.parameters())
    print("| parameters | tokens | ms a call | ms a call that is due |")
    print("|---:|---:|---:|---:|")
    usual, due = (1e3 * statistics.median(seconds[which]) for which in (False, True))
    print(f"| {parameters:,} | {STEPS.length:,} | {usual:.2f} | {due:.1f} |")


if __name__ == "__main__":
    main()
