"""Integer expressions over indices and sizes: what their bounds prove, and how one index becomes several.

Sizes are symbols of at least `LEAST`; an index runs from 0 to its size minus 1. A comparison that the bounds do not
decide is None, never a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import sympy
from sympy import Function, Symbol
from sympy.core.relational import Relational

Expr: TypeAlias = Any
"""An expression of sympy, whose own annotations know few of its methods."""
LEAST = 2
"""Smallest value of a symbolic size (entries): torch makes sizes of 0 and 1 numbers, as different programs."""
idiv = Function("idiv", integer=True)
"""The quotient, rounded down."""
imod = Function("imod", integer=True)
"""Its remainder."""


def is_same(a: Expr, b: Expr) -> bool:
    """Whether two integer expressions are equal for all sizes."""
    return a == b or sympy.expand(a - b) == 0


def _coefficients(expr: Expr) -> list[Expr]:
    """The numbers before the products that an expression is a sum of."""
    return list(sympy.expand(expr).as_coefficients_dict().values())


class Indices:
    """Indices with their sizes, and what follows from these."""

    def __init__(self) -> None:
        self.sizes: dict[Symbol, Expr] = {}
        self._numbers = itertools.count()

    def fresh(self, size: Expr) -> Symbol:
        """Returns a new index that runs from 0 to `size` - 1."""
        index = Symbol(f"i{next(self._numbers)}", integer=True, nonnegative=True)
        self.sizes[index] = sympy.sympify(size)
        return index

    def is_nonnegative(self, expr: Expr) -> bool:
        """Whether the bounds prove `expr` >= 0."""
        expr = sympy.expand(expr)
        if expr.is_Integer:
            return bool(expr >= 0)
        return self._is_nonnegative(expr) or self._is_nonnegative_by_quotients(expr)

    def _is_nonnegative(self, expr: Expr) -> bool:
        opaque = {atom: self._stand_in(atom) for atom in expr.atoms(Function) if isinstance(atom, Function)}
        if any(stand_in is None for stand_in in opaque.values()):
            return False
        expr = sympy.expand(expr.xreplace(opaque))
        for index in sorted(expr.free_symbols & self.sizes.keys(), key=str):
            if index not in expr.free_symbols:
                continue
            slope = sympy.expand(expr.coeff(index, 1))
            rest = sympy.expand(expr - slope * index)
            if index in rest.free_symbols:
                return False  # not linear
            if self.is_nonnegative(slope):
                expr = rest
            elif self.is_nonnegative(-slope):
                expr = sympy.expand(rest + slope * (self.sizes[index] - 1))
            else:
                return False
        if expr.free_symbols & self.sizes.keys():
            return False if expr.free_symbols & opaque.keys() else self.is_nonnegative(expr)
        return self._has_no_negative_term(expr)

    def _is_nonnegative_by_quotients(self, expr: Expr) -> bool:
        """Whether an integer is 0 or more once each quotient by a number is at a bound: more than -1 is enough."""
        quotients = [atom for atom in expr.atoms(Function) if isinstance(atom, Function) and atom.func == idiv]
        is_whole = all(c.is_Integer for c in _coefficients(expr))
        if not quotients or not is_whole or not all(symbol.is_integer for symbol in expr.free_symbols):
            return False
        low = expr
        for atom in quotients:
            dividend: Expr
            divisor: Expr
            dividend, divisor = atom.args
            slope = low.coeff(atom, 1)
            rest = sympy.expand(low - slope * atom)
            if rest.has(atom) or not divisor.is_Integer or divisor < 1:
                return False
            is_least_below = self.is_nonnegative(slope)
            if not is_least_below and not self.is_nonnegative(-slope):
                return False
            bound = (dividend - divisor + 1 if is_least_below else dividend) / divisor
            low = sympy.expand(rest + slope * bound)
        parts = sympy.ilcm(1, *(c.q for c in _coefficients(low)))
        return self.is_nonnegative(parts * low + parts - 1)

    def _without_largest(self, expr: Expr) -> Expr:
        """The expression with the largest operand in place of a maximum, where the bounds say which one it is."""
        for atom in expr.atoms(sympy.Function):
            if str(atom.func) == "Max":
                largest = (a for a in atom.args if all(self.is_nonnegative(a - other) for other in atom.args))
                expr = expr.xreplace({atom: next(largest, atom)})
        return expr

    def _stand_in(self, atom: Expr) -> Expr | None:
        """An index or a size with the bounds of a quotient or a remainder; None if nothing is known of it."""
        if atom.func in (idiv, imod):
            dividend, divisor = atom.args
            if not (self.is_nonnegative(dividend) and self.is_nonnegative(divisor - 1)):
                return None
            if atom.func == imod:
                return self.fresh(divisor)
            return Symbol(f"w_{len(str(atom))}_{next(self._numbers)}", integer=True, nonnegative=True)
        return None

    def _has_no_negative_term(self, expr: Expr) -> bool:
        """Whether no term is negative once every size is written as the least one and a number of 0 or more."""
        shifted = {
            symbol: symbol + (0 if str(symbol).startswith("w_") else 1 if "_by_" in str(symbol) else LEAST)
            for symbol in expr.free_symbols
            if symbol.is_integer and symbol.is_nonnegative
        }
        if shifted.keys() != expr.free_symbols:
            return False
        expanded = sympy.expand(expr.subs(shifted, simultaneous=True))
        if not expanded.free_symbols:
            return bool(expanded >= 0)
        if not expanded.is_polynomial(*expanded.free_symbols):
            return False
        return all(bool(c >= 0) for c in sympy.Poly(expanded, *sorted(expanded.free_symbols, key=str)).coeffs())

    def is_below(self, a: Expr, b: Expr) -> bool | None:
        """Whether a < b; None if the bounds do not say."""
        if self.is_nonnegative(b - a - 1):
            return True
        return False if self.is_nonnegative(a - b) else None

    def follows(self, condition: Expr) -> bool:
        """Whether a comparison of sizes holds by the bounds."""
        if not isinstance(condition, Relational):
            return False
        relation: Any = condition
        left, right = map(self._without_largest, relation.args)
        if isinstance(condition, sympy.Eq):
            return is_same(left, right)
        if isinstance(condition, sympy.Ne):
            return self.is_below(left, right) is True or self.is_below(right, left) is True
        if isinstance(condition, (sympy.Lt, sympy.Gt)):
            low, high = (left, right) if isinstance(condition, sympy.Lt) else (right, left)
            return self.is_below(low, high) is True
        low, high = (left, right) if isinstance(condition, sympy.Le) else (right, left)
        return self.is_nonnegative(high - low)

    def divided(self, expr: Expr, by: Expr) -> tuple[Expr, Expr]:
        """Returns quotient and remainder of an expression of 0 or more; uninterpreted where bounds do not say them."""
        expr, by = sympy.expand(expr), sympy.expand(by)
        if by == 1:
            return expr, sympy.Integer(0)
        if self.is_below(expr, by):
            return sympy.Integer(0), expr
        if by.is_Integer:
            whole = sum((t for t in sympy.Add.make_args(expr) if (t / by).is_integer), sympy.Integer(0))
            quotient, rest = sympy.expand(whole / by), sympy.expand(expr - whole)
        else:
            (quotient,), rest = sympy.reduced(expr, [by])
            if not all(c.is_Integer for c in _coefficients(quotient)):
                return idiv(expr, by), imod(expr, by)
        if self.is_nonnegative(rest) and self.is_below(rest, by):
            return quotient, rest
        return idiv(expr, by), imod(expr, by)

    def unflattened(self, flat: Expr, shape: Sequence[Expr]) -> list[Expr]:
        """Returns the index in each dimension of the entry with this number."""
        found: list[Expr] = []
        for size in reversed(shape[1:]):
            flat, rest = self.divided(flat, size)
            found.insert(0, rest)
        return [flat, *found] if shape else []

    def reshaped(self, index: Sequence[Expr], old: Sequence[Expr], new: Sequence[Expr]) -> list[Expr]:
        """Returns where the entry at `index` of shape `old` is in shape `new`, which has the same order of entries."""
        ones = [n for n, size in enumerate(new) if size == 1]
        left = [(i, size) for i, size in zip(index, old, strict=True) if size != 1]
        wanted = [size for size in new if size != 1]
        first: list[Expr] = []
        last: list[Expr] = []
        while left and wanted and is_same(left[-1][1], wanted[-1]):
            last.insert(0, left.pop()[0])
            wanted.pop()
        while left and wanted and is_same(left[0][1], wanted[0]):
            first.append(left.pop(0)[0])
            wanted.pop(0)
        flat: Expr = sympy.Integer(0)
        for i, size in left:
            is_split = i.func == imod and i.args[1] == size and flat == idiv(*i.args)
            flat = i.args[0] if is_split else flat * size + i
        found = [*first, *self.unflattened(flat, wanted), *last]
        for n in ones:
            found.insert(n, sympy.Integer(0))
        return found
