"""Paths from the outputs of a pattern to values of the graph, and the values found there.

A path leads from an output of the pattern through argument names and list positions to a value of the graph. Once the
output nodes are chosen, every path names one value, so a failing alternative leaves nothing to undo.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set as AbstractSet
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.pattern.terms import frozen, holds

FIRST = "first operand"
"""Step of a path that means a node's first argument, whatever its name."""
ABSENT: Any = object()
"""Value of a path that does not exist; it equals nothing."""


class Path:
    """The way to a value: `Path.root(0)` is the first output, `path / "self"` an argument of the node at `path`.

    Equal paths are one object, so hashing and comparing them is as cheap as for a pointer.
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
        """Returns the path of an output of the pattern."""
        return cls._of(None, output)

    def __truediv__(self, step: str | int) -> Path:
        return Path._of(self, step)

    def __str__(self) -> str:
        if self.parent is None:
            return "root" if self.step == 0 else "item" if self.step == -1 else f"output{self.step}"
        return f"{self.parent}[{self.step}]" if isinstance(self.step, int) else f"{self.parent}.{self.step}"

    def __repr__(self) -> str:
        return str(self)


class Candidate:
    """Values by path for chosen output nodes, computed when first requested."""

    __slots__ = ("values",)

    def __init__(self, values: dict[Path, Any]) -> None:
        self.values = values

    def choose(self, output: int, node: Any) -> Candidate:
        """Returns a candidate in which a further output of the pattern is this node, or ABSENT."""
        return Candidate({**self.values, Path.root(output): node})

    def known(self, paths: AbstractSet[Path]) -> dict[Path, Any]:
        """Returns the values by path, which include all `paths`."""
        if not paths <= self.values.keys():
            for path in paths:
                self.value(path)
        return self.values

    def value(self, path: Path) -> Any:
        """Returns the value at the path, or ABSENT."""
        try:
            return self.values[path]
        except KeyError:
            pass
        assert path.parent is not None
        found = self.values[path] = part(self.value(path.parent), path.step)
        return found


_CALLS = ("call_function", "call_method", "call_module")


def part(value: Any, step: str | int) -> Any:
    """Returns an argument of a node, or an item of a list; ABSENT if it does not exist."""
    if not isinstance(value, fx.Node):
        is_item = isinstance(value, (list, tuple)) and isinstance(step, int) and -len(value) <= step < len(value)
        return value[step] if is_item else ABSENT  # pyright: ignore[reportCallIssue, reportArgumentType]
    signature = call_signature(value) if value.op in _CALLS else None
    if signature is None:
        return ABSENT
    bound: dict[Any, Any] = signature.bind(value.args, value.kwargs)
    return next(iter(bound.values()), ABSENT) if step == FIRST else bound.get(step, ABSENT)


def call_signature(node: fx.Node) -> ops.Signature | None:
    """Returns how the node spells its arguments; None if they fit no signature."""
    try:
        return ops.signature_of(ops.callee(node), node.args, node.kwargs)
    except ops.BindingError:
        return None


def is_same(value: Any, other: Any) -> bool:
    """Whether both are the same node, or equal Python values."""
    if isinstance(value, fx.Node) or isinstance(other, fx.Node):
        return value is other
    return frozen(value) == frozen(other)


def as_number(value: Any, repeats: int) -> Any:
    """Returns the integer that means this list as an argument that takes lists of `repeats`; else the value itself."""
    is_list = isinstance(value, (list, tuple)) and len(value) == repeats > 0
    return value[0] if is_list and all(is_same(item, value[0]) for item in value) else value


def rank_of(value: Any) -> int:
    """Returns the rank of a tensor of the graph; -1 if it is not known."""
    tensor = ops.value(value) if isinstance(value, fx.Node) else None
    return tensor.ndim if isinstance(tensor, torch.Tensor) else -1


def literal_outcomes(value: Any, step: str | int, parent: Any) -> Iterable[Any]:
    """Returns the literals that a part of `parent` may equal, which are looked up among the literals of all rules.

    If the rank is known, a dimension has two names: counted from the front and from the back. Where an operand is known
    to be of floating-point numbers, 2 and 2.0 are one number.
    """
    if value is ABSENT or holds(value, fx.Node):
        return ()
    if step in ops.DIM_ARGUMENTS:
        return dict.fromkeys(map(frozen, (value, *_other_dims(value, parent))))
    other = ops.same_number(value) if type(value) in (int, float) else None
    return (frozen(value), frozen(other)) if other is not None and _is_of_floats(parent) else (frozen(value),)


def _other_dims(value: Any, node: Any) -> Iterator[Any]:
    """Yields the dimension or dimensions, each counted from either end; nothing if the rank is unknown."""
    if not isinstance(node, fx.Node):
        return
    first = part(node, FIRST)
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    rank = rank_of(first)
    if rank < 0:
        return
    rank += ops.has_trait(node, "new_dim")
    if type(value) is int:
        yield value - rank if value >= 0 else value + rank
    elif isinstance(value, list) and len(value) <= _MOST_DIMS and all(type(dim) is int for dim in value):
        is_set = ops.has_trait(node, "dims_are_a_set")
        for dims in itertools.product(*((dim % rank, dim % rank - rank) for dim in value if rank)):
            yield sorted(dims) if is_set else list(dims)


_MOST_DIMS = 4
"""Dimensions in a list of which each is counted from either end; of more, they are compared as they are written."""


def _is_of_floats(node: Any) -> bool:
    """Whether a call of ATen has an operand of floating-point or complex numbers, so that a number becomes one too."""
    if not isinstance(node, fx.Node) or not ops.key(node).startswith("aten::"):
        return False
    return any(map(ops.has_inexact, node.all_input_nodes))
