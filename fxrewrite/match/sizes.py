"""Sizes, dtypes and devices of one value as arguments of a call on another: `x.view(y.shape[0], 4)` in a pattern.

The graph may have a literal that equals the size, or a node that holds it, however that is computed. Where no values
are known, only the calls that read it count: `y.size(0)`, `y.shape[0]`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.graph.sizes import is_same_size
from fxrewrite.pattern.terms import ARITHMETIC_ON_SIZES

_NUMBERS = (int, torch.SymInt)
_SIZE = ("aten::sym_size", "aten::size")


@dataclass(frozen=True, slots=True)
class _Call:
    """The size of a value that is not known: the call that reads it."""

    node: Any
    dim: int | None


def size_of(node: Any, dim: int) -> Any:
    """Returns the size of a dimension, or the call that reads it; None if there is no such dimension."""
    value = ops.value(node) if isinstance(node, fx.Node) else None
    if value is ops.MISSING:
        return _Call(node, dim)
    return value.shape[dim] if isinstance(value, torch.Tensor) and -value.ndim <= dim < value.ndim else None


def numel_of(node: Any) -> Any:
    """Returns the number of entries, without a guard."""
    value = ops.value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    count: Any = 1
    for size in value.shape:
        count = count * size
    return count


def computed(name: str, *operands: Any) -> Any:
    """Returns the result of arithmetic on sizes; None if one is not known."""
    if not all(isinstance(operand, _NUMBERS) for operand in operands):
        return None
    return ARITHMETIC_ON_SIZES[name](*operands)


def is_number(value: Any, expected: Any) -> bool:
    """Whether a literal, or a node, is this size for every length that the graph admits."""
    if isinstance(expected, _Call):
        return _call_of(value) == expected
    found = ops.value(value) if isinstance(value, fx.Node) else value
    both = isinstance(found, _NUMBERS) and isinstance(expected, _NUMBERS) and not isinstance(found, bool)
    return both and is_same_size(found, expected)


def is_shape(value: Any, base: Any) -> bool:
    """Whether a list, or a node, is the whole shape of a value."""
    if isinstance(value, fx.Node):
        return _call_of(value) == _Call(base, None)
    if isinstance(value, (list, tuple)) and len(value) == 1 and _call_of(value[0]) == _Call(base, None):
        return True  # an operator that takes `*size`
    known = ops.value(base) if isinstance(base, fx.Node) else None
    if not isinstance(value, (list, tuple)) or not isinstance(known, torch.Tensor) or len(value) != known.ndim:
        return False
    return all(map(is_number, value, known.shape))


def is_attribute(value: Any, base: Any, name: str) -> bool:
    """Whether a literal, or a node that reads it, is the dtype or the device of a value."""
    if isinstance(value, fx.Node):
        return value.target is getattr and value.args == (base, name)
    known = ops.value(base) if isinstance(base, fx.Node) else None
    if not isinstance(known, torch.Tensor) or value is None:
        return False
    is_device = name == "device" and isinstance(value, (str, torch.device))
    return getattr(known, name) == (torch.device(value) if is_device else value)


def is_size_call(value: Any, dim: int) -> bool:
    """Whether a node reads this size of its first operand."""
    found = _call_of(value)
    return found is not None and found.dim == dim and found.node is value.args[0]


def _call_of(value: Any) -> _Call | None:
    if not isinstance(value, fx.Node):
        return None
    args: list[Any] = list(value.args)
    if ops.key(value) in _SIZE:
        dim = args[1] if len(args) > 1 else value.kwargs.get("dim")
        return _Call(args[0], dim) if dim is None or type(dim) is int else None
    if value.target is getattr and args[1] == "shape":
        return _Call(args[0], None)
    if value.target is operator.getitem and type(args[1]) is int:
        whole = _call_of(args[0])
        return _Call(whole.node, args[1]) if whole is not None and whole.dim is None else None
    return None


NAMES_OF_SIZES: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (size_of, numel_of, computed, is_number, is_shape, is_attribute, is_size_call)
}
"""What the expressions of conditions on sizes may name."""
