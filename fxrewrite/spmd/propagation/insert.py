"""Redistributions are inserted on every edge whose produced placement is not the required one."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import mutates
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.layouts.rule import tensor_of
from fxrewrite.spmd.placement import Axis, Placement, is_same_placement
from fxrewrite.spmd.propagation.decision import Decision, operands_of
from fxrewrite.spmd.propagation.legal import DECIDED
from fxrewrite.spmd.redistribute import redistribute, without_padding

__all__ = ["insert_redistributions"]


def insert_redistributions(edit: Edit, decisions: dict[fx.Node, Decision], axis: Axis, name: str) -> int:
    """Inserts the redistributions that decisions need, notes decisions on nodes, and returns the number of changes.

    Users that require the same placement of a value share one: it is sent once.
    """
    made: dict[tuple[fx.Node, str, int], fx.Node] = {}
    region = settled = 0

    def shared(
        user: fx.Node, operand: fx.Node, want: Placement, how: str, target: Any, args: tuple[Any, ...]
    ) -> fx.Node:
        at = (args[0], how, region)
        if at not in made:
            like = operand if user.op == "output" else user
            made[at] = edit.call(target, args, before=user, like=like, rule=name, val=tensor_of(operand))
            edit.set_fact(made[at], PLACEMENT, want)
        return made[at]

    for node in edit.nodes():
        if mutates(node):
            region += 1  # a copy made before a write, or under another autograd mode, is not right for users after it
        decision = decisions[node]
        if decision.produced:
            several = isinstance(node.meta.get("val"), (list, tuple))
            edit.set_fact(node, PLACEMENT, decision.produced if several else decision.produced[0])
        edit.set_fact(node, DECIDED, decision)
        if node.target is redistribute:
            settled += _settle(edit, node, decisions)
        if not decision.required or node.target is redistribute:
            continue
        swap: dict[fx.Node, list[fx.Node]] = {}
        for position, (operand, want) in enumerate(zip(operands_of(node), decision.required, strict=True)):
            origin = operand
            if operand.target is redistribute and not is_same_placement(decisions[operand].produced[0], want):
                origin = operand.all_input_nodes[0]  # straight from the producer, not by way of the stated placement
            have, neutral = decisions[origin].produced[0], decision.neutral
            value = origin
            if not is_same_placement(have, want):
                value = shared(node, operand, want, str(want), redistribute, (origin, have, want, axis))
            if neutral is not None and neutral.operand == position and value.target is not without_padding:
                how = f"{want} with {neutral.fill}"
                value = shared(node, operand, want, how, without_padding, (value, want, axis, neutral.fill))
            swap.setdefault(operand, []).append(value)
        if any(value is not operand for operand, values in swap.items() for value in values):
            edit.set_args(node, *_swapped(node, swap))
    unread = 0
    # What is stated and read by no user is not sent. A maximum stays, to be refused where it is differentiated.
    for node in reversed(edit.nodes()):
        if node.target is redistribute and not node.users and getattr(node.args[2], "reduce_op", "sum") == "sum":
            edit.erase(node)
            unread += 1
    return settled + len(made) + unread


def _settle(edit: Edit, node: fx.Node, decisions: dict[fx.Node, Decision]) -> int:
    """Give a stated redistribution the placement that its operand is produced with; drop it where they are the same."""
    value, _, dst, axis = node.args
    assert isinstance(value, fx.Node)
    have = decisions[value].produced[0]
    if is_same_placement(have, dst):  # pyright: ignore[reportArgumentType]
        edit.replace_uses(node, value)
        edit.erase(node)
    else:
        edit.set_args(node, (value, have, dst, axis))
    return 1


def _swapped(node: fx.Node, swap: dict[fx.Node, list[fx.Node]]) -> tuple[Any, Any]:
    """The node's arguments with each tensor operand replaced, occurrence by occurrence, in schema order."""
    queues = {operand: list(values) for operand, values in swap.items()}

    def take(n: fx.Node) -> fx.Node:
        values = queues.get(n)
        return values.pop(0) if values else n

    return map_arg(node.args, take), map_arg(node.kwargs, take)
