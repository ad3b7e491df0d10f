"""Schemas: the overloads of an operator, and which of them fit given arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite.ops.tables import OMITTED
from fxrewrite.ops.value import MISSING, value


class _NoDefault:
    """Means "has no default", which differs from the default None."""

    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT: Any = _NoDefault()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a schema.

    Attributes:
        kind: the schema's type without Optional, for example "Tensor" or "List[int]".
        repeats: how often the list that a bare integer means holds it: 2 for `int[2] stride`.
    """

    name: str
    kind: str
    optional: bool
    keyword_only: bool
    default: Any
    repeats: int = 1


@dataclass(frozen=True)
class Schema:
    """The arguments of one overload, and the overload itself if torch has it."""

    parameters: tuple[Parameter, ...]
    overload: torch._ops.OpOverload | None

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments, in schema order."""
        return tuple(p.name for p in self.parameters)

    @functools.cached_property
    def defaults(self) -> Mapping[str, Any]:
        """The default of every argument that has one."""
        return {p.name: p.default for p in self.parameters if p.default is not NO_DEFAULT}

    @functools.cached_property
    def omissible(self) -> Mapping[str, Any]:
        """What every argument may be that a pattern does not mention: its default, or what means that it is omitted."""
        omitted = (p.name for p in self.parameters if p.default is NO_DEFAULT and p.optional and p.name in OMITTED)
        return {**self.defaults, **dict.fromkeys(omitted if self.overload is not None else ())}


_ENUM_DEFAULTS: Mapping[tuple[str, int], Any] = {
    ("ScalarType", 4): torch.int64,
    ("MemoryFormat", 0): torch.contiguous_format,
}
"""Values of defaults that schemas give as numbers of an enumeration; these are the only ones that occur."""


@functools.cache
def schema_of(overload: torch._ops.OpOverload) -> Schema:
    """Returns the schema of one overload."""
    parameters: list[Parameter] = []
    for argument in overload._schema.arguments:
        text = str(argument.real_type)
        optional = text.startswith("Optional[")
        default = argument.default_value if argument.has_default_value() else NO_DEFAULT
        kind = text[len("Optional[") : -1] if optional else text
        default = _ENUM_DEFAULTS.get((kind, default), default) if isinstance(default, int) else default
        if kind == "number" and isinstance(default, float) and default.is_integer():
            default = int(default)  # as `Signature.multipliers` are read
        parameters.append(Parameter(argument.name, kind, optional, argument.kwarg_only, default, argument.N or 1))  # pyright: ignore[reportAttributeAccessIssue]
    return Schema(tuple(parameters), overload)


def python_parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Returns the arguments of a Python callable that have names, of unknown kinds.

    Raises:
        TypeError, ValueError: it has no signature, as some builtins.
    """
    return tuple(
        Parameter(
            p.name, "", p.default is None, p.kind is p.KEYWORD_ONLY, NO_DEFAULT if p.default is p.empty else p.default
        )
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


@functools.cache
def schemas_of(packet: torch._ops.OpOverloadPacket, with_out: bool = False) -> tuple[Schema, ...]:
    """Returns all overloads of an operator that a graph may call, in torch's order.

    If an overload takes tensors, TorchScript's overloads on plain numbers, lists and strings are left out.
    """
    overloads = [getattr(packet, name) for name in packet.overloads()]
    schemas = [schema_of(o) for o in overloads if any(a.is_out for a in o._schema.arguments) == with_out]
    on_tensors = [s for s in schemas if any("Tensor" in p.kind for p in s.parameters)]
    return tuple(on_tensors or schemas)


@functools.cache
def repeats_of(packet: torch._ops.OpOverloadPacket, argument: str) -> int:
    """Returns how often the list that a bare integer means as this argument holds it; 0 if it takes no such list."""
    found = (p.repeats for s in schemas_of(packet) for p in s.parameters if (p.name, p.kind) == (argument, "List[int]"))
    return next(found, 0)


def fits(parameter: Parameter, given: Any) -> bool:
    """True if a call may pass `given` for this parameter.

    Nodes are judged by their fake values. Nodes without one, and objects that are not plain Python values (terms of a
    pattern), fit everything.
    """
    if isinstance(given, fx.Node):
        given = value(given)
        if given is MISSING:
            return True
    if given is None:
        return parameter.optional
    return _fits_kind(parameter.kind, given)


_INTS = (int, torch.SymInt)
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)
_ENUMS: Mapping[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Generator": torch.Generator,
    "str": str,
}
_PLAIN = (*_NUMBERS, bool, str, list, tuple, dict, slice, torch.Tensor, torch.SymBool, torch.device, *_ENUMS.values())


def _fits_kind(kind: str, given: Any) -> bool:
    if isinstance(given, fx.Node):
        given = value(given)
        if given is MISSING:
            return True
    if not isinstance(given, _PLAIN):
        return True
    if kind == "Tensor":
        return isinstance(given, torch.Tensor)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1].removeprefix("Optional[").removesuffix("]")
        if isinstance(given, Sequence) and not isinstance(given, str):
            return all(item is None or _fits_kind(inner, item) for item in given)
        return inner == "int" and isinstance(given, _INTS) and not isinstance(given, bool)
    if kind == "bool":
        return isinstance(given, (bool, torch.SymBool))
    if kind == "int":
        return isinstance(given, _INTS) and not isinstance(given, bool)
    if kind == "float":
        return isinstance(given, (*_INTS, float, torch.SymFloat)) and not isinstance(given, bool)
    if kind == "number":
        return isinstance(given, (*_NUMBERS, bool))
    if kind == "Device":
        return isinstance(given, (torch.device, str))
    if kind in _ENUMS:
        return isinstance(given, _ENUMS[kind])
    return True
