"""What a dense attention mask costs, and the same mask computed by rows: peak memory and time of a training step.

    python -m tests.bench.masks [--length 8192]

One device, one decoder layer (256 wide, 8 heads, 4 of keys), a batch of one, float32. Each cell runs in a process of
its own. The peak is of what torch allocates in a step, so without weights; times are of the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from torch import fx

from fxrewrite import DeadCode, RuleSet
from fxrewrite.capture import normalize
from rules.attention.by_rows import BY_ROWS
from rules.attention.operator import RAISE_ATTENTION
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.masks.dense import MASKS

KINDS = ("causal and padding", "window of 1,024", "documents of 2,048")
WAYS = {"dense": (NORMAL_FORMS,), "by rows": (NORMAL_FORMS, MASKS, RAISE_ATTENTION, BY_ROWS)}


def model_and_inputs(kind: str, length: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    widths = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": length, "use_cache": False}
    ids = torch.arange(length)[None] % 251
    inputs = {"input_ids": ids, "labels": ids}
    if kind.startswith("window"):
        config = transformers.MistralConfig(**widths, **heads, sliding_window=1024)
        return transformers.MistralForCausalLM(config), inputs
    if kind.startswith("documents"):
        inputs["position_ids"] = torch.arange(length)[None] % 2048
    else:
        inputs["attention_mask"] = (torch.arange(length)[None] < length - 100).long()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**widths, **heads)), inputs


def cell(kind: str, way: str, length: int) -> str:
    """Peak bytes and CPU seconds of a step, as a line of text."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, inputs = model_and_inputs(kind, length)

    def backend(gm: fx.GraphModule, _: list[Any]) -> Any:
        normal = normalize(gm)
        RuleSet("mask", *WAYS[way], DeadCode()).once().apply(normal)
        return normal.forward

    step = torch.compile(model, backend=backend, fullgraph=True)
    step(**inputs)[0].backward()
    model.zero_grad()
    started = time.process_time()
    step(**inputs)[0].backward()
    seconds = time.process_time() - started
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(**inputs)[0].backward()
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return f"{max(held)} {seconds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(cell(*options.cell, options.length))
        return
    print(f"torch {torch.__version__}, {options.length:,} tokens, {datetime.now(UTC):%Y-%m-%d}\n")
    print("| mask | dense, MiB | by rows, MiB | dense, CPU s | by rows, CPU s |\n|---|---|---|---|---|")
    for kind in KINDS:
        found: list[list[float]] = []
        for way in WAYS:
            command = [sys.executable, "-m", "tests.bench.masks", "--length", str(options.length), "--cell", kind, way]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append([float(number) for number in done.stdout.split()[-2:]])
        (dense, dense_s), (rows, rows_s) = found
        print(f"| {kind} | {dense / 2**20:,.0f} | {rows / 2**20:,.0f} | {dense_s:.2f} | {rows_s:.2f} |")


if __name__ == "__main__":
    main()
