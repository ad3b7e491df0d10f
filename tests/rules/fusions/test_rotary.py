"""Rotary embeddings become one node and come back, bit for bit; what is cut elsewhere stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from rules.fusions.rotary import INLINE_ROTARY, ROTARY, rotary_embedding
from tests.rewriting import calls, check_left_alone, check_rewritten, check_stages, traced

Rotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
Parts = Callable[[torch.Tensor], Any]


def of_halves(parts: Parts) -> Rotary:
    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = parts(x)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    return rotary


def of_pairs(parts: Parts) -> Rotary:
    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        even, odd = parts(x)
        return x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin

    return rotary


SPELLINGS: dict[str, tuple[str, Rotary]] = {
    "llama": ("fuse_halves", lambda x, cos, sin: x * cos + llama.rotate_half(x) * sin),
    "factors in another order": ("fuse_halves", lambda x, cos, sin: sin * llama.rotate_half(x) + cos * x),
    "chunk": ("fuse_halves", of_halves(lambda x: x.chunk(2, -1))),
    "split": ("fuse_halves", of_halves(lambda x: x.split(4, dim=-1))),
    "split with sizes": ("fuse_halves", of_halves(lambda x: x.split([4, 4], dim=3))),
    "narrow": ("fuse_halves", of_halves(lambda x: (x.narrow(-1, 0, 4), x.narrow(-1, 4, 4)))),
    "cohere": ("fuse_pairs", lambda x, cos, sin: x * cos + cohere.rotate_half(x) * sin),
    "gptj": ("fuse_pairs", lambda x, cos, sin: x * cos + gptj.rotate_every_two(x) * sin),
    "pairs in another order": ("fuse_pairs", lambda x, cos, sin: sin * cohere.rotate_half(x) + cos * x),
}
KEPT: dict[str, tuple[str, int, Rotary, str]] = {
    "cut elsewhere": ("fuse_halves", 8, of_halves(lambda x: (x[..., :2], x[..., 2:])), "cut at 2 of 8"),
    "the last entry left out": (
        "fuse_halves",
        2,
        of_halves(lambda x: (x[..., :1], x[..., 1:1])),
        "the last part ends at 1 of 2",
    ),
    "an odd size": ("fuse_halves", 7, of_halves(lambda x: x.chunk(2, -1)), "size(x, -1) is 7"),
    "another dim": (
        "fuse_halves",
        8,
        lambda x, cos, sin: x * cos + torch.cat((-x[:, :, 4:], x[:, :, :4]), dim=-2) * sin,
        "the literal -1",
    ),
    "nothing negated": (
        "fuse_halves",
        8,
        lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin,
        "aten::neg",
    ),
    "the other way round": (
        "fuse_pairs",
        8,
        lambda x, cos, sin: x * cos + torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2) * sin,
        "the literal 1",
    ),
}


def inputs(dtype: torch.dtype = torch.float64, size: int = 8) -> tuple[torch.Tensor, ...]:
    """x [2, 3, 8, d], cos and sin [8, d]."""
    angles = torch.randn(8, size)
    return torch.randn(2, 3, 8, size).to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_there_and_back(spelling: str, dtype: torch.dtype) -> None:
    rule, rotary = SPELLINGS[spelling]
    args = inputs(dtype)
    gm = check_rewritten(ROTARY, f"rotary.{rule}", rotary, args)
    assert calls(gm) == [rotary_embedding]
    check_rewritten(INLINE_ROTARY, "rotary.inline", gm, args)
    assert rotary_embedding not in calls(gm)
    assert ROTARY.apply(gm)[f"rotary.{rule}"].rewrites == 1


def test_mixed_precision_as_in_cohere() -> None:
    x, cos, sin = inputs(torch.bfloat16)
    gm = traced(lambda x, cos, sin: cohere.apply_rotary_pos_emb(x, x, cos, sin, 0), x, cos, sin)
    expected = gm(x, cos, sin)[0]
    assert ROTARY.apply(gm)["rotary.fuse_pairs"].rewrites == 2
    assert torch.equal(gm(x, cos, sin)[0], expected)


@pytest.mark.parametrize("case", KEPT)
def test_leaves_alone(case: str) -> None:
    rule, size, rotary, reason = KEPT[case]
    check_left_alone(ROTARY, f"rotary.{rule}", rotary, inputs(size=size), reason)


def test_before_and_after(fx_snapshot: Any) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *llama.apply_rotary_pos_emb(q, k, cos, sin, 0), gptj.rotate_every_two(q) * sin + q * cos

    q, cos, sin = inputs(torch.bfloat16)
    check_stages(traced(attention, q, q[:, :1], cos, sin), fx_snapshot, after=ROTARY, inlined=INLINE_ROTARY)
