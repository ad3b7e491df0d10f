"""Several values that are redistributed alike travel in one collective.

    redistribute(bundle([q, k, v])[i], S(2) -> S(1))  ->  one all-to-all of what all three send to each rank

`bundle` is the identity on a list of values; whoever puts it in front of their redistributions asks for this. What goes
to each rank is written in a row, value after value, so values may differ in shape and in which dimensions move.
Matches all-to-alls and all-gathers of the values of one bundle, on local shapes. A bundle's values have one dtype.
Shapes: [ranks, *parts] of each value -> [ranks, n] -> joined on n, and back.
Numerics: exact. Source: the fused QKV all-to-all of Megatron and DeepSpeed-Ulysses implementations.

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

from fxrewrite import Constraint, DeadCode, Literal, Match, Pattern, Rule, RuleSet, cap, op, siblings, where
from fxrewrite.ops import declare_pure
from fxrewrite.spmd import Axis, Layout, Replicated, Shard, product, redistribute
from rules.collectives import Lowering, moves

__all__ = ["BUNDLE_RULES", "bundle"]

aten = torch.ops.aten


@declare_pure
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
        match: Match, index: list[int], src: list[Layout], dst: list[Layout], axis: list[Axis]
    ) -> tuple[fx.Proxy, ...]:
        """one collective, split"""
        return _sent_at_once(match, kind, index, list(zip(src, dst, strict=True)), axis[0])

    return made


def _sent_at_once(
    match: Match, kind: str, index: Sequence[int], moved: Sequence[tuple[Layout, Layout]], axis: Axis
) -> tuple[fx.Proxy, ...]:
    values = [match["values"].args[0][i] for i in index]
    lows = [Lowering(match, axis, value) for value in values]
    parts = [[size for _, size in low.parts(*move)] for low, move in zip(lows, moved, strict=True)]
    lengths = [lows[0].size(product(sizes)) for sizes in parts]
    to_all = 1 if kind == "all_gather" else axis.size
    rows = [
        aten.reshape(low.sent(match.proxy(value), *move), [to_all, length])
        for low, value, move, length in zip(lows, values, moved, lengths, strict=True)
    ]
    came = aten.split_with_sizes(lows[0].collective(kind, aten.cat(rows, 1)), lengths, 1)
    results = []
    for i, (low, move, sizes) in enumerate(zip(lows, moved, parts, strict=True)):
        row = low.reshape(match.call(operator.getitem, came, i), [axis.size, *sizes])
        results.append(low.settled(low.received(row, *move), match.outputs[i]))
    return tuple(results)


BUNDLE_RULES = RuleSet(
    "bundles",
    _together("all_to_all", moves(Shard, Shard)),
    _together("all_gather", moves(Shard, Replicated)),
    DeadCode("open_bundles"),
)
"""In front of `rules.collectives`."""
