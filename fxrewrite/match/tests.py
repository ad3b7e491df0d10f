"""The tests that patterns lower to: (kind, path, value), read by the matcher and by the explanation alike.

A path leads from an output of the pattern through argument names and list positions to a value of the graph; once the
output nodes are chosen, every path names one value, so nothing has to be undone when an alternative fails.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason
from fxrewrite.pattern.terms import freeze

__all__ = [
    "ABSENT",
    "FIRST",
    "REASONS",
    "Arguments",
    "Candidate",
    "Path",
    "Test",
    "found_text",
    "has_node",
    "holds",
    "is_same",
    "literal_outcomes",
    "part",
    "test_text",
]

FIRST = "first operand"
"""The step of a path to the first argument of a node, whatever its name."""
ABSENT: Any = object()
"""What stands where a path leads nowhere; it equals nothing."""


class Path:
    """The way to a value: `Path.root(0)` is the first output, `path / "self"` an argument of the node at `path`.

    Equal paths are one object, so that looking one up costs a pointer comparison.
    """

    __slots__ = ("parent", "step")
    _known: dict[tuple[Path | None, str | int], Path] = {}  # noqa: RUF012

    parent: Path | None
    step: str | int

    @classmethod
    def _of(cls, parent: Path | None, step: str | int) -> Path:
        found = cls._known.get((parent, step))
        if found is None:
            found = cls._known[parent, step] = cls.__new__(cls)
            found.parent = parent
            found.step = step
        return found

    @classmethod
    def root(cls, output: int) -> Path:
        """The path of an output of the pattern."""
        return cls._of(None, output)

    def __truediv__(self, step: str | int) -> Path:
        return Path._of(self, step)

    def __str__(self) -> str:
        if self.parent is None:
            return "root" if self.step == 0 else f"output{self.step}"
        return f"{self.parent}[{self.step}]" if isinstance(self.step, int) else f"{self.parent}.{self.step}"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Test:
    """One condition on the value at a path.

    Kinds: `operator` (value: key), `operators` (value: keys), `arguments` (value: the names that the pattern mentions;
    all others are at their defaults), `literal` (value: frozen literal), `list` (value: length), `node`, `param` (a
    node that reads a parameter), `plain` (no node in it), `optional` (a node or None), `same` (value: path of the value
    that it must equal), `other` (value: path of a node that it must not be).
    """

    __test__ = False  # not a test class of pytest
    kind: str
    path: Path
    value: Any = None


REASONS: Mapping[str, Reason] = {
    "operator": Reason.OPERATOR,
    "operators": Reason.OPERATOR,
    "arguments": Reason.ARGUMENTS,
    "literal": Reason.LITERAL,
    "list": Reason.LITERAL,
    "node": Reason.CAPTURE,
    "param": Reason.CAPTURE,
    "plain": Reason.CAPTURE,
    "optional": Reason.CAPTURE,
    "same": Reason.SAME,
    "other": Reason.SAME,
}
"""What it means when a test of a kind fails."""


class Candidate:
    """Values by path for chosen output nodes; found when they are first asked for."""

    __slots__ = ("values",)

    def __init__(self, values: dict[Path, Any]) -> None:
        self.values = values

    def choose(self, output: int, node: fx.Node) -> Candidate:
        """A candidate in which a further output of the pattern is this node."""
        return Candidate({**self.values, Path.root(output): node})

    def known(self, paths: AbstractSet[Path]) -> dict[Path, Any]:
        """Values by path, these among them."""
        if not paths <= self.values.keys():
            for path in paths:
                self.value(path)
        return self.values

    def value(self, path: Path) -> Any:
        """The value at the path, or ABSENT."""
        try:
            return self.values[path]
        except KeyError:
            pass
        assert path.parent is not None
        found = self.values[path] = part(self.value(path.parent), path.step)
        return found


def part(value: Any, step: str | int) -> Any:
    """An argument of a node, or an item of a list; ABSENT where there is none."""
    if not isinstance(value, fx.Node):
        is_item = isinstance(value, (list, tuple)) and isinstance(step, int) and step < len(value)
        return value[step] if is_item else ABSENT  # pyright: ignore[reportCallIssue, reportArgumentType]
    layout = layout_of(value) if value.op in ("call_function", "call_method") else None
    if layout is None:
        return ABSENT
    bound: dict[Any, Any] = layout.bind(value.args, value.kwargs)
    return next(iter(bound.values()), ABSENT) if step == FIRST else bound.get(step, ABSENT)


def layout_of(node: fx.Node) -> ops.Layout | None:
    """How the node spells its arguments; None where they fit no signature."""
    try:
        return ops.layout_of(node.target, node.args, node.kwargs)
    except ops.BindingError:
        return None


def holds(test: Test, candidate: Candidate) -> bool:
    """Whether one test is true of a candidate."""
    kind = test.kind
    if kind == "arguments":
        return Arguments(test.value).hold(test.path, candidate)
    value = candidate.value(test.path)
    if kind == "node":
        return isinstance(value, fx.Node)
    if kind == "operator":
        return isinstance(value, fx.Node) and ops.key(value) == test.value
    if kind == "operators":
        return isinstance(value, fx.Node) and ops.key(value) in test.value
    if kind == "param":
        return isinstance(value, fx.Node) and ops.is_parameter(value)
    if kind == "literal":
        parent = test.path.parent
        return test.value in literal_outcomes(value, test.path.step, candidate.value(parent) if parent else None)
    if kind == "list":
        return isinstance(value, (list, tuple)) and len(value) == test.value
    if kind == "plain":
        return value is not ABSENT and not has_node(value)
    if kind == "optional":
        return value is None or isinstance(value, fx.Node)
    other = candidate.value(test.value)
    return value is not other if kind == "other" else is_same(value, other)


def is_same(value: Any, other: Any) -> bool:
    """One node, or equal Python values."""
    if isinstance(value, fx.Node) or isinstance(other, fx.Node):
        return value is other
    return _frozen(value) == _frozen(other)


def literal_outcomes(value: Any, step: str | int, parent: Any) -> Iterator[Any]:
    """What a `literal` test of a part of `parent` may equal: the matcher looks it up among the literals of all rules.

    A dimension has two names, from the front and from the back, when the rank is known.
    """
    if value is ABSENT or has_node(value):
        return
    yield _frozen(value)
    if step in ops.DIM_ARGUMENTS:
        other = _other_dims(value, parent)
        if other is not None:
            yield _frozen(other)


def _other_dims(value: Any, node: Any) -> Any:
    """The same dimension, or list of dimensions, counted from the other end; None when the rank is not known."""
    if not isinstance(node, fx.Node) or ops.has_trait(node, "new_dim"):
        return None
    first = part(node, FIRST)
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    tensor = ops.value(first) if isinstance(first, fx.Node) else None
    if not isinstance(tensor, torch.Tensor):
        return None
    rank = tensor.ndim
    if type(value) is int:
        return value - rank if value >= 0 else value + rank
    if isinstance(value, list) and value and all(type(dim) is int for dim in value):
        from_front = all(dim >= 0 for dim in value)
        return [dim - rank if from_front else dim if dim >= 0 else dim + rank for dim in value]
    return None


class Arguments:
    """The `arguments` test of one pattern: all arguments that it names exist, all others are at their defaults.

    What that means for a way of writing the call is worked out once.
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
        """The mentioned arguments in order, or None; of two operands that commute, the number stands second."""
        spelling = ops.spelling(node)
        reading = self._spelled.get(spelling)
        if reading is None:
            layout = layout_of(node)
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

    def hold(self, path: Path, candidate: Candidate) -> bool:
        """Whether the call at the path is such; afterwards the candidate has its mentioned arguments."""
        node = candidate.value(path)
        found = self.read(node) if isinstance(node, fx.Node) else None
        if found is None:
            return False
        candidate.values.update((path / name, value) for name, value in zip(self.mentioned, found, strict=True))
        return True

    def _work_out(self, layout: ops.Layout, node: fx.Node) -> _Reading | None:
        others = tuple(name for name in layout.given if name not in self.mentioned)
        if not set(self.mentioned) <= set(layout.names) or not set(others) <= layout.defaults.keys():
            return None
        commutes = self._pair is not None and ops.is_commutative(ops.key(node))
        return _Reading(layout, self.mentioned, others, commutes)


class _Reading:
    """How the arguments of one way of writing a call are read."""

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
    return value is default or (not has_node(value) and _frozen(value) == _frozen(default))


def _frozen(value: Any) -> Any:
    """`freeze`, with unhashable values replaced by something that equals only itself."""
    try:
        return freeze(value)
    except TypeError:
        return id(value)


def has_node(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(has_node, value))
    if isinstance(value, slice):
        return any(map(has_node, (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return any(map(has_node, value.values()))
    return isinstance(value, fx.Node)


def test_text(test: Test) -> str:
    """What the test expects, in words."""
    if test.kind == "operator":
        return f"operator {test.value} at {test.path}"
    if test.kind == "operators":
        return f"operator {' or '.join(test.value)} at {test.path}"
    if test.kind == "literal":
        return f"the literal {_thaw(test.value)!r} at {test.path}"
    if test.kind == "arguments":
        return f"no arguments but {', '.join(test.value)} at {test.path}"
    if test.kind == "list":
        return f"a list of {test.value} at {test.path}"
    if test.kind == "other":
        return f"another value at {test.path} than at {test.value}"
    if test.kind == "same":
        return f"the same value at {test.path} as at {test.value}"
    words = {
        "node": "a value of the graph",
        "param": "a parameter",
        "plain": "a Python value",
        "optional": "a value of the graph or None",
    }
    return f"{words[test.kind]} at {test.path}"


test_text.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # not a test function of pytest


def found_text(test: Test, candidate: Candidate) -> str:
    """What stands at the path of the test, in words."""
    value = candidate.value(test.path)
    if test.kind == "arguments":
        layout = layout_of(value)
        if layout is None:
            return "arguments that fit no signature"
        return ", ".join(f"{name}={candidate.value(test.path / name)!r}" for name in layout.given)
    if isinstance(value, fx.Node):
        return f"{ops.key(value)} (%{value.name})"
    return "nothing" if value is ABSENT else repr(value)


def _thaw(frozen: Any) -> Any:
    """The literal that a frozen form stands for, as far as it is needed to print it."""
    kind, value = frozen
    if kind in (list, tuple):
        return kind(_thaw(item) for item in value)
    if kind is slice:
        return slice(*_thaw(value))
    return kind(value) if kind is float else value
