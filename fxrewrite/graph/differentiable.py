"""May autograd run through a value? Answered from the graph: fake values of normal graphs do not say it."""

from __future__ import annotations

from torch import fx

from fxrewrite import ops
from fxrewrite.graph.walk import reached

__all__ = ["is_differentiable"]


def is_differentiable(node: fx.Node) -> bool:
    """Whether a gradient may flow from `node` to a floating-point input of its graph; True where it is not known.

    Whether the inputs require gradients is known to the caller of the program alone, so all of them count.
    """
    through = reached([node], lambda found: found.all_input_nodes if _is_passed(found) else ())
    return any(found.op in ("placeholder", "get_attr") and _is_passed(found) for found in through)


def _is_passed(node: fx.Node) -> bool:
    return ops.has_inexact(node) and not ops.has_trait(node, "detach")
