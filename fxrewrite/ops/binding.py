"""Argument binding: the arguments of a call by their schema names, whatever the spelling of the call."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from fxrewrite.ops import keys
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.schemas import NO_DEFAULT, Parameter, Schema, fits, python_parameters, schema_of, schemas_of
from fxrewrite.ops.tables import (
    CASTS,
    DIMS_ARE_A_SET,
    OF_ALL,
    OPERATORS,
    RENAMED_KEYWORDS,
    VARARGS,
    Wrapper,
    parameters_of,
)
from fxrewrite.ops.value import MISSING, value

_SPLIT_SIZES = torch.ops.aten.split.sizes  # the same operator as split_with_sizes under another argument name

_KERNEL_FLAGS = ("cudnn_enable", "cudnn_enabled")
"""Which kernel computes a norm, and not what it computes: torch.export writes False where others write True."""

_TRUE_DIVISION = frozenset({(torch.ops.aten.div.Tensor, "other"), (torch.ops.aten.div.Scalar, "other")})

Convert: TypeAlias = Callable[[Any], Any]
Reader: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]
"""Gives some arguments of a call: of what a matcher reads, which it does not need, and its `args` and `kwargs`."""


class BindingError(TypeError):
    """The arguments of a call fit no signature of its target."""


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """How one spelling of a call maps its arguments to schema names; there is one object per spelling.

    Attributes:
        schema: of what is called; that of a Python callable has no overload.
        given: the names that this spelling passes, in schema order; the others have their defaults.
        base: every name in schema order with its default; a call overwrites the given ones, which keeps the order.
        positions: (name, index in args) of positional arguments.
        keywords: (name, keyword) of keyword arguments.
        rest: name and first index of a list that is spread over the positional arguments.
        conversions: (name, function of the value that the call gives), in the order in which they are applied.
    """

    schema: Schema
    given: tuple[str, ...]
    base: Mapping[str, Any]
    positions: tuple[tuple[str, int], ...]
    keywords: tuple[tuple[str, str], ...]
    rest: tuple[str, int] | None
    conversions: tuple[tuple[str, Convert], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in schema order."""
        return self.schema.names

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The default of every name that has one in the schema, or that may be omitted, given or not."""
        return self.schema.omissible

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values by schema name, in schema order, with defaults."""
        return _binder(self)(args, kwargs)

    def reader(self, names: Sequence[str]) -> Reader:
        """Returns a function of a call and its arguments: the values that `bind` gives for these names, in their order.

        Compiled once per spelling and names, as the matcher reads every call that may match.
        """
        return _reader(self, tuple(names))


@functools.cache
def _binder(signature: Signature) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    sources, known = _sources(signature)
    items = ", ".join(f"{name!r}: {source}" for name, source in sources.items())
    return eval(f"lambda args, kwargs: {{{items}}}", known)


@functools.cache
def _reader(signature: Signature, names: tuple[str, ...]) -> Reader:
    sources, known = _sources(signature)
    values = "".join(f"{sources[name]}, " for name in names)
    return eval(f"lambda node, args, kwargs: ({values})", known)


def _sources(signature: Signature) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns expressions in `args` and `kwargs` for all names of a signature, in schema order, and what they use."""
    sources = {name: f"base[{name!r}]" for name in signature.names}
    sources |= {name: f"args[{index}]" for name, index in signature.positions}
    sources |= {name: f"kwargs[{keyword!r}]" for name, keyword in signature.keywords}
    if signature.rest is not None:
        name, start = signature.rest
        sources[name] = f"list(args[{start}:])"
    known: dict[str, Any] = {"base": signature.base}
    for index, (name, convert) in enumerate(signature.conversions):
        known[f"convert{index}"] = convert
        sources[name] = f"convert{index}({sources[name]})"
    return sources, known


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _repeated(repeats: int, value: Any) -> Any:
    """Returns the list of integers that a bare integer means."""
    is_bare = isinstance(value, (int, torch.SymInt)) or keys.is_scalar_argument(value)
    return [value] * repeats if is_bare else value


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _as_device(value: Any) -> Any:
    return torch.device(value) if isinstance(value, str) else value


def _true_or_none(flag: Any) -> Any:
    return None if flag is False else flag


def _enabled(flag: Any) -> bool:
    del flag
    return True


def _whole(number: Any) -> Any:
    """Returns an integer for a float that is one; -0.0 and what an int64 cannot hold stay."""
    same = same_number(number) if type(number) is float else None
    return number if same is None else same


def same_number(number: float) -> int | float | None:
    """Returns the integer that a float is, and the converse; None for -0.0, and where they may differ."""
    if abs(number) >= 2**53 or (type(number) is float and not number.is_integer()):
        return None
    if type(number) is int:
        return float(number)
    return int(number) if number or math.copysign(1, number) > 0 else None


def _as_set(dims: Any) -> Any:
    return sorted(dims) if isinstance(dims, list) and all(type(dim) is int for dim in dims) else dims


def _none_of_all(dims: Any) -> Any:
    return None if dims == [] else dims


def _conversions(schema: Schema, convert: Mapping[str, Convert]) -> Iterator[tuple[str, Convert]]:
    """Yields (name, function of the value that a call gives), so that what means the same is bound as the same."""
    takes_tensors = any("Tensor" in parameter.kind for parameter in schema.parameters)
    of = schema.overload._schema.name.removeprefix("aten::") if schema.overload is not None else ""
    for parameter in schema.parameters:
        name, kind = parameter.name, parameter.kind
        if kind.startswith("List["):
            yield name, _as_list
        if kind == "List[int]":
            yield name, functools.partial(_repeated, parameter.repeats)
            if name in ("dim", "dims") and of in DIMS_ARE_A_SET:
                yield name, _as_set
            if name == "dim" and of in OF_ALL:
                yield name, _none_of_all
        if kind == "float" or (schema.overload, name) in _TRUE_DIVISION:
            yield name, _as_float
        if kind == "Device":
            yield name, _as_device
        if name == "pin_memory":
            yield name, _true_or_none
        if name in _KERNEL_FLAGS:
            yield name, _enabled
        if name in convert:
            yield name, convert[name]
        # A multiplier, such as `alpha`. `arange` takes no tensors; there the type of the step is that of the result.
        if takes_tensors and kind == "number" and isinstance(parameter.default, (int, float)):
            yield name, _whole


_SIGNATURES: dict[Any, Signature | None] = {}
"""Signatures by (target, argument count, keyword names); None if the kinds of the arguments decide."""
_TARGETS: dict[Any, Any] = {}
"""Keeps the targets alive whose ids are keys of the tables."""
_SOLE: ByTarget[torch._ops.OpOverload | Literal[False]] = ByTarget()
_OVERLOADS: dict[Any, torch._ops.OpOverload | None] = {}
"""Overloads by the kinds of the arguments, because binding does not distinguish `gt.Tensor` from `gt.Scalar`."""
_BY_KINDS: dict[Any, Signature] = {}
"""Signatures by key, spelling and kinds of the arguments, where `_SIGNATURES` has None."""


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
    attribute = keys.attribute_of(target, args)
    if attribute is not None:
        return signature_of(attribute, args[:1], kwargs)
    spelled = spelling(target, args, kwargs)
    found = _SIGNATURES.get(spelled, _SIGNATURES)
    if found is _SIGNATURES:
        _TARGETS[spelled[0]] = target
        found = _SIGNATURES[spelled] = _settled(target, len(args), tuple(kwargs))
    if found is None:
        meant = _meant(target, args, kwargs)
        kinds = (meant, spelled, *map(_kind, args), *map(_kind, kwargs.values()))
        found = _BY_KINDS.get(kinds)
        if found is None:
            found = _BY_KINDS[kinds] = _choose(target, args, kwargs)
    return found  # pyright: ignore[reportReturnType]


def _meant(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns the key of a call whose arguments decide by their values what it is, as `reduction="batchmean"` does."""
    wrapper = keys.wrapper_of(target)
    decides = wrapper is not None and wrapper.depends_on_values
    return keys.call_key(target, args, kwargs) if decides else ""


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
        if _is_unknown_attribute(argument):
            return getattr
        argument = value(argument)
    if isinstance(argument, (list, tuple)):
        return list, tuple(_kind(item) for item in argument)
    return type(argument)


def overload_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch._ops.OpOverload | None:
    """Returns the torch overload that a call means; None if it is not a single operator (a Python callable)."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    attribute = keys.attribute_of(target, args)
    if attribute is not None:
        return attribute
    sole = _SOLE.get(target)
    if sole is None:
        sole = _SOLE.set(target, _sole_overload(target))
    if sole and "out" not in kwargs:
        return sole
    name = target if type(target) is str else id(target)
    meant = _meant(target, args, kwargs)
    kinds = (meant, name, len(args), tuple(kwargs), *map(_kind, args), *map(_kind, kwargs.values()))
    found = _OVERLOADS.get(kinds, _OVERLOADS)
    if found is _OVERLOADS:
        _TARGETS[name] = target
        found = _OVERLOADS[kinds] = _choose(target, args, kwargs).schema.overload
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
    if (wrapper is not None and wrapper.depends_on_values) or (count and _packed_from(target) is not None):
        return None
    signatures = _signatures(target, count, keywords)
    return signatures[0] if all(_same(signatures[0], other) for other in signatures[1:]) else None


def _choose(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """Returns the first signature, in torch's order of overloads, that every argument fits."""
    is_other = keys.wrapper_of(target) is not None and "::" not in keys.call_key(target, args, kwargs)
    of = keys.python_function(target) if is_other else target
    signatures = _signatures(of, len(args), tuple(kwargs), _spread_from(target, args), as_operator=not is_other)
    # What has no value is a tensor if some overload takes one, as the `src` of `scatter` that may be a number too. And
    # torch wraps a number into a 0-dim tensor only if no overload takes the number itself.
    guessed = tuple(map(_as_tensor, args)), {name: _as_tensor(given) for name, given in kwargs.items()}
    for given, numbers_as_tensors in ((guessed, False), ((args, kwargs), False), ((args, kwargs), True)):
        for signature in signatures:
            bound = signature.bind(*given)
            if signature.schema.overload is None or all(
                fits(parameter, bound[parameter.name])
                or (numbers_as_tensors and _is_wrapped_number(parameter, bound[parameter.name]))
                for parameter in signature.schema.parameters
                if parameter.name in signature.given
            ):
                return signature
    raise BindingError(f"{keys.key(target)} called with {args} {dict(kwargs)}: no overload of it takes these arguments")


def _as_tensor(argument: Any) -> Any:
    is_unknown = isinstance(argument, fx.Node) and value(argument) is MISSING
    return torch.Tensor() if is_unknown and not _is_unknown_attribute(argument) else argument


def _is_unknown_attribute(node: fx.Node) -> bool:
    """Whether it reads an attribute, such as a dtype, in a graph without values."""
    return node.target is getattr and value(node) is MISSING


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
    """Whether two signatures bind all arguments in the same way, of whatever kinds they are."""
    lists_a, lists_b = ({name for name, convert in s.conversions if convert is _as_list} for s in (a, b))
    return (a.names, a.given, lists_a) == (b.names, b.given, lists_b) and a.defaults == b.defaults


def _packed_from(target: Any) -> int | None:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    return VARARGS.get(name) if isinstance(target, str) or inspect.isroutine(target) else None


def _signatures(
    target: Any, count: int, keywords: tuple[str, ...], rest: int | None = None, *, as_operator: bool = True
) -> list[Signature]:
    """Returns the signatures of all overloads that take this many positional arguments and these keywords.

    Args:
        target: what is called.
        count: number of positional arguments.
        keywords: names of the keyword arguments.
        rest: where a list starts that is spread over the positional arguments.
        as_operator: whether the call means the operator that the target wraps, if it wraps one.

    Raises:
        BindingError: there are none.
    """
    forms = _forms(target, keywords) if as_operator else None
    if forms is None:
        forms = [_schema_form(_python_schema(target, count, keywords))]
    fitted = [_fitted(form, count, keywords, rest) for form in forms]
    signatures = [found for found in fitted if isinstance(found, Signature)]
    if not signatures:
        why = fitted[0] if len(fitted) == 1 else "no overload of it takes these arguments"
        raise BindingError(
            f"{keys.key(target)} called with {count} positional arguments and keywords {list(keywords)}: {why}"
        )
    return signatures


@dataclass(frozen=True, slots=True)
class _Form:
    """One way in which Python calls an operator.

    Attributes:
        schema: of the operator.
        positional: its names of the positional arguments, in order; "" for an argument that it does not have.
        keywords: the same for keyword arguments.
        defaults: what it gets for arguments that a call does not pass.
        given: names that each call passes, because the default here is not that of the schema.
        conversions: of values that a call passes.
    """

    schema: Schema
    positional: Sequence[str]
    keywords: Mapping[str, str]
    defaults: Mapping[str, Any]
    given: Collection[str]
    conversions: tuple[tuple[str, Convert], ...]


def _forms(target: Any, keywords: tuple[str, ...]) -> list[_Form] | None:
    """Returns the ways in which an operator may be called, in torch's order of overloads; None if it is none."""
    wrapper = keys.wrapper_of(target)
    if wrapper is not None:
        return [_wrapper_form(keys.python_function(target), wrapper)]
    if isinstance(target, str) and target in CASTS:
        cast = schema_of(torch.ops.aten.to.dtype)
        defaults = {**cast.defaults, "dtype": CASTS[target]}
        by_keyword = {"memory_format": "memory_format"}
        return [_Form(cast, ["self"], by_keyword, defaults, ["dtype"], tuple(_conversions(cast, {})))]
    schemas = _candidates(target, keywords)
    is_method = isinstance(target, str) or hasattr(target, "__objclass__")
    return None if schemas is None else [_schema_form(schema, is_method=is_method) for schema in schemas]


def _fitted(form: _Form, count: int, keywords: tuple[str, ...], rest: int | None) -> Signature | str:
    """Returns the signature of a call with such arguments, or why the form does not take them."""
    spread: tuple[str, int] | None = None
    if rest is not None:
        lists = {parameter.name for parameter in form.schema.parameters if parameter.kind.startswith("List[")}
        if rest >= len(form.positional) or form.positional[rest] not in lists:
            return "it takes no spread list"
        spread, count = (form.positional[rest], rest), rest
    unknown = [keyword for keyword in keywords if keyword not in form.keywords]
    if count > len(form.positional) or unknown:
        return f"it takes no keyword {unknown[0]}" if unknown else f"it takes at most {len(form.positional)}"
    positions = tuple((name, index) for index, name in enumerate(form.positional[:count]) if name)
    by_keyword = tuple((form.keywords[keyword], keyword) for keyword in keywords if form.keywords[keyword])
    passed = [name for name, _ in (*positions, *by_keyword)] + ([spread[0]] if spread else [])
    # Every name must be passed once, or have a default; otherwise the call means another overload.
    if len(set(passed)) < len(passed):
        return "one of them is given twice"
    names = form.schema.names
    if missing := [name for name in names if name not in passed and name not in form.defaults]:
        return f"it is called without {', '.join(missing)}"
    return Signature(
        schema=form.schema,
        given=tuple(name for name in names if name in passed or name in form.given),
        base={name: form.defaults.get(name) for name in names},
        positions=positions,
        keywords=by_keyword,
        rest=spread,
        conversions=tuple((name, convert) for name, convert in form.conversions if name in passed),
    )


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


def _schema_form(schema: Schema, *, is_method: bool = False) -> _Form:
    """Returns how a function whose arguments are those of the schema is called; bindings of torch rename some.

    A method is called with `self` first, wherever the schema has it: `x.where(condition, y)`.
    """
    names = schema.names
    positional = [parameter.name for parameter in schema.parameters if not parameter.keyword_only]
    if is_method and "self" in positional:
        positional = ["self", *(name for name in positional if name != "self")]
    renamed = {keyword: name for keyword, name in RENAMED_KEYWORDS.items() if name in names}
    for name in names:
        if name.startswith("split_size"):  # `torch.split` has one name for the argument that is two in ATen
            renamed |= dict.fromkeys(("split_size", "split_size_or_sections"), name)
    return _Form(
        schema=schema,
        positional=positional,
        keywords={**renamed, **{name: name for name in names}},
        defaults=schema.defaults,
        given=(),
        conversions=tuple(_conversions(schema, {})),
    )


def _wrapper_form(target: Any, wrapper: Wrapper) -> _Form:
    """Returns how a Python wrapper is called, in terms of the operator that it wraps."""
    schema = schemas_of(getattr(torch.ops.aten, wrapper.name))[0]
    parameters = parameters_of(target)
    python_names = {name: wrapper.arguments.get(name, name) for name in schema.names}
    own = {name: parameters[source].default for name, source in python_names.items() if source in parameters}
    defaults = {**schema.defaults, **wrapper.constants, **own}
    conversions = tuple(_conversions(schema, wrapper.convert))
    for name, convert in conversions:
        if name in defaults:
            defaults[name] = convert(defaults[name])
    # The wrapper's own default may differ from the schema's (dropout's `training`): then the call passes it.
    differing = [
        name for name, default in defaults.items() if not _is_same(default, schema.defaults.get(name, NO_DEFAULT))
    ]
    schema_names = {source: name for name, source in python_names.items()}
    return _Form(
        schema=schema,
        positional=[schema_names.get(name, "") for name in parameters],
        keywords={name: schema_names.get(name, "") for name in parameters},
        defaults={name: default for name, default in defaults.items() if default is not inspect.Parameter.empty},
        given=differing,
        conversions=conversions,
    )


def _is_same(a: Any, b: Any) -> bool:
    return a is b or a == b


def _python_schema(target: Any, count: int, keywords: tuple[str, ...]) -> Schema:
    """Returns the arguments of a callable that is not a torch operator, with as many of its variadic ones as are given.

    A class of modules has those of `forward`.
    """
    is_module = isinstance(target, type) and issubclass(target, torch.nn.Module)
    try:
        fixed = python_parameters(target.forward if is_module else target)[is_module:]
    except (TypeError, ValueError):  # builtins without a signature
        fixed = ()
    num_positional = sum(not parameter.keyword_only for parameter in fixed)
    known = {parameter.name for parameter in fixed}
    more = [Parameter(f"arg{at}", "", True, False, NO_DEFAULT) for at in range(num_positional, count)]
    more += [Parameter(name, "", True, True, NO_DEFAULT) for name in keywords if name not in known]
    return Schema((*fixed, *more), None)
