"""Writes what a Python function does to values, such as one under torch.vmap, as operators of a replacement.

traced(match, lambda x: torch.vmap(f)(x), x)   ->   the operators that torch.vmap makes of f, on x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxrewrite.match import Match
from fxrewrite.ops import fake_value, value
from fxrewrite.spmd.operators.shared_nodes import size_proxy

aten = torch.ops.aten
_RESHAPES = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
"""A chunk need not be contiguous, as the whole value was."""


def operators_of(function: Callable[..., Any], values: Sequence[Any], *, pre_dispatch: bool) -> fx.GraphModule:
    """What a function of these fake values runs, as operators for chunks; `pre_dispatch`, as above autograd."""
    # Equal calls share a fake value, and tracing knows operands by their values: each gets one of its own.
    own = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in values]
    body = make_fx(function, tracing_mode="fake", pre_dispatch=pre_dispatch)(*own)
    for node in body.graph.nodes:
        node.target = _RESHAPES.get(node.target, node.target)
    return body


def traced(match: Match, function: Callable[..., Any], *operands: fx.Node) -> Any:
    """In a replacement, makes the operators that a function of tensors runs, below autograd; returns its result.

    Sizes that the function reads are computed from the inputs of the graph. A detach in it may be lost, as torch 2.15
    traces it under torch.vmap: detach operands before, in the replacement.

    Args:
        match: whose replacement runs.
        function: of the fake values of the operands; gives a tensor, or several.
        operands: nodes of the graph.

    Raises:
        RefusedError: an operand has no fake value.
    """
    with torch.no_grad():
        body = operators_of(function, [fake_value(operand) for operand in operands], pre_dispatch=False)
    made: dict[fx.Node, Any] = {}
    given = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            made[node] = match.proxy(next(given))
        elif isinstance(value(node), torch.SymInt):
            made[node] = size_proxy(match, value(node))
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), made.__getitem__)  # pyright: ignore[reportArgumentType]
            made[node] = match.call(node.target, *args, **kwargs)
    return pytree.tree_map_only(fx.Node, made.__getitem__, body.graph.output_node().args[0])
