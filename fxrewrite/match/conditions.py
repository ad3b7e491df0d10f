"""What a pattern asks of the values at its paths.

Patterns are lowered to conditions (lower.py). The matcher compiles them into one function (compile.py), and
explanations evaluate them one by one (explain.py). All but `Arguments` are one Python expression, which both use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

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
    is_same,
    literal_outcomes,
    rank_of,
)
from fxrewrite.pattern.terms import freeze, holds

NAMES: Mapping[str, Any] = MappingProxyType(
    {
        "ABSENT": ABSENT,
        "Node": fx.Node,
        "as_number": as_number,
        "freeze": freeze,
        "holds": holds,
        "is_parameter": ops.is_parameter,
        "is_same": is_same,
        "is_scalar": ops.is_scalar,
        "key": ops.key,
        "outcomes": literal_outcomes,
        "rank_of": rank_of,
        **NAMES_OF_SIZES,
    }
)
"""What the expressions of conditions may name."""


@dataclass(frozen=True, eq=False)
class Kind:
    """What conditions ask for; called with a path and operands, it gives a condition. Compared by identity.

    Attributes:
        reason: what it means when such a condition does not hold.
        words: what it asks for, with {path}, and {0}, {1} ... for the operands.
        expression: of the value {v} at the path, and of the operands; with the names of `NAMES`.
    """

    reason: Reason
    words: str
    expression: str

    def __call__(self, path: Path, *operands: Any) -> Condition:
        return Condition(path, operands, self)


class Condition(NamedTuple):
    """One condition on the value at `path`.

    Conditions of one kind at one path differ in their operands alone; the decision tree branches on these.

    Attributes:
        operands: paths, which mean the values there, and other values, all hashable.
    """

    path: Path
    operands: tuple[Any, ...]
    kind: Kind

    def holds(self, candidate: Candidate) -> bool:
        """Whether the condition is true of the candidate."""
        operands = [candidate.value(one) if isinstance(one, Path) else one for one in self.operands]
        return _predicate(self.kind.expression, len(operands))(candidate.value(self.path), *operands)

    def code(self, value: str, at: Callable[[Path], str]) -> str:
        """Returns the expression of the variable `value`; `at` gives the variable with the value at another path."""
        operands = [at(one) if isinstance(one, Path) else repr(one) for one in self.operands]
        return self.kind.expression.format(*operands, v=value)

    def expected(self) -> str:
        """Returns what the condition requires, as text."""
        operands = [" or ".join(one) if isinstance(one, tuple) else one for one in self.operands]
        return self.kind.words.format(*operands, path=self.path)

    def found(self, candidate: Candidate) -> str:
        """Returns what is at the path instead, as text."""
        value = candidate.value(self.path)
        if isinstance(value, fx.Node):
            return f"{ops.key(value)} (%{value.name})"
        return "nothing" if value is ABSENT else repr(value)


@cache
def _predicate(expression: str, num_operands: int) -> Callable[..., bool]:
    names = [f"x{index}" for index in range(num_operands)]
    return eval(f"lambda {', '.join(('v', *names))}: {expression.format(*names, v='v')}", dict(NAMES))


class Arguments(Condition):
    """The call has the arguments of these names, the operands, and all others have their defaults."""

    @cached_property
    def reader(self) -> ArgumentReader:
        return ArgumentReader(self.operands)

    def holds(self, candidate: Candidate) -> bool:
        """Whether the call at the path fits; adds its named arguments to the candidate."""
        node = candidate.value(self.path)
        values = self.reader.read(node) if isinstance(node, fx.Node) else None
        if values is None:
            return False
        candidate.values.update((self.path / name, value) for name, value in zip(self.operands, values, strict=True))
        return True

    def expected(self) -> str:
        return f"no arguments but {', '.join(self.operands)} at {self.path}"

    def found(self, candidate: Candidate) -> str:
        signature = call_signature(candidate.value(self.path))
        if signature is None:
            return "arguments that fit no signature"
        return ", ".join(f"{name}={candidate.value(self.path / name)!r}" for name in signature.given)


ARGUMENTS = Kind(Reason.ARGUMENTS, "", "")
"""The kind of `Arguments`, which is no expression."""
_IS_TENSOR = "isinstance({v}, Node) and not is_scalar({v})"
IS_NODE = Kind(Reason.CAPTURE, "a tensor of the graph at {path}", _IS_TENSOR)
"""A value of the graph that is not known to be a number."""
IS_OPTIONAL_NODE = Kind(Reason.CAPTURE, "a tensor of the graph or None at {path}", f"{{v}} is None or {_IS_TENSOR}")
"""A value of the graph that is not known to be a number, or None."""
IS_PARAMETER = Kind(Reason.CAPTURE, "a parameter at {path}", "isinstance({v}, Node) and is_parameter({v})")
"""A value of the graph that is a parameter or a buffer of the model."""
IS_PLAIN = Kind(Reason.CAPTURE, "a Python value at {path}", "{v} is not ABSENT and not holds({v}, Node)")
"""A Python value that contains no value of the graph."""
IS_OPERATOR = Kind(Reason.OPERATOR, "operator {0} at {path}", "isinstance({v}, Node) and key({v}) == {0}")
"""A call of the operator with this key."""
IS_ONE_OF = Kind(Reason.OPERATOR, "operator {0} at {path}", "isinstance({v}, Node) and key({v}) in {0}")
"""A call of an operator whose key is in this tuple."""
IS_LITERAL = Kind(Reason.LITERAL, "the literal {0.value!r} at {path}", "freeze({0}.value) in outcomes({v}, {1}, {2})")
"""A Python value that equals this `LiteralValue`, as the argument {1} of the call {2}."""
IS_LIST = Kind(Reason.LITERAL, "a list of {0} at {path}", "isinstance({v}, (list, tuple)) and len({v}) == {0}")
"""A list or tuple of this length."""
HAS_ITEMS = Kind(
    Reason.LITERAL, "a list of {0} or more at {path}", "isinstance({v}, (list, tuple)) and len({v}) >= {0}"
)
"""A list or tuple of this length or more."""
HAS_RANK = Kind(Reason.CAPTURE, "a tensor of rank {0} to {1} at {path}", "{0} <= rank_of({v}) <= {1}")
"""A value of the graph that is known to have one of these ranks."""
IS_SIZE_CALL = Kind(Reason.LITERAL, "a call that reads size {0} of a value at {path}", "is_size_call({v}, {0})")
"""A node that reads the size of this dimension of its first operand."""
IS_SAME = Kind(Reason.SAME, "the same value at {path} as at {0}", "is_same({v}, {0})")
"""The same node as at another path, or an equal Python value."""
IS_SAME_NUMBER = Kind(IS_SAME.reason, IS_SAME.words, "is_same(as_number({v}, {1}), as_number({0}, {2}))")
"""The same value as at another path, where an argument takes a list or an integer that means it: `sum(x, dim=1)`.

{1} and {2} are the lengths of the lists that an integer means here and there; 0 where it means none.
"""
IS_ANOTHER = Kind(Reason.SAME, "another value at {path} than at {0}", "{v} is not {0}")
"""Another node than at another path."""
