"""From an operator key and arguments by name back to a call, as a trace or as a model's author writes it."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it

from fxrewrite import ops
from fxrewrite.ops.schemas import NO_DEFAULT, Parameter, Schema, python_parameters, schema_of, schemas_of
from fxrewrite.ops.tables import OPERATORS
from fxrewrite.pattern.terms import OF_PARTS, Capture, Ignore, ListOf, LiteralValue, Op, Term

Form: TypeAlias = Literal["aten", "torch"]
"""ATen overloads, or functions and methods of torch."""
Emit: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
_VALUES = ("Tensor", "List[Tensor]", "List[Optional[Tensor]]")
_NEVER_CHOSEN = ("Device", "Layout", "Generator", "Dimname", "List[Dimname]", "Stream", "Storage")
_BUILTINS = {
    "torch.Tensor.type": (
        Parameter("arg0", "Tensor", False, False, NO_DEFAULT),
        Parameter("arg1", "ScalarType", False, False, NO_DEFAULT),
    )
}
"""Parameters of builtins that have no signature; `argN` is the name that `ops.bind` gives their arguments."""
_BY_KEY = {f"aten::{name}": function for function, name in reversed(list(OPERATORS.items()))}


class NoCallError(ValueError):
    """An operator cannot be called in this way."""


def _function(key: str) -> Any:
    """Returns the callable of a key: a higher-order operator, or one by its dotted name, if its module is imported."""
    if "::" in key and (operator := ops.named_operator(key)) is not None:
        return operator
    module, _, name = key.rpartition(".")
    found: Any = sys.modules.get(module)
    while found is None and "." in module:  # a method: its module is the prefix before the class
        module, _, owner = module.rpartition(".")
        found, name = sys.modules.get(module), f"{owner}.{name}"
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        raise NoCallError(
            f"{key} is a module, of which no samples are made; test the rule on the functions that it calls"
        )
    if found is None:
        raise NoCallError(f"there is no callable {key} in the modules imported so far")
    return found


@functools.cache
def _python_signature(key: str) -> Schema:
    try:
        return Schema(python_parameters(_function(key)), None)
    except (TypeError, ValueError):
        return Schema(_BUILTINS.get(key, ()), None)


def signatures(term: Op) -> tuple[Schema, ...]:
    """Returns the signatures that a call of the term may have; of a Python callable its own, without kinds.

    Raises:
        NoCallError: there is no such signature.
    """
    packet = ops.packet_of(term.key)
    if packet is None:
        return (_of_functional(term) or _python_signature(term.key),)
    fitting = tuple(schema for schema in schemas_of(packet) if _takes(schema, term, strict=True))
    fitting = fitting or tuple(schema for schema in schemas_of(packet) if _takes(schema, term, strict=False))
    if not fitting:
        whole = [name for name, part in term.args if isinstance(part, Op) and _is_list(packet, name)]
        if whole:
            raise NoCallError(f"a graph of ATen overloads has a list as {whole[0]} of {term.key}; {OF_PARTS}")
        raise NoCallError(f"no overload of {term.key} takes {', '.join(name for name, _ in term.args)} alone")
    return fitting


def _is_list(packet: torch._ops.OpOverloadPacket, name: str) -> bool:
    return any(p.kind == "List[Tensor]" for schema in schemas_of(packet) for p in schema.parameters if p.name == name)


def _of_functional(term: Op) -> Schema | None:
    """Returns the signature of a call that `functional` makes: what the operator reads, then what it writes to."""
    called = dict(term.args).get("_mutable_op")
    if not (isinstance(called, LiteralValue) and isinstance(called.value, torch._ops.OpOverload)):
        return None
    written = {a.name for a in called.value._schema.arguments if a.alias_info and a.alias_info.is_write}
    parameters = sorted(schema_of(called.value).parameters, key=lambda p: p.name in written)
    return Schema((*parameters, Parameter("_all_bases", "List[Tensor]", False, True, NO_DEFAULT)), None)


def _takes(schema: Schema, term: Op, *, strict: bool) -> bool:
    given = dict(term.args)
    overload = schema.overload
    if overload is not None and (overload._schema.is_mutable or overload._overloadname.startswith("prim_")):
        return False  # only for TorchScript; `to.prim_dtype` with None exhausts the memory
    parameters = {p.name: p for p in schema.parameters}
    if not given.keys() <= parameters.keys():
        return False
    for parameter in schema.parameters:
        if parameter.name not in given:
            must_be_given = parameter.default is NO_DEFAULT
            if must_be_given and (not term.loose or parameter.kind in _NEVER_CHOSEN):
                return False
        elif not _may_stand(given[parameter.name], parameter, strict=strict):
            return False
    return True


def _may_stand(term: Term, parameter: Parameter, *, strict: bool) -> bool:
    """Whether the term can be an argument of this kind; if not `strict`, a number may be given for a tensor."""
    takes_values, takes_lists = parameter.kind in _VALUES, parameter.kind.startswith("List[")
    if isinstance(term, ListOf):
        return takes_lists
    if isinstance(term, Op):
        return not (takes_values and takes_lists)
    if isinstance(term, Capture) and term.kind in ("node", "param"):
        return parameter.kind == "Tensor"
    is_literal = isinstance(term, LiteralValue) or (isinstance(term, Capture) and term.kind == "literal")
    if is_literal:
        is_none = isinstance(term, LiteralValue) and term.value is None
        if is_none:
            return parameter.optional
        if takes_values:
            return not strict and parameter.kind == "Tensor"
        return parameter.kind not in _NEVER_CHOSEN
    return isinstance(term, Ignore) or parameter.kind not in _NEVER_CHOSEN


def first_name(key: str) -> str:
    """Returns the name of an operator's first argument; `arg0`, as in `ops.bind`, for a builtin without a signature.

    Raises:
        NoCallError: there is no such callable.
    """
    packet = ops.packet_of(key)
    found = schemas_of(packet)[0].names if packet is not None else _python_signature(key).names
    return next(iter(found), "arg0")


def emit(form: Form, key: str, schema: Schema, given: Mapping[str, Any], make: Emit) -> Any:
    """Emits a call with this signature and these arguments by name; `make` makes every node.

    Raises:
        NoCallError: the operator cannot be called in this way in this form.
    """
    packet = ops.packet_of(key)
    if packet is None:
        return _emit_function(form, key, given, make)
    if form == "aten":
        return ops.emit_aten(schema.overload or packet, (), given, make)
    for target, args, kwargs in _spellings(key, packet, given):
        called = ops.call_key(target, args, kwargs)
        if called == key or (key, called) == ("aten::split", "aten::split_with_sizes"):
            return make(target, args, kwargs)
    raise NoCallError(f"torch has no function or method for {key}({', '.join(given)})")


def _emit_function(form: Form, key: str, given: Mapping[str, Any], make: Emit) -> Any:
    function, parameters = _function(key), _python_signature(key).parameters
    args, rest = _by_position(parameters, given) if parameters else (tuple(given.values()), {})
    if form == "aten" and key == "operator.getitem":
        return ops.emit_aten(function, args, rest, make)
    return make(function, args, rest)


def _by_position(
    parameters: Sequence[Parameter], given: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the arguments up to the first that is not given or has to be named, and the others by name.

    Those of `*args` are by position: they are called `arg2` and so on, and no parameter is.
    """
    first = itertools.takewhile(lambda p: p.name in given and not p.keyword_only, parameters)
    names = [parameter.name for parameter in first]
    known = {parameter.name for parameter in parameters}
    names += [name for name in given if name not in known and name.removeprefix("arg").isdigit()]
    return tuple(given[name] for name in names), {name: given[name] for name in given if name not in names}


def _spellings(
    key: str, packet: torch._ops.OpOverloadPacket, given: Mapping[str, Any]
) -> Iterator[tuple[Any, tuple[Any, ...], Mapping[str, Any]]]:
    """Yields calls of torch that may mean the operator: a Python operator, a function, a method, nn.functional."""
    name = key.partition("::")[2]
    if key in _BY_KEY and given.keys() <= {"self", "other"}:
        yield _BY_KEY[key], tuple(given.values()), {}
    for schema in schemas_of(packet):
        if not given.keys() <= set(schema.names):
            continue
        args, kwargs = _by_position(schema.parameters, given)
        for module in (torch, F):
            function = getattr(module, name, None)
            if function is not None and callable(function):
                yield function, args, kwargs
        if callable(getattr(torch.Tensor, name, None)) and args:  # `mT` is a property, not a method
            yield name, args, kwargs
