"""Sizes and numbers as expressions, and what divisions and roots need.

`Arithmetic(is_real=False)` interprets no arithmetic at all: two equal expressions are then the same floating-point
operations on the same entries, and the same operators on operands that are the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import sympy
import torch
from sympy import Integer, Symbol

from fxrewrite.ops import dtype_name
from fxrewrite.prove.indices import Expr, Indices
from fxrewrite.prove.reals import apply, expanded, is_nonnegative, is_positive
from fxrewrite.prove.symbolic import size_expression
from fxrewrite.prove.text import readable
from fxrewrite.prove.value import UndefinedError, UnknownError

Relation: TypeAlias = Literal["!= 0", ">= 0", "> 0"]
_ENTRY = re.compile(r"(\w+)\((?:j\d+|0|, )*\)")
"""An entry at any index: what holds of it is said of the whole input, whatever its rank."""
_SQUARES = (*map(sympy.Rational, (2, 3, "1/2", "1/3")), 1 / sympy.pi, 2 / sympy.pi)
_ROOTS = {float(root.evalf(30)): root for q in _SQUARES for root in (sympy.sqrt(q), -sympy.sqrt(q))}
"""Roots of small numbers, or of these by pi, by the numbers to which they round."""
_WITH_INFINITY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Need:
    """A condition on a real expression, whose indices are numbered in order: at any index."""

    relation: Relation
    expr: Expr

    @property
    def weaker(self) -> Iterator[Need]:
        """What follows from it about the same expression."""
        if self.relation == "> 0":
            yield Need("!= 0", self.expr)
            yield Need(">= 0", self.expr)

    def text(self, names: Mapping[Symbol, str]) -> str:
        """The condition, with names of sizes."""
        text = readable(self.expr, names)
        entry = _ENTRY.fullmatch(text)
        return f"{entry[1] if entry else text} {self.relation}"


@dataclass(slots=True)
class SymbolicArithmetic:
    """How numbers are read, and what was assumed of them.

    Attributes:
        is_real: whether arithmetic on floating-point entries is that of the reals; else it is uninterpreted.
        indices: of all values.
        simplify: rewrites sizes by what is known of them.
        needs: conditions under which divisions and roots are defined, and that do not always hold.
        undefined: the condition that holds for no input; empty if there is none.
        roots: numbers that were read as the roots that they round.
    """

    is_real: bool
    indices: Indices = field(default_factory=Indices)
    simplify: Callable[[Expr], Expr] = lambda expr: expr
    needs: dict[Need, None] = field(default_factory=dict["Need", None])
    undefined: str = ""
    roots: dict[str, None] = field(default_factory=dict[str, None])

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
        if not self.is_real:
            is_plain = math.isfinite(value) and (value or math.copysign(1.0, value) > 0)
            return sympy.Rational(value) if is_plain else Symbol(repr(value), real=True)
        if not math.isfinite(value):
            raise UnknownError(f"{value} is not a real number")
        root = _ROOTS.get(value)
        if root is None:
            return sympy.Rational(value)
        self.roots[f"{value!r} is {root}"] = None
        return root

    def operand(self, number: Any, dtype: torch.dtype) -> Expr:
        """A number as an operand of arithmetic in `dtype`, which does not round it."""
        entry = self.number(number)
        return entry if dtype.is_floating_point else apply(f"number_{dtype_name(dtype)}", entry)

    def entry(self, number: Any, dtype: torch.dtype) -> Expr:
        """A number as an entry of a tensor, rounded to its dtype, unless it is read as a root."""
        if not dtype.is_floating_point:
            return self.operand(number, dtype)
        if isinstance(number, torch.SymFloat) and self.size(number).is_number:
            number = float(self.size(number))
        if isinstance(number, float) and math.isfinite(number) and number not in _ROOTS:
            number = torch.full((), number, dtype=torch.float64).to(dtype).item()
        return self.number(number)

    def need(self, relation: Relation, expr: Expr) -> None:
        """Notes what must hold of an expression, as conditions on its parts where it holds of these alone.

        Raises:
            UndefinedError: it holds for no input.
        """
        expr = expanded(expr)
        is_strict = relation != ">= 0"
        if is_positive(expr) or (relation == ">= 0" and is_nonnegative(expr)):
            return
        if relation == "!= 0" and expr.is_number and expr.is_nonzero:
            return
        is_never = expr == 0 if relation == "!= 0" else (is_nonnegative if is_strict else is_positive)(expanded(-expr))
        if is_never:
            self.undefined = f"{readable(expr)} {relation}"
            raise UndefinedError(self.undefined)
        if relation == "!= 0":
            self._need_nonzero(expr)
        elif expr.is_Mul and any(map(is_positive, expr.args)):
            self.need(relation, sympy.Mul(*(factor for factor in expr.args if not is_positive(factor))))
        elif is_strict and is_nonnegative(expr) and not expr.is_Add:
            self._need_nonzero(expr)
        else:
            self._note(relation, expr)

    def _need_nonzero(self, expr: Expr) -> None:
        """An expression is not zero where none of its factors is, and a root of what is positive."""
        if expr.is_Mul:
            for factor in expr.args:
                self.need("!= 0", factor)
        elif expr.is_Pow and expr.exp.is_Integer:
            self.need("!= 0", expr.base)
        elif expr.is_Pow and expr.exp.is_Rational:
            self.need("> 0", expr.base)
        elif getattr(expr.func, "__name__", "") in ("abs", "Abs"):
            self.need("!= 0", expr.args[0])
        else:
            self._note("> 0" if is_nonnegative(expr) else "!= 0", expr)

    def _note(self, relation: Relation, expr: Expr) -> None:
        bound = sorted(expr.free_symbols & self.indices.sizes.keys(), key=lambda s: int(s.name[1:]))
        renamed = expr.xreplace({s: Symbol(f"j{n}", integer=True, nonnegative=True) for n, s in enumerate(bound)})
        self.needs[Need(relation, expanded(renamed))] = None

    def power(self, base: Expr, exponent: Expr) -> Expr:
        """Returns base ** exponent over the reals, with what that needs."""
        base = expanded(base)
        if exponent.is_Integer:
            if exponent < 0:
                self.need("!= 0", base)
        elif exponent.is_Rational:
            self.need(">= 0" if exponent > 0 else "> 0", base)
        else:
            return apply("pow", base, exponent)
        return sympy.Pow(base, exponent)

    def divide(self, a: Expr, b: Expr) -> Expr:
        """Returns a / b over the reals."""
        return a * self.power(b, Integer(-1))


def cast(entry: Expr, old: torch.dtype, new: torch.dtype) -> Expr:
    """A cast is an uninterpreted function, unless it changes nothing: a number that both dtypes have stays."""
    if old == new:
        return entry
    number = entry.args[0] if is_integer(entry) else entry
    is_in_both = (is_integer(entry) or _is_number_of(entry, old)) and _is_number_of(number, new)
    return number if is_in_both else apply(f"cast_{dtype_name(old)}_{dtype_name(new)}", entry)


def is_integer(entry: Expr) -> bool:
    """Whether an entry is a number of a tensor of integers."""
    return getattr(entry.func, "__name__", "").startswith("number_int") and bool(entry.args[0].is_Integer)


def _is_number_of(entry: Expr, dtype: torch.dtype) -> bool:
    """Whether an entry is a number that the floating-point dtype has, infinities included."""
    if str(entry) in ("inf", "-inf"):
        return dtype in _WITH_INFINITY
    if dtype not in _WITH_INFINITY or not entry.is_Rational:
        return False
    return sympy.Rational(torch.full((), float(entry), dtype=torch.float64).to(dtype).item()) == entry
