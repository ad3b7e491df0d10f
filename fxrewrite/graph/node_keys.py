"""What a node computes, as a key: equal for nodes that run the same operator with the same literals."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxrewrite.graph.argument_keys import argument_key
from fxrewrite.ops import held, key, nodes_in, tensors_of, value

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

    def of_leaf(leaf: Any) -> Hashable:
        if isinstance(leaf, fx.Node):
            body = held(gm, leaf) if leaf.op == "get_attr" else None
            return _body_key(body) if isinstance(body, fx.GraphModule) else "%"
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return type(leaf), _size(leaf, None)
        try:
            hash(leaf)
        except TypeError:
            return type(leaf), id(leaf)
        return type(leaf), leaf

    return argument_key(argument, of_leaf)


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
        wires = tuple(at[operand] for operand in nodes_in((node.args, node.kwargs)))
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
