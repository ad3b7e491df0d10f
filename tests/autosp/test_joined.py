"""Tokens that are joined to a sequence: what runs after them is sharded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

from autosp_rules import AutoSPConfig, AutoSPError
from tests.autosp.one_device import assert_equal_to_one_device
from tests.versions import TORCH

WIDTH, HEADS, VOCAB = 32, 4, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Joined(nn.Module):
    """Layers on [tokens of its own | embedded ids], as with memory tokens and prompt tuning."""

    def __init__(self, num_own: int) -> None:
        super().__init__()
        self.embed, self.own = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(1, num_own, WIDTH))
        self.layers, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.own.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)
        return F.cross_entropy(self.head(self.layers(x)[:, self.own.shape[1] :]).flatten(0, 1), ids.flatten())


class Vision(nn.Module):
    """Patches after a class token, which is what the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 10)
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        return F.cross_entropy(self.head(self.layers(x)[:, 0]), labels)


class Streams(nn.Module):
    """Text and image in blocks of their own, then joined, as the single-stream blocks of Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(12, WIDTH), nn.Linear(8, WIDTH)
        self.alone, self.together = nn.ModuleList([Block(), Block()]), nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        both = (self.alone[0](self.text(text)), self.alone[1](self.image(image)))
        return self.out(self.together(torch.cat(both, 1))[:, text.shape[1] :]).square().mean()


class Patches(nn.Module):
    """Patches of an image, which meet a text as `join` says, in the blocks of a diffusion transformer."""

    def __init__(self, join: Callable[[Patches, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.join = join
        self.text, self.patch, self.out = nn.Linear(12, WIDTH), nn.Conv2d(4, WIDTH, 2, 2), nn.Linear(WIDTH, 16)
        self.position, self.layers = nn.Parameter(torch.randn(1, 68, WIDTH)), nn.Sequential(Block(), Block())

    def forward(self, text: Tensor, pixels: Tensor) -> Tensor:
        patches = self.patch(pixels).flatten(2).transpose(1, 2)
        return self.out(self.join(self, self.text(text), patches)).square().mean()


def _positions_of_both(m: Patches, text: Tensor, patches: Tensor) -> Tensor:
    """As CogVideoX adds positions to text and patches together, and takes them apart again."""
    both = torch.cat([text, patches], 1) + m.position
    return m.layers(both[:, text.shape[1] :]) + both[:, : text.shape[1]].mean(1, keepdim=True)


def _modulated(m: Patches, text: Tensor, patches: Tensor) -> Tensor:
    """As Mochi scales patches by what it pools of the text, before any operator that is known as a norm."""
    return m.layers(patches * patches.square().mean(-1, keepdim=True).rsqrt() * (1 + text.mean(1, keepdim=True)))


def _row_by_row(m: Patches, text: Tensor, patches: Tensor) -> Tensor:
    """As Z-Image joins the rows of a batch, one by one, since their texts may have different lengths."""
    rows = [torch.cat(row) for row in zip(m.layers[0](patches), text, strict=True)]
    return m.layers[1](nn.utils.rnn.pad_sequence(rows, batch_first=True))


def _valid_text(m: Patches, text: Tensor, patches: Tensor) -> Tensor:
    """As Mochi attends to the tokens of each row's text that are no padding, and pads what comes out again."""
    x = m.layers[0](patches)
    heads, text_heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (x, text))
    found: list[Tensor] = []
    for row in range(len(x)):
        valid = (text[row, :, 0] > 0).nonzero().flatten()
        kept = text_heads[row : row + 1, :, : len(valid)]  # the padding is at the end
        both = torch.cat([heads[row : row + 1], kept], 2)
        y = F.scaled_dot_product_attention(both, both, both)
        found.append(F.pad(y, (0, 0, 0, x.shape[1] + text.shape[1] - y.shape[2])))
    return m.layers[1](x + torch.cat(found).transpose(1, 2).flatten(2)[:, : x.shape[1]])


def _llava() -> nn.Module:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**vision, "vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=3,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _ids(rows: int, length: int) -> Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _with_image() -> Tensor:
    ids = _ids(1, 32)
    ids[:, 2:18] = 3
    return ids


def _text_and_pixels() -> dict[str, Any]:
    return {"text": _floats(2, 4, 12), "pixels": _floats(2, 4, 16, 16)}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "four memory tokens": (lambda: Joined(4), lambda: {"ids": _ids(1, 64)}),
    "a prompt of three, length 15": (lambda: Joined(3), lambda: {"ids": _ids(3, 15)}),
    "a class token": (Vision, lambda: {"pixels": _floats(1, 3, 16, 16), "labels": torch.tensor([3])}),
    "two streams": (Streams, lambda: {"text": _floats(1, 8, 12), "image": _floats(1, 16, 8)}),
    "two streams, odd": (Streams, lambda: {"text": _floats(2, 7, 12), "image": _floats(2, 16, 8)}),
    "positions of text and patches": (lambda: Patches(_positions_of_both), _text_and_pixels),
    "patches that a text modulates": (lambda: Patches(_modulated), _text_and_pixels),
    "rows that are joined one by one": (lambda: Patches(_row_by_row), _text_and_pixels),
    "text of lengths that the data say": (lambda: Patches(_valid_text), _text_and_pixels),
    "llava": (
        _llava,
        lambda: {"input_ids": (ids := _with_image()), "pixel_values": _floats(1, 3, 16, 16), "labels": ids},
    ),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(3)
def test_layers_after_joined_tokens_are_sharded(case: str, num_ranks: int) -> None:
    if case == "llava" and TORCH < (2, 13):
        pytest.skip("Dynamo of torch 2.11 and 2.12 fails to trace it, whatever the backend")
    torch.manual_seed(0)
    build, inputs = CASES[case]
    tolerance = 1e-6 if case == "llava" else 1e-12  # its norms and loss are in float32
    report = assert_equal_to_one_device(build().double(), inputs(), ranks=(num_ranks,), loss=tolerance, grads=tolerance)
    assert report.whole_share <= 0.05


class Mixed(nn.Module):
    """A transform of the sequence that has no layout rule, and a product of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(33, 33)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.fft.rfft(self.embed(ids).transpose(1, 2), dim=-1).real
        return self.mix(x).square().mean()


def test_the_report_leads_with_what_runs_whole_and_strict_has_a_bound() -> None:
    model, inputs = Mixed().double(), {"ids": _ids(1, 64)}
    report = assert_equal_to_one_device(model, inputs, ranks=(3,))
    assert report.whole_share == 1.0
    assert (
        str(report)
        .splitlines()[1]
        .startswith("  whole: 1 of 1 matrix products run whole on every rank of sp, 100.0% of")
    )
    with pytest.raises(AutoSPError, match=r"strict=True: .*"):
        assert_equal_to_one_device(model, inputs, ranks=(3,), config=AutoSPConfig(strict=True))
