"""Several values that are redistributed alike travel in one collective.

    redistribute(bundle([q, k, v])[i], S(2) -> S(1))  ->  one all-to-all of what all three send to each rank

`bundle` is the identity on a list of values; whoever puts it before their redistributions asks for this. What goes
to each rank is joined in the dimension that differs, as the heads of q, k and v, so that inductor vectorizes what
writes and reads it; or it is written value after value, where values differ in more.
Matches all-to-alls and all-gathers of the values of one bundle, on local shapes. A bundle's values have one dtype.
Shapes: [ranks, *parts] of each value, joined on one of parts -> the same in the order of senders; else [ranks, n].
Numerics: exact. Source: coalesced collectives, as for q, k and v in libraries for attention on many ranks.

>>> import torch
>>> q, k = bundle([torch.ones(2), torch.zeros(3)])
>>> q.shape, k.shape
(torch.Size([2]), torch.Size([3]))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fxrewrite.graph.sizes import Size, is_same_size, product
from fxrewrite.match.match import Match
from fxrewrite.pattern import where
from fxrewrite.pattern.combinators import Literal, cap, op, siblings
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.where.base import Constraint
from fxrewrite.plan import RuleSet
from fxrewrite.plan.dead_code import DeadCode
from fxrewrite.rule import Rule
from fxrewrite.spmd.lower.collectives import Lowering, moves
from fxrewrite.spmd.placement import Axis, Placement, Replicate, Shard
from fxrewrite.spmd.properties import COLLECTIVE_CALLS, LOCAL_SHAPES
from fxrewrite.spmd.redistribute import redistribute
from fxrewrite.spmd.virtual import declare_virtual

aten = torch.ops.aten


@declare_virtual(lambda _, placements: tuple(placements))
def bundle(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values; their redistributions become one collective."""
    return list(values)


@where.predicate("values", text="is_bundle")
def _is_bundle(values: fx.Node) -> bool:
    return values.target is bundle


def _together(kind: str, condition: Constraint) -> Rule:
    item = op(operator.getitem, cap("values"), cap("index", Literal))
    moved = op(redistribute, item, cap("src", Literal), cap("dst", Literal), cap("axis", Literal))
    made = Rule(
        f"collectives.{kind}_together",
        Pattern((siblings(moved, on="values"),), (condition, _is_bundle)),
        shapes="changes",  # the same sizes, in other terms where they are symbolic
    )

    @made.replacement
    def _(
        match: Match, index: list[int], src: list[Placement], dst: list[Placement], axis: list[Axis]
    ) -> tuple[fx.Proxy, ...]:
        """one collective, split"""
        return _sent_at_once(match, kind, index, list(zip(src, dst, strict=True)), axis[0])

    return made


def _sent_at_once(
    match: Match, kind: str, index: Sequence[int], moved: Sequence[tuple[Placement, Placement]], axis: Axis
) -> tuple[fx.Proxy, ...]:
    values = [match["values"].args[0][i] for i in index]
    lows = [Lowering(match, axis, value) for value in values]
    parts = [[size for _, size in low.parts(*move)] for low, move in zip(lows, moved, strict=True)]
    at = _joint(parts)
    dim = 1 if at is None else 1 + at
    rows = [low.sent(match.proxy(value), *move) for low, value, move in zip(lows, values, moved, strict=True)]
    lengths = [lows[0].size(product(sizes) if at is None else sizes[at]) for sizes in parts]
    if at is None:
        to_all = 1 if kind == "all_gather" else axis.size
        rows = [aten.reshape(row, [to_all, length]) for row, length in zip(rows, lengths, strict=True)]
    came = aten.split_with_sizes(lows[0].collective(kind, aten.cat(rows, dim)), lengths, dim)
    results = []
    for i, (low, move, sizes) in enumerate(zip(lows, moved, parts, strict=True)):
        row = match.call(operator.getitem, came, i)
        if at is None:
            row = low.reshape(row, [axis.size, *sizes])
        results.append(low.settled(low.received(row, *move), match.outputs[i]))
    return tuple(results)


def _joint(parts: Sequence[Sequence[Size]]) -> int | None:
    """The one dimension in which the parts differ, 0 where they are alike; None where they differ in more."""
    if len({len(sizes) for sizes in parts}) > 1:
        return None
    alike = [all(is_same_size(size, sizes[0]) for size in sizes) for sizes in zip(*parts, strict=True)]
    return None if alike.count(False) > 1 else alike.index(False) if False in alike else 0


BUNDLE_RULES = RuleSet(
    "bundles",
    _together("all_to_all", moves(Shard, Shard)),
    _together("all_gather", moves(Shard, Replicate)),
    DeadCode("open_bundles"),
    needs=(LOCAL_SHAPES,),
    precedes=(COLLECTIVE_CALLS,),
)
