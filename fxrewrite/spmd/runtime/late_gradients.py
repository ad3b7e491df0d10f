"""Gradients of outputs beside a loss that are computed only where one comes.

    tails = detach_outputs(program, [1])            the program returns output 1 without a gradient, and more values
    operands = tails[1].operands(values, inputs)    of what the program returned, and what it was called with
    tails[1].gradients(operands, gradient)          what an unchanged program would add to the operands' gradients

A compiled program reads the gradient of each of its outputs in its backward pass: where nobody used an output beside
the loss, torch makes zeros of its size, which are held and added. What scores of many classes are computed from, an
activation and a weight, is much smaller. So a program returns the activation, with a gradient, and the scores without
one; if a gradient of the scores comes, the operators between the two, the tail, run again and are differentiated.

Differentiation is linear, so the sum of both parts is the gradient. Operators on parameters alone are in a tail, so
that what exchanges their gradients over ranks does so for this part as well: every rank must get a gradient then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite.backends.replayed_views import is_view_of_input
from fxrewrite.graph.sizes import product, size_hint
from fxrewrite.graph.walk import reached
from fxrewrite.ops import bodies_of_communicating, is_barrier, is_parameter, is_pure, memory_written
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.runtime.gradients import refuse_second_derivatives

aten = torch.ops.aten
_SMALLER = 4
"""How many times smaller than an output must be what it is computed from: that is what the caller holds in addition."""
_MOST = 16
"""Most operators of a tail on activations: a head with a scale, a soft cap and casts has fewer."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What computes an output of a program from other values.

    Attributes:
        module: returns the output of the operands.
        values, inputs: positions of the operands among what the program returns, and among its inputs.
    """

    module: fx.GraphModule
    values: tuple[int, ...]
    inputs: tuple[int, ...]

    def operands(self, values: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the module is called with, of all that the program returned, and of its inputs in that call."""
        return (*(values[i] for i in self.values), *(inputs[i] for i in self.inputs))

    def gradients(self, operands: Sequence[Any], gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradient of each operand, None of what requires none; `gradient` is that of the output."""
        is_again = torch.is_grad_enabled()  # create_graph=True: somebody may differentiate the gradients
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            held = [_leaf(x) if isinstance(x, torch.Tensor) else x for x in operands]
            output = self.module(*held)
        wanted = [x for x in held if isinstance(x, torch.Tensor) and x.requires_grad]
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        if is_again:
            found = refuse_second_derivatives(found)
        by_leaf = dict(zip(map(id, wanted), found, strict=True))
        return [by_leaf.get(id(x)) for x in held]


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def detach_outputs(program: fx.GraphModule, positions: Iterable[int]) -> dict[int, Tail]:
    """Changes the program, so that outputs at these positions leave without a gradient; returns their tails.

    Where no tail pays, or can run again, an output is as before. What tails read is appended to what is returned; where
    that is a view with a gradient of its own, `copy_replayed` must follow.

    Args:
        program: returns one flat list.
        positions: of outputs.
    """
    if not torch.is_grad_enabled():
        return {}
    output, tails = program.graph.output_node(), dict[int, Tail]()
    returned: list[Any] = list(output.args[0])  # pyright: ignore[reportArgumentType]
    finder, more = _Finder(program), dict[fx.Node, int]()
    for position in positions:
        value = returned[position]
        nodes = finder.tail_of(value)
        if nodes is None:
            continue
        read = [node for node in finder.read_by(nodes) if node.op != "placeholder"]
        at = [more.setdefault(node, len(returned) + len(more)) for node in read]
        tails[position] = finder.tail(value, nodes, at)
        with program.graph.inserting_before(output):
            detached = program.graph.call_function(aten.detach.default, (value,))
        detached.meta = dict(value.meta)
        returned[position] = detached
    if tails:
        output.args = ((*returned, *more),)
        program.recompile()
    return tails


class _Finder:
    """Finds tails of one program."""

    def __init__(self, program: fx.GraphModule) -> None:
        self._program = program
        self._order = {node: i for i, node in enumerate(program.graph.nodes)}
        self._written = memory_written(program.graph)

    def tail_of(self, value: Any) -> list[fx.Node] | None:
        """The operators that compute a value from ones that are much smaller, and from parameters, in order."""
        result = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(result, torch.Tensor) or not (result.is_floating_point() or result.is_complex()):
            return None
        found: dict[fx.Node, None] = {}
        todo = value
        while todo.op != "placeholder" and self._repeats(todo) and len(found) < _MOST:
            found[todo] = None
            found |= dict.fromkeys(n for operand in todo.all_input_nodes for n in self._of_parameters(operand))
            read = [node for node in self.read_by(found) if not is_parameter(node)]
            tensors = [node for node in read if isinstance(node.meta.get("val"), torch.Tensor)]
            if not all(node in tensors or node.op == "placeholder" for node in read):
                return None  # a size that is computed
            if sum(map(_num_bytes, tensors)) * _SMALLER <= _num_bytes(value):
                is_plain = not any(node in self._written or is_view_of_input(node) for node in tensors)
                return sorted(found, key=self._order.__getitem__) if is_plain else None
            todo = max(tensors, key=_num_bytes)
        return None

    def read_by(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """What these nodes read that is not among them, in the order of the graph."""
        inside = set(nodes)
        read = {operand for node in inside for operand in node.all_input_nodes} - inside
        return sorted(read, key=self._order.__getitem__)

    def tail(self, value: fx.Node, nodes: Sequence[fx.Node], at: Sequence[int]) -> Tail:
        """The tail of these nodes; `at` are the positions of what it reads, but inputs, among what is returned."""
        inputs = {node: i for i, node in enumerate(self._program.graph.find_nodes(op="placeholder"))}
        read = sorted(self.read_by(nodes), key=lambda node: node in inputs)  # stable: in order, inputs at last
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in read:
            copies[node] = graph.placeholder(node.name)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[value])
        positions = tuple(inputs[node] for node in read if node in inputs)
        return Tail(fx.GraphModule(self._program, graph), tuple(at), positions)

    def _repeats(self, node: fx.Node) -> bool:
        """Whether the node computes the same value again, on this rank alone."""
        is_call = node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator)
        sends = node.target in COLLECTIVES.values() or node.target in bodies_of_communicating()
        return is_call and not sends and is_pure(node) and not is_barrier(node) and node not in self._written

    def _of_parameters(self, node: fx.Node) -> list[fx.Node]:
        """The node and what it is computed from, if that is parameters alone: a weight after a cast, or gathered."""
        ancestors = list(reached([node]))
        inputs = [n for n in ancestors if n.op in ("placeholder", "get_attr")]
        calls = (n for n in ancestors if n.op not in ("placeholder", "get_attr"))
        is_own = bool(inputs) and all(map(is_parameter, inputs)) and self._written.isdisjoint(ancestors)
        if not is_own or not all(is_pure(n) or n.target in COLLECTIVES.values() for n in calls):
            return []
        return [n for n in ancestors if n.op != "placeholder"]


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return size_hint(product(value.shape)) * value.element_size()
