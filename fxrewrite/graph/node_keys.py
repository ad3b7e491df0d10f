"""What a node computes, as a key: equal for nodes that run the same operator with the same literals."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxrewrite.ops import held, key, tensors_of, value

__all__ = ["decided_names", "key_of_node", "look_of", "operands_in_order"]

_CHECKS = ("aten::_assert_scalar", "aten::_assert_async")
"""Operators whose second argument is a message, which may name a symbol."""
_DECIDED = sympy.Symbol("decided_by_data")
"""Any size that data decide."""


def key_of_node(gm: fx.GraphModule, node: fx.Node) -> Hashable:
    """What a node computes, without what it reads: operator, literals, the look of its result, tags."""
    target: Any = node.target
    if node.op == "call_module":
        target = ("module", target)  # modules have parameters of their own
    tags = node.meta.get("recompute"), repr(node.meta.get("custom"))
    given = [node.args[0]] if key(node) in _CHECKS else [node.args, node.kwargs]  # a message names a symbol
    return (node.op, target, _literal(gm, given), look_of(value(node)), tags)


def _literal(gm: fx.GraphModule, argument: Any) -> Hashable:
    """An argument as a key; nodes are holes, except subgraphs."""
    if isinstance(argument, fx.Node):
        if argument.op == "get_attr":
            body = held(gm, argument)
            return _body_key(body) if isinstance(body, fx.GraphModule) else "%"
        return "%"
    if isinstance(argument, (tuple, list)):
        items: Sequence[Any] = argument  # pyright: ignore[reportUnknownVariableType]
        return (type(items).__name__, *(_literal(gm, item) for item in items))
    if isinstance(argument, dict):
        entries: dict[Any, Any] = argument  # pyright: ignore[reportUnknownVariableType]
        return ("dict", *((name, _literal(gm, item)) for name, item in entries.items()))
    if isinstance(argument, slice):
        return ("slice", *(_literal(gm, item) for item in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(argument).__name__, _size(argument, None))
    if isinstance(argument, (float, complex)):
        return (type(argument).__name__, repr(argument))  # nan and -0.0 are literals too
    try:
        hash(argument)
    except TypeError:
        return (type(argument).__name__, id(argument))
    return (type(argument).__name__, argument)


def _body_key(body: fx.GraphModule) -> Hashable:
    """Equal for subgraphs that compute the same; tensors that they hold count by identity."""
    at: dict[fx.Node, int] = {}
    found: list[Hashable] = []
    for i, node in enumerate(body.graph.nodes):
        at[node] = i
        attribute = None
        if node.op == "get_attr":
            found_there = held(body, node)
            attribute = _body_key(found_there) if isinstance(found_there, fx.GraphModule) else id(found_there)
        target = node.target if node.op in ("call_function", "call_method") else None
        wires = tuple(at[operand] for operand in operands_in_order(node))
        literals = _literal(body, (node.args, node.kwargs))
        found.append((node.op, target, literals, wires, attribute, look_of(value(node))))
    return tuple(found)


def look_of(found: Any, names: Mapping[Any, Any] | None = None) -> Hashable:
    """What a compiler knows of a value: dtype, shape, strides, device; `names` are those of sizes that data decide."""
    if isinstance(found, torch.Tensor):
        kind = "" if type(found).__name__ in ("FakeTensor", "Parameter", "Tensor") else type(found).__name__
        sizes = (found.shape, found.stride()) if found.layout is torch.strided else (found.shape,)
        return (
            kind,
            found.dtype,
            found.layout,
            found.device,
            *(tuple(_size(n, names) for n in size) for size in sizes),
        )
    if isinstance(found, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(found).__name__, _size(found, names))
    if isinstance(found, (list, tuple)):
        items: Sequence[Any] = found  # pyright: ignore[reportUnknownVariableType]
        return tuple(look_of(item, names) for item in items)
    return type(found).__name__


def _size(size: Any, names: Mapping[Any, Any] | None) -> Hashable:
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    decided = free_unbacked_symbols(size)
    return size.node.expr.xreplace({s: (names or {}).get(s, _DECIDED) for s in decided})


def decided_names(nodes: Sequence[fx.Node]) -> dict[Any, Any]:
    """Numbers for the sizes that data decide, in the order in which the nodes make them."""
    names: dict[Any, Any] = {}
    for node in nodes:
        found = value(node)
        is_size = isinstance(found, (torch.SymInt, torch.SymFloat, torch.SymBool))
        for symbol in sorted(
            free_unbacked_symbols([found] if is_size else tensors_of(node)), key=lambda s: (len(s.name), s.name)
        ):
            names.setdefault(symbol, sympy.Symbol(f"decided_{len(names)}"))
    return names


def operands_in_order(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments in order, one as often as it occurs: f(a, b, b) is not f(a, a, b)."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
