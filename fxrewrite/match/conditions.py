"""What a pattern asks of the values at its paths: one class for each kind of condition.

Patterns are lowered to these (lower.py). The matcher compiles them into one function (compile.py), and explanations
evaluate them one by one (explain.py). Most are one Python expression, which both of them use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason
from fxrewrite.match.arguments import ArgumentReader
from fxrewrite.match.sizes import NAMES_OF_SIZES
from fxrewrite.match.values import (
    ABSENT,
    Candidate,
    Path,
    as_number,
    call_signature,
    has_node,
    is_same,
    literal_outcomes,
)

__all__ = [
    "NAMES",
    "Another",
    "Arguments",
    "Condition",
    "Expressible",
    "HasItems",
    "IsList",
    "IsLiteral",
    "IsNode",
    "IsOneOf",
    "IsOperator",
    "IsOptionalNode",
    "IsParameter",
    "IsPlain",
    "IsSame",
    "IsSameNumber",
    "IsSize",
    "IsSizeCall",
]

NAMES: Mapping[str, Any] = MappingProxyType(
    {
        "ABSENT": ABSENT,
        "Node": fx.Node,
        "as_number": as_number,
        "has_node": has_node,
        "is_parameter": ops.is_parameter,
        "is_same": is_same,
        "is_scalar": ops.is_scalar,
        "key": ops.key,
        **NAMES_OF_SIZES,
    }
)
"""What the expressions of conditions may name."""


@dataclass(frozen=True)
class Condition(ABC):
    """One condition on the value at `path`.

    Conditions of one class at one path differ in `value` alone; the decision tree branches on it.

    Attributes:
        reason: what it means when the condition does not hold.
    """

    reason: ClassVar[Reason]
    path: Path

    @property
    @abstractmethod
    def value(self) -> Any:
        """What tells conditions of this class at this path apart; hashable, and None if there is one only."""

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


@dataclass(frozen=True)
class Arguments(Condition):
    """The call has the arguments of these names, and all others have their defaults."""

    reason = Reason.ARGUMENTS
    names: tuple[str, ...]

    @property
    def value(self) -> tuple[str, ...]:
        return self.names

    @cached_property
    def reader(self) -> ArgumentReader:
        return ArgumentReader(self.names)

    def holds(self, candidate: Candidate) -> bool:
        """Whether the call at the path fits; adds its named arguments to the candidate."""
        node = candidate.value(self.path)
        values = self.reader.read(node) if isinstance(node, fx.Node) else None
        if values is None:
            return False
        candidate.values.update((self.path / name, value) for name, value in zip(self.names, values, strict=True))
        return True

    def expected(self) -> str:
        return f"no arguments but {', '.join(self.names)} at {self.path}"

    def found(self, candidate: Candidate) -> str:
        signature = call_signature(candidate.value(self.path))
        if signature is None:
            return "arguments that fit no signature"
        return ", ".join(f"{name}={candidate.value(self.path / name)!r}" for name in signature.given)


@dataclass(frozen=True)
class IsLiteral(Condition):
    """A Python value that equals a literal, which is frozen (`pattern.terms.freeze`)."""

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
class Expressible(Condition):
    """A condition that is one Python expression of the value `v` at the path and of an operand `x`.

    Attributes:
        expression: with {v} and {x}, and the names of NAMES.
        words: what it asks for, with {x} and {path}.
    """

    expression: ClassVar[str]
    words: ClassVar[str]

    @property
    def value(self) -> Any:
        return None

    def holds(self, candidate: Candidate) -> bool:
        operand = candidate.value(self.value) if isinstance(self.value, Path) else self.value
        return _predicate(self.expression)(candidate.value(self.path), operand)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        """Returns the expression of the variable `value`; `at` gives the variable with the value at another path."""
        return self.expression.format(v=value, x=at(self.value) if isinstance(self.value, Path) else repr(self.value))

    def expected(self) -> str:
        keys = self.value
        return self.words.format(x=" or ".join(keys) if isinstance(keys, tuple) else keys, path=self.path)


@cache
def _predicate(expression: str) -> Callable[[Any, Any], bool]:
    return eval(f"lambda v, x: {expression.format(v='v', x='x')}", dict(NAMES))


class IsNode(Expressible):
    """A value of the graph that is not known to be a number."""

    reason = Reason.CAPTURE
    expression = "isinstance({v}, Node) and not is_scalar({v})"
    words = "a tensor of the graph at {path}"


class IsParameter(Expressible):
    """A value of the graph that is a parameter or a buffer of the model."""

    reason = Reason.CAPTURE
    expression = "isinstance({v}, Node) and is_parameter({v})"
    words = "a parameter at {path}"


class IsPlain(Expressible):
    """A Python value that contains no value of the graph."""

    reason = Reason.CAPTURE
    expression = "{v} is not ABSENT and not has_node({v})"
    words = "a Python value at {path}"


class IsOptionalNode(Expressible):
    """A value of the graph that is not known to be a number, or None."""

    reason = Reason.CAPTURE
    expression = "{v} is None or isinstance({v}, Node) and not is_scalar({v})"
    words = "a tensor of the graph or None at {path}"


@dataclass(frozen=True)
class _WithOperand(Expressible):
    operand: Any

    @property
    def value(self) -> Any:
        return self.operand


class IsOperator(_WithOperand):
    """A call of the operator with the key `operand`."""

    reason = Reason.OPERATOR
    expression = "isinstance({v}, Node) and key({v}) == {x}"
    words = "operator {x} at {path}"


class IsOneOf(_WithOperand):
    """A call of an operator whose key is in the tuple `operand`."""

    reason = Reason.OPERATOR
    expression = "isinstance({v}, Node) and key({v}) in {x}"
    words = "operator {x} at {path}"


class IsList(_WithOperand):
    """A list or tuple of length `operand`."""

    reason = Reason.LITERAL
    expression = "isinstance({v}, (list, tuple)) and len({v}) == {x}"
    words = "a list of {x} at {path}"


class HasItems(_WithOperand):
    """A list or tuple of length `operand` or more."""

    reason = Reason.LITERAL
    expression = "isinstance({v}, (list, tuple)) and len({v}) >= {x}"
    words = "a list of {x} or more at {path}"


class IsSame(_WithOperand):
    """The same node as at the path `operand`, or an equal Python value."""

    reason = Reason.SAME
    expression = "is_same({v}, {x})"
    words = "the same value at {path} as at {x}"


@dataclass(frozen=True)
class IsSameNumber(Expressible):
    """The same value as at another path, where an argument takes a list or an integer that means it: `sum(x, dim=1)`.

    Attributes:
        other: the other path.
        repeats: how long the lists are that an integer means, at the path and at the other; 0 where it means none.
    """

    reason = Reason.SAME
    other: Path
    repeats: tuple[int, int]

    @property
    def value(self) -> Any:
        return self.other, self.repeats

    def holds(self, candidate: Candidate) -> bool:
        here, there = map(as_number, (candidate.value(self.path), candidate.value(self.other)), self.repeats)
        return is_same(here, there)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return f"is_same(as_number({value}, {self.repeats[0]}), as_number({at(self.other)}, {self.repeats[1]}))"

    def expected(self) -> str:
        return f"the same value at {self.path} as at {self.other}"


class IsSizeCall(_WithOperand):
    """A node that reads the size of the dimension `operand` of its first operand."""

    reason = Reason.LITERAL
    expression = "is_size_call({v}, {x})"
    words = "a call that reads size {x} of a value at {path}"


@dataclass(frozen=True)
class IsSize(Expressible):
    """A size, dtype or device of the values at the paths `bases`, or a number computed of sizes.

    Attributes:
        text: what it is, for readers.
        test: the expression, with {v} for the value and {0}, {1} ... for the bases.
    """

    reason = Reason.LITERAL
    text: str
    test: str
    bases: tuple[Path, ...]

    @property
    def value(self) -> Any:
        return self.test, self.bases

    def holds(self, candidate: Candidate) -> bool:
        names = [f"b{index}" for index in range(len(self.bases))]
        test = _test(self.test.format(*names, v="v"), tuple(names))
        return test(candidate.value(self.path), *map(candidate.value, self.bases))

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        return self.test.format(*map(at, self.bases), v=value)

    def expected(self) -> str:
        return f"{self.text} at {self.path}"


@cache
def _test(expression: str, names: tuple[str, ...]) -> Callable[..., bool]:
    return eval(f"lambda {', '.join(('v', *names))}: {expression}", dict(NAMES))


class Another(_WithOperand):
    """Another node than at the path `operand`."""

    reason = Reason.SAME
    expression = "{v} is not {x}"
    words = "another value at {path} than at {x}"


def _thaw(frozen: Any) -> Any:
    """Returns the literal of a frozen form, as far as printing needs it."""
    kind, value = frozen
    if kind in (list, tuple):
        return kind(_thaw(item) for item in value)
    if kind is slice:
        return slice(*_thaw(value))
    return kind(value) if kind is float else value
