"""A bias is added to the chunks that a sum over ranks is scattered to, and not to the whole sum.

    redistribute(linear(x, w) + b, R, S)  ->  redistribute(linear(x, w), R, S) + b        w stored in shards

The left side is a stated placement of a row-parallel linear with bias (`rules.biases` has taken the bias out). There
the sum is completed for the addition, and then cut: an all-reduce and a slice, which send twice what a reduce-scatter
sends. Shapes: b [d]; S is not the last dimension.
Numerics: exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.ops import bind, fake_value, is_parameter, key
from fxrewrite.spmd import Replicate, Shard, held_as, input_of, redistribute

aten = torch.ops.aten


@where.predicate("y", "b", "dst", text="is_linear_and_bias")
def _is_linear_and_bias(y: fx.Node, b: fx.Node, dst: object) -> bool:
    if key(y) != "aten::linear" or not isinstance(held_as(bind(y)["weight"]), Shard):
        return False
    held, is_bias = held_as(b), is_parameter(input_of(b))
    return is_bias and held in (None, Replicate()) and isinstance(dst, Shard) and dst.dim < fake_value(y).dim() - 1


add_after_scatter = Rule(
    "chunks.add_after_scatter",
    Pattern(
        (
            op(
                redistribute,
                op("add", cap("y"), cap("b")),
                cap("src", Literal),
                cap("dst", Literal),
                cap("axis", Literal),
            ),
        ),
        (_is_linear_and_bias,),
    ),
)


@add_after_scatter.replacement
def _(match: Match, y: Any, b: Any, src: Any, dst: Any, axis: Any) -> Any:
    """redistribute(y) + b"""
    return aten.add(match.call(redistribute, y, src, dst, axis), b)


CHUNKED_BIASES = RuleSet("chunked_biases", add_after_scatter)
"""Runs after `rules.biases`, before propagation."""
