"""The bias of a linear is added after the reduction over the ranks, if the contracted dimension is sharded.

    linear(x, w, b)    ->  linear(x, w) + b        w stored as Shard(1)
    addmm(b, x, w)     ->  mm(x, w) + b            w stored as Shard(0)

Inside the operator every rank would add the bias once, so without this rule propagation gathers the operands.
Shapes: x [..., d], w [n, d] or [d, n], b [n].
Numerics: reassociates. Source: Megatron-LM, megatron/core/tensor_parallel/layers.py (RowParallelLinear).
"""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite import Constraint, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.spmd import Shard, held_as

aten = torch.ops.aten


def _is_held_on(dim: int) -> Constraint:
    @where.predicate("w", text=f"is_held_on[{dim}]")
    def is_held(w: fx.Node) -> bool:
        placement = held_as(w)
        return isinstance(placement, Shard) and placement.dim == dim

    return is_held


add_after_linear = Rule(
    "biases.add_after_linear",
    Pattern((op("linear", cap("x"), cap("w"), cap("b")),), (_is_held_on(1),)),
    numerics="reassociates",
)
add_after_mm = Rule(
    "biases.add_after_mm",
    Pattern((op("addmm", cap("b"), cap("x"), cap("w")),), (_is_held_on(0),)),
    numerics="reassociates",
)


@add_after_linear.replacement
def _(x: fx.Proxy, w: fx.Proxy, b: fx.Proxy) -> fx.Proxy:
    """linear(x, w) + b"""
    return aten.add(aten.linear(x, w), b)


@add_after_mm.replacement
def _(b: fx.Proxy, x: fx.Proxy, w: fx.Proxy) -> fx.Proxy:
    """mm(x, w) + b"""
    return aten.add(aten.mm(x, w), b)


BIASES = RuleSet("biases", add_after_linear, add_after_mm)
"""Runs after the placements of weights are annotated, before propagation."""
