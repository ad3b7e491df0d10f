"""Models beside causal language models: encoders, encoder-decoders, images, sound, and two from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from autosp_rules import AutoSPConfig
from tests.zoo.models import BATCH, LENGTH, VOCAB, enlarge_weights, inputs_of, tiny_config

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Other:
    """How a model is built in training mode, and one batch for it; its output has the `loss`."""

    build: Callable[[str, torch.dtype], nn.Module]
    """From an attention implementation ("sdpa", "eager") and the dtype of the parameters."""
    inputs: Callable[[torch.dtype], Inputs]
    config: AutoSPConfig = field(default_factory=AutoSPConfig)


class NanoGPT(nn.Module):
    """A decoder as one writes it by hand: learned positions, tied weights, one product for q, k and v."""

    def __init__(self, attention: str = "sdpa", dropout: float = 0.0, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.attention, self.dropout, self.heads = attention, dropout, heads
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "proj": nn.Linear(width, width),
                    "norm_2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropped(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            x = x + self.attend(block, block["norm_1"](x))
            x = x + self.dropped(block["down"](F.gelu(block["up"](block["norm_2"](x)))))
        logits = self.head(self.norm(x))
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)

    def attend(self, block: Any, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in block["qkv"](x).split(width, dim=2))
        if self.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            y = self.dropped(scores.masked_fill(future, float("-inf")).softmax(-1)) @ v
        return self.dropped(block["proj"](y.transpose(1, 2).contiguous().view(b, s, width)))

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class TorchEncoder(nn.Module):
    """`torch.nn.TransformerEncoder` over token ids or over features, batch or sequence first."""

    def __init__(self, *, batch_first: bool = True, of_ids: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.length_dim = int(batch_first)
        self.tokens = nn.Embedding(VOCAB, 32) if of_ids else nn.Identity()
        self.positions = nn.Parameter(torch.randn(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> CausalLMOutput:
        positions = self.positions[: x.shape[self.length_dim]]
        x = self.tokens(x) + (positions if self.length_dim else positions[:, None])
        logits = self.head(self.encoder(x))
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


_OVERRIDES: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {"d_kv": 8, "d_ff": 48, "decoder_start_token_id": 1},
    "BartForConditionalGeneration": {"decoder_start_token_id": 1},
    "WhisperForConditionalGeneration": {
        "decoder_start_token_id": 1,
        "num_mel_bins": 8,
        "max_source_positions": LENGTH,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    # 15 patches of 4 x 4 and the class token are 16 tokens
    "ViTForImageClassification": {"image_size": (12, 20), "patch_size": 4, "num_labels": 5},
}


def others() -> dict[str, Other]:
    """Each model by its name; the names of classes are those of transformers."""
    found = {
        f"{name}ForMaskedLM": _other(f"{name}ForMaskedLM", _text)
        for name in ("Bert", "Roberta", "ModernBert", "DebertaV2", "Deberta", "Electra")
    }
    found |= {
        f"{name}ForConditionalGeneration": _other(f"{name}ForConditionalGeneration", _text) for name in ("T5", "Bart")
    }
    found["WhisperForConditionalGeneration"] = _other("WhisperForConditionalGeneration", _sound)
    found["ViTForImageClassification"] = _other("ViTForImageClassification", _image)
    for order, batch_first in (("[B, S]", True), ("[S, B]", False)):
        for what, of_ids in (("ids", True), ("features", False)):
            found[f"torch.nn.TransformerEncoder of {what} {order}"] = _torch_encoder(batch_first, of_ids)
    found["nanoGPT"] = Other(lambda attention, dtype: _ready(NanoGPT(attention), dtype), _text)
    return found


def _other(name: str, inputs: Callable[[torch.dtype], Inputs]) -> Other:
    def build(attention: str, dtype: torch.dtype) -> nn.Module:
        cls = getattr(transformers, name)
        config = tiny_config(cls.config_class, {"is_decoder": False, **_OVERRIDES.get(name, {})})
        return _ready(cls._from_config(config, attn_implementation=attention), dtype)

    return Other(build, inputs)


def _torch_encoder(batch_first: bool, of_ids: bool) -> Other:
    def inputs(dtype: torch.dtype) -> Inputs:
        text = _text(dtype)
        x = text["input_ids"] if of_ids else torch.randn(BATCH, LENGTH, 32, generator=_generator(), dtype=dtype)
        found = {"x": x, "labels": text["labels"]}
        if not batch_first:
            found = {name: value.transpose(0, 1).contiguous() for name, value in found.items()}
        return found

    def build(attention: str, dtype: torch.dtype) -> nn.Module:
        return _ready(TorchEncoder(batch_first=batch_first, of_ids=of_ids), dtype)

    return Other(build, inputs, AutoSPConfig(sequence_dim=None if batch_first else 0))


def _ready(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = model.to(dtype).train()
    enlarge_weights(model)
    return model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _text(dtype: torch.dtype) -> Inputs:
    return inputs_of("")


def _sound(dtype: torch.dtype) -> Inputs:
    frames = torch.randn(BATCH, 8, 2 * LENGTH, generator=_generator(), dtype=dtype)
    return {"input_features": frames, "labels": inputs_of("")["labels"]}


def _image(dtype: torch.dtype) -> Inputs:
    pixels = torch.randn(BATCH, 3, 12, 20, generator=_generator(), dtype=dtype)
    return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
