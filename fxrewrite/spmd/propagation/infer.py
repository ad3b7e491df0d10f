"""The placement of a node that a rule makes, inferred from those of its operands as its fake value is.

Propagation may redistribute operands; inference may not. A rule that runs after propagation states what it needs by
`redistribute` in its replacement, and whatever then cannot run as it is placed is refused: nothing is replicated by
default.

y = op(a, b)      a: S(1), b: R, and the rule of op says that both are what sharding one index gives  ->  y likewise
y = op(a, b)      a: P, b: R, and op is linear in a  ->  y: P
"""

from __future__ import annotations

from typing import NoReturn

from torch import fx

from fxrewrite.errors import refuse
from fxrewrite.graph.linear import is_linear_in
from fxrewrite.ops import key, value
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.layouts.rule import LayoutRules
from fxrewrite.spmd.placement import Partial, Placement, Replicate, Shard, is_same_placement
from fxrewrite.spmd.propagation.decision import operands_of, producer_of, replicated, spread
from fxrewrite.spmd.virtual import placement_of_virtual

R = Replicate()


def inferred(node: fx.Node, rules: LayoutRules) -> Placement | tuple[Placement, ...] | None:
    """The placement that the node produces from its operands as they are placed; None where nothing tells it.

    Raises:
        RefusedError: no sharding of the operator requires its operands placed so.
    """
    result = value(node)
    several = isinstance(result, (list, tuple))
    source, index = producer_of(node)
    if source is not node:
        of_source = PLACEMENT.of(source)
        return of_source[index] if isinstance(of_source, tuple) else of_source
    # An operand without placement is a node from before propagation, or one that could not be inferred itself.
    operands = operands_of(node)
    placements = [PLACEMENT.of(operand) for operand in operands]
    known = [placement for placement in placements if placement is not None and not isinstance(placement, tuple)]
    if len(known) < len(placements):
        return None
    # A virtual operator states its placement; `redistribute` does so by its argument.
    stated = placement_of_virtual(node, known)
    if stated is not None:
        return stated
    if all(placement == R for placement in known):
        produced = replicated(0, len(result) if several else 1).produced
    # A pending reduction passes through what commutes with it: linear operators and sums. Nothing commutes with both a
    # sum and a shard, since each rank would combine its summand of the one with its chunk of the other.
    elif pending := [placement for placement in known if isinstance(placement, Partial)]:
        if (found := _spread_by_rule(node, known, rules)) is not None:  # what is added once to a sum of shards
            return found if several else found[0]
        sums = [operand for operand, placement in zip(operands, known, strict=True) if placement == Partial()]
        if several or any(isinstance(placement, Shard) for placement in known) or not is_linear_in(node, sums):
            _refuse(node, known, "is not linear in pending sums")
        if len(sums) < len(pending):
            _refuse(node, known, "does not run on pending maxima and minima")
        produced = (Partial(),)
    else:
        found = _by_rule(node, known, rules)
        if found is None:
            return None
        produced = found
    return produced if several else produced[0]


def _by_rule(node: fx.Node, placements: list[Placement], rules: LayoutRules) -> tuple[Placement, ...] | None:
    _, rule, indices = rules.of(node)
    if rule is None or indices is None:
        return None
    found = _spread_by_rule(node, placements, rules)
    return found or _refuse(node, placements, f"cannot run so by {rule.id} ({rule.says()})")


def _spread_by_rule(node: fx.Node, placements: list[Placement], rules: LayoutRules) -> tuple[Placement, ...] | None:
    """What the node gives if its operands are placed as sharding one of its indices requires them; else None."""
    _, rule, indices = rules.of(node)
    if rule is None or indices is None:
        return None
    located = zip(indices.operands, placements, strict=True)
    parts = [indices.locate(terms, placement) for terms, placement in located if isinstance(placement, Shard)]
    # Any operand that is sharded may tell the index; it counts if all others are placed as sharding that one requires.
    for part in parts:
        if part is not None and not indices.must_join(part):
            decision = spread(indices, part, "", reduce_op=rule.reduce_op)
            if all(is_same_placement(want, have) for want, have in zip(decision.required, placements, strict=True)):
                return decision.produced
    return None


def _refuse(node: fx.Node, placements: list[Placement], why: str) -> NoReturn:
    placed = ", ".join(
        f"%{operand.name} {placement}" for operand, placement in zip(operands_of(node), placements, strict=True)
    )
    refuse(
        f"{key(node)} reads {placed}, and {why}",
        node=node,
        hint="redistribute its operands in the replacement",
    )
