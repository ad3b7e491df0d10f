"""May autograd run through a value? Answered from the graph: fake values of normal graphs do not say it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite import ops
from fxrewrite.graph.walk import reached

NO_GRADIENTS = "runs_without_gradients"
"""Metadata key of a graph module that autograd runs without gradients: it is the body of a custom function."""


def passed(node: fx.Node) -> Collection[fx.Node]:
    """The operands that a gradient of the node flows to, if they have one: none of `detach`."""
    return () if ops.has_trait(node, "detach") else node.all_input_nodes


def requires_gradient(node: fx.Node) -> bool:
    """Whether an input requires a gradient in what the graph was traced with; True where that is not known."""
    return node.op == "placeholder" and getattr(node.meta.get("example_value"), "requires_grad", True)


def may_go_backward(graph: fx.Graph) -> bool:
    """Whether AOTAutograd makes a backward graph, or may: gradients are enabled, and an input requires one."""
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr") and ops.has_inexact(node)]
    return torch.is_grad_enabled() and any(map(_may_require_gradient, inputs))


def _may_require_gradient(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return requires_gradient(node)
    owner = node.graph.owning_module
    return owner is None or getattr(ops.held(owner, node), "requires_grad", False)


def differentiated(
    nodes: Sequence[fx.Node],
    requires: Callable[[fx.Node], bool],
    passed: Callable[[fx.Node], Collection[fx.Node]] = passed,
) -> set[fx.Node]:
    """The nodes of a graph that a gradient may flow through, to an input that requires one.

    Args:
        nodes: all of the graph, in order.
        requires: of an input or attribute with floating-point entries, whether it requires a gradient.
        passed: the operands that an operator's gradient flows to.
    """
    off, found = ops.without_gradients(nodes), set[fx.Node]()
    for node in nodes:
        if not ops.has_inexact(node) or node in off:
            continue
        if requires(node) if node.op in ("placeholder", "get_attr") else not found.isdisjoint(passed(node)):
            found.add(node)
    return found


def is_differentiable(node: fx.Node) -> bool:
    """Whether a gradient may flow from `node` to a floating-point input of its graph; True where it is not known.

    Whether the inputs require gradients is known to the caller of the program alone, so all of them count.
    """
    owner = node.graph.owning_module
    if owner is not None and owner.meta.get(NO_GRADIENTS):
        return False
    through = reached([node], lambda found: found.all_input_nodes if _is_passed(found) else ())
    return any(found.op in ("placeholder", "get_attr") and _is_passed(found) for found in through)


def _is_passed(node: fx.Node) -> bool:
    return ops.has_inexact(node) and not ops.has_trait(node, "detach")


def is_recomputed(node: fx.Node) -> bool:
    """Whether the node's tag makes the backward pass compute it again, if that needs it.

    AOTAutograd's partitioner takes both tags for orders.
    """
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
