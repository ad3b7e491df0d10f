"""Tiny random models of transformers, in float64."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

WIDTHS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
}


def build(family: str, **options: Any) -> Any:
    """A causal language model of the family, such as "Llama"."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**WIDTHS, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


GROUPED = "grouped_in_float64"
"""An implementation of experts for `model.set_experts_implementation`."""


def _experts(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Grouped products in the program, whose fallback takes float64; torch's own, on one device, does not."""
    run = grouped_mm_experts_forward if torch.compiler.is_compiling() else batched_mm_experts_forward
    return run(self, *args)


ALL_EXPERTS_FUNCTIONS.register(GROUPED, _experts)
