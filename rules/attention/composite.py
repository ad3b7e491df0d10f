"""Decomposed attention, as Hugging Face's eager models write it, becomes scaled_dot_product_attention.

    softmax(q @ k^T * c + bias + mask) @ v      ->  sdpa(q, k, v, bias + mask, scale=c)
    softmax((q @ k^T + bias) * c + mask) @ v    ->  sdpa(q, k, v, bias * c + mask, scale=c)
    softmax(where(kept, q @ k^T * c + bias, fill)) @ v
                 ->  sdpa(q, k, v, where(kept, bias, fill), scale=c), or the mean of v in rows that keep no key

    softmax(where(kept, q @ k^T, fill) * c) @ v, softmax(where(kept, q @ k^T * c, fill) + mask) @ v   likewise

Matches `* c`, `/ c` with a number c, or none; a mask, a bias and a mask, or none; masked_fill for `where`; scores in
q's dtype or a wider one, cast before the scale or the softmax; a cast before or after a dropout; `_safe_softmax`, and
nan_to_num after a softmax. `q @ k^T` is any matrix product: the replacement transposes the second operand, and
rules/attention/spellings.py merges that with the model's own transpose and turns einsum into such products.
rules/attention/heads.py does the same for bmm and baddbmm, and rules/canonical/operands.py for numbers in tensors.
Leaves alone: weights that have other users, a softmax over another dimension, scores scaled by a tensor, a softcap
(but for ATTENTION_UNBIASED), and, in these words:
    "q has dtype int64"; "dtypes are float32, float32, float64"; "the ranks are 4, 4, 3"
    "batch and heads of k are (2, 4), of q (2, 1)": q would have to be repeated
    "the mask has rank 1, the scores have 4", "the mask has shape (2, 1, 6, 6), the scores have (1, 4, 6, 6)"
    "the softmax is in torch.float32, the operands in torch.float64": the operator would not round there. So the eager
    attention of Llama, whose softmax is always in float32, is not rewritten in a float64 model.
    "a score may be as low as -100.0": a fill must be -65504 or less, or it does not hide
    "the mask is in torch.float64, the operands in torch.float32": on a CPU a float32 mask is taken as it is.
ATTENTION_UNBIASED matches the same without an added mask or bias, or with one of which each row provably keeps its own
key (causal, windows, ALiBi); the note on rows that keep no key says why that is a set of its own. It includes
rules/attention/sinks.py and softcap.py, which do the same with sinks, and with a softcap and any mask.
Refuses a dropout that draws; ATTENTION_DROPOUT takes it: the draws may be others, of the same distribution
(fused kernels draw in their own order).
Rows that keep no key: with a fill of -inf the original is NaN and the operator 0. With a finite fill the original
attends to all keys equally, without a gradient to q and k; so does the replacement, at the cost of a mean (or,
with a dropout or an added mask, of zeros in q). Where the
bias hides all kept keys of a row, values are equal, but gradients of q and k are not. An added mask is passed on
unchanged: where a whole row is -inf, the original is NaN and the operator 0; where a whole row is the lowest number of
the dtype, values are equal except in float16, where the original rounds all scores of the row to that number and the
operator does not; but torch 2.13's CPU kernel gives such a row different gradients if a gradient reaches it (rows of
left padding get none, because no loss counts them).
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

from fxrewrite import Constraint, Literal, Match, Rule, RuleSet, cap, either, maybe, op, where
from rules.attention.heads import HEADS
from rules.attention.parts import (
    BIAS,
    DIVISOR,
    KT,
    MASK,
    SAFE_SOFTMAX,
    SCALE,
    Q,
    V,
    add,
    attend,
    attend_to_kept,
    filled,
    fused,
    fusion,
    hides,
    hides_by_divisor,
    hides_times_scale,
    is_added,
    is_mask,
    keys,
    raw_weights,
    scaled,
    scaled_fill,
    weights,
)
from rules.attention.sinks import ATTENTION_SINKS, UNSHIFT
from rules.attention.softcap import MERGE_FACTORS, SOFTCAPS
from rules.attention.spellings import CLEANUP, EINSUM, KEYS, SOFTMAX
from rules.canonical.normal_forms import drop_to, type_as_to_to
from rules.canonical.operands import OPERANDS
from rules.masks.own_keys import keeps_own_keys

__all__ = ["ATTENTION", "ATTENTION_DROPOUT", "ATTENTION_UNBIASED", "FUSIONS_UNBIASED"]

_product: Any = torch.matmul(Q, KT)
_scores: Any = scaled(_product)
_biased: Any = maybe(_scores + BIAS)
_scaled_bias: Any = either((_product + BIAS) * SCALE, (_product + BIAS) / DIVISOR)
_fill_first: Any = filled(maybe(_product + BIAS), is_first=False)
_wide: Any = op("to", _product, cap("cast", Literal))
_KEPT = (*is_mask("kept", torch.bool), *is_mask("hidden", torch.bool), hides)


def _read(weighted: Any, name: str, *conditions: Constraint) -> Rule:
    return fusion(name, torch.matmul(weighted, V), *conditions)


def _hidden_or_masked(scores: Any) -> Any:
    return either(filled(scores, is_first=False), scores + MASK, scores)


fuse = _read(weights(maybe(_biased + MASK)), "fuse", *is_added("bias"), *is_added("mask"))
fuse_scaled_bias = _read(weights(maybe(_scaled_bias + MASK)), "fuse_scaled_bias", *is_added("bias"), *is_added("mask"))
fuse_filled = _read(weights(filled(_biased, is_first=False)), "fuse_filled", *is_added("bias"), *_KEPT)
fuse_filled_mask = _read(weights(filled(_scores, is_first=False) + MASK), "fuse_filled_mask", *is_added("mask"), *_KEPT)
fuse_scaled_fill = _read(
    weights(either(_fill_first * SCALE, _fill_first / DIVISOR)),
    "fuse_scaled_fill",
    *is_added("bias"),
    *_KEPT,
    hides_times_scale,
    hides_by_divisor,
)
fuse_wide = _read(weights(_hidden_or_masked(scaled(_wide))), "fuse_wide", *is_added("mask"), *_KEPT)
_cast: Any = maybe(op("to", _hidden_or_masked(_scores), cap("wide", Literal)))  # of float16; see `softmax` of parts
fuse_safe = _read(weights(_cast, by=SAFE_SOFTMAX), "fuse_safe", *is_added("mask"), *_KEPT)


@fuse.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy, bias: Any, mask: Any) -> Any:
    """sdpa(q, k, v, bias + mask, scale)"""
    return attend(match, q, keys(kt), v, add(bias, mask))


@fuse_scaled_bias.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy, bias: fx.Proxy, mask: Any) -> Any:
    """sdpa(q, k, v, bias * scale + mask, scale)"""
    return attend(match, q, keys(kt), v, add(_scaled(match, bias), mask))


@fuse_filled.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, bias: Any, fill: float) -> Any:
    """sdpa(q, k, v, where(kept, bias, fill), scale), or what reads all values in rows that keep no key"""
    return attend_to_kept(match, q, keys(kt), v, bias, None, fill)


@fuse_filled_mask.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, mask: fx.Proxy, fill: float) -> Any:
    """sdpa(q, k, v, where(kept, 0, fill) + mask, scale), or softmax(fill + mask) in rows that keep no key"""
    return attend_to_kept(match, q, keys(kt), v, None, mask, fill)


@fuse_wide.replacement
@fuse_safe.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, mask: Any, fill: float | None) -> Any:
    """sdpa(q, k, v, mask, scale), or as fuse_filled does it"""
    if fill is None:
        return attend(match, q, keys(kt), v, mask)
    return attend_to_kept(match, q, keys(kt), v, None, None, fill)


@fuse_scaled_fill.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, bias: Any, fill: float) -> Any:
    """sdpa(q, k, v, where(kept, bias, fill) * scale, scale), or what reads all values in rows that keep no key"""
    return attend_to_kept(
        match, q, keys(kt), v, None if bias is None else _scaled(match, bias), None, scaled_fill(match, fill)
    )


def _scaled(match: Match, bias: Any) -> Any:
    return bias * match["scale"] if match["divisor"] is None else bias / match["divisor"]


fuse_unbiased = fusion("fuse_unbiased", torch.matmul(raw_weights(_scores), V))
fuse_unbiased_filled = fusion(
    "fuse_unbiased_filled",
    torch.matmul(raw_weights(filled(_scores)), V),
    *_KEPT,
)


fuse_causal_bias = fusion(
    "fuse_causal_bias",
    torch.matmul(raw_weights(_scores + MASK), V),
    *is_added("mask"),
    where.predicate("mask", text="keeps_own_keys")(keeps_own_keys),
)


@fuse_causal_bias.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy, mask: fx.Proxy) -> Any:
    """sdpa(q, k, v, mask, scale)"""
    return attend(match, q, keys(kt), v, mask)


@fuse_unbiased.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: fx.Proxy) -> Any:
    """sdpa(q, k, v, scale)"""
    return attend(match, q, keys(kt), v, None)


@fuse_unbiased_filled.replacement
def _(match: Match, q: fx.Proxy, kt: fx.Proxy, v: Any, fill: float) -> Any:
    """sdpa(q, k, v, kept, scale), or the mean of v in rows that keep no key"""
    return attend_to_kept(match, q, keys(kt), v, None, None, fill)


def _drawing(rule: Rule) -> Rule:
    """Returns the same rule with permission to draw other numbers."""
    name = rule.id.replace("attention.", "attention_dropout.")
    promises: dict[str, Any] = {"numerics": rule.numerics, "domain": rule.domain, "rng": "changes"}
    return fused(Rule(name, rule.pattern, rule.body, optional=True, **promises))


_FUSIONS = (fuse, fuse_scaled_bias, fuse_filled, fuse_filled_mask, fuse_scaled_fill, fuse_wide, fuse_safe)
_CASTS = RuleSet("attention.casts", RuleSet("attention.type_as", type_as_to_to), drop_to)
_STEPS = (OPERANDS, _CASTS, EINSUM, UNSHIFT, SOFTMAX, HEADS)

ATTENTION = RuleSet("attention", *_STEPS, RuleSet("attention.fusions", *_FUSIONS), CLEANUP)
ATTENTION_DROPOUT = RuleSet(
    "attention_dropout", *_STEPS, RuleSet("attention_dropout.fusions", *map(_drawing, _FUSIONS)), CLEANUP
)
FUSIONS_UNBIASED = RuleSet(
    "attention_unbiased.fusions", fuse_unbiased, fuse_unbiased_filled, fuse_causal_bias, *SOFTCAPS.rules()
)
ATTENTION_UNBIASED = RuleSet(
    "attention_unbiased",
    OPERANDS,
    EINSUM,
    MERGE_FACTORS,
    FUSIONS_UNBIASED,
    ATTENTION_SINKS,
    KEYS,
)
"""For attention whose added bias, if any, hides no whole row, or with sinks or a softcap: every row is equal, gradients
too."""
