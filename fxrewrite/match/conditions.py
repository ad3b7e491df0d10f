"""Conditions of a pattern on the values at its paths: one class per kind.

Patterns are lowered to these (lower.py). The matcher compiles them into one function (compile.py), and explanations
evaluate them one by one (explain.py), so both have the same meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason
from fxrewrite.match.arguments import ArgumentReader
from fxrewrite.match.values import ABSENT, Candidate, Path, has_node, is_same, literal_outcomes, signature

__all__ = [
    "Another",
    "Arguments",
    "Condition",
    "Expressible",
    "IsList",
    "IsLiteral",
    "IsNode",
    "IsOneOf",
    "IsOperator",
    "IsOptionalNode",
    "IsParameter",
    "IsPlain",
    "Same",
]


@dataclass(frozen=True)
class Condition(ABC):
    """One condition on the value at `path`.

    Conditions of one class at one path differ only in `value`, on which the decision tree branches.

    Attributes:
        reason: the reason that a failed condition reports.
    """

    reason: ClassVar[Reason]
    path: Path

    @property
    def value(self) -> Any:
        """A hashable key of conditions of this class at this path."""
        return None

    @abstractmethod
    def holds(self, candidate: Candidate) -> bool:
        """Whether the condition is true of the candidate."""

    @abstractmethod
    def expected(self) -> str:
        """Returns what the condition requires, as text."""

    def found(self, candidate: Candidate) -> str:
        """Returns what is at the path instead, as text."""
        value = candidate.value(self.path)
        if isinstance(value, fx.Node):
            return f"{ops.key(value)} (%{value.name})"
        return "nothing" if value is ABSENT else repr(value)


class Expressible(Condition):
    """A condition that can be written as one Python expression."""

    @abstractmethod
    def code(self, value: str, at: Callable[[Path], str]) -> str:
        """Returns an expression that is true if the condition holds.

        Args:
            value: name of the variable that holds the value at the path.
            at: returns the name of the variable that holds the value at another path.
        """


@dataclass(frozen=True)
class IsOperator(Expressible):
    """A call of one operator."""

    reason = Reason.OPERATOR
    key: str

    @property
    def value(self) -> str:
        return self.key

    def holds(self, candidate: Candidate) -> bool:
        value = candidate.value(self.path)
        return isinstance(value, fx.Node) and ops.key(value) == self.key

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"isinstance({value}, Node) and key({value}) == {self.key!r}"

    def expected(self) -> str:
        return f"operator {self.key} at {self.path}"


@dataclass(frozen=True)
class IsOneOf(Expressible):
    """A call of one of several operators."""

    reason = Reason.OPERATOR
    keys: tuple[str, ...]

    @property
    def value(self) -> tuple[str, ...]:
        return self.keys

    def holds(self, candidate: Candidate) -> bool:
        value = candidate.value(self.path)
        return isinstance(value, fx.Node) and ops.key(value) in self.keys

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"isinstance({value}, Node) and key({value}) in {self.keys!r}"

    def expected(self) -> str:
        return f"operator {' or '.join(self.keys)} at {self.path}"


@dataclass(frozen=True)
class Arguments(Condition):
    """The call has the named arguments, and all others have their defaults."""

    reason = Reason.ARGUMENTS
    names: tuple[str, ...]

    @property
    def value(self) -> tuple[str, ...]:
        return self.names

    @cached_property
    def reader(self) -> ArgumentReader:
        return ArgumentReader(self.names)

    def holds(self, candidate: Candidate) -> bool:
        """Whether the call fits; adds its named arguments to the candidate."""
        node = candidate.value(self.path)
        values = self.reader.read(node) if isinstance(node, fx.Node) else None
        if values is None:
            return False
        candidate.values.update((self.path / name, value) for name, value in zip(self.names, values, strict=True))
        return True

    def expected(self) -> str:
        return f"no arguments but {', '.join(self.names)} at {self.path}"

    def found(self, candidate: Candidate) -> str:
        layout = signature(candidate.value(self.path))
        if layout is None:
            return "arguments that fit no signature"
        return ", ".join(f"{name}={candidate.value(self.path / name)!r}" for name in layout.given)


@dataclass(frozen=True)
class IsLiteral(Condition):
    """A Python value that equals a literal; the literal is in frozen form (`pattern.terms.freeze`)."""

    reason = Reason.LITERAL
    literal: Any

    @property
    def value(self) -> Any:
        return self.literal

    def holds(self, candidate: Candidate) -> bool:
        parent = self.path.parent
        call = candidate.value(parent) if parent else None
        return self.literal in literal_outcomes(candidate.value(self.path), self.path.step, call)

    def expected(self) -> str:
        return f"the literal {_thaw(self.literal)!r} at {self.path}"


@dataclass(frozen=True)
class IsList(Expressible):
    """A list or tuple of this length."""

    reason = Reason.LITERAL
    length: int

    @property
    def value(self) -> int:
        return self.length

    def holds(self, candidate: Candidate) -> bool:
        value = candidate.value(self.path)
        return isinstance(value, (list, tuple)) and len(value) == self.length  # pyright: ignore[reportUnknownArgumentType]

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"isinstance({value}, (list, tuple)) and len({value}) == {self.length}"

    def expected(self) -> str:
        return f"a list of {self.length} at {self.path}"


@dataclass(frozen=True)
class IsNode(Expressible):
    """A value of the graph."""

    reason = Reason.CAPTURE

    def holds(self, candidate: Candidate) -> bool:
        return isinstance(candidate.value(self.path), fx.Node)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"isinstance({value}, Node)"

    def expected(self) -> str:
        return f"a value of the graph at {self.path}"


@dataclass(frozen=True)
class IsParameter(Expressible):
    """A value of the graph that is a parameter, or a buffer, of the model."""

    reason = Reason.CAPTURE

    def holds(self, candidate: Candidate) -> bool:
        value = candidate.value(self.path)
        return isinstance(value, fx.Node) and ops.is_parameter(value)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"isinstance({value}, Node) and is_parameter({value})"

    def expected(self) -> str:
        return f"a parameter at {self.path}"


@dataclass(frozen=True)
class IsPlain(Expressible):
    """A Python value that contains no node."""

    reason = Reason.CAPTURE

    def holds(self, candidate: Candidate) -> bool:
        value = candidate.value(self.path)
        return value is not ABSENT and not has_node(value)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"{value} is not ABSENT and not has_node({value})"

    def expected(self) -> str:
        return f"a Python value at {self.path}"


@dataclass(frozen=True)
class IsOptionalNode(Expressible):
    """A value of the graph, or None."""

    reason = Reason.CAPTURE

    def holds(self, candidate: Candidate) -> bool:
        value = candidate.value(self.path)
        return value is None or isinstance(value, fx.Node)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"{value} is None or isinstance({value}, Node)"

    def expected(self) -> str:
        return f"a value of the graph or None at {self.path}"


@dataclass(frozen=True)
class Same(Expressible):
    """The values at two paths are the same node, or equal Python values."""

    reason = Reason.SAME
    other: Path

    @property
    def value(self) -> Path:
        return self.other

    def holds(self, candidate: Candidate) -> bool:
        return is_same(candidate.value(self.path), candidate.value(self.other))

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"is_same({value}, {at(self.other)})"

    def expected(self) -> str:
        return f"the same value at {self.path} as at {self.other}"


@dataclass(frozen=True)
class Another(Expressible):
    """The nodes at two paths are different."""

    reason = Reason.SAME
    other: Path

    @property
    def value(self) -> Path:
        return self.other

    def holds(self, candidate: Candidate) -> bool:
        return candidate.value(self.path) is not candidate.value(self.other)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"{value} is not {at(self.other)}"

    def expected(self) -> str:
        return f"another value at {self.path} than at {self.other}"


def _thaw(frozen: Any) -> Any:
    """Returns the literal of a frozen form, as far as printing needs it."""
    kind, value = frozen
    if kind in (list, tuple):
        return kind(_thaw(item) for item in value)
    if kind is slice:
        return slice(*_thaw(value))
    return kind(value) if kind is float else value
