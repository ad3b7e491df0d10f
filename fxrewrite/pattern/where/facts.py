"""Conditions on captured nodes: dtype, device, shape, memory, users, and predicates that the author writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError, first_line
from fxrewrite.graph.sizes import is_always, is_same_size
from fxrewrite.pattern.where.base import BaseConstraint, OneName, node_of, tensor_of


@dataclass(frozen=True, slots=True)
class Dtype(OneName):
    """The dtype is one of these."""

    name: str
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        wrong = [dtype for dtype in self.dtypes if not isinstance(dtype, torch.dtype)]  # pyright: ignore[reportUnnecessaryIsInstance]
        if wrong or not self.dtypes:
            raise RuleDefinitionError(f"dtype({self.name}) takes dtypes such as torch.float32, not {wrong or 'none'}")

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        found = tensor_of(captures, self.name).dtype
        return "" if found in self.dtypes else f"{self.name} has dtype {_short(found)}"

    def __str__(self) -> str:
        return f"dtype({self.name}) in {{{', '.join(map(_short, self.dtypes))}}}"


@dataclass(frozen=True, slots=True)
class Device(OneName):
    """The device is one of these; without an index, as in "cuda", any of that type."""

    name: str
    devices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise RuleDefinitionError(f"device({self.name}) takes devices such as 'cpu' or 'cuda:0'")
        for device in self.devices:
            try:
                torch.device(device)
            except RuntimeError as error:
                why = first_line(error)
                raise RuleDefinitionError(f"device({self.name}): {device!r} is not a device: {why}") from error

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        found = tensor_of(captures, self.name).device
        holds = any(device in (found.type, str(found)) for device in self.devices)
        return "" if holds else f"{self.name} is on {found}"

    def __str__(self) -> str:
        devices = [device if device.isidentifier() else f'"{device}"' for device in self.devices]
        return f"device({self.name}) " + (f"== {devices[0]}" if len(devices) == 1 else f"in {{{', '.join(devices)}}}")


@dataclass(frozen=True, slots=True)
class Same(BaseConstraint):
    """All these tensors have the same dtype or device; `what` names the attribute."""

    what: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise RuleDefinitionError(f"{self} compares two captures or more")

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        found = [getattr(tensor_of(captures, name), self.what) for name in self.names]
        return "" if len(set(found)) == 1 else f"{self.what}s are {', '.join(map(_short, found))}"

    def __str__(self) -> str:
        return f"same_{self.what}({', '.join(self.names)})"


@dataclass(frozen=True, slots=True)
class ShapeEq(BaseConstraint):
    """Two tensors have equal shapes."""

    a: str
    b: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        a, b = tensor_of(captures, self.a).shape, tensor_of(captures, self.b).shape
        if len(a) != len(b):
            return f"shapes are {tuple(a)} and {tuple(b)}"
        differing = [(m, n) for m, n in zip(a, b, strict=True) if not is_same_size(m, n)]
        if not differing:
            return ""
        unknown = not any(is_always(m != n) for m, n in differing)
        return f"shapes are {tuple(a)} and {tuple(b)}" + (": not known to be equal" if unknown else "")

    def __str__(self) -> str:
        return f"shape({self.a}) == shape({self.b})"


@dataclass(frozen=True, slots=True)
class ListRelation(BaseConstraint):
    """Two captured lists are related in a way of `ON_LISTS`; `dim` is a dimension, or the capture that is one."""

    asked: str
    names: tuple[str, ...]
    dim: int | str | None = None

    def __post_init__(self) -> None:
        if len(self.names) != (2 if self.dim is None or isinstance(self.dim, int) else 3):
            raise RuleDefinitionError(f"{self} relates two captured lists")

    @property
    def whole(self) -> tuple[str, ...]:
        """The captures that are read as lists."""
        return self.names

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        one, other = (captures[name] for name in self.names[:2])
        for name in self.names[:2]:
            if not isinstance(captures[name], (list, tuple)):
                return f"{name} is {captures[name]!r}, not a list"
        dim = captures[self.dim] if isinstance(self.dim, str) else self.dim
        if dim is None:
            return "" if _is_inverse(one, other) else f"{self.names[0]} is {one}, {self.names[1]} is {other}"
        if len(one) != len(other):
            return f"{self.names[0]} has {len(one)} items, {self.names[1]} has {len(other)}"
        tensors = [tensor_of({self.names[1]: item}, self.names[1]) for item in other]
        if not all(type(dim) is int and -tensor.ndim <= dim < tensor.ndim for tensor in tensors):
            return f"the items of {self.names[1]} have no dimension {dim}"
        found = [tensor.shape[dim] for tensor in tensors]
        same = all(isinstance(n, (int, torch.SymInt)) and is_same_size(n, m) for n, m in zip(one, found, strict=True))
        return "" if same else f"{self.names[0]} is {list(one)}, the sizes are {found}"

    def __str__(self) -> str:
        arguments = [*self.names, str(self.dim)] if isinstance(self.dim, int) else self.names
        return f"{self.asked}({', '.join(arguments)})"


def _is_inverse(one: Any, other: Any) -> bool:
    """Whether two lists of dimensions, counted from either end, are permutations of which one undoes the other."""
    rank = len(one)
    if rank != len(other) or not all(type(dim) is int and -rank <= dim < rank for dim in (*one, *other)):
        return False
    return all(one[dim] % rank == place for place, dim in enumerate(other))


@dataclass(frozen=True, slots=True)
class Is(OneName):
    """The captured value is what `asked` says, a name in `ASKED`."""

    asked: str
    name: str

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        return ASKED[self.asked](captures, self.name)

    def __str__(self) -> str:
        return f"{self.asked}({self.name})"


def _contiguous(captures: Mapping[str, Any], name: str) -> str:
    found = tensor_of(captures, name)
    if found.layout is not torch.strided:
        return f"{name} has layout {_short(found.layout)}"
    if _is_contiguous(found):
        return ""
    return f"{name} has shape {tuple(found.shape)} and strides {tuple(found.stride())}"


def _is_param(captures: Mapping[str, Any], name: str) -> str:
    node = node_of(captures, name)
    return "" if ops.is_parameter(node) else f"%{node.name} is not a parameter"


def _no_other_users(captures: Mapping[str, Any], name: str) -> str:
    node = node_of(captures, name)
    return "" if len(node.users) == 1 else f"%{node.name} has {len(node.users)} users"


ASKED: Mapping[str, Callable[[Mapping[str, Any], str], str]] = {
    "contiguous": _contiguous,
    "is_param": _is_param,
    "no_other_users": _no_other_users,
}
"""What may be asked of one captured value: why a capture of this name is not so, or an empty text."""


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Like `tensor.is_contiguous()` at every admitted length; torch's own would add guards on symbolic sizes."""
    if any(is_same_size(size, 0) for size in tensor.shape):
        return True
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if is_same_size(size, 1):
            continue
        if not is_same_size(stride, expected):
            return False
        expected = expected * size
    return True


@dataclass(frozen=True, slots=True)
class Predicate(BaseConstraint):
    """A Python function decides; the only constraint whose text cannot be parsed back."""

    function: Callable[..., bool | str]
    names: tuple[str, ...]
    text: str

    @property
    def whole(self) -> tuple[str, ...]:
        """The captures that it reads as lists, where they are lists."""
        return self.names

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        holds = self.function(*(captures[name] for name in self.names))
        if isinstance(holds, str):
            return holds
        return "" if holds else f"it is false of {', '.join(f'{name}={captures[name]}' for name in self.names)}"

    def __str__(self) -> str:
        return f"{self.text}({', '.join(self.names)})"


def _short(found: Any) -> str:
    return str(found).removeprefix("torch.")
