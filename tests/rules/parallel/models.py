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


class Adapted(nn.Module):
    """A linear with an adapter of low rank, by peft's names."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        made = {"bias": False, "dtype": base_layer.weight.dtype}
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, **made)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features, **made)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2


def adapt(model: nn.Module, *names: str) -> None:
    """Puts an adapter of three features around each linear of these names."""
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if name in names and isinstance(linear, nn.Linear):
                setattr(module, name, Adapted(linear))
