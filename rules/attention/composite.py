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

from fxrewrite import Literal, Rule, RuleSet, cap, either, maybe, op, where
from rules.attention.heads import HEADS
from rules.attention.parts import (
    BIAS,
    DIVISOR,
    KEPT,
    KT,
    MASK,
    SAFE_SOFTMAX,
    SCALE,
    Q,
    filled,
    fused,
    fusion,
    hides_by_divisor,
    hides_times_scale,
    is_added,
    raw_weights,
    scaled,
    weights,
)
from rules.attention.sinks import ATTENTION_SINKS, UNSHIFT
from rules.attention.softcap import MERGE_FACTORS, SOFTCAPS
from rules.attention.spellings import CLEANUP, EINSUM, KEYS, SOFTMAX
from rules.canonical.normal_forms import drop_to, type_as_to_to
from rules.canonical.operands import OPERANDS
from rules.masks.meanings import keeps_own_keys

_product: Any = torch.matmul(Q, KT)
_scores: Any = scaled(_product)
_biased: Any = maybe(_scores + BIAS)
_scaled_bias: Any = either((_product + BIAS) * SCALE, (_product + BIAS) / DIVISOR)
_fill_first: Any = filled(maybe(_product + BIAS), is_first=False)
_wide: Any = op("to", _product, cap("cast", Literal))


def _hidden_or_masked(scores: Any) -> Any:
    return either(filled(scores, is_first=False), scores + MASK, scores)


_ADDED = (*is_added("bias"), *is_added("mask"))
_cast: Any = maybe(op("to", _hidden_or_masked(_scores), cap("wide", Literal)))  # of float16; see `softmax` of parts

_FUSIONS = (
    fusion("fuse", weights(maybe(_biased + MASK)), *_ADDED),
    fusion("fuse_scaled_bias", weights(maybe(_scaled_bias + MASK)), *_ADDED, is_scaled_last=True),
    fusion("fuse_filled", weights(filled(_biased, is_first=False)), *is_added("bias"), *KEPT),
    fusion("fuse_filled_mask", weights(filled(_scores, is_first=False) + MASK), *is_added("mask"), *KEPT),
    fusion(
        "fuse_scaled_fill",
        weights(either(_fill_first * SCALE, _fill_first / DIVISOR)),
        *(*is_added("bias"), *KEPT, hides_times_scale, hides_by_divisor),
        is_scaled_last=True,
    ),
    fusion("fuse_wide", weights(_hidden_or_masked(scaled(_wide))), *is_added("mask"), *KEPT),
    fusion("fuse_safe", weights(_cast, by=SAFE_SOFTMAX), *is_added("mask"), *KEPT),
)
_UNBIASED = (
    fusion("fuse_unbiased", raw_weights(_scores)),
    fusion("fuse_unbiased_filled", raw_weights(filled(_scores)), *KEPT),
    fusion(
        "fuse_causal_bias",
        raw_weights(_scores + MASK),
        *is_added("mask"),
        where.predicate("mask", text="keeps_own_keys")(keeps_own_keys),
    ),
)


def _drawing(rule: Rule) -> Rule:
    """Returns the same rule with permission to draw other numbers."""
    name = rule.id.replace("attention.", "attention_dropout.")
    promises: dict[str, Any] = {"numerics": rule.numerics, "domain": rule.domain, "rng": "changes"}
    return fused(Rule(name, rule.pattern, rule.body, optional=True, **promises))


_CASTS = RuleSet("attention.casts", RuleSet("attention.type_as", type_as_to_to), drop_to)
_STEPS = (OPERANDS, _CASTS, EINSUM, UNSHIFT, SOFTMAX, HEADS)

ATTENTION = RuleSet("attention", *_STEPS, RuleSet("attention.fusions", *_FUSIONS), CLEANUP)
ATTENTION_DROPOUT = RuleSet(
    "attention_dropout", *_STEPS, RuleSet("attention_dropout.fusions", *map(_drawing, _FUSIONS)), CLEANUP
)
FUSIONS_UNBIASED = RuleSet("attention_unbiased.fusions", *_UNBIASED, *SOFTCAPS.rules())
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
