"""Decomposed attention, as Hugging Face's eager models write it, becomes scaled_dot_product_attention.

    softmax(q @ k^T * c + bias + mask) @ v      ->  sdpa(q, k, v, bias + mask, scale=c)
    softmax((q @ k^T + bias) * c + mask) @ v    ->  sdpa(q, k, v, bias * c + mask, scale=c)
    softmax(where(kept, q @ k^T * c + bias, fill)) @ v
                 ->  sdpa(q, k, v, where(kept, bias, fill), scale=c), or the mean of v in rows that keep no key

Matches `* c`, `/ c` with a number c, or none; a mask, a bias and a mask, or none; masked_fill for `where`; a softmax in
q's dtype or a wider one, cast back or not; a dropout that does not draw. `q @ k^T` is any matrix product: the
replacement transposes the second operand, and rules/attention/spellings.py merges that with the model's own transpose
and turns einsum into such products. Products by bmm and baddbmm are matched in rules/attention/heads.py.
Leaves alone: weights that have other users, a softcap, a softmax over another
dimension, scores scaled by a tensor, and, in these words:
    "q has dtype int64"; "dtypes are float32, float32, float64"; "the ranks are 4, 4, 3"
    "batch and heads of k are (2, 4), of q (2, 1)": q would have to be repeated
    "the mask has rank 1, the scores have 4", "the mask has shape (2, 1, 6, 6), the scores have (1, 4, 6, 6)"
    "the softmax is in torch.float32, the operands in torch.float64": the operator would not round there. So the eager
    attention of Llama, whose softmax is always in float32, is not rewritten in a float64 model.
    "a score may be as low as -100.0": a fill must be -65504 or less, or it does not hide
ATTENTION_UNBIASED matches the same without an added mask or bias; the note on such rows below says why that is a set of
its own. It includes rules/attention/sinks.py, which does the same with sinks.
Refuses a dropout that draws; ATTENTION_DROPOUT takes it: the draws may be others, of the same distribution
(fused kernels draw in their own order).
Rows that keep no key: with a fill of -inf the original is NaN and the operator 0. With a finite fill the original
attends to all keys equally, without a gradient to q and k; so does the replacement, at the cost of a mean. Where the
bias hides all kept keys of a row, values are equal, but gradients of q and k are not. An added mask is passed on
unchanged: where a whole row is -inf, the original is NaN and the operator 0; where a whole row is the lowest number of
the dtype, values are equal, but torch 2.13's CPU kernel gives such a row different gradients if a gradient reaches it
(rows of left padding get none, because no loss counts them).
Numerics: reassociates. In half precision the operator rounds once, at the end, the original after each step. Fused
kernels have a first derivative, and no second derivative.
Source: Hugging Face transformers, eager_attention_forward of each modeling_*.py; PyTorch,
aten/src/ATen/native/transformers/attention.cpp.

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def attention(q, k, v):
...     return torch.softmax(q @ k.transpose(-2, -1) / 8.0, -1) @ v
>>> gm = make_fx(attention, tracing_mode="fake", pre_dispatch=True)(*torch.rand(3, 2, 4, 6, 64))
>>> ATTENTION.apply(gm)["attention.fuse"].rewrites
1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Match, Rule, RuleSet, either, maybe, refuse
from rules.attention.heads import HEADS
from rules.attention.parts import (
    BIAS,
    DIVISOR,
    KT,
    MASK,
    SCALE,
    Q,
    V,
    add,
    attend,
    filled,
    fused,
    fusion,
    hides,
    is_mask,
    keys,
    scaled,
    weights,
)
from rules.attention.sinks import ATTENTION_SINKS
from rules.attention.spellings import CLEANUP, EINSUM, KEYS

__all__ = ["ATTENTION", "ATTENTION_DROPOUT", "ATTENTION_UNBIASED"]

_product: Any = torch.matmul(Q, KT)
_scores: Any = scaled(_product)
_scaled_bias: Any = either((_product + BIAS) * SCALE, (_product + BIAS) / DIVISOR)
_biased: Any = maybe(_scores + BIAS)

fuse = fusion(
    "fuse",
    torch.matmul(weights(maybe(maybe(_scores + BIAS) + MASK)), V),
    *is_mask("bias"),
    *is_mask("mask"),
)
fuse_scaled_bias = fusion(
    "fuse_scaled_bias",
    torch.matmul(weights(maybe(_scaled_bias + MASK)), V),
    *is_mask("bias"),
    *is_mask("mask"),
)
fuse_filled = fusion(
    "fuse_filled",
    torch.matmul(weights(filled(_biased)), V),
    *is_mask("bias"),
    *is_mask("kept", torch.bool),
    *is_mask("hidden", torch.bool),
    hides,
)


@fuse.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy, bias: Any, mask: Any) -> Any:
    """sdpa(q, k, v, bias + mask, scale)"""
    return attend(match, q, keys(kt), v, add(bias, mask))


@fuse_scaled_bias.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy, bias: fx.Proxy, mask: Any) -> Any:
    """sdpa(q, k, v, bias * scale + mask, scale)"""
    bias = bias * match["scale"] if match["divisor"] is None else bias / match["divisor"]
    return attend(match, q, keys(kt), v, add(bias, mask))


@fuse_filled.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, bias: Any, kept: Any, hidden: Any, fill: float) -> Any:
    """sdpa(q, k, v, where(kept, bias, fill), scale), or the mean of v in rows that keep no key"""
    return _attend_to_kept(match, q, kt, v, kept, hidden, bias, fill)


def _attend_to_kept(match: Match, q: Any, kt: Any, v: Any, kept: Any, hidden: Any, bias: Any, fill: float) -> Any:
    kept = torch.logical_not(hidden) if kept is None else kept
    mask = kept if bias is None else torch.ops.aten.where.ScalarOther(kept, bias, fill)
    attended = attend(match, q, keys(kt), v, mask)
    if fill == -torch.inf:
        return attended
    if match["p"] and match["train"]:
        refuse("a dropout draws in rows that may keep no key", hint="fill with -inf")
    return torch.where(torch.any(kept, -1, True), attended, torch.mean(v, -2, True))


fuse_unbiased = fusion("fuse_unbiased", torch.matmul(weights(_scores), V))
fuse_unbiased_filled = fusion(
    "fuse_unbiased_filled",
    torch.matmul(weights(filled(_scores)), V),
    *is_mask("kept", torch.bool),
    *is_mask("hidden", torch.bool),
    hides,
)


@fuse_unbiased.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy) -> Any:
    """sdpa(q, k, v, scale)"""
    return attend(match, q, keys(kt), v, None)


@fuse_unbiased_filled.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, kept: Any, hidden: Any, fill: float) -> Any:
    """sdpa(q, k, v, kept, scale), or the mean of v in rows that keep no key"""
    return _attend_to_kept(match, q, kt, v, kept, hidden, None, fill)


def _drawing(rule: Rule) -> Rule:
    """Returns the same rule with permission to draw other numbers."""
    name = rule.id.replace("attention.", "attention_dropout.")
    promises: dict[str, Any] = {"numerics": rule.numerics, "domain": rule.domain, "rng": "changes"}
    return fused(Rule(name, rule.pattern, rule.body, optional=True, **promises))


_FUSIONS = (fuse, fuse_scaled_bias, fuse_filled, *HEADS)

ATTENTION = RuleSet("attention", EINSUM, RuleSet("attention.fusions", *_FUSIONS), CLEANUP)
ATTENTION_DROPOUT = RuleSet(
    "attention_dropout", EINSUM, RuleSet("attention_dropout.fusions", *map(_drawing, _FUSIONS)), CLEANUP
)
ATTENTION_UNBIASED = RuleSet(
    "attention_unbiased",
    EINSUM,
    RuleSet("attention_unbiased.fusions", fuse_unbiased, fuse_unbiased_filled),
    ATTENTION_SINKS,
    KEYS,
)
"""For attention without an added bias, or with sinks: values and gradients are equal in every row, padding included."""
