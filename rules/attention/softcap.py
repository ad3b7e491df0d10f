"""Attention whose scores are bent to stay below a cap becomes one operator.

    tanh(q @ k^T * c / s)                        ->  tanh(q @ k^T * (c / s))
    softmax(tanh(q @ k^T * c) * s + mask) @ v    ->  attention(q, k, v, mask, scale=c * s, softcap=s)
    softmax(where(kept, tanh(q @ k^T * c) * s, fill)) @ v
                 ->  attention(q, k, v, kept, scale=c * s, softcap=s), or the mean of v in rows that keep no key

scaled_dot_product_attention has no argument for the cap, so every kernel of the operator is one of this repository, and
none rounds scores by which rows would differ: an added mask may hide all keys of a row, unlike in
rules/attention/composite.py. `rules.attention.by_rows` computes it without holding scores.
Matches `* c`, `/ c` or none before the tanh, twice (a scale and a cap), and `* s` after it. The two caps need not be
equal. Scores may be cast to a wider dtype before all that. Casts, softmaxes and masked_fill are those of
ATTENTION_UNBIASED, and one mask may be added.
Leaves alone what rules/attention/composite.py leaves alone, and, in these words: "a dropout of 0.1 draws"; "a division
by 0"; and a tanh that nothing multiplies.
Rows that keep no key: as in rules/attention/composite.py, with gradients to q and k where an added number hides them.
Shapes: q [*, L, E], k [*, S, E], v [*, S, D]; `*` is a batch, or batch and heads.
Numerics: reassociates.
Source: Gemma 2 (arXiv 2408.00118); Hugging Face transformers, modeling_gemma2.py (eager_attention_forward).

>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def attention(q, k, v):
...     return torch.softmax(torch.tanh(q @ k.transpose(-2, -1) / 8.0 / 50.0) * 50.0, -1) @ v
>>> gm = make_fx(attention, tracing_mode="fake", pre_dispatch=True)(*torch.rand(3, 2, 4, 6, 64))
>>> (MERGE_FACTORS >> SOFTCAPS).apply(gm)["attention.fuse_softcap"].rewrites
1
"""

from __future__ import annotations

from typing import Any

import torch

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, either, maybe, op, where
from rules.attention.parts import (
    DIVISOR,
    KEPT,
    KT,
    MASK,
    SCALE,
    Q,
    divides,
    draws_nothing,
    filled,
    fused,
    fusion,
    is_added,
    is_number,
    no_narrower,
    raw_weights,
    scale_of,
    scaled,
)

_FACTOR: Any = cap("factor", Literal)
_PART: Any = cap("part", Literal)
_SOFTCAP: Any = cap("softcap", Literal)

_product: Any = maybe(op("to", torch.matmul(Q, KT), cap("cast", Literal)))

_once: Any = either(_product * SCALE, _product / DIVISOR)
_twice: Any = either(_once * _FACTOR, _once / _PART)
_of_tanh: Any = torch.tanh(_twice)
merge_factors = fused(
    Rule(
        "attention.merge_factors",
        Pattern(
            (_of_tanh,),
            (
                where.dtype("q", torch.float16, torch.bfloat16, torch.float32, torch.float64),
                *no_narrower("q", "cast"),
                *(is_number("scale"), divides("divisor"), is_number("factor"), divides("part")),
            ),
        ),
        numerics="reassociates",
        domain="finite",
        optional=True,
    )
)


@merge_factors.replacement
def _(match: Match, q: Any, kt: Any, cast: torch.dtype | None) -> Any:
    """tanh(q @ k^T * c)"""
    factor = match["factor"] if match["part"] is None else 1.0 / match["part"]
    product = torch.matmul(q, kt)
    return torch.tanh((product if cast is None else product.to(cast)) * (scale_of(match) * factor))


_bent: Any = torch.tanh(scaled(_product)) * _SOFTCAP
_CAPPED = (divides("softcap"), draws_nothing)

fuse_softcap = fusion("fuse_softcap", raw_weights(maybe(_bent + MASK)), *is_added("mask"), *_CAPPED)
fuse_softcap_filled = fusion("fuse_softcap_filled", raw_weights(filled(_bent)), *KEPT, *_CAPPED)

MERGE_FACTORS = RuleSet("attention_softcap.spellings", merge_factors)
SOFTCAPS = RuleSet("attention_softcap.fusions", fuse_softcap, fuse_softcap_filled)
"""Runs after MERGE_FACTORS."""
