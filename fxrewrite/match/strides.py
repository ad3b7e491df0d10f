"""Whether strides matter: runs the operators that read a value on fake values with other strides."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import is_same_size

__all__ = ["is_laid_out_alike", "stride_reader"]


def is_laid_out_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors have equal strides, for every length that the graph admits.

    Strides of dimensions with one entry are ignored. Source: torch._prims_common.check_significant_strides.
    """
    pairs = zip(a.stride(), b.stride(), a.shape, strict=False)
    return a.ndim == b.ndim and all(m is n or is_same_size(m, n) or is_same_size(size, 1) for m, n, size in pairs)


def stride_reader(edit: Edit, old: fx.Node, new: torch.Tensor) -> fx.Node | None:
    """Returns the first node that fails, or draws other random numbers, if `old` gets the strides of `new`; else None.

    Runs affected operators in graph order, each once, until results have their old strides. HOP subgraphs and Python
    callables are not entered.
    """
    values: dict[fx.Node, Any] = {old: new}
    waiting = list(old.users)
    heapq.heapify(waiting)
    seen = set(waiting)
    while waiting:
        node = heapq.heappop(waiting)
        was = ops.value(node)
        if not isinstance(was, torch.Tensor) or "::" not in ops.key(node) or not _is_operator(node):
            continue
        if ops.is_random(node):
            return node
        try:
            result = edit.run_with(node, values)
        except Exception:  # noqa: BLE001  # any error means that the operator does not accept these strides
            return node
        if isinstance(result, torch.Tensor) and not is_laid_out_alike(was, result):
            values[node] = result
            for user in node.users:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, user)
    return None


def _is_operator(node: fx.Node) -> bool:
    higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op in ("call_function", "call_method") and not higher_order and not ops.mutates(node)
