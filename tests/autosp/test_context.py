"""Context parallelism: each rank is called with its chunk of the batch; loss and gradients are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autosp_rules.parallelism import CONTEXT, CONTEXT_ZERO3, CONTEXT_ZIGZAG
from fxrewrite.spmd import Parallelism, Parallelisms, input_placements
from fxrewrite.testing import simulate
from rules.parallel import ZERO3
from tests.rules.parallel.models import build

IDS = torch.arange(64).reshape(4, 16) * 7 % 61
LABELS = torch.where(IDS % 5 == 3, -100, IDS)
POSITIONS = torch.arange(16).expand(4, 16) + torch.tensor([[0], [3], [5], [7]])
MASK = (torch.arange(16) < torch.tensor([[16], [11], [16], [7]])).long()


def gpt2() -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_positions": 32, "n_layer": 2, "vocab_size": 64}
    options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **options)).double()


@pytest.mark.parametrize(
    ("family", "options", "plan", "mesh", "more"),
    [
        ("Llama", {}, CONTEXT, {"sp": 4}, {"position_ids": POSITIONS}),
        ("Qwen3", {"head_dim": 8}, CONTEXT_ZIGZAG, {"sp": 4}, {"attention_mask": MASK}),
        ("GPT2", {}, CONTEXT_ZIGZAG, {"sp": 2}, {}),
        ("Gemma2", {"head_dim": 8, "sliding_window": 12}, CONTEXT_ZIGZAG, {"sp": 2}, {"attention_mask": MASK}),
        ("Llama", {}, ZERO3 | CONTEXT_ZIGZAG, {"dp": 2, "sp": 2}, {"position_ids": POSITIONS}),
        ("Llama", {}, ZERO3 | CONTEXT_ZERO3, {"dp": 2, "sp": 2}, {"position_ids": POSITIONS}),
    ],
)
@pytest.mark.some(2)
def test_dense_models(
    family: str,
    options: dict[str, Any],
    plan: Parallelism | Parallelisms,
    mesh: dict[str, int],
    more: dict[str, torch.Tensor],
) -> None:
    """The model shifts labels and counts positions, or is given them; padding is handed in chunks as well."""
    model = gpt2() if family == "GPT2" else build(family, **options)
    model.loss_type = "ForCausalLM"  # GPT-2 would log, which breaks the graph
    labels = IDS if "dp" in mesh else LABELS  # replicas count their labels alike
    found = simulate(model, {"input_ids": IDS, "labels": labels.clone(), **more}, plan, mesh)
    assert found.loss_error < 1e-6, str(found)  # transformers computes losses in float32, and Gemma 2 its norms
    assert found.grad_error < (1e-7 if family == "Gemma2" else 1e-12), str(found)
    held = [held for held in input_placements(found.program) if getattr(held.get("sp"), "dim", None) == 1]
    assert len(held) == 2 + len(more), "of ids, labels, and what else is given"
