"""Functions that Dynamo calls without a look inside (`allow_in_graph`): an autograd function keeps its own backward.

    y = scale(x, w)    ->    y = autograd_function_apply(forward, backward, x, w)

A tracer above autograd would record what such a function computes forward, and autograd would differentiate that: the
loss would be right, and gradients not. So forward and backward are traced together below autograd, as AOTAutograd does,
and cut into the two subgraphs of a custom function. Tensor subclasses that live inside of the function, such as scaled
float8 values, are then the plain tensors that they consist of.
Source: PyTorch, torch/_dynamo/variables/misc.py (`produce_trampoline_autograd_apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree

from fxrewrite.errors import refuse
from fxrewrite.graph.walk import reached
from fxrewrite.ops import mutates

_OF_AUTOGRAD_FUNCTION = "trampoline_autograd_apply"
"""Name of the function by which Dynamo calls an autograd function without a look inside."""


class OpaqueCall(NamedTuple):
    """A call whose gradient is its own: its subgraphs, its operands, and how its result is made of theirs."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    operands: tuple[Any, ...]
    options: dict[str, Any]
    spec: pytree.TreeSpec


def is_opaque(target: Any) -> bool:
    """Whether Dynamo calls a function of the user that it has not looked into, or an autograd function so."""
    if not isinstance(target, FunctionType):
        return False
    return target.__name__ == _OF_AUTOGRAD_FUNCTION or str(target.__module__).partition(".")[0] != "torch"


def opaque_call(function: FunctionType, args: Any, kwargs: Any, node: fx.Node) -> OpaqueCall | None:
    """Traces a call of an opaque function; None where a tracer above autograd sees all that is in it.

    Raises:
        RefusedError: the function has its own backward, and writes to its input.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (torch.Tensor, torch.SymInt))]
    shapes: list[pytree.TreeSpec] = []

    def flat(*operands: Any) -> list[Any]:
        given = list(leaves)
        for i, operand in zip(at, operands, strict=True):
            given[i] = operand
        own_args, own_kwargs = pytree.tree_unflatten(given, spec)
        results, shape = pytree.tree_flatten(function(*own_args, **own_kwargs))
        shapes.append(shape)
        return results

    operands = tuple(leaves[i] for i in at)
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():  # whose mode records switches of autograd
        inputs = list(map(_alike, operands))
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]  # no leaves
        before = [getattr(value, "_version", 0) for value in copies]
        results = flat(*copies)
        if not _has_own_backward(results) and function.__name__ != _OF_AUTOGRAD_FUNCTION:
            return None
        if [getattr(value, "_version", 0) for value in copies] != before:
            refuse(
                "an autograd function that Dynamo does not look into writes to its input",
                node=node,
                hint="return a new tensor from its forward, without ctx.mark_dirty",
            )
        goes_back = [isinstance(result, torch.Tensor) and result.requires_grad for result in results]
        tangents = [torch.zeros_like(r.detach()) for r, goes in zip(results, goes_back, strict=True) if goes]
        joint = _traced_jointly(flat, inputs, tangents, goes_back)
    forward, backward, num_saved = _parts(joint, len(operands), goes_back)
    options = {
        "non_differentiable_idx": [i for i, goes in enumerate(goes_back) if not goes],
        "saved_for_backward_idx": list(range(num_saved)),
    }
    return OpaqueCall(forward, backward, operands, options, shapes[-1])


def _alike(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _has_own_backward(results: Sequence[Any]) -> bool:
    """Whether autograd would call the backward of an autograd function."""
    todo = [result.grad_fn for result in results if isinstance(result, torch.Tensor)]
    seen = set[Any]()
    while todo:
        step = todo.pop()
        if isinstance(step, BackwardCFunction):
            return True
        if step is not None and step not in seen:
            seen.add(step)
            todo.extend(before for before, _ in step.next_functions)
    return False


def _traced_jointly(
    flat: Callable[..., list[Any]], inputs: Sequence[Any], tangents: Sequence[torch.Tensor], goes_back: Sequence[bool]
) -> fx.GraphModule:
    """The graph of (*operands, *gradients of results) -> [*results, *gradients of operands], without writes to its own
    values."""
    wants = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad]

    def joint(*given: Any) -> list[Any]:
        operands, gradients = given[: len(inputs)], given[len(inputs) :]
        results = flat(*operands)
        found: list[torch.Tensor | None] = [None] * len(operands)
        if gradients:
            ends = [result for result, goes in zip(results, goes_back, strict=True) if goes]
            made = torch.autograd.grad(ends, [operands[i] for i in wants], gradients, allow_unused=True)
            for i, gradient in zip(wants, made, strict=True):
                found[i] = gradient
        return [*results, *found]

    traced = make_fx(joint, tracing_mode="symbolic")(*inputs, *tangents)
    if any(map(mutates, traced.graph.nodes)):
        functional = torch.func.functionalize(fx.Interpreter(traced).run, remove="mutations")
        own = [value.detach() if isinstance(value, torch.Tensor) else value for value in (*inputs, *tangents)]
        traced = make_fx(functional, tracing_mode="symbolic")(*own)
        traced.graph.eliminate_dead_code()
    return traced


def _parts(
    joint: fx.GraphModule, num_operands: int, goes_back: Sequence[bool]
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Cuts the graph into forward and backward; returns them, and how many values the first saves for the second."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    operands, tangents = placeholders[:num_operands], placeholders[num_operands:]
    returned: list[Any] = list(joint.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    results, gradients = returned[: len(goes_back)], returned[len(goes_back) :]
    forward = {*operands, *reached(_nodes(results))}
    backward = {*reached(_nodes(gradients))} - forward
    read = {used for node in backward for used in node.all_input_nodes} | {*_nodes(gradients)}
    saved = [node for node in joint.graph.nodes if node in forward and node in read]
    first = _graph(joint, operands, forward, (tuple(results), tuple(saved)))
    arrives = iter(tangents)
    incoming = [next(arrives) if goes else None for goes in goes_back]
    second = _graph(joint, [*incoming, *saved], backward, tuple(gradients))
    return first, second, len(saved)


def _graph(
    joint: fx.GraphModule, inputs: Sequence[fx.Node | None], nodes: Collection[fx.Node], result: Any
) -> fx.GraphModule:
    """The nodes of the joint graph as a graph of these inputs; None is an input that nothing reads."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(inputs):
        made = graph.placeholder(node.name if node is not None else f"unread_{i}")
        if node is not None:
            value = node.meta["val"]
            made.meta = {**node.meta, "val": value.detach() if isinstance(value, torch.Tensor) else value}
            copies[node] = made
    for node in joint.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(result, copies.__getitem__))
    return fx.GraphModule(joint, graph)


def _nodes(values: Sequence[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]
