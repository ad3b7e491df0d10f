"""What ranks hand from the forward to the backward pass, by the options `checkpoint`, `logits` and `mlp_tile`.

    python -m tests.bench.saved

A Llama of 2 layers, hidden size 512, inner size 2,048, 8 heads of which 2 have keys and values, 32,000 tokens in the
vocabulary, a batch of one with 1,024 tokens in bfloat16, two simulated ranks. Counted in the forward graph that
AOTAutograd cuts off: what it returns and no input holds, of the first layer in hidden sizes per token, and in all. With
tiles it returns the gradient of the head too, 62.5 MiB, which is not counted: the backward pass would make it first.
A second table has the same on 1, 2, 4 and 8 ranks, and P times a rank's share as part of what one device holds.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import fx

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh
from tests.autosp.one_device import captured
from tests.autosp.partition import Partition

HIDDEN, LENGTH, RANKS = 512, 1024, 2
ROWS: tuple[dict[str, Any], ...] = (
    {"checkpoint": "none"},
    {"checkpoint": "none", "logits": "drop"},
    {"checkpoint": "none", "logits": "drop", "mlp_tile": 2**20},
    {"checkpoint": "attention"},
    {"checkpoint": "attention", "logits": "drop"},
    {"checkpoint": "full", "logits": "drop"},
    {"checkpoint": "auto", "logits": "drop"},
)


def main() -> None:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32_000,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    ids = torch.randint(32_000, (1, LENGTH))
    gm, inputs = captured(model, {"input_ids": ids, "labels": ids})
    print("| checkpoint | logits | mlp_tile | hidden sizes per token and layer | in all, MiB | the report |")
    print("|---|---|---|---|---|---|")
    for options in ROWS:
        partition, report = _partition(gm, inputs, options, RANKS)
        sizes = partition.kept(r"\.layers\.0\b") / (LENGTH // RANKS * HIDDEN * 2)
        line = next((line for line in report.lines if line.startswith("checkpoint=")), "")
        how = f"{options['checkpoint']} | {options.get('logits', 'keep')} | {options.get('mlp_tile', 'auto')}"
        print(f"| {how} | {sizes:.2f} | {partition.kept() / 2**20:.1f} | {line} |", flush=True)
    print("\n| checkpoint | logits | ranks | bytes a rank | P x bytes / one device |")
    print("|---|---|---|---|---|")
    for options in (ROWS[1], ROWS[4]):
        whole = 0
        for ranks in (1, 2, 4, 8):
            kept = _partition(gm, inputs, options, ranks)[0].kept()
            whole = whole or kept
            how = f"{options['checkpoint']} | {options['logits']} | {ranks}"
            print(f"| {how} | {kept:,} | {ranks * kept / whole:.3f} |", flush=True)


def _partition(
    gm: fx.GraphModule, inputs: list[Any], options: dict[str, Any], ranks: int
) -> tuple[Partition, AutoSPReport]:
    # "auto" is shown as on a device that has no memory to spare
    with fake_mesh((ranks,), ("sp",)) as mesh, patch("autosp_rules.memory.checkpoint._memory_of", lambda device: 0):
        program, report = transform(gm, AutoSPConfig(loss_tile=2**22, **options), axis_of(mesh, "sp"))
        return Partition(program, inputs), report


if __name__ == "__main__":
    main()
