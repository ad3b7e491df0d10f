"""May autograd run through a value? Answered from the graph: fake values of normal graphs do not say it."""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite import ops

__all__ = ["is_differentiable"]

_STOPS = ("aten::detach", "aten::detach_copy")


def is_differentiable(node: fx.Node) -> bool:
    """Whether a gradient may flow from `node` to a floating-point input of its graph; True where it is not known.

    Whether the inputs require gradients is known to the caller of the program alone, so all of them count.
    """
    todo, seen = [node], {node}
    while todo:
        found = todo.pop()
        if ops.key(found) in _STOPS or not _is_float(found):
            continue
        if found.op in ("placeholder", "get_attr"):
            return True
        new = [operand for operand in found.all_input_nodes if operand not in seen]
        seen.update(new)
        todo += new
    return False


def _is_float(node: fx.Node) -> bool:
    value = ops.value(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)
