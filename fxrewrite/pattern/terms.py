"""Pattern terms: frozen values that describe a part of a graph.

Terms behave like tensors: torch functions, operators and tensor methods on terms make larger terms. So a traced
function, the combinators and the text form all give the same values. Terms are compared by structure: equal subterms
are one value, whether the graph computes it once or twice.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal, TypeAlias, TypeGuard

import torch

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.ops.schemas import schemas_of

CaptureKind: TypeAlias = Literal["node", "optional", "param", "literal", "any"]


class Term:
    """Base class of all pattern terms; torch functions, operators and tensor methods on terms make terms."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Term:
        del types
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in _READ:
            return call(_READ[name], (self,), {})
        if name in ops.ATTRIBUTES:
            return call(ops.named_operator(ops.ATTRIBUTES[name]), (self,), {})
        if name in (results := _named_results(self)):
            return self[results.index(name)]
        if not name.startswith("_") and callable(getattr(torch.Tensor, name, None)):
            return lambda *args, **kwargs: call(name, (self, *args), kwargs)
        instead = _INSTEAD.get(name, "it has shape, dtype and device, else see fxrewrite.where")
        raise AttributeError(f"a pattern has no attribute {name!r}; {instead}")

    def __bool__(self) -> bool:
        raise RuleDefinitionError("a pattern cannot branch on a value; write a rule for each case, or use either()")

    def __len__(self) -> int:
        # a TypeError, which `[*x]` takes to mean that the length is not known
        raise TypeError("a pattern does not know how many entries or items a value has; see where= and len()")

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked(sys._getframe(1))
        if count is None or isinstance(self, Each):
            raise RuleDefinitionError(
                "a pattern cannot unpack a value of unknown length; take its parts as value[0] ..., or as a, b = value"
            )
        return (self[index] for index in range(count))

    def __index__(self) -> int:
        raise RuleDefinitionError("a pattern knows no numbers, so it cannot loop over a size or a captured number")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuleDefinitionError(
            "a pattern cannot write to x[i]; match the functional operator, such as slice_scatter or index_put, on a "
            "graph made functional first"
        )

    def __getitem__(self, index: Any) -> Term:
        if _is_shape(self):
            if type(index) is not int:
                raise RuleDefinitionError(
                    f"a pattern takes sizes one by one, x.shape[0] or b, s, d = x.shape, and not [{index}] of a shape; "
                    "for any rank, capture the whole argument, as shape: Any"
                )
            return call(_READ["shape"], (self.args[0][1], index), {})
        return call(operator.getitem, (self, index), {})


def _named_results(term: Term) -> tuple[str, ...]:
    """Returns the names of several results of an operator of torch: "values" and "indices" of `max`."""
    named = getattr(torch.return_types, term.key.partition("::")[2], None) if isinstance(term, Op) else None
    return getattr(named, "__match_args__", ())


def _unpacked(frame: FrameType) -> int | None:
    """Returns into how many names the code that runs unpacks a value, as `torch.fx` does; None if it does not."""
    steps = dis.get_instructions(frame.f_code)
    step = next((step for step in steps if step.offset == frame.f_lasti), None)
    return step.argval if step is not None and step.opname.startswith("UNPACK_S") else None


_READ: Mapping[str, Any] = {
    "shape": torch.ops.aten.size,
    "dtype": torch.ops.prim.dtype,
    "device": torch.ops.prim.device,
}
"""What is read of a value as an attribute."""
_INSTEAD: Mapping[str, str] = {
    "real": "write torch.real(x)",
    "imag": "write torch.imag(x)",
    "ndim": 'state it, as in where=["rank(x) == 2"]',
}
"""What to write instead of an attribute."""
_NUMBERS_OF = ("aten::size", "aten::numel")
_ATTRIBUTES_OF = ("prim::dtype", "prim::device")
ONCE = "fxrewrite::once"
"""Key of what a replacement that is written as an expression computes when its rule is applied."""
ARITHMETIC_ON_SIZES: Mapping[str, Callable[..., Any]] = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::mul": operator.mul,
    "aten::floor_divide": operator.floordiv,
    "aten::neg": operator.neg,
}
"""What may be computed of sizes in a pattern."""


def _arithmetic(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Term]:
    def method(self: Term, *others: Any) -> Term:
        return call(function, (*others, self) if reflected else (self, *others), {})

    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in _BINARY.split():
    setattr(Term, f"__{_name.rstrip('_')}__", _arithmetic(getattr(operator, _name)))
    setattr(Term, f"__r{_name.rstrip('_')}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("lt", "le", "gt", "ge", "neg", "pos", "invert", "abs"):
    setattr(Term, f"__{_name}__", _arithmetic(getattr(operator, _name)))


@dataclass(frozen=True, slots=True)
class Op(Term):
    """A node with this operator whose arguments match; arguments that are not mentioned have their defaults.

    Attributes:
        key: canonical operator key.
        args: (schema name, term) in schema order.
        shared: users outside the match are allowed; then the node stays in the graph for them.
        loose: arguments that are not mentioned may have any value.
    """

    key: str
    args: tuple[tuple[str, Term], ...]
    shared: bool = False
    loose: bool = False

    @property
    def may_draw(self) -> bool:
        """Whether some call like this one draws random numbers."""
        literals = [part.value for _, part in self.args if isinstance(part, LiteralValue)]
        return ops.may_be_random(self.key, ops.called_overload(literals))


@dataclass(frozen=True, slots=True)
class Capture(Term):
    """Captures a value by name; a name that occurs twice must capture the same value twice.

    `node`: a value of the graph, no number. `optional`: a node or None. `param`: a parameter or buffer of the module.
    `literal`: a Python value that contains no nodes. `any`: anything.
    """

    name: str
    kind: CaptureKind = "node"

    def __iter__(self) -> Iterator[Term]:
        """Makes `*x` in a list any number of items; `a, b = x` takes the parts of a value."""
        count = _unpacked(sys._getframe(1))
        return iter([Each(self)]) if count is None else (self[index] for index in range(count))


@dataclass(frozen=True, slots=True, eq=False)
class LiteralValue(Term):
    """A Python value equal to this one, also in type: 1, 1.0 and True differ (the schema type float takes integers)."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteralValue) and freeze(self.value) == freeze(other.value)

    def __hash__(self) -> int:
        return hash(freeze(self.value))


@dataclass(frozen=True, slots=True)
class Ignore(Term):
    """Matches anything without capturing it; written `...`."""


@dataclass(frozen=True, slots=True)
class ListOf(Term):
    """A list or tuple of exactly these items, at least one of which is not a plain literal."""

    items: tuple[Term, ...]

    def __iter__(self) -> Iterator[Term]:
        """Makes `*each(...)` in a list its items."""
        return iter(self.items)


@dataclass(frozen=True, slots=True)
class Each(Term):
    """Among the items of a list, any number of neighbors that match `term`; its captures are lists, an entry for each.

    Attributes:
        term: what every item is.
        on: captures of the term that are no lists: all items have the same value there.
    """

    term: Term
    on: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The captures that are lists."""
        found = (part.name for part in subterms(self.term) if isinstance(part, Capture))
        return tuple(dict.fromkeys(name for name in found if name not in self.on))


@dataclass(frozen=True, slots=True)
class Maybe(Term):
    """`step`, or `base` if the graph has no such step; then captures that occur only in the step are None."""

    step: Op
    base: Term


@dataclass(frozen=True, slots=True)
class Either(Term):
    """The first of the options that matches; captures that occur only in other options are None."""

    options: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Chain(Term):
    """A run of operators from `base` upwards, each the first operand of the next; the longest run that fits.

    Attributes:
        base: the term where the run starts.
        keys: the operators that the run may consist of, with any arguments.
        least, most: bounds of the length of the run.
    """

    base: Term
    keys: tuple[str, ...]
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Siblings(Term):
    """All values like `each` that read one value, as the outputs of a pattern; the match is at the last of them.

    Attributes:
        each: the operator; in the match its captures are lists, with one item per sibling in graph order.
        on: the capture that all siblings read.
        least: the smallest number of siblings that match.
    """

    each: Term
    on: str
    least: int = 2


_TRACING = contextvars.ContextVar[tuple[bool, ...] | None]("_TRACING", default=None)
"""The modes in which the function of a pattern was called; None while none runs."""


@contextlib.contextmanager
def tracing() -> Generator[None]:
    """Within it, `==` and `!=` in code outside of this package are calls, as `<` is; elsewhere they compare terms."""
    before = _TRACING.set(ops.modes_now())
    try:
        yield
    finally:
        _TRACING.reset(before)


def _compares(function: Callable[..., Any], terms: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    package = __name__.partition(".")[0]

    def method(self: Term, other: Any) -> Any:
        if _TRACING.get() is not None and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != package:
            if is_size(self):
                raise RuleDefinitionError(
                    'a pattern cannot branch on sizes or dtypes; state them, as in where=["size(x, 0) == 2"]'
                )
            return call(function, (self, other), {})
        return terms(self, other)

    return method


for _class in (Op, Capture, Maybe, Either, Chain):
    _class.__ne__ = _compares(operator.ne, object.__ne__)
    _class.__eq__ = _compares(operator.eq, _class.__eq__)  # pyright: ignore[reportAttributeAccessIssue]


def freeze(value: Any) -> Any:
    """Returns a hashable form of a literal; types differ (1, 1.0, True; 0.0, -0.0; `x[0, 1]` and `x[[0, 1]]`).

    Raises:
        TypeError: the value is not hashable.
    """
    if isinstance(value, (list, tuple)):
        return list if isinstance(value, list) else tuple, tuple(freeze(item) for item in value)
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, complex):
        return complex, (repr(value.real), repr(value.imag))
    if isinstance(value, slice):
        return slice, freeze((value.start, value.stop, value.step))
    if isinstance(value, Mapping):
        return dict, tuple((name, freeze(item)) for name, item in sorted(value.items()))
    hash(value)
    return type(value), value


def frozen(value: Any) -> Any:
    """Like `freeze`, but an unhashable value becomes something that equals only itself."""
    try:
        return freeze(value)
    except TypeError:
        return id(value)


def tensor_text(tensor: torch.Tensor) -> str:
    """Returns dtype and shape as text: `float32[2, 3]`."""
    return f"{ops.dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def as_term(value: Any) -> Term:
    """Converts to a term: terms stay, `...` is Ignore, a list that contains terms is ListOf, others are literals."""
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
    if isinstance(value, torch.Tensor):
        raise RuleDefinitionError(
            f"a pattern cannot hold a tensor ({tensor_text(value)}): it is "
            "compared by structure alone; make it a parameter of the pattern, annotated Param if the model holds it, "
            "and state its values by a constraint (fxrewrite.where.predicate), or write a number"
        )
    try:
        freeze(value)
    except TypeError as error:
        raise RuleDefinitionError(f"a literal in a pattern must be hashable, {type(value).__name__} is not") from error
    return LiteralValue(value)


def call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, shared: bool = False) -> Op:
    """Returns the term for a node that calls `target` with these arguments, in any spelling of the call.

    Raises:
        RuleDefinitionError: the call fits no signature, writes to memory, or is made in another mode than its pattern.
    """
    target = ops.operator_of(target)
    key = ops.call_key(target, args, kwargs)
    if _TRACING.get() not in (None, ops.modes_now()):
        raise RuleDefinitionError(
            f"a pattern calls {key} in a mode of its own, as under torch.no_grad() or autocast, of which the node of a "
            "call says nothing; match detach(x) for a value without its gradient, and casts as x.to(dtype)"
        )
    try:
        signature = _signature(target, args, kwargs)
    except ops.BindingError as error:
        raise RuleDefinitionError(f"in a pattern: {error}") from error
    overload = signature.schema.overload
    written = overload is not None and overload._schema.is_mutable
    takes_out = kwargs.get("out") is not None and ops.may_take_out(target)
    if written or takes_out or (key.endswith("_") and not key.endswith("__")):
        raise RuleDefinitionError(
            f"{key} in a pattern writes to memory; match the functional operator, on a graph made functional first"
        )
    is_index = key == "operator.getitem"
    terms: list[tuple[str, Term]] = []
    for name, value in signature.bind(args, kwargs).items():
        if not isinstance(value, Term) and name in signature.defaults and _is_default(value, signature.defaults[name]):
            continue
        literal_index = is_index and name == signature.names[1] and not holds_term(value)  # here `...` means itself
        terms.append((name, LiteralValue(value) if literal_index else as_term(_sizes(name, value))))
    return Op(key, tuple(terms), shared)


def _signature(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ops.Signature:
    """Returns the signature of a call: of several, that in which what the pattern takes for a tensor is one."""
    tensors = tuple(map(_as_tensor, args)), {name: _as_tensor(value) for name, value in kwargs.items()}
    try:
        return ops.signature_of(target, *tensors)
    except ops.BindingError:  # a value of the graph may be a list, too
        return ops.signature_of(target, args, kwargs)


def _as_tensor(value: Any) -> Any:
    is_value = isinstance(value, Capture) and value.kind in ("node", "param")
    is_result = isinstance(value, Op) and not is_size(value) and not has_parts(value)
    return torch.Tensor() if is_value or is_result else value


def in_steps(term: Op) -> Op | None:
    """Returns the slices, selects, unsqueezes or `aten::index` that indexing a tensor is in a graph of ATen overloads.

    None if the term is not such an index, or if it takes a part of several results by number.
    """
    if term.key != "operator.getitem" or len(term.args) != 2:
        return None
    (_, base), (_, index) = term.args
    if not isinstance(index, LiteralValue):
        return _by_tensors(term, base, index)
    if isinstance(index.value, int) and has_parts(base):
        return None
    items = index.value if isinstance(index.value, tuple) else (index.value,)
    if not all(item is None or item is ... or type(item) in (int, slice) for item in items):
        return None
    found: Term = base
    for overload, args in ops.index_steps(index.value):
        found = call(overload, (found, *args), {})
    return replace(found, shared=term.shared) if isinstance(found, Op) and found is not base else None


def _by_tensors(term: Op, base: Term, index: Term) -> Op | None:
    """Returns the index by tensors that `x[:, i, j]` is; None if the index has other items than tensors and `:`."""
    items = index.items if isinstance(index, ListOf) else (index,)
    if any(isinstance(item, (Each, Ignore)) or item == LiteralValue(None) for item in items):
        return None
    literals = [item.value for item in items if isinstance(item, LiteralValue)]
    if any(value != slice(None) for value in literals):
        return None
    given = [None if isinstance(item, LiteralValue) else item for item in items]
    return replace(call(torch.ops.aten.index.Tensor, (base, given), {}), shared=term.shared)


def reflected(term: Op) -> tuple[Op, ...]:
    """Returns the calls that a number divided by a tensor is in a graph of ATen overloads; else none."""
    aten = torch.ops.aten
    if term.key != "aten::div" or [name for name, _ in term.args] != ["self", "other"]:
        return ()
    (_, number), (_, tensor) = term.args
    is_literal = isinstance(number, LiteralValue) and type(number.value) in (int, float)
    if not (is_literal or (isinstance(number, Capture) and number.kind == "literal")):
        return ()
    if isinstance(tensor, LiteralValue) or is_size(tensor):
        return ()
    inverse = call(aten.reciprocal.default, (tensor,), {})
    numbers: list[Term] = [number]
    if isinstance(number, LiteralValue) and float(number.value).is_integer():  # a quotient is no integer: 1 is 1.0
        numbers = [LiteralValue(kind(number.value)) for kind in (type(number.value), float, int)]
    found = [call(aten.mul.Tensor, (inverse, factor), {}) for factor in dict.fromkeys(numbers)]
    found += [inverse] if LiteralValue(1) in numbers else []
    return tuple(replace(one, shared=term.shared) for one in found)


def twins(term: Op) -> Iterator[tuple[Op, str, tuple[int, int] | None]]:
    """Yields the calls of other operators that torch defines as the same function (`fxrewrite.ops.twins`).

    With each the name of an argument, and the least and largest rank that it must have; None if it may have any.
    """
    given = dict(term.args)
    seen = {term}
    for arguments, ranks, others in () if term.loose else ops.twins_of(term.key):
        for order in dict.fromkeys((tuple(given), tuple(_exchanged(term.key, given)))):
            letters = _letters(arguments, dict(zip(order, given.values(), strict=True)))
            if letters is None:
                continue
            for key, wanted in others:
                name = next(name for name, letter in wanted.items() if letter == "x")
                found = replace(_with_letters((key, wanted), letters), shared=term.shared)
                if found not in seen:
                    seen.add(found)
                    yield found, name, ranks


def _exchanged(key: str, names: Iterable[str]) -> list[str]:
    """Returns the names with those in each other's place that may be exchanged."""
    one, other = ops.exchangeable(key) or ("", "")
    return [other if name == one else one if name == other else name for name in names]


def _letters(arguments: Mapping[str, Any], given: Mapping[str, Term]) -> dict[str, Term] | None:
    """Returns what the letters of a call stand for where its arguments are these; None if it is another call."""
    if arguments.keys() != given.keys():
        return None
    letters: dict[str, Term] = {}
    for name, wanted in arguments.items():
        term = given[name]
        if isinstance(wanted, str):
            if is_number(term) and wanted in "xy":
                return None
            letters[wanted] = term
        elif isinstance(wanted, tuple):
            inner = _letters(wanted[1], dict(term.args)) if isinstance(term, Op) and term.key == wanted[0] else None
            if inner is None:
                return None
            letters |= inner
        elif term != LiteralValue(wanted):
            return None
    return letters


def _with_letters(wanted: tuple[str, Mapping[str, Any]], letters: Mapping[str, Term]) -> Op:
    """Returns the call with these terms in place of its letters."""
    key, arguments = wanted

    def term(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return _with_letters(argument, letters)
        return letters[argument] if isinstance(argument, str) else argument

    return call(ops.packet_of(key), (), {name: term(argument) for name, argument in arguments.items()})


_SHAPES = ("size", "shape")


def is_number(term: Term) -> bool:
    """Whether the term is a Python value, written in the pattern or captured, and not a node."""
    return isinstance(term, LiteralValue) or (isinstance(term, Capture) and term.kind == "literal")


def is_size(term: Any) -> TypeGuard[Op]:
    """Whether the term is a size of another value, a number computed of sizes, or a dtype or device."""
    if not isinstance(term, Op):
        return False
    if term.key in _NUMBERS_OF or term.key in _ATTRIBUTES_OF:
        return True
    parts = [part for _, part in term.args]
    if term.key not in ARITHMETIC_ON_SIZES or not any(map(is_size, parts)):
        return False
    return all(is_size(part) or _is_integer(part) for part in parts)


def _is_integer(term: Any) -> bool:
    """Whether it is an integer that is computed with sizes: a stated one, or one that the pattern captures."""
    if isinstance(term, Capture):
        return term.kind == "literal"
    return isinstance(term, LiteralValue) and type(term.value) is int


def _sizes(name: str, value: Any) -> Any:
    """Returns the sizes that `x.view(y.numel())` and `torch.zeros(x.shape)` mean, which also take `*size`."""
    one = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    if name not in _SHAPES or not is_size(one):
        whole = [item for item in value if _is_shape(item)] if isinstance(value, (list, tuple)) else []
        if whole:
            base = whole[0].args[0][1]
            text = base.name if isinstance(base, Capture) else "x"
            raise RuleDefinitionError(
                f"{name} has all sizes of {text} among others; write them singly, {text}.shape[0] or size({text}, 0)"
            )
        return value
    return one if _is_shape(one) else [one]


def _is_shape(term: Any) -> TypeGuard[Op]:
    return isinstance(term, Op) and term.key == "aten::size" and len(term.args) == 1


def with_sizes(term: Op) -> Op | None:
    """Returns what a split by a captured value is where that is a list of sizes; None if the term is no such split."""
    names = [name for name, _ in term.args]
    if term.key != "aten::split" or "split_size" not in names:
        return None
    at = names.index("split_size")
    sizes = term.args[at][1]
    if not isinstance(sizes, Capture) or sizes.kind not in ("literal", "any"):
        return None
    return replace(
        term, key="aten::split_with_sizes", args=(*term.args[:at], ("split_sizes", sizes), *term.args[at + 1 :])
    )


def part_of(term: Term) -> tuple[Op, int] | None:
    """Returns the operator with several results of which the term is one, by number; None if it is no such part."""
    if not isinstance(term, Op) or term.key != "operator.getitem" or len(term.args) != 2:
        return None
    (_, base), (_, index) = term.args
    is_number = isinstance(index, LiteralValue) and type(index.value) is int
    return (base, index.value) if is_number and isinstance(base, Op) and has_parts(base) else None


OF_PARTS = "to match the parts of a list, write each(part), with `def part(i: Literal): return parts[i]`"


def has_parts(term: Term) -> bool:
    """Whether the value may be a tuple or a list: some overload of the operator returns one, or several results."""
    if not isinstance(term, Op):
        return False
    packet = ops.packet_of(term.key)
    if packet is None:
        return True
    returns = [schema.overload._schema.returns for schema in schemas_of(packet) if schema.overload is not None]
    return any(len(returned) > 1 or str(found.type).startswith("List[") for returned in returns for found in returned)


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return not holds_term(value) and freeze(value) == freeze(default)


def holds_term(value: Any) -> bool:
    """Whether the value is a term, or a container with one."""
    return holds(value, Term)


def holds(value: Any, kind: type[Any]) -> bool:
    """Whether the value is of the class, or a list, tuple, slice or dict with such a value, at any depth."""
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    elif isinstance(value, dict):
        value = (*value.values(),)
    if isinstance(value, (list, tuple)):
        return any(holds(item, kind) for item in value)
    return isinstance(value, kind)


def parts_of(term: Term) -> tuple[Term, ...]:
    """Returns the terms that a term is made of."""
    if isinstance(term, Op):
        return tuple(part for _, part in term.args)
    if isinstance(term, ListOf):
        return term.items
    if isinstance(term, Maybe):
        return term.step, term.base
    if isinstance(term, Either):
        return term.options
    if isinstance(term, Chain):
        return (term.base,)
    if isinstance(term, Siblings):
        return (term.each,)
    return (term.term,) if isinstance(term, Each) else ()


def subterms(term: Term) -> Iterator[Term]:
    """Yields the term and all its subterms, each before its own, in the order of the text form."""
    left = [term]
    while left:
        term = left.pop()
        yield term
        left += reversed(parts_of(term))
