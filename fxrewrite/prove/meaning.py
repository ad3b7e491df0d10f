"""What operators compute: every entry of a result as an expression over entries of the operands.

A `Value` gives its entry at any index. Views, permutations, slices, concatenations and broadcasts change the index;
arithmetic acts on entries; a product of matrices is a sum over an index; norms, softmax and attention are what their
documentation says. An operator that has no entry here is decomposed by torch's own decompositions, or is traced if it
is a Python function, or is an uninterpreted function of all that it is given.

`Meaning(real=False)` interprets no arithmetic at all: two equal expressions are then the same floating-point operations
on the same entries, and the same operators on operands that are the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from sympy import Function, Integer, Symbol
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.prove.indices import Expr, Indices, is_same
from fxrewrite.prove.reals import expanded, is_positive, total
from fxrewrite.prove.symbolic import decomposed, size_expression

__all__ = ["Meaning", "UnknownError", "Value"]

At: TypeAlias = Callable[[Sequence[Expr]], Expr]
_ENTRY = re.compile(r"(\w+)\((?:j\d+|0|, )*\)")
"""An entry at any index: what holds of it is said of the whole input, whatever its rank."""
_ROOTS = {float(sympy.sqrt(q).evalf(30)): sympy.sqrt(q) for q in map(sympy.Rational, (2, 3, "1/2", "1/3"))}
_ROOTS_OF_PI = {float(sympy.sqrt(q / sympy.pi).evalf(30)): sympy.sqrt(q / sympy.pi) for q in map(Integer, (1, 2))}

_WITH_INFINITY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class UnknownError(Exception):
    """Nothing can be said of a value; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor.

    Attributes:
        shape: sizes.
        dtype: of the entries.
        at: the entry at an index.
        name: the text of the call that makes it: equal names are equal values.
    """

    shape: tuple[Expr, ...]
    dtype: torch.dtype
    at: At
    name: str


def _function(name: str, *args: Any) -> Expr:
    return Function(name, real=True)(*args)


def _root(value: float) -> Expr | None:
    """The root of a small number, or of one by pi, that the number rounds; None if it rounds none."""
    for sign in (1, -1):
        root = _ROOTS.get(sign * value) or _ROOTS_OF_PI.get(sign * value)
        if root is not None:
            return sign * root
    return None


def _is_number_of(entry: Expr, dtype: torch.dtype) -> bool:
    """Whether an entry is a number that the floating-point dtype has, infinities included."""
    if str(entry) in ("inf", "-inf"):
        return dtype in _WITH_INFINITY
    if dtype not in _WITH_INFINITY or not entry.is_Rational:
        return False
    return sympy.Rational(torch.full((), float(entry), dtype=torch.float64).to(dtype).item()) == entry


def _is_integer(entry: Expr) -> bool:
    """Whether an entry is a number of a tensor of integers."""
    return getattr(entry.func, "__name__", "").startswith("number_int") and bool(entry.args[0].is_Integer)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Meaning:
    """Interprets graphs.

    Attributes:
        real: whether arithmetic on floating-point entries is that of the reals; else it is uninterpreted.
        indices: of all values.
        simplify: rewrites sizes by what is known of them.
        needs: conditions under which divisions and roots are defined, by text.
        roots: numbers that were read as the roots that they round.
    """

    real: bool
    indices: Indices = field(default_factory=Indices)
    simplify: Callable[[Expr], Expr] = lambda expr: expr
    needs: dict[str, None] = field(default_factory=dict[str, None])
    roots: dict[str, None] = field(default_factory=dict[str, None])

    # Graphs

    def run(self, nodes: Iterable[fx.Node], inputs: Sequence[Any]) -> Any:
        """Returns what a graph gives, with values for its placeholders.

        Raises:
            UnknownError: an operator writes, draws random numbers, or has a shape that data decide.
        """
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            elif node.op == "get_attr":
                raise UnknownError(f"%{node.name} is an attribute of the graph")
            else:
                values[node] = self.call(node, values)
        return None

    def call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Returns the value of one call."""
        result = ops.value(node)
        if isinstance(result, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return result
        key = ops.key(node)
        if ops.mutates(node) or ops.is_virtual(key):
            raise UnknownError(f"{key} writes, or is only a placeholder")
        bound: dict[str, Any] = {}
        try:
            bound = dict(ops.bind(node))
        except TypeError as error:
            raise UnknownError(f"{key} cannot be bound: {error}") from error
        args = {name: self._argument(value, values) for name, value in bound.items()}
        call = _Call(self, key, args, result, node)
        made = call.made()
        if made is not NotImplemented:
            return made
        if ops.may_draw(node.target) and ops.is_random(node):
            raise UnknownError(f"{key} draws random numbers")
        body = decomposed(node) if self.real or not isinstance(node.target, torch._ops.OpOverload) else None
        if body is not None:
            inner = [self._argument(a, values) for a in body.operands]
            return self.run(body.graph.nodes, inner)
        return call.opaque()

    def _argument(self, value: Any, values: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, (list, tuple)):
            return [self._argument(item, values) for item in value]
        return value

    # Entries

    def size(self, size: Any) -> Expr:
        """The expression of a size."""
        return self.simplify(size_expression(size))

    def shape(self, tensor: torch.Tensor) -> tuple[Expr, ...]:
        """The sizes of a fake tensor."""
        return tuple(self.size(size) for size in tensor.shape)

    def number(self, value: Any) -> Expr:
        """A Python number, exactly; one that rounds a root of a small number is that root."""
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            expr = self.simplify(size_expression(value))
            return expr.xreplace({part: self.number(float(part)) for part in expr.atoms(sympy.Float)})
        if isinstance(value, (bool, int)):
            return Integer(int(value))
        if not isinstance(value, float):
            raise UnknownError(f"{value!r} is not a real number")
        if not self.real:
            is_plain = math.isfinite(value) and (value or math.copysign(1.0, value) > 0)
            return sympy.Rational(value) if is_plain else Symbol(repr(value), real=True)
        if not math.isfinite(value):
            raise UnknownError(f"{value} is not a real number")
        root = _root(value)
        if root is None:
            return sympy.Rational(value)
        self.roots[f"{value!r} is {root}"] = None
        return root

    def need(self, kind: str, expr: Expr) -> None:
        """Notes that an expression must not be zero, or must not be negative."""
        if is_positive(expr) or (expr.is_number and expr.is_nonzero):
            return
        bound = sorted(expr.free_symbols & self.indices.sizes.keys(), key=lambda s: int(s.name[1:]))
        renamed = expr.xreplace({s: Symbol(f"j{n}", integer=True, nonnegative=True) for n, s in enumerate(bound)})
        text = str(expanded(renamed))
        entry = _ENTRY.fullmatch(text)
        self.needs[f"{entry[1] if entry else text} {kind}"] = None

    def power(self, base: Expr, exponent: Expr) -> Expr:
        """Returns base ** exponent over the reals, with what that needs."""
        base = expanded(base)
        if exponent.is_Integer:
            if exponent < 0:
                self.need("!= 0", base)
        elif exponent.is_Rational:
            self.need(">= 0" if exponent > 0 else "> 0", base)
        else:
            return _function("pow", base, exponent)
        return sympy.Pow(base, exponent)

    def divide(self, a: Expr, b: Expr) -> Expr:
        """Returns a / b over the reals."""
        return a * self.power(b, Integer(-1))


@dataclass(slots=True)
class _Call:
    """One call of an operator, on values."""

    of: Meaning
    key: str
    args: Mapping[str, Any]
    result: Any
    node: fx.Node

    # What is read of the call

    @property
    def name(self) -> str:
        return self.key.rpartition("::")[2]

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.of.shape(self.result)

    def text(self) -> str:
        """The call, by what it is called with."""
        return f"{self.key}({', '.join(f'{name}={self._text(value)}' for name, value in self.args.items())})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Value):
            return value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return str(self.of.number(value))
        return repr(value)

    def operands(self) -> list[Value]:
        """All tensors among the arguments."""
        return [value for argument in self.args.values() for value in _tensors(argument)]

    def value(self, at: At, shape: Sequence[Expr] | None = None) -> Value:
        """Returns a result with these entries."""
        return Value(tuple(shape or self.shape), self.result.dtype, at, self.text())

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        rank = rank if rank is not None else len(self._self().shape)
        return self.args[name] % max(rank, 1)

    def _self(self) -> Value:
        return self.operands()[0]

    # Entries of operands

    def read(self, operand: Any, index: Sequence[Expr], dtype: torch.dtype | None = None) -> Expr:
        """The entry of an operand that is broadcast to the result, or a number; cast to `dtype` if that differs."""
        if not isinstance(operand, Value):
            return self.of.number(operand)
        own = index[len(index) - len(operand.shape) :]
        shape = self.shape[len(self.shape) - len(operand.shape) :] if len(index) == len(self.shape) else operand.shape
        at: list[Expr] = []
        for i, size, full in zip(own, operand.shape, shape, strict=True):
            if size == 1:
                at.append(Integer(0))
            elif is_same(size, full):
                at.append(i)
            else:
                raise UnknownError(f"{self.key}: it is not known whether size {size} is broadcast to {full}")
        return self.cast(operand.at(at), operand.dtype, dtype or operand.dtype)

    def cast(self, entry: Expr, old: torch.dtype, new: torch.dtype) -> Expr:
        """A cast is an uninterpreted function, unless it changes nothing: a number that both dtypes have stays."""
        if old == new:
            return entry
        number = entry.args[0] if _is_integer(entry) else entry
        is_same = (_is_integer(entry) or _is_number_of(entry, old)) and _is_number_of(number, new)
        return number if is_same else _function(f"cast_{_dtype_name(old)}_{_dtype_name(new)}", entry)

    # Operators

    def made(self) -> Any:
        """Returns the result; NotImplemented if no entry of this file describes the operator."""
        if self.key == "torch.Tensor.type":
            return self._to()
        if self.name in _MEANS_OF_LOSSES and self.of.real:
            reduction = self.args.get("reduction", 0)
            return self._of_losses(reduction) if reduction in (1, 2) else self.opaque()
        if not self.key.startswith("aten::") and self.key != "operator.getitem":
            return NotImplemented
        if self.name == "getitem" or self.key == "operator.getitem":
            items, at = self.args.values()
            return items[at] if isinstance(items, (list, tuple)) else NotImplemented
        handler = getattr(self, f"_{self.name}", None) or self._by_trait()
        if handler is None and isinstance(self.result, torch.Tensor):
            handler = self._arithmetic()
        return handler() if handler is not None else NotImplemented

    def _by_trait(self) -> Callable[[], Any] | None:
        if ops.has_trait(self.key, "reshape", "squeeze"):
            is_of_bits = self.result.dtype != self._self().dtype  # view(dtype) reads the same bits as other numbers
            return self.opaque if is_of_bits else self._reshaped
        if self.name in ("alias", "clone", "contiguous"):
            return lambda: self._same(self._self())
        return None

    def _same(self, operand: Value) -> Value:
        is_alias = self.name in ("alias", "to", "_to_copy", "dropout")
        return Value(operand.shape, operand.dtype, operand.at, operand.name if is_alias else self.text())

    def _reshaped(self) -> Value:
        x, shape = self._self(), self.shape
        return self.value(lambda i: x.at(self.of.indices.reshaped(i, shape, x.shape)), shape)

    def _detach(self) -> Value:
        x = self._self()
        return self.value(lambda i: _function("detach", x.at(i)), x.shape)  # other gradients: another function

    def _to(self) -> Value:
        x, dtype = self._self(), self.result.dtype
        if x.dtype == dtype:
            return self._same(x)
        return self.value(lambda i: self.cast(x.at(i), x.dtype, dtype), x.shape)

    __to_copy = _type_as = _to

    def _expand(self) -> Value:
        x = self._self()
        return self.value(lambda i: self.read(x, i))

    _broadcast_to = _expand_as = _expand

    def _permuted(self, order: Sequence[int]) -> Value:
        x = self._self()
        return self.value(lambda i: x.at([i[order.index(dim)] for dim in range(len(order))]), self.shape)

    def _permute(self) -> Value:
        rank = len(self._self().shape)
        return self._permuted([dim % max(rank, 1) for dim in self.args["dims"]])

    def _transpose(self) -> Value:
        order = list(range(len(self._self().shape)))
        if order:
            a, b = self.dim("dim0"), self.dim("dim1")
            order[a], order[b] = order[b], order[a]
        return self._permuted(order)

    def _t(self) -> Value:
        return self._permuted(list(range(len(self._self().shape)))[::-1])

    def _mT(self) -> Value:  # noqa: N802  # torch's name
        order = list(range(len(self._self().shape)))
        return self._permuted([*order[:-2], *order[:-3:-1]])

    def _select(self) -> Value:
        x, dim = self._self(), self.dim()
        at = self.of.size(self.args["index"])
        at = at if self.of.indices.is_nonnegative(at) else at + x.shape[dim]
        if self.of.indices.is_below(at, x.shape[dim]) is not True or not self.of.indices.is_nonnegative(at):
            raise UnknownError(f"it is not known whether entry {at} is one of {x.shape[dim]}")
        return self.value(lambda i: x.at([*i[:dim], at, *i[dim:]]))

    def _slice(self) -> Value:
        x, dim, step = self._self(), self.dim(), self.args["step"]
        start = self._start(self.args["start"], x.shape[dim])
        if not isinstance(step, int):
            raise UnknownError("the step of a slice is no number")
        return self._cut(x, dim, start, Integer(step))

    def _start(self, start: Any, size: Expr) -> Expr:
        first = Integer(0) if start is None else self.of.size(start)
        indices = self.of.indices
        if not indices.is_nonnegative(first):
            if not indices.is_nonnegative(-first - 1):
                raise UnknownError(f"it is not known whether {first} counts from the end")
            first = first + size
            if not indices.is_nonnegative(first):
                return Integer(0) if indices.is_nonnegative(-first) else self._not_known(first)
        return first

    def _not_known(self, what: Expr) -> Expr:
        raise UnknownError(f"it is not known whether {what} is negative")

    def _cut(self, x: Value, dim: int, start: Expr, step: Expr = Integer(1)) -> Value:  # noqa: B008
        return self.value(lambda i: x.at([*i[:dim], start + i[dim] * step, *i[dim + 1 :]]))

    def _narrow(self) -> Value:
        x, dim = self._self(), self.dim()
        if isinstance(self.args["start"], Value):
            raise UnknownError("data decide where narrow starts")
        return self._cut(x, dim, self._start(self.args["start"], x.shape[dim]))

    def _parts(self) -> list[Value]:
        x, dim = self._self(), self.dim()
        parts: list[Value] = []
        start: Expr = Integer(0)
        for number, part in enumerate(self.result):
            shape = self.of.shape(part)
            parts.append(Value(shape, part.dtype, _shifted(x, dim, start), f"{self.text()}[{number}]"))
            start = start + shape[dim]
        return parts

    _split = _split_with_sizes = _chunk = _parts

    def _unbind(self) -> list[Value]:
        x, dim = self._self(), self.dim()

        def part(number: int) -> Value:
            shape = self.of.shape(self.result[number])
            return Value(
                shape, x.dtype, lambda i: x.at([*i[:dim], Integer(number), *i[dim:]]), f"{self.text()}[{number}]"
            )

        return [part(number) for number in range(len(self.result))]

    def _cat(self) -> Value:
        tensors, rank = self.args["tensors"], len(self.shape)
        kept = [x for x in tensors if len(x.shape) == rank]  # torch skips empty tensors of one dimension
        if any(x.shape != (Integer(0),) for x in tensors if x not in kept):
            raise UnknownError("cat of different ranks")
        dim = self.args["dim"] % max(rank, 1)

        def at(index: Sequence[Expr]) -> Expr:
            return self._piece(kept, dim, list(index), Integer(0))

        return self.value(at)

    def _piece(self, tensors: Sequence[Value], dim: int, index: list[Expr], start: Expr) -> Expr:
        first, rest = tensors[0], tensors[1:]
        inner = [*index[:dim], index[dim] - start, *index[dim + 1 :]]

        def own() -> Expr:
            return self.cast(first.at(inner), first.dtype, self.result.dtype)

        if not rest:
            return own()
        below = self.of.indices.is_below(index[dim] - start, first.shape[dim])
        if below is None:
            other = self._piece(rest, dim, index, start + first.shape[dim])
            return _where(_function("is_below", sympy.expand(index[dim] - start), first.shape[dim]), own(), other)
        return own() if below else self._piece(rest, dim, index, start + first.shape[dim])

    def _stack(self) -> Value:
        tensors, rank = self.args["tensors"], len(self.shape)
        dim = self.args["dim"] % rank

        def at(index: Sequence[Expr]) -> Expr:
            inner = [*index[:dim], *index[dim + 1 :]]
            found = self.cast(tensors[-1].at(inner), tensors[-1].dtype, self.result.dtype)
            for number in reversed(range(len(tensors) - 1)):
                own = self.cast(tensors[number].at(inner), tensors[number].dtype, self.result.dtype)
                found = _where(_function("is", index[dim], Integer(number)), own, found)
            if index[dim].is_Integer:
                chosen = tensors[int(index[dim])]
                return self.cast(chosen.at(inner), chosen.dtype, self.result.dtype)
            return found

        return self.value(at)

    def _repeat_interleave(self) -> Any:
        x, repeats, dim = self.args.get("self"), self.args["repeats"], self.args["dim"]
        if not isinstance(x, Value) or isinstance(repeats, Value):
            return NotImplemented
        count = self.of.size(repeats)
        if dim is None:
            flat = sympy.prod(x.shape)
            return self.value(
                lambda i: x.at(self.of.indices.reshaped([self.of.indices.divided(i[0], count)[0]], [flat], x.shape))
            )
        dim = self.dim()
        return self.value(lambda i: x.at([*i[:dim], self.of.indices.divided(i[dim], count)[0], *i[dim + 1 :]]))

    def _repeat(self) -> Value:
        x = self._self()

        def at(index: Sequence[Expr]) -> Expr:
            own = index[len(index) - len(x.shape) :]
            return x.at([self.of.indices.divided(i, size)[1] for i, size in zip(own, x.shape, strict=True)])

        return self.value(at)

    def _flip(self) -> Value:
        x = self._self()
        flipped = {dim % max(len(x.shape), 1) for dim in self.args["dims"]}
        return self.value(
            lambda i: x.at([x.shape[n] - 1 - own if n in flipped else own for n, own in enumerate(i)]), x.shape
        )

    def _filled(self, value: Any) -> Value:
        dtype = self.result.dtype
        if isinstance(value, Value):
            return NotImplemented
        if self.result.layout is not torch.strided:
            raise UnknownError("a sparse tensor")
        entry = self._entry(value, dtype)
        return self.value(lambda _: entry)

    def _entry(self, number: Any, dtype: torch.dtype) -> Expr:
        """A number as an entry of a tensor, rounded to its dtype, unless it is read as a root."""
        if not dtype.is_floating_point:
            return _function(f"number_{_dtype_name(dtype)}", self.of.number(number))
        if isinstance(number, torch.SymFloat) and self.of.size(number).is_number:
            number = float(self.of.size(number))
        if isinstance(number, float) and math.isfinite(number) and _root(number) is None:
            number = torch.full((), number, dtype=torch.float64).to(dtype).item()
        return self.of.number(number)

    def _zeros(self) -> Value:
        return self._filled(0)

    def _ones(self) -> Value:
        return self._filled(1)

    def _full(self) -> Value:
        return self._filled(self.args["fill_value"])

    _new_zeros = _zeros_like = _zeros
    _new_ones = _ones_like = _ones
    _new_full = _full_like = _full

    def _where(self) -> Value:
        condition, a, b = self.args["condition"], self.args["self"], self.args["other"]
        dtype = self.result.dtype
        return self.value(
            lambda i: _where(self.read(condition, i), self._chosen(a, i, dtype), self._chosen(b, i, dtype)),
        )

    def _masked_fill(self) -> Value:
        x, mask, value = self.args["self"], self.args["mask"], self.args["value"]
        return self.value(lambda i: _where(self.read(mask, i), self._chosen(value, i, x.dtype), self.read(x, i)))

    def _chosen(self, operand: Any, index: Sequence[Expr], dtype: torch.dtype) -> Expr:
        return self.read(operand, index, dtype) if isinstance(operand, Value) else self._entry(operand, dtype)

    def _as(self, operand: Any, index: Sequence[Expr], dtype: torch.dtype) -> Expr:
        """An operand of arithmetic in `dtype`."""
        if isinstance(operand, Value):
            return self.read(operand, index, dtype)
        entry = self.of.number(operand)
        if dtype.is_floating_point:
            return entry
        return _function(f"number_{_dtype_name(dtype)}", entry)

    def _dropout(self) -> Any:
        return self._same(self._self()) if self.args["train"] is False or self.args["p"] == 0 else NotImplemented

    # Arithmetic

    def _arithmetic(self) -> Callable[[], Any] | None:
        """Entry by entry, or a sum, if the result is a real number and all operands are."""
        is_real = self.of.real and self.result.dtype.is_floating_point
        is_real = is_real and all(x.dtype.is_floating_point or self._is_integer(x) for x in self.operands())
        entry = _ENTRIES.get(self.name) if is_real else None
        if entry is not None:
            return lambda: entry(self)
        target = self.node.target
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
            return self._uninterpreted if not target._schema.is_mutable else None
        return None

    def _is_integer(self, x: Value) -> bool:
        """Whether a tensor holds one integer that is known."""
        return all(size == 1 for size in x.shape) and _is_integer(x.at([Integer(0)] * len(x.shape)))

    def _uninterpreted(self) -> Any:
        if self.args.get("reduction", 0) != 0:
            return NotImplemented
        dtype = self.result.dtype
        tensors = [(name, value) for name, value in self.args.items() if isinstance(value, Value)]
        others = [f"{n}={self._text(v)}" for n, v in self.args.items() if not _tensors(v) and not _is_number(v)]
        if any(isinstance(value, (list, tuple)) and _tensors(value) for value in self.args.values()):
            return NotImplemented
        numbers = [(n, v) for n, v in self.args.items() if _is_number(v)]
        written = [sympy.Tuple(Symbol(n), self.of.number(v)) for n, v in numbers]
        is_swapped = ops.is_commutative(self.key) and len(tensors) == 2 and all(value == 1 for _, value in numbers)

        is_mixed = len({x.dtype for _, x in tensors}) > 1

        def kind(x: Value) -> str:
            """A tensor without dimensions does not decide in which dtype mixed operands are computed."""
            return "" if x.shape or not is_mixed else " alone"

        def at(index: Sequence[Expr]) -> Expr:
            found = [(_dtype_name(x.dtype) + kind(x), expanded(self.read(x, index))) for _, x in tensors]
            if is_swapped:
                found.sort(key=lambda one: (one[0], sympy.srepr(one[1])))
            dtypes = ",".join(dtype for dtype, _ in found)
            name = f"{self.name}[{dtypes}->{_dtype_name(dtype)};{','.join(others)}]"
            return _function(name, *(entry for _, entry in found), *written)

        return self.value(at)

    def entries(self, function: Callable[..., Expr], *names: str) -> Value:
        """A function of the entries of operands and of numbers."""
        dtype = self.result.dtype
        return self.value(lambda i: function(*(self._as(self.args[name], i, dtype) for name in names)))

    def reduced(self, function: Callable[[Expr, list[Symbol]], Expr], dims: Any, *, keepdim: bool) -> Value:
        """A function of all entries along some dimensions."""
        x = self._self()
        rank = len(x.shape)
        chosen = range(rank) if dims is None or dims == [] else dims if isinstance(dims, (list, tuple)) else [dims]
        over = {dim % max(rank, 1) for dim in chosen} if rank else set[int]()

        def at(index: Sequence[Expr]) -> Expr:
            bound = {dim: self.of.indices.fresh(x.shape[dim]) for dim in sorted(over)}
            given = iter(index)
            inner: list[Expr] = []
            for dim in range(rank):
                if dim in bound:
                    inner.append(bound[dim])
                    if keepdim:
                        next(given)
                else:
                    inner.append(next(given))
            return function(self.cast(x.at(inner), x.dtype, self.result.dtype), list(bound.values()))

        return self.value(at)

    def count(self, dims: Any) -> Expr:
        """How many entries a reduction reads."""
        shape = self._self().shape
        chosen = (
            range(len(shape)) if dims is None or dims == [] else dims if isinstance(dims, (list, tuple)) else [dims]
        )
        return sympy.prod([shape[dim] for dim in chosen]) if shape else Integer(1)

    def total(self, entry: Expr, over: Iterable[Symbol]) -> Expr:
        return total(entry, over, self.of.indices)

    # What nothing is known of

    def opaque(self) -> Any:
        """An uninterpreted function of everything that the operator is given.

        In the reals its operands count by their entries, else by the calls that made them.
        """
        if not isinstance(self.result, (torch.Tensor, list, tuple)):
            raise UnknownError(f"{self.key} gives {type(self.result).__name__}")
        tensors = self.operands()
        if self.of.real:
            name = f"{self.key}({', '.join(f'{n}={self._shown(v)}' for n, v in self.args.items())})"
            closed = [self._closed(x) for x in tensors]
            numbers = self._numbers(self.args)
        else:
            name, closed, numbers = self.text(), [], []

        if not all(isinstance(part, torch.Tensor) for part in _flat(self.result)):
            raise UnknownError(f"{self.key} gives a list with more than tensors")

        def made(result: torch.Tensor, number: str) -> Value:
            shape = self.of.shape(result)

            def at(index: Sequence[Expr]) -> Expr:
                where = sympy.Tuple(*map(sympy.expand, index))
                return _function(f"{name}{number}:{_dtype_name(result.dtype)}", where, *closed, *numbers)

            return Value(shape, result.dtype, at, self.text() + number)

        if isinstance(self.result, torch.Tensor):
            return made(self.result, "")
        return [made(part, f"[{n}]") for n, part in enumerate(self.result)]

    def _shown(self, value: Any) -> str:
        if isinstance(value, Value):
            return "@"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._shown, value))}]"
        return "#" if _is_number(value) else self._text(value)

    def _numbers(self, args: Mapping[str, Any]) -> list[Expr]:
        """All numbers among the arguments, those in lists too: what `_shown` leaves out."""
        return [self.of.number(v) for argument in args.values() for v in _flat(argument) if _is_number(v)]

    def _closed(self, x: Value) -> Expr:
        """A whole operand: its shape, and its entry at any index."""
        index = [self.of.indices.fresh(size) for size in x.shape]
        entry = expanded(x.at(index))
        names = {i: Symbol(f"_p{n}", integer=True, nonnegative=True) for n, i in enumerate(index)}
        return sympy.Tuple(Symbol(_dtype_name(x.dtype)), sympy.Tuple(*x.shape), entry.xreplace(names))

    def _of_losses(self, reduction: int) -> Value:
        """A mean or a sum of losses, as the documentation of the argument `reduction` says."""
        shape = self._losses_shape()
        one = _Call(self.of, self.key, {**self.args, "reduction": 0}, torch.empty(()), self.node)
        name = f"{one.key}({', '.join(f'{n}={one._shown(v)}' for n, v in one.args.items())})"
        closed = [self._closed(x) for x in self.operands()]
        numbers = one._numbers(one.args)
        dtype = _dtype_name(self.result.dtype)
        over = [self.of.indices.fresh(size) for size in shape]
        entry = _function(f"{name}:{dtype}", sympy.Tuple(*over), *closed, *numbers)
        summed = self.total(entry, over)
        return self.value(lambda _: summed / (sympy.prod(shape) if reduction == 1 else 1), ())

    def _losses_shape(self) -> tuple[Expr, ...]:
        tensors = {name: value for name, value in self.args.items() if isinstance(value, Value)}
        target: Any = self.node.target
        fakes = {name: ops.value(value) for name, value in ops.bind(self.node).items() if isinstance(value, fx.Node)}
        args = {name: fakes.get(name, value) for name, value in ops.bind(self.node).items()}
        assert fakes.keys() == tensors.keys()
        return self.of.shape(target(**{**args, "reduction": 0}))


_MEANS_OF_LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "soft_margin_loss"),
        *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "triplet_margin_loss", "margin_ranking_loss"),
        *("hinge_embedding_loss", "poisson_nll_loss"),
    }
)
"""Losses whose `reduction` "mean" and "sum" are those of their losses under "none", without weights in the count."""


def _tensors(value: Any) -> list[Value]:
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _tensors(item)]
    return [value] if isinstance(value, Value) else []


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _shifted(x: Value, dim: int, start: Expr) -> At:
    return lambda i: x.at([*i[:dim], i[dim] + start, *i[dim + 1 :]])


def _where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return a if a == b else _function("where", condition, expanded(a), expanded(b))


def _apply(name: str) -> Callable[[Expr], Expr]:
    return lambda entry: _function(name, expanded(entry))


def _softmax(call: _Call, *, log: bool = False) -> Value:
    x, dim = call._self(), call.dim()
    dtype = call.result.dtype
    if x.shape == ():
        return NotImplemented

    def score(index: Sequence[Expr]) -> Expr:
        return expanded(call.cast(x.at(index), x.dtype, dtype))

    def at(index: Sequence[Expr]) -> Expr:
        other = call.of.indices.fresh(x.shape[dim])
        whole = call.total(sympy.exp(score([*index[:dim], other, *index[dim + 1 :]])), [other])
        if log:
            return score(index) - _function("log", whole)
        return sympy.exp(score(index)) / whole

    return call.value(at, x.shape)


def _mean(call: _Call) -> Value:
    dims = call.args.get("dim")
    return call.reduced(
        lambda entry, over: call.total(entry, over) / call.count(dims), dims, keepdim=call.args.get("keepdim", False)
    )


def _sum(call: _Call) -> Value:
    return call.reduced(call.total, call.args.get("dim"), keepdim=call.args.get("keepdim", False))


def _var(call: _Call) -> Any:
    dims, correction = call.args.get("dim"), call.args.get("correction", 1)
    if "unbiased" in call.args and call.args["unbiased"] is not None:
        correction = int(call.args["unbiased"])
    count = call.count(dims)

    def variance(entry: Expr, over: list[Symbol]) -> Expr:
        mean = call.total(entry, over) / count
        return call.of.divide(
            call.total((entry - mean) ** 2, over), count - call.of.number(1 if correction is None else correction)
        )

    return call.reduced(variance, dims, keepdim=call.args.get("keepdim", False))


def _largest(call: _Call) -> Any:
    if not isinstance(call.result, torch.Tensor):
        return NotImplemented

    def largest(entry: Expr, over: list[Symbol]) -> Expr:
        return _max_over(call, entry, over)

    return call.reduced(largest, call.args.get("dim"), keepdim=call.args.get("keepdim", False))


def _max_over(call: _Call, entry: Expr, over: list[Symbol]) -> Expr:
    entry = expanded(entry)
    used = [int(s.name[2:]) for s in entry.free_symbols if s.name.startswith("_k")]
    first = 1 + max(used, default=0)
    names = {i: Symbol(f"_k{first + n}", integer=True, nonnegative=True) for n, i in enumerate(over)}
    return _function("largest", entry.xreplace(names), *(sympy.Tuple(names[i], call.of.indices.sizes[i]) for i in over))


def _product(call: _Call) -> Any:
    left, right = (call.args[name] for name in ops.factors(call.key) or ("", ""))
    bias, beta, alpha = None, 1, 1
    if call.name in ("addmm", "baddbmm", "addmv", "addbmm"):
        bias, beta, alpha = call.args["self"], call.args["beta"], call.args["alpha"]
    elif call.name == "linear":
        bias = call.args["bias"]
    dtype = call.result.dtype
    if left.dtype != dtype or right.dtype != dtype:
        return NotImplemented

    def at(index: Sequence[Expr]) -> Expr:
        k = call.of.indices.fresh(left.shape[-1])
        if call.name == "linear":
            a, b = (
                left.at([*index[: len(left.shape) - 1], k]),
                right.at([index[-1], k] if len(right.shape) > 1 else [k]),
            )
        else:
            has_columns = len(right.shape) > 1
            batch = index[: len(index) - (len(left.shape) > 1) - has_columns]
            row = [index[len(batch)]] if len(left.shape) > 1 else []
            a = left.at([*_broadcast(call, batch, left.shape[:-2]), *row, k])
            b = right.at([*_broadcast(call, batch, right.shape[:-2]), k, index[-1]] if has_columns else [k])
        found = call.total(a * b, [k]) * call.of.number(alpha)
        return found if bias is None else found + call.of.number(beta) * call.read(bias, index)

    return call.value(at)


def _broadcast(call: _Call, index: Sequence[Expr], shape: Sequence[Expr]) -> list[Expr]:
    own = index[len(index) - len(shape) :]
    full = call.shape[len(index) - len(shape) : len(index)]
    for size, wanted in zip(shape, full, strict=True):
        if size != 1 and not is_same(size, wanted):
            raise UnknownError(f"{call.key}: it is not known whether size {size} is broadcast to {wanted}")
    return [Integer(0) if size == 1 else i for i, size in zip(own, shape, strict=True)]


def _einsum(call: _Call) -> Any:
    text, tensors = call.args["equation"].replace(" ", ""), call.args["tensors"]
    terms, arrow, result = text.partition("->")
    operands = terms.split(",")
    if not arrow or "." in text or any(x.dtype != call.result.dtype for x in tensors):
        return NotImplemented
    if any(len(set(part)) != len(part) for part in operands):
        return NotImplemented
    sizes = {
        letter: size
        for part, x in zip(operands, tensors, strict=True)
        for letter, size in zip(part, x.shape, strict=True)
        if size != 1
    }

    def at(index: Sequence[Expr]) -> Expr:
        known = dict(zip(result, index, strict=True))
        summed = {letter: call.of.indices.fresh(size) for letter, size in sizes.items() if letter not in known}
        known |= summed
        entry: Expr = Integer(1)
        for part, x in zip(operands, tensors, strict=True):
            entry *= x.at([Integer(0) if size == 1 else known[c] for c, size in zip(part, x.shape, strict=True)])
        return call.total(entry, summed.values())

    return call.value(at)


def _normalized(call: _Call) -> Any:
    """rms_norm and layer_norm over the last dimensions, in the precision of the operand."""
    x = call.args["input"]
    count = len(call.args["normalized_shape"])
    scale, bias, eps = call.args.get("weight"), call.args.get("bias"), call.args["eps"]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if any(y is not None and y.dtype != x.dtype for y in (scale, bias)):
        return NotImplemented
    is_centered = call.name == "layer_norm"
    size = sympy.prod(x.shape[-count:])

    def at(index: Sequence[Expr]) -> Expr:
        over = [call.of.indices.fresh(n) for n in x.shape[-count:]]
        entry = x.at([*index[:-count], *over])
        mean = call.total(entry, over) / size if is_centered else Integer(0)
        variance = call.total((entry - mean) ** 2, over) / size
        found = (x.at(index) - mean) * call.of.power(variance + call.of.number(eps), sympy.Rational(-1, 2))
        found = found if scale is None else found * scale.at(index[-count:])
        return found if bias is None else found + bias.at(index[-count:])

    return call.value(at, x.shape)


def _attention(call: _Call) -> Any:
    """softmax(q k^T * scale + mask) v; a mask of bools, or a causal one, gives weight zero."""
    q, k, v, mask = (call.args[name] for name in ("query", "key", "value", "attn_mask"))
    if call.args["dropout_p"] != 0:
        return NotImplemented
    if any(x.dtype != call.result.dtype for x in (q, k, v)):
        return NotImplemented
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        return NotImplemented
    given = call.args["scale"]
    scale = sympy.Pow(q.shape[-1], sympy.Rational(-1, 2)) if given is None else call.of.number(given)
    heads = call.shape[:-2]
    groups = [Integer(1), Integer(1)]
    if call.args["enable_gqa"]:
        groups = [call.of.indices.divided(q.shape[-3], x.shape[-3])[0] for x in (k, v)]
        heads = q.shape[:-2]

    def grouped(batch: Sequence[Expr], x: Value, number: int) -> list[Expr]:
        if not call.args["enable_gqa"]:
            return _broadcast_to(call, batch, x.shape[:-2], heads)
        rest = _broadcast_to(call, batch[:-1], x.shape[:-3], heads[:-1])
        return [*rest, call.of.indices.divided(batch[-1], groups[number])[0]]

    def at(index: Sequence[Expr]) -> Expr:
        batch, row, column = index[:-2], index[-2], index[-1]

        def weight(j: Expr) -> Expr:
            d = call.of.indices.fresh(q.shape[-1])
            product = q.at([*_broadcast_to(call, batch, q.shape[:-2], heads), row, d]) * k.at(
                [*grouped(batch, k, 0), j, d]
            )
            score = expanded(call.total(product, [d]) * scale)
            if mask is not None:
                own = _broadcast_to(call, [*batch, row, j], mask.shape, [*heads, q.shape[-2], k.shape[-2]])
                if mask.dtype == torch.bool:
                    return _where(mask.at(own), sympy.exp(score), Integer(0))
                score = expanded(score + mask.at(own))
            if call.args["is_causal"]:
                return _where(_function("is_below", j, row + 1), sympy.exp(score), Integer(0))
            return sympy.exp(score)

        j, other = (call.of.indices.fresh(k.shape[-2]) for _ in range(2))
        whole = call.total(weight(other), [other])
        return call.of.divide(call.total(weight(j) * v.at([*grouped(batch, v, 1), j, column]), [j]), whole)

    return call.value(at)


def _broadcast_to(call: _Call, index: Sequence[Expr], shape: Sequence[Expr], full: Sequence[Expr]) -> list[Expr]:
    own, wanted = index[len(index) - len(shape) :], full[len(full) - len(shape) :]
    for size, whole in zip(shape, wanted, strict=True):
        if size != 1 and not is_same(size, whole):
            raise UnknownError(f"{call.key}: it is not known whether size {size} is broadcast to {whole}")
    return [Integer(0) if size == 1 else i for i, size in zip(own, shape, strict=True)]


def _sigmoid(entry: Expr) -> Expr:
    return 1 / (1 + sympy.exp(expanded(-entry)))


def _gelu(call: _Call) -> Value:
    def exact(x: Expr) -> Expr:
        return x * (1 + _function("erf", expanded(x / sympy.sqrt(2)))) / 2

    def by_tanh(x: Expr) -> Expr:
        inner = sympy.sqrt(2 / sympy.pi) * (x + sympy.Rational(0.044715) * x**3)
        return x * (1 + _function("tanh", expanded(inner))) / 2

    return call.entries(by_tanh if call.args["approximate"] == "tanh" else exact, "self")


def _scaled(sign: int) -> Callable[[_Call], Any]:
    def entry(call: _Call) -> Any:
        alpha = call.of.number(call.args.get("alpha", 1))
        return call.entries(lambda a, b: a + sign * alpha * b, "self", "other")

    return entry


def _quotient(call: _Call) -> Any:
    if call.args.get("rounding_mode") is not None:
        return NotImplemented
    return call.entries(call.of.divide, "self", "other")


def _one(function: Callable[[Meaning, Expr], Expr]) -> Callable[[_Call], Any]:
    return lambda call: call.entries(lambda x: function(call.of, x), "self")


_ENTRIES: Mapping[str, Callable[[_Call], Any]] = {
    "add": _scaled(1),
    "sub": _scaled(-1),
    "rsub": lambda call: call.entries(lambda a, b: b - call.of.number(call.args["alpha"]) * a, "self", "other"),
    "mul": lambda call: call.entries(lambda a, b: a * b, "self", "other"),
    "div": _quotient,
    "neg": _one(lambda _, x: -x),
    "square": _one(lambda _, x: x**2),
    "reciprocal": _one(lambda of, x: of.power(x, Integer(-1))),
    "sqrt": _one(lambda of, x: of.power(x, sympy.Rational(1, 2))),
    "rsqrt": _one(lambda of, x: of.power(x, sympy.Rational(-1, 2))),
    "exp": _one(lambda _, x: sympy.exp(expanded(x))),
    "pow": lambda call: call.entries(call.of.power, "self", "exponent"),
    "sigmoid": _one(lambda _, x: _sigmoid(x)),
    "silu": _one(lambda _, x: x * _sigmoid(x)),
    "gelu": _gelu,
    **{
        name: _one(lambda _, x, name=name: _apply(name)(x))
        for name in ("erf", "tanh", "sin", "cos", "log", "abs", "relu")
    },
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "amax": _largest,
    "softmax": _softmax,
    "log_softmax": lambda call: _softmax(call, log=True),
    **dict.fromkeys(("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "mv", "dot"), _product),
    "einsum": _einsum,
    "rms_norm": _normalized,
    "layer_norm": _normalized,
    "scaled_dot_product_attention": _attention,
}
"""Operators on real numbers."""
