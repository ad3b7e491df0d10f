"""Constraints on the captured values of a match: frozen, with a text form, each saying why it does not hold.

They look at fake values only and never add a guard: a size that is not known to be equal counts as different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.graph.sizes import divide_exactly, is_same_size

__all__ = [
    "Constraint",
    "divisible",
    "dtype",
    "is_param",
    "no_other_users",
    "predicate",
    "rank",
    "same_dtype",
    "shape_eq",
]


class Constraint(Protocol):
    """A condition on captures; `names` are the captures that it reads."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def why_not(self, captures: Mapping[str, Any]) -> str:
        """Empty when it holds, else one clause that says what was found."""
        ...


def _tensor(captures: Mapping[str, Any], name: str) -> torch.Tensor | str:
    """The fake tensor of a capture, or why there is none."""
    captured = captures[name]
    if not isinstance(captured, fx.Node):
        return f"{name} is {captured!r}, not a value of the graph"
    found = ops.value(captured)
    if found is ops.MISSING:
        return f"%{captured.name} has no value in its metadata"
    return found if isinstance(found, torch.Tensor) else f"%{captured.name} is not a tensor"


@dataclass(frozen=True, slots=True)
class _Rank:
    name: str
    num_dims: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def why_not(self, captures: Mapping[str, Any]) -> str:
        found = _tensor(captures, self.name)
        if isinstance(found, str):
            return found
        return "" if found.ndim == self.num_dims else f"{self.name} has rank {found.ndim}"

    def __str__(self) -> str:
        return f"rank({self.name}) == {self.num_dims}"


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def why_not(self, captures: Mapping[str, Any]) -> str:
        found = _tensor(captures, self.name)
        if isinstance(found, str):
            return found
        return "" if found.dtype in self.dtypes else f"{self.name} has dtype {_short(found.dtype)}"

    def __str__(self) -> str:
        return f"dtype({self.name}) in {{{', '.join(map(_short, self.dtypes))}}}"


@dataclass(frozen=True, slots=True)
class _SameDtype:
    names: tuple[str, ...]

    def why_not(self, captures: Mapping[str, Any]) -> str:
        found: list[torch.dtype] = []
        for name in self.names:
            tensor = _tensor(captures, name)
            if isinstance(tensor, str):
                return tensor
            found.append(tensor.dtype)
        return "" if len(set(found)) == 1 else f"dtypes are {', '.join(map(_short, found))}"

    def __str__(self) -> str:
        return f"same_dtype({', '.join(self.names)})"


@dataclass(frozen=True, slots=True)
class _ShapeEq:
    a: str
    b: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def why_not(self, captures: Mapping[str, Any]) -> str:
        a, b = _tensor(captures, self.a), _tensor(captures, self.b)
        if isinstance(a, str):
            return a
        if isinstance(b, str):
            return b
        if len(a.shape) == len(b.shape) and all(is_same_size(m, n) for m, n in zip(a.shape, b.shape, strict=True)):
            return ""
        return f"shapes are {tuple(a.shape)} and {tuple(b.shape)}"

    def __str__(self) -> str:
        return f"shape({self.a}) == shape({self.b})"


@dataclass(frozen=True, slots=True)
class _Divisible:
    name: str
    dim: int
    by: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def why_not(self, captures: Mapping[str, Any]) -> str:
        found = _tensor(captures, self.name)
        if isinstance(found, str):
            return found
        if not -found.ndim <= self.dim < found.ndim:
            return f"{self.name} has rank {found.ndim}"
        size = found.shape[self.dim]
        return "" if divide_exactly(size, self.by) is not None else f"the size is {size}"

    def __str__(self) -> str:
        return f"size({self.name}, {self.dim}) % {self.by} == 0"


@dataclass(frozen=True, slots=True)
class _NoOtherUsers:
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def why_not(self, captures: Mapping[str, Any]) -> str:
        captured = captures[self.name]
        if not isinstance(captured, fx.Node):
            return f"{self.name} is {captured!r}, not a value of the graph"
        return "" if len(captured.users) == 1 else f"%{captured.name} has {len(captured.users)} users"

    def __str__(self) -> str:
        return f"no_other_users({self.name})"


@dataclass(frozen=True, slots=True)
class _IsParam:
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def why_not(self, captures: Mapping[str, Any]) -> str:
        captured = captures[self.name]
        if not isinstance(captured, fx.Node):
            return f"{self.name} is {captured!r}, not a value of the graph"
        if captured.op == "get_attr" or isinstance(ops.value(captured), torch.nn.Parameter):
            return ""
        return f"%{captured.name} is no parameter"

    def __str__(self) -> str:
        return f"is_param({self.name})"


@dataclass(frozen=True, slots=True)
class _Predicate:
    function: Callable[..., bool | str]
    names: tuple[str, ...]
    text: str

    def why_not(self, captures: Mapping[str, Any]) -> str:
        holds = self.function(*(captures[name] for name in self.names))
        if isinstance(holds, str):
            return holds
        return "" if holds else f"it is false of {', '.join(f'{name}={captures[name]}' for name in self.names)}"

    def __str__(self) -> str:
        return f"{self.text}({', '.join(self.names)})"


def rank(name: str, num_dims: int) -> Constraint:
    """The captured tensor has this many dimensions."""
    return _Rank(name, num_dims)


def dtype(name: str, *dtypes: torch.dtype) -> Constraint:
    """The captured tensor has one of these dtypes."""
    return _Dtype(name, dtypes)


def same_dtype(*names: str) -> Constraint:
    """All these captured tensors have one dtype."""
    return _SameDtype(names)


def shape_eq(a: str, b: str) -> Constraint:
    """Two captured tensors have equal shapes, symbolic ones for every length that the graph admits."""
    return _ShapeEq(a, b)


def divisible(name: str, dim: int, by: int) -> Constraint:
    """The size of a dimension of a captured tensor is a multiple of `by`, for every length that the graph admits."""
    return _Divisible(name, dim, by)


def no_other_users(name: str) -> Constraint:
    """The captured node is used by one node only."""
    return _NoOtherUsers(name)


def is_param(name: str) -> Constraint:
    """The captured node reads a parameter or a buffer of the module."""
    return _IsParam(name)


def predicate(*names: str, text: str = "") -> Callable[[Callable[..., bool | str]], Constraint]:
    """A condition in Python: called with the captures of these names, it answers True, False, or why not.

    `where.predicate("scale", "q")(lambda scale, q: ...)`. Its code is part of the rule's digest.
    """

    def wrap(function: Callable[..., bool | str]) -> Constraint:
        return _Predicate(function, names, text or getattr(function, "__name__", "predicate"))

    return wrap


def _short(found: torch.dtype) -> str:
    return str(found).removeprefix("torch.")
