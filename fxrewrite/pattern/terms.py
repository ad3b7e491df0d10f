"""Pattern terms: frozen values that say what a part of a graph looks like.

A term can be computed with like a tensor: torch functions, operators and tensor methods on terms build larger terms,
so a traced function, the combinators and the text form all end in the same values. Structure is meaning: two equal
subterms are one value, whether the graph computes it once or twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError

__all__ = [
    "Capture",
    "CaptureKind",
    "Chain",
    "Either",
    "Ignore",
    "ListOf",
    "LiteralValue",
    "Maybe",
    "Op",
    "Siblings",
    "Term",
    "as_term",
    "call",
    "freeze",
    "subterms",
]

CaptureKind: TypeAlias = Literal["node", "optional", "param", "literal", "any"]


class Term:
    """Base of all pattern terms; torch functions, operators and tensor methods on terms build terms."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Term:
        del types
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if not name.startswith("_") and callable(getattr(torch.Tensor, name, None)):
            return lambda *args, **kwargs: call(name, (self, *args), kwargs)
        raise AttributeError(
            f"a pattern has no attribute {name!r}: shapes and dtypes of values are constraints, see fxrewrite.where"
        )

    def __bool__(self) -> bool:
        raise RuleDefinitionError("a pattern cannot branch on a value; write a rule for each case, or use either()")

    def __iter__(self) -> Iterator[Any]:
        raise RuleDefinitionError("a pattern cannot unpack a value of unknown length; take its parts as value[0] ...")

    def __getitem__(self, index: Any) -> Term:
        return call(operator.getitem, (self, index), {})


def _arithmetic(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Term]:
    def method(self: Term, *others: Any) -> Term:
        return call(function, (*others, self) if reflected else (self, *others), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    setattr(Term, f"__{_name.rstrip('_')}__", _arithmetic(getattr(operator, _name)))
    setattr(Term, f"__r{_name.rstrip('_')}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("lt", "le", "gt", "ge", "neg", "invert", "abs"):  # eq and ne compare terms; a pattern says torch.eq
    setattr(Term, f"__{_name}__", _arithmetic(getattr(operator, _name)))


@dataclass(frozen=True, slots=True)
class Op(Term):
    """A node with this operator whose arguments match; arguments that are not mentioned are at their defaults.

    Attributes:
        key: canonical operator key.
        args: (schema name, term) in schema order.
        shared: users outside the match are allowed; then the node stays for them.
        loose: arguments that are not mentioned may be anything, not only at their defaults.
    """

    key: str
    args: tuple[tuple[str, Term], ...]
    shared: bool = False
    loose: bool = False


@dataclass(frozen=True, slots=True)
class Capture(Term):
    """Whatever stands here, by name; a name that occurs twice must meet the same value twice.

    `node`: a value of the graph. `optional`: one, or None. `param`: a parameter or buffer of the module. `literal`: a
    Python value without nodes in it. `any`: anything.
    """

    name: str
    kind: CaptureKind = "node"


@dataclass(frozen=True, slots=True, eq=False)
class LiteralValue(Term):
    """A Python value equal to this one, in type too: 1, 1.0 and True differ (the schema type float takes integers)."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteralValue) and freeze(self.value) == freeze(other.value)

    def __hash__(self) -> int:
        return hash(freeze(self.value))


@dataclass(frozen=True, slots=True)
class Ignore(Term):
    """Anything, not captured; written `...`."""


@dataclass(frozen=True, slots=True)
class ListOf(Term):
    """A list or tuple of exactly these items, at least one of which is no plain literal."""

    items: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Maybe(Term):
    """`step`, or `base` where the graph leaves the step out; captures of the step alone are None then."""

    step: Op
    base: Term


@dataclass(frozen=True, slots=True)
class Either(Term):
    """The first of the options that matches; captures of the others are None."""

    options: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Chain(Term):
    """A run of operators from `base` up, each the first operand of the next; the longest run that fits.

    Attributes:
        base: what the run starts at.
        keys: the operators that it may consist of, with any arguments.
        least, most: how many there are.
    """

    base: Term
    keys: tuple[str, ...]
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Siblings(Term):
    """All values like `each` that read one value, as the outputs of a pattern; found at the last of them.

    Attributes:
        each: the operator; its captures are lists in the match, one item for each sibling in graph order.
        on: the capture that they have in common.
        least: fewer are no match.
    """

    each: Term
    on: str
    least: int = 2


def freeze(value: Any) -> Any:
    """A hashable form of a literal that tells types apart (1, 1.0, True; 0.0, -0.0; `x[0, 1]` and `x[[0, 1]]`).

    Raises:
        TypeError: the value is not hashable.
    """
    if isinstance(value, (list, tuple)):
        return list if isinstance(value, list) else tuple, tuple(freeze(item) for item in value)
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, slice):
        return slice, freeze((value.start, value.stop, value.step))
    if isinstance(value, Mapping):
        return dict, tuple((name, freeze(item)) for name, item in sorted(value.items()))
    hash(value)
    return type(value), value


def as_term(value: Any) -> Term:
    """A term as it is; `...` is Ignore; a list with terms in it is ListOf; any other value must be equal."""
    if isinstance(value, Term):
        return value
    if value is ...:
        return Ignore()
    if isinstance(value, (list, tuple)):
        items = tuple(as_term(item) for item in value)
        if not all(isinstance(item, LiteralValue) for item in items):
            return ListOf(items)
    if isinstance(value, slice) and any(isinstance(v, Term) for v in (value.start, value.stop, value.step)):
        raise RuleDefinitionError("a pattern cannot capture a bound of a slice; capture the whole index instead")
    try:
        freeze(value)
    except TypeError as error:
        raise RuleDefinitionError(f"a literal in a pattern must be hashable, {type(value).__name__} is not") from error
    return LiteralValue(value)


def call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, shared: bool = False) -> Op:
    """The term for a node that calls `target` with these arguments, in any spelling of the call.

    Raises:
        RuleDefinitionError: the call fits no signature, or writes to memory.
    """
    key = ops.call_key(target, args, kwargs)
    try:
        layout = ops.layout_of(target, args, kwargs)
    except ops.BindingError as error:
        raise RuleDefinitionError(f"in a pattern: {error}") from error
    written = layout.overload is not None and layout.overload._schema.is_mutable
    if written or kwargs.get("out") is not None or (key.endswith("_") and not key.endswith("__")):
        raise RuleDefinitionError(
            f"{key} in a pattern writes to memory; match the functional operator, on a graph made functional first"
        )
    is_index = key == "operator.getitem"
    terms: list[tuple[str, Term]] = []
    for name, value in layout.bind(args, kwargs).items():
        if not isinstance(value, Term) and name in layout.defaults and _is_default(value, layout.defaults[name]):
            continue
        literal_index = is_index and name == layout.names[1] and not _holds_term(value)  # here `...` means itself
        terms.append((name, LiteralValue(value) if literal_index else as_term(value)))
    return Op(key, tuple(terms), shared)


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return not _holds_term(value) and freeze(value) == freeze(default)


def _holds_term(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_term, value))
    if isinstance(value, slice):
        return any(map(_holds_term, (value.start, value.stop, value.step)))
    return isinstance(value, Term)


def subterms(term: Term) -> Iterator[Term]:
    """The term and everything in it, outermost first."""
    yield term
    if isinstance(term, Op):
        parts: tuple[Term, ...] = tuple(part for _, part in term.args)
    elif isinstance(term, ListOf):
        parts = term.items
    elif isinstance(term, Maybe):
        parts = (term.step, term.base)
    elif isinstance(term, Either):
        parts = term.options
    elif isinstance(term, Chain):
        parts = (term.base,)
    elif isinstance(term, Siblings):
        parts = (term.each,)
    else:
        parts = ()
    for part in parts:
        yield from subterms(part)
