"""The identity of a function for digests: its code and the values it closes over, but never its address."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import pydantic
import torch

__all__ = ["NoIdentityError", "identity"]


class NoIdentityError(TypeError):
    """A value is identified by its address only, so a digest of it would differ between processes."""


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...), torch.dtype, torch.device, torch.layout)
_BY_NAME = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def identity(value: Any, *, with_addresses: bool = False) -> str:
    """Returns a text that is equal for equal values, in every process.

    For a function, it contains bytecode, constants, defaults, closure and the globals that it names. Functions among
    these are included if they belong to the same top-level package.

    Args:
        value: anything.
        with_addresses: write the address of what has no other identity; then the text is of this process.

    Raises:
        NoIdentityError: the value, or one that it refers to, is identified by its address only.
    """
    return "\n".join(_parts(value, {}, with_addresses))


def _parts(value: Any, seen: dict[int, int], addresses: bool) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, enum.Enum):
        yield f"{type(value).__qualname__}.{value.name}"
    elif isinstance(value, PurePath):
        yield f"path {value}"
    elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops._OpNamespace):
        yield f"op {value}"
    elif isinstance(value, _BY_NAME):
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    elif id(value) in seen:
        yield f"seen {seen[id(value)]}"
    else:
        seen[id(value)] = len(seen)
        yield from _compound(value, seen, addresses)


def _compound(value: Any, seen: dict[int, int], addresses: bool) -> Iterator[str]:
    if isinstance(value, types.FunctionType):
        yield from _function(value, seen, addresses)
    elif isinstance(value, types.MethodType):
        yield from _parts(value.__func__, seen, addresses)
        yield from _parts(value.__self__, seen, addresses)
    elif isinstance(value, types.CodeType):
        yield from _code(value, seen)
    elif isinstance(value, functools.partial):
        yield "partial"
        for part in (value.func, value.args, value.keywords):
            yield from _parts(part, seen, addresses)
    elif is_dataclass(value):
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        for item in fields(value):
            yield item.name
            yield from _parts(getattr(value, item.name), seen, addresses)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for name in sorted(value, key=repr):
            yield from _parts(name, seen, addresses)
            yield from _parts(value[name], seen, addresses)
    elif isinstance(value, AbstractSet):
        yield f"set {len(value)}"
        yield from sorted("\n".join(_parts(item, dict(seen), addresses)) for item in value)
    elif isinstance(value, Sequence):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _parts(item, seen, addresses)
    elif isinstance(value, pydantic.BaseModel):
        yield f"{type(value).__module__}.{type(value).__qualname__} {value.model_dump_json()}"
    elif hasattr(type(value), "__torch_function__") or inspect.getattr_static(value, "__name__", None) is None:
        if addresses:
            yield f"{type(value).__qualname__} at {id(value):#x}"
            return
        raise NoIdentityError(f"{type(value).__qualname__} object {value!r} has no identity but its address")
    else:
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


def _function(function: types.FunctionType, seen: dict[int, int], addresses: bool) -> Iterator[str]:
    yield f"function {function.__module__}.{function.__qualname__}"
    yield from _code(function.__code__, seen)
    for part in (function.__defaults__, function.__kwdefaults__):
        yield from _parts(part, seen, addresses)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, seen, addresses)
    package = (function.__module__ or "").partition(".")[0]
    for name in _names(function.__code__):
        if name in function.__globals__:
            found = function.__globals__[name]
            yield name
            module = getattr(found, "__module__", None) or ""
            if isinstance(found, types.FunctionType) and module.partition(".")[0] != package:
                yield f"{module}.{found.__qualname__}"
            else:
                yield from _parts(found, seen, addresses)


def _names(code: types.CodeType) -> list[str]:
    """Returns the globals that the code reads; attribute names are excluded."""
    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_names(constant))
    return sorted(found)


def _code(code: types.CodeType, seen: dict[int, int]) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant, seen)
        elif isinstance(constant, frozenset):
            yield repr(sorted(constant, key=repr))
        else:
            yield repr(constant)
