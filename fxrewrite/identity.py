"""The identity of a function for digests: its code and the values it closes over, but never its address."""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import inspect
import itertools
import logging
import types
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import pydantic
import torch

from fxrewrite.sources import TOOLKIT, installed, source_digest


class NoIdentityError(TypeError):
    """A value is identified by its address only, so a digest of it would differ between processes."""


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...), torch.dtype, torch.device, torch.layout)
_BY_NAME = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


Objects: TypeAlias = Literal["state", "address", "refuse"]


def identity(value: Any, *, objects: Objects = "state") -> str:
    """Returns a text that is equal for equal values, in every process.

    For a function, it contains bytecode, constants, defaults and closure; of the user's functions also the globals and
    attributes of modules that they name. What belongs to an installed package is named with the version of the package.
    A class or a module of the user's is the hash of its source, with that of all modules of the user's that it imports.
    Another object is its class and its attributes, or what its method `decisive` returns, if `objects` says so.

    Args:
        value: anything.
        objects: what stands for an object of another class: what it holds now; or its address, so that the text is of
            this process; or nothing, which is an error. An object of a class of an installed package, as a tensor, is
            never what it holds.

    Raises:
        NoIdentityError: the value, or one that it refers to, is identified by its address only.
    """
    return "\n".join(_Writer(objects, {}).lines(value))


class _Writer:
    """Writes values as lines of text.

    Args:
        objects: see `identity`.
        seen: objects by address, with the order in which they were seen; they are kept, so that nothing else gets the
            address.
    """

    def __init__(self, objects: Objects, seen: Mapping[int, tuple[int, Any]]) -> None:
        self._objects: Objects = objects
        self._seen = dict(seen)

    def lines(self, *values: Any) -> Iterator[str]:
        """Yields what stands for these values, one after the other."""
        for value in values:
            if isinstance(value, _PLAIN):
                yield f"{type(value).__name__} {value!r}"
            elif isinstance(value, enum.Enum):
                yield f"{type(value).__qualname__}.{value.name}"
            elif isinstance(value, PurePath):
                yield f"path {value}"
            elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops._OpNamespace):
                yield f"op {value}"
            elif isinstance(value, _BY_NAME):
                yield _name(value)
            elif isinstance(value, logging.Logger):
                yield f"logger {value.name}"
            elif isinstance(value, types.ModuleType):
                yield from _source(value.__name__, value.__name__)
            elif isinstance(value, type):
                yield from _source(_name(value), value.__module__)
            elif id(value) in self._seen:
                yield f"seen {self._seen[id(value)][0]}"
            else:
                self._seen[id(value)] = len(self._seen), value
                yield from self._compound(value)

    def _compound(self, value: Any) -> Iterator[str]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from self.lines(value.__func__, value.__self__)
        elif isinstance(value, types.CodeType):
            yield from _code(value)
        elif isinstance(value, functools.partial):
            yield "partial"
            yield from self.lines(value.func, value.args, value.keywords)
        elif is_dataclass(value):
            yield from self.lines(type(value), {item.name: getattr(value, item.name) for item in fields(value)})
        elif isinstance(value, Mapping):
            yield f"mapping {len(value)}"
            for name in sorted(value, key=repr):
                yield from self.lines(name, value[name])
        elif isinstance(value, AbstractSet):
            yield f"set {len(value)}"
            yield from sorted("\n".join(_Writer(self._objects, self._seen).lines(item)) for item in value)
        elif isinstance(value, Sequence):
            yield f"{type(value).__name__} {len(value)}"
            yield from self.lines(*value)
        elif isinstance(value, pydantic.BaseModel):
            yield from self.lines(type(value), value.model_dump_json())
        elif self._objects == "state" and hasattr(value, "decisive"):
            yield from self.lines(type(value), value.decisive())
        elif self._objects == "state" and _is_object(value):
            yield from self.lines(type(value), _state(value))
        elif hasattr(type(value), "__torch_function__") or inspect.getattr_static(value, "__name__", None) is None:
            if self._objects != "address":
                raise NoIdentityError(f"{type(value).__qualname__} object {value!r} has no identity but its address")
            yield f"{type(value).__qualname__} at {id(value):#x}"
        elif installed(getattr(value, "__module__", None) or "") is None and hasattr(value, "__wrapped__"):
            yield from self.lines(type(value), value.__wrapped__)  # of functools.cache, say
        else:
            yield from _source(_name(value), getattr(value, "__module__", None) or "")

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield f"function {function.__module__}.{function.__qualname__}"
        yield from _code(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        yield from self.lines(function.__defaults__, function.__kwdefaults__, *cells)
        if version := installed(function.__module__ or ""):
            yield version
            return
        for name, *attributes in _names(function.__code__):
            if name in function.__globals__:
                found = function.__globals__[name]
                yield name
                for attribute in attributes:
                    is_of_user = isinstance(found, types.ModuleType) and not installed(found.__name__)
                    if not is_of_user or not hasattr(found, attribute):
                        break
                    yield attribute
                    found = getattr(found, attribute)
                yield from self.lines(found)
        for module in _imported(function):
            yield from _source(module, module)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class of this toolkit or of the user's, but no tensor."""
    known = installed(type(value).__module__)
    return (known is None or known in TOOLKIT) and not hasattr(type(value), "__torch_function__")


def _state(value: Any) -> dict[str, Any]:
    """What an object holds in attributes and slots, without properties that it remembers."""
    classes = type(value).__mro__
    cached = {
        name for kind in classes for name, item in vars(kind).items() if isinstance(item, functools.cached_property)
    }
    slots = {name for kind in classes for name in getattr(kind, "__slots__", ())} - {"__dict__", "__weakref__"}
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**{name: item for name, item in getattr(value, "__dict__", {}).items() if name not in cached}, **held}


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


def _source(name: str, module: str) -> Iterator[str]:
    """What stands for something that is known by its name: the version of its package, or its source.

    Raises:
        NoIdentityError: it has no source, as what is written in a shell.
    """
    yield name
    found = installed(module) or source_digest(module)
    if found is None:
        raise NoIdentityError(f"{name} has no source that is a file, and no identity but its name")
    yield found


def _names(code: types.CodeType) -> list[tuple[str, ...]]:
    """Returns the globals that the code reads, with the attributes that it reads of each: (a, b, c) of `a.b.c(x)`."""
    found = set[tuple[str, ...]]()
    chain: tuple[str, ...] = ()
    for step in itertools.chain.from_iterable((*dis.get_instructions(one), None) for one in _codes(code)):
        if step is not None and chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, str(step.argval))
            continue
        if chain:
            found.add(chain)
        chain = (str(step.argval),) if step is not None and step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    return sorted(found)


def _imported(function: types.FunctionType) -> list[str]:
    """Returns the modules that a function imports when it is called."""
    found = set[str]()
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        for index, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[index - 2].argval
                package = function.__globals__.get("__package__") or ""
                found.add(importlib.util.resolve_name("." * level + step.argval, package) if level else step.argval)
    return sorted(found)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code(code: types.CodeType) -> Iterator[str]:
    for one in _codes(code):
        yield f"code {one.co_code.hex()} {one.co_names} {one.co_varnames} {one.co_freevars}"
        for constant in one.co_consts:
            if isinstance(constant, frozenset):
                yield repr(sorted(constant, key=repr))
            else:
                yield constant.co_name if isinstance(constant, types.CodeType) else repr(constant)
