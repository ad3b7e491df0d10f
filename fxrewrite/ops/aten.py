"""Converts torch calls to ATen overloads as tracing does, so that new nodes are spelled like traced ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxrewrite.ops.binding import BindingError, Signature, overload_of, signature_of
from fxrewrite.ops.keys import key
from fxrewrite.ops.schemas import schema_of
from fxrewrite.ops.value import is_tensor, value

_aten = torch.ops.aten
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)
_TENSOR_OVERLOADS = {getattr(_aten, name).Scalar: getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div")}
"""Tracing writes `x * 2` as `mul.Tensor(x, 2)`."""

Emit = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


def emit_aten(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], emit: Emit) -> Any:
    """Emits a torch call as ATen overloads; a Python function that is not a single operator is emitted unchanged.

    Args:
        target: a function, overload packet, or the name of a tensor method.
        args: nodes and plain values.
        kwargs: the same by name.
        emit: called with (target, args, kwargs) for every node to make, in order; its last result is returned.
    """
    if target is operator.getitem and isinstance(args[0], fx.Node) and is_tensor(args[0]):
        return _emit_index(args[0], args[1], emit) if _is_basic(args[1]) else emit(target, args, kwargs)
    try:
        signature = signature_of(target, args, kwargs)
        overload = overload_of(target, args, kwargs)
    except BindingError:
        return emit(target, args, kwargs)
    if overload is None or not (_has_tensor(args, kwargs) or isinstance(target, torch._ops.OpOverloadPacket)):
        return emit(target, args, kwargs)
    operator_key = key(target)
    if operator_key in ("aten::add", "aten::mul", "aten::sub", "aten::div"):
        bound = signature.bind(args, kwargs)
        if _is_number(bound.get("self")) and "rounding_mode" not in bound:
            return _emit_reflected(operator_key, bound["self"], bound["other"], emit)
        overload = _TENSOR_OVERLOADS.get(overload, overload)
    places = _PLACES.get((signature, id(overload)))
    if places is None:
        places = _PLACES[signature, id(overload)] = _places(signature, overload)
    positional, by_keyword, is_as_written = places
    if is_as_written and (len(args), len(kwargs)) == (len(positional), len(by_keyword)):  # a wrapper takes more
        return emit(overload, args, kwargs)
    bound = signature.bind(args, kwargs)
    return emit(overload, tuple(bound[name] for name in positional), {name: bound[name] for name in by_keyword})


_Places: TypeAlias = tuple[list[str], list[str], bool]
"""Names of positional and of keyword arguments, and whether a call has them as it is."""
_PLACES: dict[tuple[Signature, int], _Places] = {}
"""By the spelling of a call, and its overload."""


def _places(signature: Signature, overload: torch._ops.OpOverload) -> _Places:
    positional: list[str] = []
    by_keyword: list[str] = []
    skipped = False
    for parameter in schema_of(overload).parameters:
        if parameter.name not in signature.given and parameter.name in signature.defaults:
            skipped = True
        elif parameter.keyword_only or skipped:
            by_keyword.append(parameter.name)
        else:
            positional.append(parameter.name)
    written = [(name, at) for at, name in enumerate(positional)], [(name, name) for name in by_keyword]
    is_same = written == ([*signature.positions], [*signature.keywords])
    return positional, by_keyword, is_same and not signature.conversions and signature.rest is None


def _emit_reflected(operator_key: str, number: Any, tensor: Any, emit: Emit) -> Any:
    """Emits arithmetic with a number on the left: `2 - x` and `2 / x`."""
    if operator_key == "aten::sub":
        return emit(_aten.rsub.Scalar, (tensor, number), {})
    if operator_key == "aten::div":
        return emit(_aten.mul.Tensor, (emit(_aten.reciprocal.default, (tensor,), {}), number), {})
    return emit(_aten.add.Tensor if operator_key == "aten::add" else _aten.mul.Tensor, (tensor, number), {})


def _emit_index(tensor: Any, index: Any, emit: Emit) -> Any:
    """Emits `x[:, 0, None, ..., 2:]` as slices, selects and unsqueezes."""
    for overload, args in index_steps(index, value(tensor).ndim):
        tensor = emit(overload, (tensor, *args), {})
    return tensor


def index_steps(index: Any, rank: int | None = None) -> list[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    """Returns the operators that a basic index is, one on the result of the other, with their further arguments.

    Args:
        index: of integers, slices, None and `...`.
        rank: of the tensor; if it is not known, dimensions after `...` are counted from the end.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if ... in items and rank is not None:
        at = items.index(...)
        items[at : at + 1] = [slice(None)] * (rank - sum(item is not None and item is not ... for item in items))
    steps: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []
    dim = 0
    for place, item in enumerate(items):
        if item is ...:
            dim = None
            continue
        remaining = sum(other is not None for other in items[place:])  # this one too, unless it is None
        at = dim if dim is not None else -remaining - (item is None)
        if item is None:
            steps.append((_aten.unsqueeze.default, (at,)))
        elif isinstance(item, slice):
            if item != slice(None):
                end = item.stop if item.stop is not None else 2**63 - 1
                step = () if item.step in (None, 1) else (item.step,)
                steps.append((_aten.slice.Tensor, (at, item.start or 0, end, *step)))
        else:
            steps.append((_aten.select.int, (at, item)))
        if dim is not None and (item is None or isinstance(item, slice)):
            dim += 1
    return steps


def _is_basic(index: Any) -> bool:
    """True for an index of integers, slices, None and `...` that is not a no-op."""
    items = index if isinstance(index, tuple) else (index,)
    plain = (int, slice, type(None), type(...), torch.SymInt)
    basic = all(
        (isinstance(i, plain) and not isinstance(i, bool)) or (isinstance(i, fx.Node) and _is_number(i)) for i in items
    )
    return basic and any(i is not ... and i != slice(None) for i in items)


def _has_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if args and isinstance(args[0], fx.Node) and not _is_number(args[0]):
        return True
    return any(isinstance(a, fx.Node) and not _is_number(a) for a in _leaves((args, kwargs)))


def _is_number(item: Any) -> bool:
    return isinstance(value(item) if isinstance(item, fx.Node) else item, _NUMBERS)


def _leaves(item: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(item, found.append)
    return found
