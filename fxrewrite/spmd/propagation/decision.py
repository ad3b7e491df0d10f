"""How one node runs over the axis: the placements that it requires of its operands, and those that it produces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite.spmd.layouts.notation import IndexMap, IndexPart, Lookup
from fxrewrite.spmd.layouts.rule import Call, Neutral
from fxrewrite.spmd.placement import Partial, Placement, ReduceOp, Replicate

R = Replicate()


@dataclass(frozen=True, slots=True)
class Decision:
    """How one node runs: its operands as `required`, its results as `produced`, which its users see as `shown`."""

    required: tuple[Placement, ...]
    produced: tuple[Placement, ...]
    shown: tuple[Placement, ...]
    why: str = ""
    gathered: str = ""
    """Why operands had to be made whole, where they had."""
    neutral: Neutral | None = None
    """The operand whose padded entries must count nothing in a sum, and what they are for that."""
    preferred: bool = False
    """Whether a result is shown sharded because that is preferred, and not because of its operands: that serves users
    within the graph, and nobody outside."""

    stays: bool = False
    """Whether it is a slice whose entries stay where they are."""
    lookup: Lookup | None = None
    """How a rank looks up entries that its chunk has, where the result is the sum over ranks of what they find."""

    def required_of(self, operands: Sequence[fx.Node], value: fx.Node) -> list[Placement]:
        """The placements that the node requires of a value, for each time that it is among its operands.

        What is no operator requires nothing of its operands, and reads them whole.
        """
        if len(operands) != len(self.required):
            return [R]
        return [want for operand, want in zip(operands, self.required, strict=True) if operand is value]

    def item(self, index: int) -> Decision:
        """The decision of a node that takes one of several results."""
        return Decision((), (self.produced[index],), (self.shown[index],), "part of a result", preferred=self.preferred)


def replicated(num_operands: int, num_results: int) -> Decision:
    """The node runs whole on every rank."""
    return Decision((R,) * num_operands, (R,) * num_results, (R,) * num_results)


def spread(
    indices: IndexMap, part: IndexPart, why: str, *, home: IndexPart | None = None, reduce_op: ReduceOp = "sum"
) -> Decision:
    """The node runs with `part` sharded; its results are shown sharded on `home` where they have that index.

    A result without the index of `part` is partial: `reduce_op` combines what the ranks have of it. Then what is added
    once is partial, too.
    """
    is_summed = not all(indices.has(terms, part.index) for terms in indices.results)
    required = tuple(
        Partial() if is_summed and position in indices.added else indices.placement(terms, part)
        for position, terms in enumerate(indices.operands)
    )
    produced = tuple(
        indices.placement(terms, part) if indices.has(terms, part.index) else Partial(reduce_op)
        for terms in indices.results
    )
    if home is None:
        return Decision(required, produced, produced, why)
    shown = tuple(
        indices.placement(terms, home) if indices.has(terms, home.index) else made
        for terms, made in zip(indices.results, produced, strict=True)
    )
    return Decision(required, produced, shown, why)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node: in schema order for an operator, in order of appearance for the output."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return list(Call.of(node).operands)
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def values_of(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The nodes that hold the results of `node`, each with the position of its result."""
    if not isinstance(node.meta.get("val"), (list, tuple)):
        yield node, 0
        return
    for user in node.users:
        if is_getitem(user) and isinstance(user.args[1], int):
            yield user, user.args[1]


def producer_of(value: fx.Node) -> tuple[fx.Node, int]:
    """The node that computes a value, and the position of its result; the node itself, where it is no part of one."""
    if is_getitem(value):
        node, index = value.args
        if isinstance(node, fx.Node) and isinstance(index, int):
            return node, index
    return value, 0


def is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
