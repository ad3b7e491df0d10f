"""Reads the arguments of calls that a pattern mentions, if all other arguments have their defaults."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.match.values import frozen, has_node, signature

__all__ = ["ArgumentReader"]


class ArgumentReader:
    """Reads the mentioned arguments of a call, if they exist and all others have their defaults.

    How to read a call is computed once per spelling of the call.
    """

    __slots__ = ("_known", "_pair", "_spelled", "mentioned")

    def __init__(self, mentioned: tuple[str, ...]) -> None:
        self.mentioned = mentioned
        self._known: dict[ops.Layout, _Reading | None] = {}
        self._spelled: dict[tuple[Any, ...], _Reading] = {}
        self._pair = (
            (mentioned.index("self"), mentioned.index("other")) if set(mentioned) == {"self", "other"} else None
        )

    def read(self, node: fx.Node) -> Sequence[Any] | None:
        """Returns the mentioned arguments in order, or None. If two operands commute, a number comes second."""
        spelling = ops.spelling(node)
        reading = self._spelled.get(spelling)
        if reading is None:
            layout = signature(node)
            if layout is None:
                return None
            if layout not in self._known:
                self._known[layout] = self._work_out(layout, node)
            reading = self._known[layout]
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

    def _work_out(self, layout: ops.Layout, node: fx.Node) -> _Reading | None:
        others = tuple(name for name in layout.given if name not in self.mentioned)
        if not set(self.mentioned) <= set(layout.names) or not set(others) <= layout.defaults.keys():
            return None
        commutes = self._pair is not None and ops.is_commutative(ops.key(node))
        return _Reading(layout, self.mentioned, others, commutes)


class _Reading:
    """How to read the arguments of one spelling of a call."""

    __slots__ = ("_get", "_layout", "_mentioned", "_others", "commutes")

    def __init__(self, layout: ops.Layout, mentioned: tuple[str, ...], others: tuple[str, ...], commutes: bool) -> None:
        self._layout = layout
        self._mentioned = mentioned
        self._others = others
        self.commutes = commutes
        plain = [layout.plain[name] for name in mentioned if name in layout.plain]
        is_plain = len(plain) == len(mentioned) > 1 and not others
        self._get = operator.itemgetter(*plain) if is_plain else None

    def read(self, node: fx.Node) -> Sequence[Any] | None:
        if self._get is not None:
            return self._get(node.args)
        bound = self._layout.bind(node.args, node.kwargs)
        defaults = self._layout.defaults
        if not all(_is_default(bound[name], defaults[name]) for name in self._others):
            return None
        return [bound[name] for name in self._mentioned]


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (not has_node(value) and frozen(value) == frozen(default))
