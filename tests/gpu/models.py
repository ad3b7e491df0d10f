"""Models of Llama's shapes with random weights, of which one rank of 8 is measured alone.

Collectives return at once, so times are those of what a rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.gpu.figures import Setting

RANKS = 8
_WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {**dict(zip(_WIDTHS, (2048, 8192, 16, 32, 64), strict=True)), "tie_word_embeddings": True},
    "Llama-3.2-3B": {**dict(zip(_WIDTHS, (3072, 8192, 28, 24, 128), strict=True)), "tie_word_embeddings": True},
    "Llama-3.1-8B": {**dict(zip(_WIDTHS, (4096, 14336, 32, 32, 128), strict=True)), "tie_word_embeddings": False},
}
"""Each has 8 KV heads and a vocabulary of 128,256. Source: the models' configurations on Hugging Face."""
SHORTEST = 8192
"""Tokens of the shortest sequence that is measured."""


@dataclass(frozen=True)
class Model:
    """A configuration with as many layers as are trained, and those that the model has."""

    config: transformers.LlamaConfig
    layers_of_model: int

    @classmethod
    def of(cls, name: str, setting: Setting) -> Model:
        shape = {**SHAPES[name], "num_key_value_heads": 8, "vocab_size": 128256}
        layers = shape["num_hidden_layers"]
        shape["num_hidden_layers"] = setting.layers or layers
        if setting.tiny:
            shape |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 8}
            shape |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 128}
        dtype = "bfloat16" if setting.is_cuda else "float32"
        config = transformers.LlamaConfig(
            **shape, max_position_embeddings=1 << 22, use_cache=False, attention_dropout=0.0, dtype=dtype
        )
        return cls(config, layers)

    @property
    def described(self) -> dict[str, int]:
        """What a figure says of the model."""
        return {"layers": self.config.num_hidden_layers, "layers_of_model": self.layers_of_model, "ranks": RANKS}

    def num_multiplied(self) -> int:
        """Parameters that each token is multiplied by: all but the embedding, which is looked up, and norms."""
        c = self.config
        heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        layer = c.hidden_size * (heads + 3 * c.intermediate_size)
        return c.num_hidden_layers * layer + c.vocab_size * c.hidden_size

    def operations(self, length: int) -> float:
        """Of a rank's step, forward and backward: 6 for each parameter and token, and causal attention's."""
        c = self.config
        # forward 2 products of 2 operations, of half of all scores; the backward pass is two forwards
        attention = 3 * 4 * length**2 / 2 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        return (6 * self.num_multiplied() * length + attention) / RANKS

    def ids(self, length: int, setting: Setting) -> torch.Tensor:
        """Random tokens [1, length]."""
        generator = torch.Generator().manual_seed(length)
        return torch.randint(self.config.vocab_size, (1, length), generator=generator).to(setting.device)


def would_fit(shorter: tuple[int, int], longer: tuple[int, int], limit: int) -> int:
    """Tokens with which a step takes `limit` bytes, as each further token takes the same; of (tokens, bytes) of two."""
    per_token = (longer[1] - shorter[1]) / (longer[0] - shorter[0])
    return longer[0] + int((limit - longer[1]) / max(per_token, 1))


def first_step(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], model: Model, length: int, setting: Setting
) -> dict[str, Any]:
    """The step that compiles, in seconds, which leaves gradients that later steps add to."""
    ids = model.ids(length, setting)
    with setting.using():
        started = time.perf_counter()
        loss = run(ids, ids.clone())
        loss.backward()
        is_finite = bool(loss.isfinite().item())  # of shards that were not exchanged: no more than that
        return {"loss_is_finite": is_finite, "compile": time.perf_counter() - started}
