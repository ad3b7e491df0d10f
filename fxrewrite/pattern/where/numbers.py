"""Numbers of a match, and relations between them: sizes, ranks and captured Python values.

A relation holds if it is true for every length that the graph admits. If it cannot be decided, it does not hold: an
unknown size differs from every other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.graph.sizes import is_always, is_read_from_data
from fxrewrite.pattern.terms import LiteralValue, frozen
from fxrewrite.pattern.text import literal_text
from fxrewrite.pattern.where.base import BaseConstraint, NoAnswerError, tensor_of

RELATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ORDERS = ("<", "<=", ">", ">=")
_OF_SETS = ("in", "not in")
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<", "in": "not in", "not in": "in"}
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_SUMS = ("+", "-")
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
CONSTANTS = (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)
_SYMBOLS = (torch.SymInt, torch.SymFloat)


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of a dimension of a captured tensor."""

    name: str
    dim: int

    def read(self, captures: Mapping[str, Any]) -> Any:
        """Returns the size. Raises NoAnswerError if the capture is not a tensor, or has too few dimensions."""
        found = tensor_of(captures, self.name)
        if not -found.ndim <= self.dim < found.ndim:
            raise NoAnswerError(f"{self.name} has rank {found.ndim}")
        return found.shape[self.dim]

    def said(self, found: Any) -> str:
        """Returns a clause that says what was found."""
        return f"{self} is {found}"

    def __str__(self) -> str:
        return f"size({self.name}, {self.dim})"


@dataclass(frozen=True, slots=True)
class RankOf:
    """The number of dimensions of a captured tensor."""

    name: str

    def read(self, captures: Mapping[str, Any]) -> Any:
        """Returns the rank. Raises NoAnswerError if the capture is not a tensor."""
        return tensor_of(captures, self.name).ndim

    def said(self, found: Any) -> str:
        """Returns a clause that says what was found."""
        return f"{self.name} has rank {found}"

    def __str__(self) -> str:
        return f"rank({self.name})"


@dataclass(frozen=True, slots=True)
class ValueOf:
    """A captured Python value, or the number that a captured node holds."""

    name: str

    def read(self, captures: Mapping[str, Any]) -> Any:
        """Returns the value. Raises NoAnswerError if a captured node is not a number."""
        captured = captures[self.name]
        if not isinstance(captured, fx.Node):
            return captured
        found = ops.value(captured)
        if not isinstance(found, (*_NUMBERS, bool)):
            raise NoAnswerError(f"%{captured.name} is not a number")
        return found

    def said(self, found: Any) -> str:
        """Returns a clause that says what was found."""
        return f"{self.name} is {found!r}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class TotalOf:
    """The number of items of a captured list, `len`, or their sum; `of` is the list, or a size of each item."""

    function: str
    of: ValueOf | SizeOf

    @property
    def name(self) -> str:
        """The captured list."""
        return self.of.name

    def read(self, captures: Mapping[str, Any]) -> Any:
        """Returns the number. Raises NoAnswerError if the capture is no list, or has items that are no numbers."""
        items = captures[self.name]
        if not isinstance(items, (list, tuple)):
            raise NoAnswerError(f"{self.name} is not a list")
        if self.function == "len":
            return len(items)
        numbers = [self.of.read({self.name: item}) for item in items]
        if not all(map(_is_number, numbers)):
            raise NoAnswerError(f"{self.name} is {items!r}, which has items that are not numbers")
        return sum(numbers)

    def said(self, found: Any) -> str:
        """Returns a clause that says what was found."""
        return f"{self} is {found}"

    def __str__(self) -> str:
        return f"{self.function}({self.of})"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A sum, difference or product of numbers, or the quotient or remainder of division by a positive constant."""

    operator: str
    left: Number
    right: Number

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if isinstance(side, LiteralValue) and not _is_number(side.value):
                raise RuleDefinitionError(f"{_text(side)} is not a number")
        if self.operator in ("//", "%"):
            by = self.right.value if isinstance(self.right, LiteralValue) else None
            if type(by) is not int or by < 1:
                raise RuleDefinitionError(f"{self}: a size is divided by a positive integer only")

    def read(self, captures: Mapping[str, Any]) -> Any:
        """Returns the result. Raises NoAnswerError if an operand is not a number."""
        left, right = _read(self.left, captures), _read(self.right, captures)
        for found in (left, right):
            if not _is_number(found):
                raise NoAnswerError(f"{_found((self.left, self.right), captures)}: not a number")
        return _ARITHMETIC[self.operator](left, right)

    def __str__(self) -> str:
        product = self.operator not in _SUMS
        left = _text(self.left)
        if product and isinstance(self.left, Arithmetic) and self.left.operator in _SUMS:
            left = f"({left})"
        right = _text(self.right)
        if isinstance(self.right, Arithmetic) and (product or self.right.operator in _SUMS):
            right = f"({right})"
        return f"{left} {self.operator} {right}"


Number: TypeAlias = SizeOf | RankOf | ValueOf | TotalOf | Arithmetic | LiteralValue


@dataclass(frozen=True, slots=True)
class Relation(BaseConstraint):
    """Two numbers satisfy the relation; other Python values support only == and !=.

    Of `in` and `not in`, `right` are the constants of the set.
    """

    left: Number
    relation: str
    right: Number | tuple[LiteralValue, ...]

    def __post_init__(self) -> None:
        known = _OF_SETS if isinstance(self.right, tuple) else RELATIONS
        if self.relation not in known:
            raise RuleDefinitionError(f"{self.relation!r} is not one of {', '.join(known)}")
        if self.right == ():
            raise RuleDefinitionError(f"{self}: the set has nothing in it")
        for side in self._sides:
            if isinstance(side, LiteralValue):
                _require_constant(side.value)
                if self.relation in _ORDERS and not _is_number(side.value):
                    raise RuleDefinitionError(f"{_text(side)} is not a number: it can only be == or !=")
        if not self.names:
            raise RuleDefinitionError(f"{self} reads no capture")

    @property
    def _sides(self) -> tuple[Number, ...]:
        return (self.left, *self.right) if isinstance(self.right, tuple) else (self.left, self.right)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(atom.name for side in self._sides for atom in _atoms(side)))

    @property
    def whole(self) -> tuple[str, ...]:
        """The captures that are read as lists."""
        return tuple(atom.name for side in self._sides for atom in _atoms(side) if isinstance(atom, TotalOf))

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        left, *right = (_read(side, captures) for side in self._sides)
        if _holds(left, self.relation, *right):
            return ""
        false = _holds(left, _OPPOSITE[self.relation], *right)
        return _found(self._sides, captures) + ("" if false else _unknown(left, *right))

    def __str__(self) -> str:
        is_set = isinstance(self.right, tuple)
        right = ", ".join(map(_text, self._sides[1:]))
        return f"{_text(self.left)} {self.relation} {f'{{{right}}}' if is_set else right}"


def _require_constant(value: Any) -> None:
    if value is None:
        raise RuleDefinitionError("a capture cannot be compared with None: constraints on a capture that is None hold")
    if not isinstance(value, CONSTANTS) or value != value:
        raise RuleDefinitionError(f"{value!r} is not a number, string, bool, dtype, layout or memory format")


def _read(number: Number, captures: Mapping[str, Any]) -> Any:
    return number.value if isinstance(number, LiteralValue) else number.read(captures)


def _is_number(found: Any) -> bool:
    return isinstance(found, _NUMBERS) and not isinstance(found, bool)


def _holds(left: Any, relation: str, *right: Any) -> bool:
    """Whether the relation, to one value or to a set, is true for every length that the graph admits.

    Raises:
        NoAnswerError: the values have no order.
    """
    if relation == "in":
        return any(_holds(left, "==", constant) for constant in right)
    if relation == "not in":
        return all(_holds(left, "!=", constant) for constant in right)
    (other,) = right
    if _is_number(left) and _is_number(other):
        return is_always(RELATIONS[relation](left, other))
    if relation not in _ORDERS:
        # equal Python values: 0 and 0.0 are equal, as numbers, and 1 and True are not
        return (frozen(left) == frozen(other)) == (relation == "==")
    raise NoAnswerError(f"{left!r} and {other!r} have no order")


def _found(numbers: tuple[Number, ...], captures: Mapping[str, Any]) -> str:
    atoms = dict.fromkeys(atom for number in numbers for atom in _atoms(number))
    said = [atom.said(atom.read(captures)) for atom in atoms]
    computed = [(number, _read(number, captures)) for number in numbers if isinstance(number, Arithmetic)]
    said += [f"{number} is {value}" for number, value in computed if isinstance(value, float)]  # 1 - 0.9 is not 0.1
    return ", ".join(said)


def _unknown(*found: Any) -> str:
    if any(isinstance(size, _SYMBOLS) and is_read_from_data(size) for size in found):
        return ": not known, it is read from data"
    return ": not known for every length that the graph admits"


def _atoms(number: Number) -> Iterator[SizeOf | RankOf | ValueOf | TotalOf]:
    if isinstance(number, Arithmetic):
        yield from _atoms(number.left)
        yield from _atoms(number.right)
    elif not isinstance(number, LiteralValue):
        yield number


def _text(number: Number) -> str:
    return literal_text(number.value) if isinstance(number, LiteralValue) else str(number)
