"""Reads the arguments of calls that a pattern mentions, if all other arguments have their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import fx

from fxrewrite import ops
from fxrewrite.match.values import call_signature, literal_outcomes
from fxrewrite.pattern.terms import frozen

_Read: TypeAlias = Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any]], Sequence[Any] | None]
"""Reads a call, which is given with its arguments; None if it does not fit."""


class ArgumentReader:
    """Reads the mentioned arguments of a call, if they exist and all others have their defaults.

    How to read a call is computed once per spelling of the call.

    Args:
        mentioned: the names of these arguments.
        operator: the key that a call must have; by default any.
    """

    __slots__ = ("_known", "_operator", "_pair", "_spelled", "mentioned")

    def __init__(self, mentioned: tuple[str, ...], operator: str = "") -> None:
        self.mentioned = mentioned
        self._operator = operator
        self._known: dict[ops.Signature, _Read | None] = {}
        self._spelled: dict[tuple[Any, ...], _Read] = {}
        self._pair = (
            (mentioned.index("self"), mentioned.index("other")) if set(mentioned) == {"self", "other"} else None
        )

    def read(self, value: Any) -> Sequence[Any] | None:
        """Returns the mentioned arguments in order, or None. If two operands commute, a number comes second."""
        if not isinstance(value, fx.Node):
            return None
        op, args, kwargs = value.op, value._args, value._kwargs  # what the properties give, in a third of the time
        if op == "call_function" or op == "call_method":
            name = id(value.target) if op == "call_function" else value.target
            read = self._spelled.get((name, len(args), *kwargs) if kwargs else (name, len(args)))  # as `ops.spelling`
            if read is not None:
                return read(value, args, kwargs)
        if self._operator and ops.key(value) != self._operator:
            return None
        read = self._new(ops.spelling(ops.callee(value), args, kwargs), value)
        return read(value, args, kwargs) if read is not None else None

    def _new(self, spelling: tuple[Any, ...], node: fx.Node) -> _Read | None:
        """Returns how to read a call whose spelling is new, or is not enough to know its signature."""
        signature = call_signature(node)
        if signature is None:
            return None
        if signature not in self._known:
            self._known[signature] = self._work_out(signature, node)
        read = self._known[signature]
        if read is not None and self._operator and len(ops.possible_keys(ops.callee(node))) > 1:
            read = _with_key(read, self._operator)
        if read is not None and ops.is_settled(spelling):
            self._spelled[spelling] = read
        return read

    def _work_out(self, signature: ops.Signature, node: fx.Node) -> _Read | None:
        others = tuple(name for name in signature.given if name not in self.mentioned)
        if not set(self.mentioned) <= set(signature.names) or not set(others) <= signature.defaults.keys():
            return None
        read: _Read = signature.reader(self.mentioned)
        if self._pair is not None and ops.is_commutative(ops.key(node)):
            read = _number_second(read, *self._pair)
        return _with_defaults(read, signature, others) if others else read


def _with_key(read: _Read, operator: str) -> _Read:
    """Reads arguments if the call, whose operands decide which operator it is, is one of this operator."""

    def read_if_operator(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        return read(node, args, kwargs) if ops.key(node) == operator else None

    return read_if_operator


def _number_second(read: _Read, first: int, second: int) -> _Read:
    """Reads two operands that commute: a number comes second."""

    def read_in_order(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        found = read(node, args, kwargs)
        assert found is not None
        return found[::-1] if not isinstance(found[first], fx.Node) and isinstance(found[second], fx.Node) else found

    return read_in_order


def _with_defaults(read: _Read, signature: ops.Signature, others: tuple[str, ...]) -> _Read:
    """Reads arguments if the others, which the call gives too, have their defaults."""
    read_others = signature.reader(others)
    defaults = [(name, signature.defaults[name]) for name in others]

    def read_if_default(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        values = read_others(node, args, kwargs)
        for (name, default), value in zip(defaults, values, strict=True):
            if not _is_default(value, default, name, node):
                return None
        return read(node, args, kwargs)

    return read_if_default


def _is_default(value: Any, default: Any, name: str, node: fx.Node) -> bool:
    """Whether the argument of the call is the default; of dimensions also if it is counted from the other end."""
    return value is default or frozen(default) in literal_outcomes(value, name, node)
