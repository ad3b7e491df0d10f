"""The tests that patterns lower to: (kind, path, value), read by the matcher and by the explanation alike.

A path leads from an output of the pattern through argument names and list positions to a value of the graph; once the
output nodes are chosen, every path names one value, so nothing has to be undone when an alternative fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason
from fxrewrite.pattern.terms import freeze

__all__ = [
    "FIRST",
    "REASONS",
    "Arguments",
    "Candidate",
    "Path",
    "Test",
    "found_text",
    "holds",
    "literal_outcomes",
    "test_text",
]

FIRST = "first operand"
"""The step of a path to the first argument of a node, whatever its name."""
ABSENT: Any = object()
"""What stands where a path leads nowhere; it equals nothing."""
_DIMS = frozenset({"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"})
_OTHER_RANK = frozenset({"aten::unsqueeze", "aten::stack", "aten::diag_embed"})
"""Operators whose `dim` counts dimensions of the result."""


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
    """Values by path for chosen output nodes; arguments are bound when they are first asked for."""

    __slots__ = ("_bound", "_layouts", "values")

    def __init__(self, values: dict[Path, Any]) -> None:
        self.values = values
        self._bound: dict[Path, Any] = {}
        self._layouts: dict[Path, ops.Layout | None] = {}

    def choose(self, output: int, node: fx.Node) -> Candidate:
        """A candidate in which a further output of the pattern is this node."""
        return Candidate({**self.values, Path.root(output): node})

    def value(self, path: Path) -> Any:
        """The value at the path, or ABSENT."""
        try:
            return self.values[path]
        except KeyError:
            pass
        parent, step = path.parent, path.step
        assert parent is not None
        layout = self._layouts.get(parent)
        if layout is not None and step in layout.plain:
            found = self.values[parent].args[layout.plain[step]]
        else:
            bound = self.bound(parent)
            try:
                found = bound[step]
            except (KeyError, IndexError, TypeError):
                found = next(iter(bound.values()), ABSENT) if step is FIRST and isinstance(bound, dict) else ABSENT
        self.values[path] = found
        return found

    def layout(self, path: Path) -> ops.Layout | None:
        """How the node at the path spells its arguments; None where they fit no signature."""
        try:
            return self._layouts[path]
        except KeyError:
            node = self.value(path)
            try:
                found = ops.layout_of(node.target, node.args, node.kwargs)
            except ops.BindingError:
                found = None
            self._layouts[path] = found
            return found

    def bound(self, path: Path) -> Any:
        """The bound arguments of the node at the path; the list itself where there is a list."""
        try:
            return self._bound[path]
        except KeyError:
            pass
        value = self.value(path)
        if isinstance(value, fx.Node):
            calls = value.op in ("call_function", "call_method")
            layout = self.layout(path) if calls else None
            found = {} if layout is None else layout.bind(value.args, value.kwargs)
        else:
            found = value if isinstance(value, (list, tuple)) else {}
        self._bound[path] = found
        return found


def holds(test: Test, candidate: Candidate) -> bool:
    """Whether one test is true of a candidate."""
    kind = test.kind
    if kind == "arguments":
        return Arguments(test).hold(candidate)
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
        return test.value in literal_outcomes(test.path, candidate)
    if kind == "list":
        return isinstance(value, (list, tuple)) and len(value) == test.value
    if kind == "plain":
        return value is not ABSENT and not _has_node(value)
    if kind == "optional":
        return value is None or isinstance(value, fx.Node)
    other = candidate.value(test.value)
    if kind == "other":
        return value is not other
    assert kind == "same"
    if isinstance(value, fx.Node) or isinstance(other, fx.Node):
        return value is other
    return _frozen(value) == _frozen(other)


def literal_outcomes(path: Path, candidate: Candidate) -> Iterator[Any]:
    """What a `literal` test may equal here: the matcher looks it up among the literals of all rules at once.

    A dimension has two names, from the front and from the back, when the rank is known.
    """
    value = candidate.value(path)
    if value is ABSENT or _has_node(value):
        return
    yield _frozen(value)
    if path.step in _DIMS:
        other = _other_dims(value, path, candidate)
        if other is not None:
            yield _frozen(other)


def _other_dims(value: Any, path: Path, candidate: Candidate) -> Any:
    """The same dimension, or list of dimensions, counted from the other end; None when the rank is not known."""
    assert path.parent is not None
    node = candidate.value(path.parent)
    if not isinstance(node, fx.Node) or ops.key(node) in _OTHER_RANK:
        return None
    first = next(iter(candidate.bound(path.parent).values()))
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
    """The `arguments` test at one place: all arguments that the pattern names exist, all others are at their defaults.

    What it means for a way of writing the call is worked out once. A candidate that passes has the arguments that need
    no conversion at hand, which is what the tests behind this one ask for; of two operands that commute, the number
    stands second.
    """

    __slots__ = ("_known", "_other", "_self", "mentioned", "path")

    def __init__(self, test: Test) -> None:
        self.path = test.path
        self.mentioned: tuple[str, ...] = test.value
        self._known: dict[ops.Layout, tuple[tuple[str, ...] | None, tuple[tuple[Path, int], ...], bool]] = {}
        self._self, self._other = test.path / "self", test.path / "other"

    def hold(self, candidate: Candidate) -> bool:
        """Whether they are as the pattern says."""
        path = self.path
        layout = candidate.layout(path)
        if layout is None:
            return False
        known = self._known.get(layout)
        others, plain, commutes = known if known is not None else self._work_out(layout, candidate)
        if others is None:
            return False
        values = candidate.values
        args = values[path].args
        for child, index in plain:
            values[child] = args[index]
        if commutes:
            first, second = candidate.value(self._self), candidate.value(self._other)
            if not isinstance(first, fx.Node) and isinstance(second, fx.Node):
                values[self._self], values[self._other] = second, first
        return not others or all(_is_default(candidate.value(path / name), layout.defaults[name]) for name in others)

    def _work_out(
        self, layout: ops.Layout, candidate: Candidate
    ) -> tuple[tuple[str, ...] | None, tuple[tuple[Path, int], ...], bool]:
        """The names to compare with their defaults, None where the call cannot be it; where plain arguments are; and
        whether the operands commute.
        """
        others = tuple(name for name in layout.given if name not in self.mentioned)
        fits = set(self.mentioned) <= set(layout.names) and set(others) <= layout.defaults.keys()
        plain = tuple((self.path / name, index) for name, index in layout.plain.items() if name in self.mentioned)
        commutes = set(self.mentioned) == {"self", "other"} and ops.is_commutative(ops.key(candidate.value(self.path)))
        self._known[layout] = known = (others if fits else None, plain, commutes)
        return known


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (not _has_node(value) and _frozen(value) == _frozen(default))


def _frozen(value: Any) -> Any:
    """`freeze`, with unhashable values replaced by something that equals only itself."""
    try:
        return freeze(value)
    except TypeError:
        return id(value)


def _has_node(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_node, value))
    if isinstance(value, slice):
        return any(map(_has_node, (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return any(map(_has_node, value.values()))
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
        layout = candidate.layout(test.path)
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
