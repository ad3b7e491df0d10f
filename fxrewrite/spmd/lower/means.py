"""A mean over a sharded dimension is a sum by the global count.

    mean(x, dims)  ->  sum(x, dims) / (number of entries of the whole x over dims)

Matches a mean whose result propagation found to be a partial sum; the division keeps it one.
Numerics: reassociates.
"""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite.graph.sizes import product
from fxrewrite.match.match import Match
from fxrewrite.ops import bind
from fxrewrite.pattern import where
from fxrewrite.pattern.combinators import cap, loose, op
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.plan import RuleSet
from fxrewrite.rule import Rule
from fxrewrite.spmd.facts import global_shape, placement_of
from fxrewrite.spmd.operators.shared_nodes import size_proxy
from fxrewrite.spmd.placement import Partial
from fxrewrite.spmd.properties import LOCAL_SHAPES, PLACEMENTS

aten = torch.ops.aten


@where.predicate("root", text="is_partial")
def _is_partial(root: fx.Node) -> bool:
    return placement_of(root) == Partial()


mean_over_shards = Rule(
    "reductions.mean_over_shards",
    Pattern((loose(op("aten::mean", cap("x"))),), (_is_partial,)),
    numerics="reassociates",
)


@mean_over_shards.replacement
def _(match: Match, x: fx.Proxy) -> fx.Proxy:
    """sum(x, dims) / global count"""
    shape, args = global_shape(match["x"]), bind(match.root)
    dims = args.get("dim")
    dims = list(range(len(shape))) if not dims else [dim % len(shape) for dim in dims]
    dtype = match.root.meta["val"].dtype
    # torch adds up half precision in float32 too: a sum of many entries is beyond float16
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = aten.sum(x, dims, bool(args.get("keepdim", False)), dtype=wide)
    divided = aten.div(total, size_proxy(match, product(shape[dim] for dim in dims)))
    return divided if wide == dtype else aten.to(divided, dtype)


REDUCTIONS = RuleSet("mean_over_shards", mean_over_shards, needs=(PLACEMENTS,), precedes=(LOCAL_SHAPES,))
