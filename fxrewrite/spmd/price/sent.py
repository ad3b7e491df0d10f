"""What ranks send in a step of a lowered program: its collectives forward, computed again, and backward.

The backward pass has the adjoints of collectives that a gradient flows through, and the means that `cotangents`
writes. What must be computed again there, such as gathered parameters, is sent again. An operator that communicates
inside says itself what it sends (`PRICE`).
Complexity: one pass over the nodes in each direction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field
from torch import fx

from fxrewrite.capture.custom_backward import CustomFunction, custom_function
from fxrewrite.graph.differentiable import differentiated, is_recomputed, passed, requires_gradient
from fxrewrite.graph.fake_values import FakeValues
from fxrewrite.graph.sizes import is_read_from_data, size_hint
from fxrewrite.graph.walk import reached
from fxrewrite.ops import is_inexact, key
from fxrewrite.report import bytes_text
from fxrewrite.spmd.group import ADJOINTS, COLLECTIVE_KINDS
from fxrewrite.spmd.operators.gradient_ops import GATHER_CAST, MEAN_GRADIENT, MEAN_GRADIENTS, PASS_GRADIENT
from fxrewrite.spmd.operators.send_rows import SEND_ROWS
from fxrewrite.spmd.price.price import PRICE, bytes_held, collective_bytes

Direction: TypeAlias = Literal["forward", "again", "backward"]
"""When something is sent: `again` is what the backward pass computes again."""


class Collective(BaseModel):
    """All collectives of one kind over one axis, in one direction of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(description="all_reduce, all_gather, ..., or the operator that sends inside")
    axis: str
    direction: Direction
    count: int
    bytes_sent: int = Field(description="bytes that one rank sends, in a ring in which all ranks take part")

    def __str__(self) -> str:
        sent = bytes_text(self.bytes_sent)
        return f"{self.kind:<16} {self.direction:<9} {self.count:>6} x {sent:>13} sent per rank and step"


def collectives_of(program: fx.GraphModule, sizes: Mapping[str, int], *, trains: bool) -> list[Collective]:
    """What a rank sends in a step of a lowered program: one entry for each kind, axis and direction.

    Args:
        program: of one rank.
        sizes: how many ranks each axis has, by its name, in the order of the mesh.
        trains: whether a backward pass follows.
    """
    found: dict[tuple[str, Direction, str], list[float]] = {}
    for one in sent_in(GradientFlow(program), sizes):
        if trains or one.direction == "forward":
            found.setdefault((one.axis, one.direction, one.kind), []).append(one.num_bytes)
    order = list(sizes), get_args(Direction)
    return [
        Collective(axis=axis, kind=kind, direction=direction, count=len(sent), bytes_sent=sum(map(round, sent)))
        for (axis, direction, kind), sent in sorted(
            found.items(), key=lambda entry: (order[0].index(entry[0][0]), order[1].index(entry[0][1]), entry[0][2])
        )
    ]


class GradientFlow:
    """Which values of a program have gradients, and which are computed again for them.

    Attributes:
        nodes: all of the program, in order.
        through: those that a gradient may flow through.
        live: of these, those that one does flow to, from what the program returns.
    """

    def __init__(self, program: fx.GraphModule) -> None:
        self.nodes = list(program.graph.nodes)
        self.through = differentiated(self.nodes, requires_gradient, _passed)
        self.live = _read_by_loss(self.nodes, self.through)
        self._values = FakeValues(program)
        self._saved: dict[fx.Node, list[fx.Node]] = {}

    def is_computed_again(self, node: fx.Node) -> bool:
        """Whether the backward pass reads what the value leads to, and computes it again as its tags say."""
        leads_to = reached([node], lambda value: filter(is_recomputed, value.users))
        return is_recomputed(node) and any(map(self._is_read, leads_to))

    def _is_read(self, value: fx.Node) -> bool:
        return any(value in self._saved_by(reader) for reader in (value, *value.users) if reader in self.live)

    def _saved_by(self, node: fx.Node) -> list[fx.Node]:
        if node not in self._saved:
            self._saved[node] = self._values.saved_for_backward(node, self.through)
        return self._saved[node]


def _read_by_loss(nodes: list[fx.Node], through: set[fx.Node]) -> set[fx.Node]:
    """Of these values, those that a gradient flows back to from what the program returns."""
    live = set[fx.Node]()
    for node in reversed(nodes):
        if node.op == "output" or node in live:
            live.update(operand for operand in _passed(node) if operand in through)
    return live


def _passed(node: fx.Node) -> Collection[fx.Node]:
    """The operands that the node's gradient flows to."""
    if node.target is PASS_GRADIENT:  # the value, of which it is the identity, gets none
        return [operand for operand in node.args[1:2] if isinstance(operand, fx.Node)]
    return passed(node)


class Sent(NamedTuple):
    """One collective of a step."""

    kind: str
    axis: str
    direction: Direction
    num_bytes: float


def sent_in(flow: GradientFlow, sizes: Mapping[str, int]) -> Iterator[Sent]:
    """Every collective of a step over these axes, those of the model's own not among them.

    Where a value is computed again, what it is made of is sent again. Of a custom function one body runs forward, and
    where a gradient flows to it the other one backward.
    """
    for node in flow.nodes:
        function = custom_function(node)
        if function is not None:
            yield from _sent_in_bodies(function, flow, node, sizes)
        axis: str = node.meta.get("axis", "")
        if axis not in sizes:
            continue
        there, back = _kinds(node, sizes[axis], flow.through)
        if there is not None:
            yield Sent(there[0], axis, "forward", there[1])
            if flow.is_computed_again(node):
                yield Sent(there[0], axis, "again", there[1])
        if back is not None and node in flow.live:
            yield Sent(back[0], axis, "backward", back[1])


def _sent_in_bodies(
    function: CustomFunction, flow: GradientFlow, node: fx.Node, sizes: Mapping[str, int]
) -> Iterator[Sent]:
    ways: list[tuple[fx.GraphModule, Direction]] = [(function.forward, "forward")]
    if flow.is_computed_again(node):
        ways.append((function.forward, "again"))
    if node in flow.live:
        ways.append((function.backward, "backward"))
    for body, direction in ways:
        for inner in body.graph.nodes:
            axis: str = inner.meta.get("axis", "")
            there = _kinds(inner, sizes[axis], set())[0] if axis in sizes else None
            if there is not None:
                yield Sent(there[0], axis, direction, there[1])


_Kind = tuple[str, float]
"""A kind of collective, and the bytes that a rank sends in it."""


def _kinds(node: fx.Node, num_ranks: int, through: set[fx.Node]) -> tuple[_Kind | None, _Kind | None]:
    """What a rank sends in the node, and in its backward pass if a gradient flows to it."""
    kind = COLLECTIVE_KINDS.get(node.target)
    if kind is not None:
        held, adjoint = bytes_held(node.all_input_nodes[0]), ADJOINTS[kind]
        back = collective_bytes(adjoint, bytes_held(node), num_ranks)
        return (kind, collective_bytes(kind, held, num_ranks)), (adjoint, back)
    if node.target is GATHER_CAST:  # sent in the dtype of the result, and reduced in that of the operand
        held, gathered = bytes_held(node.all_input_nodes[0]), bytes_held(node) * (num_ranks - 1) / num_ranks
        return ("all_gather", gathered), ("reduce_scatter", collective_bytes("all_gather", held, num_ranks))
    if node.target in (MEAN_GRADIENT, MEAN_GRADIENTS):
        averaged = [operand for operand in node.all_input_nodes if operand in through]
        return None, ("all_reduce", collective_bytes("all_reduce", sum(map(bytes_held, averaged)), num_ranks))
    if node.target is SEND_ROWS:
        forward, backward = _sent_rows(node, num_ranks)
        return ("all_to_all", forward), ("all_to_all", backward)
    inside = node.meta.get(PRICE)
    if inside is not None:
        name = key(node).rpartition("::")[2]
        return (name, inside.forward), (name, inside.backward)
    return None, None


def _sent_rows(node: fx.Node, num_ranks: int) -> tuple[float, float]:
    values: Any = node.args[0]
    forward = backward = 0.0
    for operand, result in zip(values, node.meta["val"], strict=True):
        value = operand.meta["val"]
        known = result if is_read_from_data(value.numel()) else value  # of one of both, data decide the rows
        sent = collective_bytes("all_to_all", size_hint(known.numel()) * known.element_size(), num_ranks)
        forward += sent
        backward += sent if is_inexact(value) else 0.0
    return forward, backward
