"""A custom `torch.autograd.Function` in the normal graph: one node with two ATen subgraphs, so it keeps its backward.

Dynamo calls `autograd_function_apply(fwd_body, bwd_body, *operands)`, where

    fwd_body(*operands)                  -> (results, saved values)
    bwd_body(*gradients, *saved values)  -> one gradient for each operand, or None

where autograd calls the second subgraph instead of differentiating the first. Source: PyTorch,
torch/_functorch/autograd_function.py (`AutogradFunctionApply`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils import _pytree as pytree

from fxrewrite import ops
from fxrewrite.capture.autocast import ENTER, EXIT, without_autocast
from fxrewrite.errors import refuse
from fxrewrite.graph.bodies import body_of, nodes_of
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.differentiable import NO_GRADIENTS
from fxrewrite.graph.source import CHECKPOINT_TAGS

APPLY = torch.ops.higher_order.autograd_function_apply
_OPTIONS = {"non_differentiable_idx", "saved_for_backward_idx", "dirty_idx"}
Normalize = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """One call of a custom function: its subgraphs, their inputs and results."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    non_differentiable: frozenset[int]
    """Positions of the results that have no gradient."""

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the forward subgraph, one for each operand."""
        return self.forward.graph.find_nodes(op="placeholder")

    @property
    def results(self) -> tuple[Any, ...]:
        """The results that the forward subgraph returns to the graph: its nodes, and plain values."""
        return tuple(_given(self.forward)[0])

    @property
    def saved(self) -> tuple[Any, ...]:
        """The values that the forward subgraph saves for the backward subgraph: its nodes, and plain values."""
        return tuple(_given(self.forward)[1])

    @property
    def incoming(self) -> list[fx.Node]:
        """The inputs of the backward subgraph that are gradients, one for each result."""
        return self.backward.graph.find_nodes(op="placeholder")[: len(self.results)]

    @property
    def restored(self) -> list[fx.Node]:
        """The inputs of the backward subgraph that were saved, one for each saved value."""
        return self.backward.graph.find_nodes(op="placeholder")[len(self.results) :]

    @property
    def outgoing(self) -> tuple[Any, ...]:
        """The gradients that the backward subgraph returns, one for each operand, or None."""
        return tuple(_given(self.backward))


def custom_function(node: fx.Node) -> CustomFunction | None:
    """Returns the custom function that `node` calls; None if it calls something else."""
    if node.target is not APPLY:
        return None
    owner = node.graph.owning_module
    assert owner is not None, f"the graph of %{node.name} belongs to no module"
    forward, backward = (body_of(owner, body) for body in node.args[:2] if isinstance(body, fx.Node))
    assert forward is not None
    assert backward is not None
    indices: Any = node.kwargs.get("non_differentiable_idx", ())
    return CustomFunction(forward, backward, frozenset(indices))


def _given(body: fx.GraphModule) -> Any:
    return body.graph.output_node().args[0]


@dataclass(frozen=True, slots=True)
class NormalBodies:
    """ATen versions of custom functions' subgraphs, by the subgraphs that Dynamo traced; others are ATen already."""

    by_body: Mapping[fx.GraphModule, fx.GraphModule] = field(default_factory=dict[fx.GraphModule, fx.GraphModule])

    @staticmethod
    def of(gm: fx.GraphModule, normalize: Normalize) -> NormalBodies:
        """Normalizes the subgraphs of all custom functions that Dynamo's graph calls, nested ones included."""
        found: dict[fx.GraphModule, fx.GraphModule] = {}
        for node in nodes_of(gm):
            function = custom_function(node)
            if function is not None and function.forward not in found:
                _refuse_unknown_convention(node, function)
                forward, backward = _detached(function.forward), _detached(function.backward, function.results)
                _drop_unread_results(node, function, forward, backward)
                found[function.forward] = normalize(forward)
                with without_autocast():  # backward runs in its caller's mode, as Dynamo's subgraph does
                    found[function.backward] = normalize(backward)
        return NormalBodies(found)

    def call(self, meta: Mapping[str, Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Runs a call with this metadata on these arguments; the running tracer records a call of normal subgraphs."""
        forward, backward = (copy_module(self.by_body.get(body, body)) for body in args[:2])
        tags = {tag: meta[tag] for tag in CHECKPOINT_TAGS if tag in meta}
        for inner in forward.graph.nodes:
            inner.meta |= tags
        for body in (forward, backward):
            body.meta[NO_GRADIENTS] = True
        results = _record(forward, backward, args[2:], options)
        dropped = len(_given(args[0])[0]) - len(_given(forward)[0])
        return (*results, *[None] * dropped)


def _record(forward: fx.GraphModule, backward: fx.GraphModule, operands: tuple[Any, ...], options: Any) -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "only a tracer can record a call"
    with disable_proxy_modes_tracing():
        results = APPLY(forward, backward, *operands, **options)
    tracer: Any = mode.tracer
    for prefix, body in (("fwd_body", forward), ("bwd_body", backward)):
        number = next(n for n in itertools.count() if not hasattr(tracer.root, f"{prefix}_{n}"))
        tracer.root.register_module(f"{prefix}_{number}", body)
    proxies = pytree.tree_map(tracer.unwrap_proxy, operands)
    call = tracer.create_proxy("call_function", APPLY, (forward, backward, *proxies), options)
    return track_tensor_tree(results, call, constant=None, tracer=tracer)


def _drop_unread_results(
    node: fx.Node, function: CustomFunction, forward: fx.GraphModule, backward: fx.GraphModule
) -> None:
    """Removes from the copied subgraphs the last results that nobody reads and whose gradients nobody reads.

    torch 2.12 makes this unnecessary. In 2.11 everything that a forward computes is a result, so a value that it wrote
    in place is a result twice, and the gradient of one of the two is lost.
    """
    gradients = backward.graph.find_nodes(op="placeholder")[: len(function.results)]
    results, saved = _given(forward)
    users: list[Any] = [user for user in node.users if user.users]
    taken = [user.args[1] if user.target is operator.getitem else -1 for user in users]
    reads = {index if isinstance(index, int) else -1 for index in taken}
    count = len(results)
    while count and not ({count - 1, -1} & reads or count - 1 in function.non_differentiable or gradients[-1].users):
        backward.graph.erase_node(gradients.pop())
        count -= 1
    forward.graph.output_node().args = ((tuple(results[:count]), saved),)
    forward.recompile()
    backward.recompile()


def _refuse_unknown_convention(node: fx.Node, function: CustomFunction) -> None:
    unknown = sorted(node.kwargs.keys() - _OPTIONS)
    if unknown:
        refuse(
            f"a custom autograd function is called with unsupported options ({', '.join(unknown)})",
            node=node,
            hint="use torch 2.13, or rewrite the model without it",
        )
    if node.kwargs.get("dirty_idx") or any(map(_is_written_input, function.results)):
        refuse(
            "a custom autograd function writes to its input",
            node=node,
            hint="return a new tensor from its forward, without ctx.mark_dirty",
        )


def _is_written_input(result: Any) -> bool:
    """Whether a result is an input that the subgraph writes to. From torch 2.13 on, `dirty_idx` says so."""
    if not isinstance(result, fx.Node) or result.target != "view_as":
        return False
    source = result.args[0]
    return (
        isinstance(source, fx.Node)
        and source.op == "placeholder"
        and any(source in ops.mutated(user) for user in source.users)
    )


def _detached(body: fx.GraphModule, results: Sequence[Any] = ()) -> fx.GraphModule:
    """Returns a copy in which nothing requires gradients, because autograd runs both subgraphs without gradients.

    Its first inputs are gradients of `results`; Dynamo leaves no value on those that the subgraph does not read.
    """
    body = copy_module(body)
    inputs = body.graph.find_nodes(op="placeholder")
    for gradient, result in zip(inputs, results, strict=False):
        value = ops.value(result) if isinstance(result, fx.Node) else None
        gradient.meta["example_value"] = value if isinstance(value, torch.Tensor) else None
    for node in inputs:
        value = ops.value(node)
        node.meta["example_value"] = value.detach() if isinstance(value, torch.Tensor) else value
    for node in body.graph.nodes:
        if ops.sets_mode(node) and node.target not in (ENTER, EXIT):
            body.graph.erase_node(node)
    body.recompile()
    return body
