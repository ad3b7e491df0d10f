"""Attention whose softmax includes a sink becomes one operator. A sink is a logit per row that reads no value.

    softmax(cat([q @ k^T * c + bias + mask, sinks], -1))[..., :-1] @ v
            ->  attention(q, k, v, bias + mask, sinks, scale=c)

It is attention * sigmoid(logsumexp(scores) - sinks), which `rules.attention.by_rows` computes without holding scores.
Matches sinks after or before the keys, with or without the maximum of a row subtracted first, and all scales, masks,
masked_fill, and softmaxes in q's dtype or wider that rules/attention/composite.py matches.
Leaves alone what that file leaves alone, and, in these words: "3 columns are concatenated with the keys"; "the values
have 5 rows, the keys 6"; "a dropout of 0.1 draws".
Rows that keep no key are 0, without a gradient to q, k and v, whatever number hides their keys: the sink gets the whole
weight. The original does the same.
Shapes: q [*, L, E], k [*, S, E], v [*, S, D], sinks [*, L, 1]; `*` is a batch, or batch and heads.
Numerics: reassociates.
Source: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453); Hugging Face transformers,
modeling_gpt_oss.py (eager_attention_forward).

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def attention(q, k, v, sinks):
...     scores = torch.cat([q @ k.transpose(-2, -1) / 8.0, sinks.expand(2, 4, 6, 1)], -1)
...     return torch.softmax(scores, -1)[..., :-1] @ v
>>> gm = make_fx(attention, tracing_mode="fake", pre_dispatch=True)(*torch.rand(3, 2, 4, 6, 64), torch.rand(4, 1, 1))
>>> ATTENTION_SINKS.apply(gm)["attention.fuse_sinks"].rewrites
1
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, either, maybe, op, where
from fxrewrite.ops import value
from fxrewrite.spmd import is_same_size
from rules.attention.parts import (
    BIAS,
    KEPT,
    KT,
    MASK,
    Q,
    cast_and_dropout,
    draws_nothing,
    filled,
    fusion,
    is_mask,
    no_narrower,
    scaled,
)

_x, _sinks, _others = cap("x"), cap("sinks"), cap("others")
_DTYPE, _END, _LENGTH = cap("dtype", Literal), cap("end", "any"), cap("length", "any")


def _softmax(scores: Any) -> Any:
    return op("softmax", maybe(op("to", scores, cap("wide", Literal))), -1, _DTYPE)


def _computed(match: Match, scores: Any) -> Any:
    """Repeats the softmax of the match on other scores."""
    return torch.softmax(scores if match["wide"] is None else scores.to(match["wide"]), -1, dtype=match["dtype"])


unshift_softmax = Rule(
    "attention.unshift_softmax",
    Pattern(
        (
            _softmax(
                either(
                    op("sub", _x, op("amax", _x, [-1], True)),
                    op("sub", _x, op(operator.getitem, op("max", _x, -1, True), 0)),
                )
            ),
        ),
        no_narrower("x", "wide", "dtype"),
    ),
    numerics="reassociates",
    domain="finite",
    optional=True,
)


@unshift_softmax.replacement
def _(match: Match, x: fx.Proxy) -> Any:
    """softmax(x), which subtracts the greatest score itself"""
    return _computed(match, x)


_in_front: Any = _softmax(op("cat", [_sinks, _others], -1))
_behind: Any = _softmax(op("cat", [_others, _sinks], -1))


@where.predicate("sinks", text="is_a_column")
def _is_a_column(sinks: fx.Node) -> bool | str:
    columns = value(sinks).shape[-1]
    return is_same_size(columns, 1) or f"{columns} columns are concatenated with the keys"


@where.predicate("root", "others", text="are_the_others")
def _are_the_others(root: fx.Node, others: fx.Node) -> bool | str:
    read, columns = value(root).shape[-1], value(others).shape[-1]
    return is_same_size(read, columns) or f"{read} of {columns} columns are read"


sinks_behind_keys = Rule(
    "attention.sinks_behind_keys",
    Pattern(
        (
            either(
                op("slice", _in_front, -1, 1, _END),
                op("narrow", _in_front, -1, 1, _LENGTH),
                op("narrow", _behind, -1, 0, _LENGTH),
            ),
        ),
        (_is_a_column, _are_the_others),
    ),
    numerics="reassociates",
    optional=True,
)


@sinks_behind_keys.replacement
def _(match: Match, others: Any, sinks: Any) -> Any:
    """softmax(cat([others, sinks], -1))[..., :-1]"""
    return torch.ops.aten.slice(_computed(match, torch.cat([others, sinks], -1)), -1, 0, -1)


def _weights(scores: Any) -> Any:
    """A softmax over keys and sinks, of which only the columns of keys are read, with an optional dropout."""
    kept = op("slice", _softmax(op("cat", [scores, _sinks], -1)), -1, 0, _END)
    return cast_and_dropout(kept, "type_as")


@where.predicate("kt", "v", text="reads_all_keys")
def _reads_all_keys(kt: fx.Node, v: fx.Node) -> bool | str:
    columns, rows = value(kt).shape[-1], value(v).shape[-2]
    return is_same_size(columns, rows) or f"the values have {rows} rows, the keys {columns}"


_SINKS = (where.same_dtype("q", "sinks"), _is_a_column, _reads_all_keys, draws_nothing)
_biased: Any = maybe(scaled(torch.matmul(Q, KT)) + BIAS)

fuse_sinks = fusion("fuse_sinks", _weights(maybe(_biased + MASK)), *is_mask("bias"), *is_mask("mask"), *_SINKS)
fuse_filled_sinks = fusion("fuse_filled_sinks", _weights(filled(_biased)), *is_mask("bias"), *KEPT, *_SINKS)

UNSHIFT = RuleSet("attention.unshift", unshift_softmax)
ATTENTION_SINKS = RuleSet(
    "attention_sinks",
    UNSHIFT,
    RuleSet("attention_sinks.spellings", sinks_behind_keys),
    RuleSet("attention_sinks.fusions", fuse_sinks, fuse_filled_sinks),
)
