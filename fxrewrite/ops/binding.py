"""Argument binding: the arguments of a call by their schema names, whatever the spelling of the call."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from fxrewrite.ops import keys
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.schemas import NO_DEFAULT, Parameter, Schema, fits, schema_of, schemas_of
from fxrewrite.ops.tables import CASTS, OPERATORS, RENAMED_KEYWORDS, VARARGS, Wrapper, parameters_of
from fxrewrite.ops.value import value

__all__ = ["BindingError", "Signature", "bind", "is_settled", "overload_of", "signature_of", "spelling"]


_SPLIT_SIZES = torch.ops.aten.split.sizes  # the same operator as split_with_sizes under another argument name

_TRUE_DIVISION = frozenset({(torch.ops.aten.div.Tensor, "other"), (torch.ops.aten.div.Scalar, "other")})

Reader: TypeAlias = Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]
"""Gives some arguments of a call node, whose `args` and `kwargs` are given with it."""


class BindingError(TypeError):
    """The arguments of a call fit no signature of its target."""


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """How one spelling of a call maps its arguments to schema names; there is one object per spelling.

    Attributes:
        names: all names, in schema order.
        given: the names that this spelling passes; the others have their defaults.
        defaults: the default of every name that has one, given or not.
        kinds: schema type per name ("Tensor", "float", "List[int]" ...); empty for Python callables.
        overload: the torch overload that the call means; None for Python callables.
        listed: given names whose type is a list; tuples are converted to lists.
        numbered: those whose type is a list of integers, and how often the list that a bare integer means holds it.
        floats: given names for which 2 and 2.0 are equal.
        multipliers: numbers of an operator on tensors that have a default, such as `alpha`; 2.0 means 2 there.
        base: every name in schema order with its default; a call overwrites the given ones, which keeps the order.
        positions: (name, index in args) of positional arguments.
        keywords: (name, keyword) of keyword arguments.
        written: the given names as the call spells them: positional names, and keywords.
        rest: name and first index of a list that is spread over the positional arguments.
        convert: name -> function of the Python value, for wrappers.
        conversions: (name, function of the value that the call gives), in the order in which they are applied.
        is_plain: whether no given argument needs a conversion.
    """

    names: tuple[str, ...]
    given: tuple[str, ...]
    defaults: Mapping[str, Any]
    kinds: Mapping[str, str]
    overload: torch._ops.OpOverload | None
    listed: tuple[str, ...]
    numbered: tuple[tuple[str, int], ...]
    floats: tuple[str, ...]
    base: Mapping[str, Any]
    positions: tuple[tuple[str, int], ...]
    keywords: tuple[tuple[str, str], ...]
    rest: tuple[str, int] | None = None
    convert: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    multipliers: tuple[str, ...] = ()
    written: tuple[tuple[str, ...], tuple[str, ...]] = field(init=False)
    conversions: tuple[tuple[str, Callable[[Any], Any]], ...] = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        keywords = tuple(keyword for _, keyword in self.keywords)
        conversions = (
            *((name, _as_list) for name in self.listed),
            *((name, functools.partial(_repeated, repeats)) for name, repeats in self.numbered),
            *((name, _as_float) for name in self.floats),
            *self.convert.items(),
            *((name, _whole) for name in self.multipliers),
        )
        object.__setattr__(self, "written", (tuple(name for name, _ in self.positions), keywords))
        object.__setattr__(self, "conversions", conversions)
        object.__setattr__(self, "is_plain", not conversions and self.rest is None)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values by schema name, in schema order, with defaults."""
        bound = dict(self.base)
        for name, index in self.positions:
            bound[name] = args[index]
        for name, keyword in self.keywords:
            bound[name] = kwargs[keyword]
        if self.rest is not None:
            bound[self.rest[0]] = list(args[self.rest[1] :])
        for name, convert in self.conversions:
            bound[name] = convert(bound[name])
        return bound

    def reader(self, names: Sequence[str]) -> Reader:
        """Returns a function of a call and its arguments: the values that `bind` gives for these names, in their order.

        One expression, compiled once per spelling and names, as the matcher reads every call that may match.
        """
        return _reader(self, tuple(names))


@functools.cache
def _reader(signature: Signature, names: tuple[str, ...]) -> Reader:
    sources = {name: f"base[{name!r}]" for name in names}
    sources |= {name: f"args[{index}]" for name, index in signature.positions}
    sources |= {name: f"kwargs[{keyword!r}]" for name, keyword in signature.keywords}
    if signature.rest is not None:
        name, start = signature.rest
        sources[name] = f"list(args[{start}:])"
    known: dict[str, Any] = {"base": signature.base}
    for index, (name, convert) in enumerate(signature.conversions):
        if name in names:
            known[f"convert{index}"] = convert
            sources[name] = f"convert{index}({sources[name]})"
    values = "".join(f"{sources[name]}, " for name in names)
    return eval(f"lambda node, args, kwargs: ({values})", known)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _repeated(repeats: int, value: Any) -> Any:
    """Returns the list of integers that a bare integer means."""
    is_bare = isinstance(value, (int, torch.SymInt)) or keys.is_scalar_argument(value)
    return [value] * repeats if is_bare else value


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _whole(number: Any) -> Any:
    """Returns an integer for a float that is one; -0.0 and what an int64 cannot hold stay."""
    is_whole = type(number) is float and number.is_integer() and abs(number) < 2**53
    return int(number) if is_whole and (number or math.copysign(1, number) > 0) else number


def _numbered(schema: Schema, given: Collection[str]) -> tuple[tuple[str, int], ...]:
    return tuple((p.name, p.repeats) for p in schema.parameters if p.name in given and p.kind == "List[int]")


def _multipliers(schema: Schema, given: Collection[str]) -> tuple[str, ...]:
    if not any("Tensor" in p.kind for p in schema.parameters):
        return ()  # of `arange`, the type of the step is the dtype of the result
    return tuple(
        p.name
        for p in schema.parameters
        if p.name in given and p.kind == "number" and isinstance(p.default, (int, float))
    )


_SIGNATURES: dict[Any, Signature | None] = {}
"""Signatures by (target, argument count, keyword names); None if the kinds of the arguments decide."""
_TARGETS: dict[Any, Any] = {}
"""Keeps the targets alive whose ids are keys of the tables."""
_SOLE: ByTarget[torch._ops.OpOverload | Literal[False]] = ByTarget()
_OVERLOADS: dict[Any, torch._ops.OpOverload | None] = {}
"""Overloads by the kinds of the arguments, because binding does not distinguish `gt.Tensor` from `gt.Scalar`."""
_BY_KINDS: dict[Any, Signature] = {}
"""Signatures by spelling and kinds of the arguments, where `_SIGNATURES` has None."""


def bind(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call node by schema name, in schema order, with defaults.

    `x.softmax(-1)`, `torch.softmax(x, dim=-1)` and `F.softmax(x, -1)` all give `{self: x, dim: -1, dtype: None}`.
    A bare integer for a list of integers becomes a list of one; spread sizes (`x.view(2, 3)`) become a list.
    Cached per spelling of the call; takes about 2 us.

    Raises:
        BindingError: the arguments fit no signature of the target.
    """
    return signature_of(keys.callee(node), node.args, node.kwargs).bind(node.args, node.kwargs)


def signature_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """The signature of a call, cached per (target, argument count, keyword names) unless argument kinds decide."""
    spelled = spelling(target, args, kwargs)
    found = _SIGNATURES.get(spelled, _SIGNATURES)
    if found is _SIGNATURES:
        _TARGETS[spelled[0]] = target
        found = _SIGNATURES[spelled] = _settled(target, len(args), tuple(kwargs))
    if found is None:
        kinds = (spelled, *map(_kind, args), *map(_kind, kwargs.values()))
        found = _BY_KINDS.get(kinds)
        if found is None:
            found = _BY_KINDS[kinds] = _choose(target, args, kwargs)
    return found  # pyright: ignore[reportReturnType]


def spelling(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the spelling of a call: its target (by identity), argument count and keyword names."""
    name = target if type(target) is str else id(target)  # as in ByTarget: an overload hashes slowly
    return (name, len(args), *kwargs) if kwargs else (name, len(args))


def is_settled(spelled: tuple[Any, ...]) -> bool:
    """Whether all calls with this spelling have the same signature, and one of them was bound already."""
    return _SIGNATURES.get(spelled) is not None


def _kind(argument: Any) -> Any:
    """Returns a cache key of all that `fits` reads of an argument."""
    if isinstance(argument, fx.Node):
        argument = value(argument)
    if isinstance(argument, (list, tuple)):
        return list, tuple(_kind(item) for item in argument)
    if type(argument) is int:
        return int, argument < 0  # for a wrapper, a negative number may mean something else
    return type(argument)


def overload_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch._ops.OpOverload | None:
    """Returns the torch overload that a call means; None if it is not a single operator (a Python callable)."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    sole = _SOLE.get(target)
    if sole is None:
        sole = _SOLE.set(target, _sole_overload(target))
    if sole and "out" not in kwargs:
        return sole
    name = target if type(target) is str else id(target)
    kinds = (name, len(args), tuple(kwargs), *map(_kind, args), *map(_kind, kwargs.values()))
    found = _OVERLOADS.get(kinds, _OVERLOADS)
    if found is _OVERLOADS:
        _TARGETS[name] = target
        found = _OVERLOADS[kinds] = _choose(target, args, kwargs).overload
    return found  # pyright: ignore[reportReturnType]


def _sole_overload(target: Any) -> torch._ops.OpOverload | Literal[False]:
    """Returns the overload of a function that has only one; False if it has several or none, or arguments decide."""
    if isinstance(target, str) or keys.wrapper_of(target) is not None:
        return False
    schemas = _candidates(target, ())
    overload = schemas[0].overload if schemas is not None and len(schemas) == 1 else None
    return False if overload is None else overload


def _settled(target: Any, count: int, keywords: tuple[str, ...]) -> Signature | None:
    """Returns the signature of all calls with this spelling; None if the arguments themselves decide."""
    wrapper = keys.wrapper_of(target)
    if (wrapper is not None and (wrapper.unless or wrapper.needs_default)) or (
        count and _packed_from(target) is not None
    ):
        return None
    signatures = _signatures(target, count, keywords)
    return signatures[0] if all(_same(signatures[0], other) for other in signatures[1:]) else None


def _choose(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """Returns the first signature, in torch's order of overloads, that every argument fits."""
    if "::" not in keys.call_key(target, args, kwargs) and keys.wrapper_of(target) is not None:
        return _python_signature(keys.python_function(target), len(args), tuple(kwargs))
    signatures = _signatures(target, len(args), tuple(kwargs), _spread_from(target, args))
    # torch wraps a number into a 0-dim tensor only if no overload takes the number itself, hence two rounds.
    for numbers_as_tensors in (False, True):
        for signature in signatures:
            parameters = {p.name: p for p in schema_of(signature.overload).parameters} if signature.overload else {}
            bound = signature.bind(args, kwargs)
            if all(
                name not in parameters
                or fits(parameters[name], bound[name])
                or (numbers_as_tensors and _is_wrapped_number(parameters[name], bound[name]))
                for name in signature.given
            ):
                return signature
    raise BindingError(f"{keys.key(target)} called with {args} {dict(kwargs)}: no overload of it takes these arguments")


def _spread_from(target: Any, args: tuple[Any, ...]) -> int | None:
    """Returns where a list starts that is spread over the positional arguments, as in `x.view(2, 3)`, or None."""
    start = _packed_from(target)
    if start is None or len(args) <= start or isinstance(args[start], (list, tuple)):
        return None
    if len(args) == start + 1 and start and not keys.is_scalar_argument(args[start]):
        return None  # `x.view(other.shape)`, `x.view(dtype)`
    return start


def _is_wrapped_number(parameter: Parameter, given: Any) -> bool:
    return parameter.kind == "Tensor" and isinstance(given, (int, float, complex, torch.SymInt, torch.SymFloat))


def _same(a: Signature, b: Signature) -> bool:
    return (a.names, a.given, a.listed) == (b.names, b.given, b.listed) and a.defaults == b.defaults


def _packed_from(target: Any) -> int | None:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    return VARARGS.get(name) if isinstance(target, str) or inspect.isroutine(target) else None


def _signatures(target: Any, count: int, keywords: tuple[str, ...], rest: int | None = None) -> list[Signature]:
    """Returns the signatures of all signatures with this many positional arguments and these keywords."""
    wrapper = keys.wrapper_of(target)
    if wrapper is not None:
        return [_wrapped_signature(keys.python_function(target), wrapper, count, keywords)]
    if isinstance(target, str) and target in CASTS:
        target, extra = "to", {"dtype": CASTS[target]}
        cast = _signature(schema_of(torch.ops.aten.to.dtype), count, keywords, rest, extra)
        return [] if cast is None else [cast]
    schemas = _candidates(target, keywords)
    if schemas is None:
        return [_python_signature(target, count, keywords)]
    found = [_signature(schema, count, keywords, rest, {}) for schema in schemas]
    signatures = [signature for signature in found if signature is not None]
    if not signatures:
        raise BindingError(
            f"{keys.key(target)} called with {count} positional arguments and keywords {list(keywords)}: "
            f"no overload of it takes these arguments"
        )
    return signatures


def _candidates(target: Any, keywords: tuple[str, ...]) -> tuple[Schema, ...] | None:
    if isinstance(target, torch._ops.OpOverload):
        return (schema_of(torch.ops.aten.split_with_sizes.default if target is _SPLIT_SIZES else target),)
    if isinstance(target, torch._ops.OpOverloadPacket) and target is not torch.ops.aten.split:
        return schemas_of(target, "out" in keywords)
    name = keys.key(target)
    if target in OPERATORS and not isinstance(target, str):
        name = f"aten::{OPERATORS[target]}"
    namespace, separator, name = name.partition("::")
    if not separator or namespace != "aten" or not hasattr(torch.ops.aten, name):
        return None
    if name == "split":
        return (schema_of(torch.ops.aten.split.Tensor), schema_of(torch.ops.aten.split_with_sizes.default))
    return schemas_of(getattr(torch.ops.aten, name), "out" in keywords)


def _signature(
    schema: Schema, count: int, keywords: tuple[str, ...], rest: int | None, extra: Mapping[str, Any]
) -> Signature | None:
    """Returns the signature of a call to one schema; None if the counts or the names do not fit it."""
    names = schema.names
    positional = [p.name for p in schema.parameters if not p.keyword_only]
    from_rest: tuple[str, int] | None = None
    if rest is not None:
        if rest >= len(positional) or not schema.parameters[rest].kind.startswith("List["):
            return None
        from_rest, count = (positional[rest], rest), rest
    if count > len(positional):
        return None
    # Bind by position, then by keyword; Python bindings rename some keywords.
    positions = tuple((name, index) for index, name in enumerate(positional[:count]))
    by_keyword: list[tuple[str, str]] = []
    for keyword in keywords:
        name = keyword if keyword in names else RENAMED_KEYWORDS.get(keyword, keyword)
        if name not in names:
            name = _split_size(keyword, names)
        if name not in names:
            return None
        by_keyword.append((name, keyword))
    # Every name must be given once, or have a default; otherwise the call means another overload.
    taken = {name for name, _ in positions} | {name for name, _ in by_keyword} | set(extra)
    taken |= {from_rest[0]} if from_rest else set()
    given = tuple(name for name in names if name in taken)
    if len(given) != count + len(keywords) + len(extra) + (from_rest is not None):
        return None
    defaults = {p.name: p.default for p in schema.parameters if p.default is not NO_DEFAULT}
    if any(name not in taken and name not in defaults for name in names):
        return None
    base: dict[str, Any] = {name: extra.get(name, defaults.get(name)) for name in names}
    kinds = {p.name: p.kind for p in schema.parameters}
    listed = tuple(name for name in given if kinds[name].startswith("List["))
    floats = tuple(name for name in given if kinds[name] == "float" or (schema.overload, name) in _TRUE_DIVISION)
    return Signature(
        names,
        given,
        defaults,
        kinds,
        schema.overload,
        listed,
        _numbered(schema, given),
        floats,
        base,
        positions,
        tuple(by_keyword),
        from_rest,
        multipliers=_multipliers(schema, given),
    )


def _split_size(keyword: str, names: tuple[str, ...]) -> str:
    """Maps `split_size_or_sections`, the argument of `torch.split`, to the name that the meant operator gives it."""
    if keyword in ("split_size", "split_size_or_sections"):
        return next((name for name in names if name.startswith("split_size")), keyword)
    return "self" if keyword == "tensor" else keyword


def _wrapped_signature(target: Any, wrapper: Wrapper, count: int, keywords: tuple[str, ...]) -> Signature:
    """Returns the signature of a Python wrapper, in terms of the operator that it wraps."""
    schema = schemas_of(getattr(torch.ops.aten, wrapper.name))[0]
    signature = parameters_of(target)
    python_names = tuple(signature)
    if count > len(python_names) or any(k not in signature for k in keywords):
        raise BindingError(f"{keys.key(target)} does not take {count} positional arguments and {list(keywords)}")
    where = {name: index for index, name in enumerate(python_names[:count])}
    base: dict[str, Any] = {}
    positions: list[tuple[str, int]] = []
    by_keyword: list[tuple[str, str]] = []
    for parameter in schema.parameters:
        name = parameter.name
        source = wrapper.arguments.get(name, name)
        base[name] = wrapper.constants.get(name, parameter.default)
        if source in where:
            positions.append((name, where[source]))
        elif source in keywords:
            by_keyword.append((name, source))
        elif source in signature:
            base[name] = signature[source].default
            if type(base[name]) is int and parameter.kind == "List[int]":
                base[name] = [base[name]] * parameter.repeats
    given_names = {name for name, _ in positions} | {name for name, _ in by_keyword}
    # The wrapper's own default may differ from the schema's (dropout's `training`): then the call passes it.
    given = tuple(
        p.name for p in schema.parameters if p.name in given_names or not _at_default(p, base[p.name], wrapper)
    )
    missing = [
        p.name for p in schema.parameters if p.name not in given_names and base[p.name] is inspect.Parameter.empty
    ]
    if missing:
        raise BindingError(f"{keys.key(target)} called without {missing}")
    kinds = {p.name: p.kind for p in schema.parameters}
    return Signature(
        schema.names,
        given,
        {p.name: p.default for p in schema.parameters if p.default is not NO_DEFAULT},
        kinds,
        schema.overload,
        tuple(name for name in given_names if kinds[name].startswith("List[")),
        _numbered(schema, given_names),
        tuple(name for name in given_names if kinds[name] == "float"),
        base,
        tuple(positions),
        tuple(by_keyword),
        None,
        wrapper.convert,
        _multipliers(schema, given),
    )


def _at_default(parameter: Parameter, given: Any, wrapper: Wrapper) -> bool:
    convert = wrapper.convert.get(parameter.name)
    given = convert(given) if convert else given
    return parameter.default is not NO_DEFAULT and (given == parameter.default or given is parameter.default)


def _forward(target: Any) -> Any:
    """Returns the method that a call of a module runs, for the class of one; anything else as it is."""
    return target.forward if isinstance(target, type) and issubclass(target, torch.nn.Module) else target


def _python_signature(target: Any, count: int, keywords: tuple[str, ...]) -> Signature:
    """Returns the signature of a callable that is not a torch operator, from its Python signature."""
    try:
        called = _forward(target)
        parameters = list(inspect.signature(called).parameters.values()) if callable(called) else []
        parameters = parameters if called is target else parameters[1:]
    except (TypeError, ValueError):  # builtins without a signature
        parameters = []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    positional = [p.name for p in parameters if p.kind not in variadic and p.kind is not inspect.Parameter.KEYWORD_ONLY]
    positional += [f"arg{index}" for index in range(len(positional), count)]
    positions = tuple((name, index) for index, name in enumerate(positional[:count]))
    by_keyword = tuple((name, name) for name in keywords)
    known = [p.name for p in parameters if p.kind not in variadic]
    extra = [name for name, _ in (*positions, *by_keyword) if name not in known]
    names = (*known, *extra)
    taken = {name for name, _ in positions} | set(keywords)
    empty = inspect.Parameter.empty
    defaults = {p.name: p.default for p in parameters if p.kind not in variadic and p.default is not empty}
    missing = [name for name in known if name not in taken and name not in defaults]
    if missing:
        raise BindingError(f"{keys.key(target)} called without {missing}")
    base = {name: defaults.get(name) for name in names}
    given = tuple(name for name in names if name in taken)
    return Signature(names, given, defaults, {}, None, (), (), (), base, positions, by_keyword)
