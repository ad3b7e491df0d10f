"""How near the estimate of `autosp(memory=...)` is to the peak that the allocator gives a step.

    python -m tests.bench.budget [--inner inductor]

Rank 0 of 2 over torch's fake process group, one thread, float32, `logits="drop"`; models of hidden size 256 and 4,096
tokens in the vocabulary. Every model runs with a budget in which all fits, and with one of 0.8 of that estimate. The
peak is that of the second step, of what the process has in memory, above the parameters and the batch, which are added
to it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from torch._dynamo.exc import BackendCompilerFailed

from autosp_rules import autosp
from autosp_rules.events import MemoryFitted
from fxrewrite.testing import fake_mesh
from tests.bench.measure import allocate_in_pages, resident_peak, row

VOCABULARY, LENGTH = 4_096, 2_048
_WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_GATED = {**_WIDTHS, "intermediate_size": 1_024, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _GATED),
    "Qwen3": ("qwen3", {**_GATED, "head_dim": 64}),
    "GPT-2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}),
    "Mixtral": ("mixtral", {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Names in the table: the model's type in transformers, and its sizes."""


def measured(model: torch.nn.Module, ids: torch.Tensor, **settings: Any) -> tuple[MemoryFitted, int]:
    """Returns what the budget decided, and the bytes that a second step took on rank 0 of 2."""
    allocate_in_pages()
    with fake_mesh((2,), ("sp",)):
        backend = autosp(**settings)
        step = torch.compile(model, backend=backend, fullgraph=True)
        step(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

        def run() -> None:
            output = step(input_ids=ids, labels=ids)
            output.loss.backward()

        peak = resident_peak(run)
    (event,) = backend.reports[0].events_of(MemoryFitted)
    return event, event.given + peak


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    kind, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, use_cache=False, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.loss_type = "ForCausalLM"
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", nargs="*", default=["aot_eager", "inductor"])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    titles = ("model", "inner", "budget, MiB", "settings", "estimate, MiB", "measured, MiB", "estimate / measured")
    print(row((*titles, "traces", "s")))
    print(row(["---"] * 9))
    for name in arguments.models:
        for inner in arguments.inner:
            budget: int | str = "64 GiB"
            for _ in range(2):
                ids = torch.randint(VOCABULARY, (1, LENGTH))
                try:
                    event, peak = measured(_model(name), ids, memory=budget, inner=inner, logits="drop")
                except BackendCompilerFailed as error:
                    why = str(error.inner_exception).partition("smallest peak of a step is ")[2].partition(",")[0]
                    print(row((name, inner, f"{int(budget) / 2**20:.1f}", "refused", why, *4 * [""])), flush=True)
                    continue
                said = ", ".join(f"`{option}={value!r}`" for option, value in event.settings.items())
                mib = [f"{size / 2**20:.1f}" for size in (event.budget, event.peak, peak)]
                cells = (name, inner, mib[0], said, mib[1], mib[2], f"{event.peak / peak:.3f}")
                print(row((*cells, str(event.num_traces), f"{event.seconds:.0f}")), flush=True)
                budget = event.peak * 4 // 5


if __name__ == "__main__":
    main()
