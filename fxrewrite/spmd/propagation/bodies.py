"""Nodes with bodies over the axis: on chunks where their bodies can run on chunks as they are, else on whole values.

    y = custom(x, w)        x: S(1), w: R    ->    y: S(1), and the bodies run on chunks, if
      forward(x, w)    -> y                          nothing moves in it, and nothing that it gives is a sum
      backward(dy, x)  -> dx, dw                     nothing moves here, dx is placed as x, dw is a sum over the ranks

The one redistribution that bodies hold completes a sum or an extremum over the ranks, as that of all absolute values by
which a float8 linear scales, where this sends less than it takes to gather the operands. What else they need whole is
gathered before the call. An operand that every rank has whole, and of which the bodies read only chunks, is sliced
there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite.capture.custom_backward import CustomFunction, custom_function
from fxrewrite.errors import RefusedError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.linear import is_linear, is_linear_in
from fxrewrite.graph.source import source_line
from fxrewrite.graph.walk import reached
from fxrewrite.ops import has_inexact, is_random, is_tensor, key, value
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import ReadOwn, Summed
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.layouts.rule import tensor_of
from fxrewrite.spmd.operators.shared_nodes import size_nodes
from fxrewrite.spmd.operators.true_gradients import give_true_gradients
from fxrewrite.spmd.placement import Axis, Partial, Placement, Replicate, Shard, is_same_placement
from fxrewrite.spmd.price.price import bytes_held
from fxrewrite.spmd.propagation.decision import Decision, operands_of, replicated
from fxrewrite.spmd.propagation.insert import Insertion
from fxrewrite.spmd.redistribute import without_padding

R = Replicate()
Propagate: TypeAlias = Callable[[Edit, Mapping[fx.Node, Placement]], dict[fx.Node, Decision]]
"""How the nodes of a body run whose inputs have the given placements."""


@dataclass(frozen=True, slots=True)
class _Body:
    """A body, and how it runs on inputs with certain placements."""

    edit: Edit
    decisions: dict[fx.Node, Decision]

    def placement_of(self, given: Any) -> Placement:
        return self.decisions[given].produced[0] if isinstance(given, fx.Node) else R

    def required_of(self, operand: fx.Node) -> Iterator[Placement]:
        """The placements that the body's operators require of a value; its output takes any."""
        for user in operand.users:
            if user.op != "output":
                yield from self.decisions[user].required_of(operands_of(user), operand)

    def why_not(self) -> str:
        """Why the body cannot run so with no other communication than what completes sums, or ''."""
        sizes = size_nodes(self.edit)
        for node in self.edit.nodes():
            decision = self.decisions[node]
            if decision.gathered:
                return decision.gathered
            for operand, want in zip(operands_of(node), decision.required, strict=False):  # inputs want nothing
                have = self.placement_of(operand)
                if not is_same_placement(have, want) and not self._completes(operand, want):
                    return f"{key(node)} wants %{operand.name} as {want}, and it is {have}"
            whole = value(node)
            dims = [placement.dim for placement in decision.produced if isinstance(placement, Shard)]
            if isinstance(whole, torch.Tensor) and not all(sizes.can_express(whole.shape[dim]) for dim in dims):
                return f"the size of %{node.name} is not known in it"
        return ""

    def _completes(self, operand: fx.Node, want: Placement) -> bool:
        return want == R and isinstance(self.placement_of(operand), Partial)

    def completed(self) -> list[fx.Node]:
        """The values that are sums or extrema over the ranks, and that operators want whole."""
        return [n for n in self.edit.nodes() if any(self._completes(n, want) for want in self.required_of(n))]

    def write(self, axis: Axis) -> None:
        """Note placements on the nodes, and complete sums."""
        Insertion(self.edit, self.decisions, axis, "complete_sums").run()


@dataclass(frozen=True, slots=True)
class _OnChunks:
    """A custom function on operands with the placements `given`, by input of its forward body."""

    function: CustomFunction
    given: Mapping[fx.Node, Placement]
    forward: _Body
    backward: _Body

    def asked(self) -> dict[fx.Node, Placement]:
        """The inputs that every rank has whole and of which the bodies read, or give as a gradient, only chunks."""
        found: dict[fx.Node, Placement] = {}
        for operand, placement in self.given.items():
            required = list(self._required_of(operand)) if placement == R else []
            if required and isinstance(required[0], Shard) and all(is_same_placement(p, required[0]) for p in required):
                found[operand] = required[0]
        return found

    def _required_of(self, operand: fx.Node) -> Iterator[Placement]:
        yield from self.forward.required_of(operand)
        for saved, restored in zip(self.function.saved, self.function.restored, strict=True):
            if saved is operand:
                yield from self.backward.required_of(restored)
        for given, gradient in zip(self.function.inputs, self.function.outgoing, strict=True):
            if given is operand and isinstance(placement := self.backward.placement_of(gradient), Shard):
                yield placement

    def why_not(self) -> str:
        """Why the function cannot run so, or ''."""
        function = self.function
        if why := self.forward.why_not():
            return f"in its forward, {why}"
        if any(isinstance(self.forward.placement_of(given), Partial) for given in (*function.results, *function.saved)):
            return "its forward gives a sum over the ranks"
        if why := self.backward.why_not():
            return f"in its backward, {why}"
        sent = 2 * sum(map(bytes_held, (*self.forward.completed(), *self.backward.completed())))
        read = sum(bytes_held(operand) for operand, placement in self.given.items() if isinstance(placement, Shard))
        if sent > read:
            return "to complete its sums sends more than to gather its operands"
        for position, result in enumerate(function.results):
            is_differentiable = isinstance(result, fx.Node) and has_inexact(result)
            if (
                position not in function.non_differentiable
                and is_differentiable
                and self.forward.placement_of(result) == R
            ):
                return "its forward gives a result that every rank has whole"
        arrived = {*function.incoming}
        for operand, gradient in zip(function.inputs, function.outgoing, strict=True):
            if isinstance(gradient, fx.Node):
                have, made = self.given[operand], self.backward.placement_of(gradient)
                if made == R and not arrived.isdisjoint(reached([gradient])) and self.backward.completed():
                    return f"the gradient of %{operand.name} is a sum that it completes"
                if made not in (R, Partial()) if have == R else not is_same_placement(have, made):
                    return f"%{operand.name} is {have}, and its gradient {made}"
        return ""

    def write(self, axis: Axis) -> None:
        """Note placements in the bodies, with sums completed, and without gradients of padding."""
        arrives = [node for node in self.function.incoming if node.users]
        is_by_row = not self.backward.completed() and is_linear(self.function.backward.graph, arrives)
        self.forward.write(axis)
        self.backward.write(axis)
        if not is_by_row:
            self._clear_gradients_of_padding(axis)

    def _clear_gradients_of_padding(self, axis: Axis) -> None:
        """Padding repeats an entry, which would get its gradient as well; one that is linear, row by row, is zero."""
        edit, cleared = self.backward.edit, dict[fx.Node, fx.Node]()
        output = edit.graph.output_node()
        for gradient in output.all_input_nodes:
            placement = self.backward.placement_of(gradient)
            if isinstance(placement, Shard) and placement.uneven:
                args = (gradient, placement, axis, 0.0)
                cleared[gradient] = edit.call(without_padding, args, before=output, val=tensor_of(gradient))
                edit.set_fact(cleared[gradient], PLACEMENT, placement)
        edit.set_args(output, map_arg(output.args, lambda node: cleared.get(node, node)))


class CustomFunctions:
    """The custom functions that a graph calls, while placements are propagated through it."""

    def __init__(self, edit: Edit, context: SpmdContext, propagate: Propagate) -> None:
        self._edit, self._context, self._propagate = edit, context, propagate
        self._on_chunks: dict[fx.Node, _OnChunks] = {}

    def decide(self, node: fx.Node, function: CustomFunction, placements: list[Placement]) -> Decision:
        """How a custom function runs whose tensor operands are seen as `placements`."""
        self._on_chunks.pop(node, None)
        why = "its bodies draw random numbers" if is_random(node) else ""
        try:
            found = None if why else self._settle(function, placements)
            why = why if found is None else found.why_not()
        except RefusedError as error:
            if self._context.strict:
                raise
            found, why = None, error.refusal.reason
        if found is None or why:
            num_results = len(function.results)
            return replace(
                replicated(len(placements), num_results), gathered=f"a function with its own backward: {why}"
            )
        self._on_chunks[node] = found
        produced = tuple(found.forward.placement_of(result) for result in function.results)
        return Decision(tuple(found.given.values()), produced, produced, "its bodies run on chunks")

    def _settle(self, function: CustomFunction, placements: list[Placement]) -> _OnChunks:
        """How the bodies run, once every operand is sliced of which only chunks are read."""
        forward, backward = self._part(function.forward), self._part(function.backward)
        inputs = [given for given in function.inputs if isinstance(value(given), torch.Tensor)]
        given = {
            n: R if isinstance(placement, Partial) else placement
            for n, placement in zip(inputs, placements, strict=True)
        }
        while True:
            first = _Body(forward, self._propagate(forward, given))
            produced = map(first.placement_of, (*function.results, *function.saved))
            arrives = dict(zip((*function.incoming, *function.restored), produced, strict=True))
            found = _OnChunks(function, given, first, _Body(backward, self._propagate(backward, arrives)))
            asked = found.asked()
            if not asked:
                return found
            given = given | asked

    def _part(self, body: fx.GraphModule) -> Edit:
        return next(part for part in self._edit.parts() if part.gm is body)

    def write(self, report: Report, own: AbstractSet[fx.Node]) -> None:
        """Note placements in the bodies, and see to it that each backward is given what it may be given.

        `own` are the nodes whose values are each rank's own.
        """
        for node in self._edit.nodes():
            function = custom_function(node)
            if function is None:
                continue
            on_chunks = self._on_chunks.get(node)
            if on_chunks is not None:
                on_chunks.write(self._context.axis)
            backward, axis = self._part(function.backward), self._context.axis
            is_changed = give_true_gradients(backward, function, axis, own=node in own)
            if is_changed and on_chunks is None:
                event = ReadOwn if node in own else Summed
                report.events.append(event(node=node.name, source=source_line(node)))


def stays_a_sum(node: fx.Node, operands: Sequence[fx.Node], placements: Sequence[Placement]) -> bool:
    """Whether a body's node may run on summands, where elsewhere they are added up first: it gives one result, and is
    linear in its operands that are sums."""
    if Partial() not in placements or not is_tensor(node):
        return False
    is_whole = all(placement in (R, Partial()) for placement in placements)
    sums = [operand for operand, placement in zip(operands, placements, strict=True) if placement == Partial()]
    return is_whole and is_linear_in(node, sums)
