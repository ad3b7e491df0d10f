"""Reads the arguments of calls that a pattern mentions, if all other arguments have their defaults."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.match.values import call_signature, frozen, literal_outcomes

__all__ = ["ArgumentReader"]


class ArgumentReader:
    """Reads the mentioned arguments of a call, if they exist and all others have their defaults.

    How to read a call is computed once per spelling of the call.
    """

    __slots__ = ("_known", "_pair", "_spelled", "mentioned")

    def __init__(self, mentioned: tuple[str, ...]) -> None:
        self.mentioned = mentioned
        self._known: dict[ops.Signature, _Reading | None] = {}
        self._spelled: dict[tuple[Any, ...], _Reading] = {}
        self._pair = (
            (mentioned.index("self"), mentioned.index("other")) if set(mentioned) == {"self", "other"} else None
        )

    def read(self, node: fx.Node) -> Sequence[Any] | None:
        """Returns the mentioned arguments in order, or None. If two operands commute, a number comes second."""
        spelling = ops.spelling(node)
        reading = self._spelled.get(spelling)
        if reading is None:
            signature = call_signature(node)
            if signature is None:
                return None
            if signature not in self._known:
                self._known[signature] = self._work_out(signature, node)
            reading = self._known[signature]
            if reading is None:
                return None
            if ops.is_settled(spelling):
                self._spelled[spelling] = reading
        found = reading.read(node)
        if found is not None and reading.commutes:
            first, second = self._pair or (0, 0)
            if not isinstance(found[first], fx.Node) and isinstance(found[second], fx.Node):
                return found[::-1]
        return found

    def _work_out(self, signature: ops.Signature, node: fx.Node) -> _Reading | None:
        others = tuple(name for name in signature.given if name not in self.mentioned)
        if not set(self.mentioned) <= set(signature.names) or not set(others) <= signature.defaults.keys():
            return None
        commutes = self._pair is not None and ops.is_commutative(ops.key(node))
        return _Reading(signature, self.mentioned, others, commutes)


class _Reading:
    """How to read the arguments of one spelling of a call."""

    __slots__ = ("_get", "_mentioned", "_others", "_signature", "commutes")

    def __init__(
        self, signature: ops.Signature, mentioned: tuple[str, ...], others: tuple[str, ...], commutes: bool
    ) -> None:
        self._signature = signature
        self._mentioned = mentioned
        self._others = others
        self.commutes = commutes
        plain = [signature.plain[name] for name in mentioned if name in signature.plain]
        is_plain = len(plain) == len(mentioned) > 1 and not others
        self._get = operator.itemgetter(*plain) if is_plain else None

    def read(self, node: fx.Node) -> Sequence[Any] | None:
        if self._get is not None:
            return self._get(node.args)
        bound = self._signature.bind(node.args, node.kwargs)
        defaults = self._signature.defaults
        if not all(_is_default(bound[name], defaults[name], name, node) for name in self._others):
            return None
        return [bound[name] for name in self._mentioned]


def _is_default(value: Any, default: Any, name: str, node: fx.Node) -> bool:
    """Whether the argument of the call is the default; of dimensions also if it is counted from the other end."""
    return value is default or frozen(default) in literal_outcomes(value, name, node)
