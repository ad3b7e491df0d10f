"""Redistributions are inserted on every edge whose produced placement is not the required one."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import mutates
from fxrewrite.spmd.facts import PLACEMENT, set_placements
from fxrewrite.spmd.layouts.rule import tensor_of
from fxrewrite.spmd.placement import Axis, Partial, Placement, is_same_placement
from fxrewrite.spmd.propagation.decision import Decision, operands_of
from fxrewrite.spmd.propagation.legal import DECIDED
from fxrewrite.spmd.redistribute import redistribute, without_padding


class Insertion:
    """One walk over the nodes, which changes operands of each where it requires them otherwise than they are.

    Users that require the same placement of a value share a redistribution: it is sent once.
    """

    def __init__(self, edit: Edit, decisions: dict[fx.Node, Decision], axis: Axis, name: str) -> None:
        self._edit, self._decisions, self._axis, self._name = edit, decisions, axis, name
        self._made: dict[tuple[fx.Node, str, int], fx.Node] = {}
        """By the value, what became of it, and the region."""
        self._region = 0
        """How many nodes before this one write, or switch autograd: what was made before is not right behind them."""

    def run(self) -> int:
        """Inserts the redistributions that decisions need, notes decisions on nodes; returns the number of changes."""
        settled = 0
        for node in self._edit.nodes():
            self._region += mutates(node)
            self._note(node)
            if node.target is redistribute:
                settled += self._settle(node)
            elif self._decisions[node].required:
                self._meet_requirements(node)
        return settled + len(self._made) + self._drop_unread()

    def _note(self, node: fx.Node) -> None:
        set_placements(self._edit, node, self._decisions[node].produced)
        self._edit.set_fact(node, DECIDED, self._decisions[node])

    def _settle(self, node: fx.Node) -> int:
        """Give a stated redistribution the placement that its operand is produced with; drop it where they are the
        same."""
        value, _, dst, axis = node.args
        assert isinstance(value, fx.Node)
        have = self._decisions[value].produced[0]
        if is_same_placement(have, dst):  # pyright: ignore[reportArgumentType]
            self._edit.replace_uses(node, value)
            self._edit.erase(node)
        else:
            self._edit.set_args(node, (value, have, dst, axis))
        return 1

    def _meet_requirements(self, node: fx.Node) -> None:
        operands = operands_of(node)
        wants = zip(operands, self._decisions[node].required, strict=True)
        values = [self._as_required(node, position, *want) for position, want in enumerate(wants)]
        if values != operands:
            self._edit.set_args(node, *_with_operands(node, operands, values))

    def _as_required(self, user: fx.Node, position: int, operand: fx.Node, want: Placement) -> fx.Node:
        """The operand in the placement that its user wants, with the padding that it wants."""
        value, neutral = operand, self._decisions[user].neutral
        if operand.target is redistribute and not is_same_placement(self._decisions[operand].produced[0], want):
            value = operand.all_input_nodes[0]  # straight from the producer, not by way of the stated placement
        have = self._decisions[value].produced[0]
        if not is_same_placement(have, want):
            value = self._shared(user, operand, want, str(want), redistribute, (value, have, want, self._axis))
        if neutral is not None and neutral.operand == position and value.target is not without_padding:
            how = f"{want} with {neutral.fill}"
            args = (value, want, self._axis, neutral.fill)
            value = self._shared(user, operand, want, how, without_padding, args)
        return value

    def _shared(
        self, user: fx.Node, operand: fx.Node, want: Placement, how: str, target: Any, args: tuple[Any, ...]
    ) -> fx.Node:
        """A call that is made once for all users in its region."""
        at = (args[0], how, self._region)
        if at not in self._made:
            # A sum is completed for whatever computes it; shards are gathered for whoever reads them.
            is_sum = target is redistribute and isinstance(args[1], Partial)
            like = operand if user.op == "output" or is_sum else user
            made = self._edit.call(target, args, before=user, like=like, rule=self._name, val=tensor_of(operand))
            self._edit.set_fact(made, PLACEMENT, want)
            self._made[at] = made
        return self._made[at]

    def _drop_unread(self) -> int:
        """What is stated and read by no user is not sent. A maximum stays, to be refused where it is differentiated."""
        unread = 0
        for node in reversed(self._edit.nodes()):
            if node.target is redistribute and not node.users and getattr(node.args[2], "reduce_op", "sum") == "sum":
                self._edit.erase(node)
                unread += 1
        return unread


def _with_operands(node: fx.Node, operands: list[fx.Node], values: list[fx.Node]) -> tuple[Any, Any]:
    """The node's arguments with each tensor operand replaced, occurrence by occurrence, in schema order."""
    swap: dict[fx.Node, list[fx.Node]] = {}
    for operand, value in zip(operands, values, strict=True):
        swap.setdefault(operand, []).append(value)

    def take(n: fx.Node) -> fx.Node:
        return swap[n].pop(0) if swap.get(n) else n

    return map_arg(node.args, take), map_arg(node.kwargs, take)
