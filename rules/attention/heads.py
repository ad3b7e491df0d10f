"""Attention by bmm, with batch and heads merged in one dimension, becomes scaled_dot_product_attention over both.

    bmm(softmax(bmm(q, k^T) * c + mask), v)              ->  sdpa(q, k, v, mask, scale=c)
    bmm(softmax(baddbmm(bias, q, k^T, beta, alpha)), v)  ->  sdpa(q, k, v, bias * beta, scale=alpha)
    bmm(view(softmax(view(baddbmm(bias, q, k^T, beta, alpha), [B, H, L, S]) + mask), [B * H, L, S]), v)
            ->  view(sdpa(view(q), view(k), view(v), view(bias) * beta + mask, scale=alpha), [B * H, L, D])

Matches everything that rules/attention/composite.py matches around the softmax, with bmm and baddbmm for both products,
and `reshape` for `view`. BLOOM writes the third. Refuses "the softmax is over [4, 2, 12, 3], the scores are [8, 6, 6]"
(a view that splits another dimension than the first), and "the bias has 1 entries in the first dimension, q has 8"
before a view.
Numerics: reassociates.
Source: Hugging Face transformers, modeling_bloom.py (BloomAttention).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Literal, Match, cap, either, maybe, op, refuse, where
from fxrewrite.ops import key, value
from fxrewrite.spmd import is_same_size
from rules.attention.parts import BIAS, KT, MASK, Q, V, add, attend, fusion, is_mask, is_number, keys, scaled, weights

__all__ = ["HEADS"]

_bmm: Any = op("bmm", Q, KT)
_baddbmm: Any = op("baddbmm", BIAS, Q, KT, beta=cap("beta", Literal), alpha=cap("alpha", Literal))
_scores: Any = either(_baddbmm, scaled(_bmm))


def _viewed(x: Any, shape: str) -> Any:
    return either(op("view", x, cap(shape, "any")), op("reshape", x, cap(shape, "any")))


_heads: Any = _viewed(_scores, "split")

fuse_bmm = fusion(
    "fuse_bmm",
    op("bmm", weights(maybe(_scores + MASK)), V),
    is_number("beta"),
    is_number("alpha"),
    *is_mask("bias"),
    *is_mask("mask"),
)
fuse_split_heads = fusion(
    "fuse_split_heads",
    op("bmm", _viewed(weights(maybe(_heads + MASK)), "merged"), V),
    is_number("beta"),
    is_number("alpha"),
    *is_mask("bias"),
    where.same_dtype("q", "mask"),
)


def _scale_and_mask(match: Match, bias: Any, mask: Any) -> tuple[float | None, Any]:
    """Returns the scale of the baddbmm, and its bias added to the mask; without a baddbmm, None and the mask."""
    if bias is None:
        return None, mask
    if match["beta"] == 0:  # torch does not read the bias then: it may be uninitialized memory
        return float(match["alpha"]), mask
    return float(match["alpha"]), add(bias if match["beta"] == 1 else bias * match["beta"], mask)


@fuse_bmm.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy, bias: Any, mask: Any) -> Any:
    """sdpa(q, k, v, bias * beta + mask, scale)"""
    scale, mask = _scale_and_mask(match, bias, mask)
    return attend(match, q, keys(kt), v, mask, scale=scale)


@fuse_split_heads.replacement
def _(match: Match, q: Any, kt: Any, v: Any, bias: Any, mask: Any, split: Any) -> Any:
    """view(sdpa(view(q), view(k), view(v), view(bias) * beta + mask, scale), shape of the product)"""
    (softmax,) = (node for node in match.nodes if key(node) == "aten::softmax")
    found, scores = list(value(softmax).shape), [*value(match["q"]).shape[:2], value(match["kt"]).shape[2]]
    rows = value(match.root).shape[1]  # the mask may have more rows than the scores
    pairs = zip([rows, *found[2:]], [scores[1], *scores[1:]], strict=False)
    if len(found) != 4 or not all(is_same_size(a, b) for a, b in pairs):
        refuse(f"the softmax is over {found}, the scores are {scores}")
    if mask is not None and mask.ndim < 2:
        refuse(f"the mask has rank {mask.ndim}, the scores have 4")
    is_per_head = bias is not None and bias.ndim == 3
    if is_per_head and not is_same_size(bias_first := value(match["bias"]).shape[0], scores[0]):
        refuse(f"the bias has {bias_first} entries in the first dimension, q has {scores[0]}")

    def heads(x: Any) -> Any:
        return torch.reshape(x, [split[0], split[1], x.shape[1], x.shape[2]])

    scale, mask = _scale_and_mask(match, heads(bias) if is_per_head else bias, mask)
    attended = attend(match, heads(q), heads(keys(kt)), heads(v), mask, scale=scale)
    return torch.reshape(attended, [q.shape[0], q.shape[1], v.shape[2]])


HEADS = (fuse_bmm, fuse_split_heads)
"""Rules for merged heads, in the order in which they are tried."""
