"""Expressions and conditions as text, for proofs that people read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import sympy
from sympy.printing.str import StrPrinter

from fxrewrite.prove.indices import Expr

_LARGEST_DIVISOR = 1000
"""A fraction with a larger divisor is written as the floating-point number that it is."""
_INDICES = re.compile(r"(?<=\w\()(?:(?:j\d+|0)(?:, |(?=\))))+")
"""Indices of an entry that no sum binds: how many there are is its rank."""
_ARGUMENTS = re.compile(r", \w+=.*")
_SIZE = re.compile(r"size\((\w+), \d+\)")
_NUMBER = re.compile(r"(?<![\w.])(?:- ?)?\d+(?:\.\d+)?(?:e-?\d+)?(?:/\d+)?")


class _Printer(StrPrinter):
    """Writes relations, quotients and remainders as Python does."""

    def _print_Relational(self, expr: Expr) -> str:  # noqa: N802  # sympy's name
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_Function(self, expr: Expr) -> str:  # noqa: N802  # sympy's name
        sign = {"idiv": "//", "imod": "%"}.get(expr.func.__name__)
        if sign is None:
            return super()._print_Function(expr)  # pyright: ignore[reportAttributeAccessIssue]
        return f"({self._print(expr.args[0])} {sign} {self._print(expr.args[1])})"


def readable(expr: Expr, names: Mapping[sympy.Symbol, str] | None = None) -> str:
    """Returns the text of an expression with these names of its symbols, and numbers as Python writes them."""
    numbers = {number: repr(float(number)) for number in expr.atoms(sympy.Float)}
    for number in expr.atoms(sympy.Rational):
        if number.q > _LARGEST_DIVISOR and sympy.Rational(float(number)) == number:
            numbers[number] = repr(float(number))
    named = {old: sympy.Symbol(text) for old, text in {**(names or {}), **numbers}.items()}
    return _Printer().doprint(expr.xreplace(named))


def brief(texts: Iterable[str], form: Callable[[str], str]) -> list[str]:
    """Returns the first text of each form, and how many more there are."""
    forms: dict[str, list[str]] = {}
    for text in texts:
        forms.setdefault(form(text), []).append(text)
    return [first + (f" (and {len(others)} of the same form)" if others else "") for first, *others in forms.values()]


def form_of_condition(text: str) -> str:
    """The same for conditions that differ in numbers or in ranks alone; for what a number is read as, the text."""
    return text if " is " in text else _NUMBER.sub("#", _SIZE.sub(r"size(\1)", _INDICES.sub("", text)))


def form_of_case(text: str) -> str:
    """The same for cases that differ in arguments other than tensors."""
    return _ARGUMENTS.sub("", text)
