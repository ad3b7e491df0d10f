"""Numbers next to which entries are drawn: those that a rule's code and its graphs name."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxrewrite.ops import key, value

_MOST = 32
"""Most numbers of a rule's code and graphs next to which entries are drawn."""
_LARGEST = 1e30
_LEAST_DEFAULT, _LARGEST_DEFAULT = 8, 1 << 31
"""Defaults of arguments between these are numbers that an operator assumes, as a loss ignores the target -100."""
_ROUNDING = frozenset(f"aten::{name}" for name in ("round", "floor", "ceil", "trunc", "frac"))
_STEPS = _ROUNDING | {
    f"aten::{name}"
    for name in ("fmod", "remainder", "floor_divide", "sign", "heaviside", "gt", "ge", "lt", "le", "eq", "ne")
}
"""Operators whose results jump, as those that round do."""
_MOST_UNITS = 8
"""Most numbers at whose multiples entries are."""
_HALVES = {0.5, 1.0, 2.0}
"""Where operators that round jump, as they do at the named numbers and at half of these."""


@dataclass(slots=True)
class Points:
    """The numbers that were read so far.

    Attributes:
        numbers: their magnitudes.
        rounds: whether a graph rounds to integers.
    """

    numbers: set[float] = field(default_factory=set[float])
    rounds: bool = False

    def name(self, numbers: Iterable[Any]) -> None:
        """Adds numbers; other values are skipped."""
        self.numbers.update(abs(float(n)) for n in numbers if type(n) in (int, float) and 0 < abs(n) < _LARGEST)

    def read(self, gm: fx.GraphModule) -> None:
        """Adds the numbers that a graph names, and those that its operators assume."""
        nodes = gm.graph.nodes
        self.name(n for node in nodes if node.op != "output" for n in pytree.tree_leaves((node.args, node.kwargs)))
        self.name(n for node in nodes for n in _defaults(node.target))
        self.rounds = self.rounds or any(map(_rounds, nodes))

    def drawn(self) -> list[float]:
        """Returns the numbers next to which entries are drawn; where a graph rounds, also halves."""
        halves = {number / 2 for number in self.numbers} | _HALVES if self.rounds else set[float]()
        return sorted(self.numbers | halves)[:_MOST]


def jumps(node: fx.Node) -> bool:
    """Whether the result of a call jumps where its operands change in the last place."""
    return key(node) in _STEPS or node.kwargs.get("rounding_mode") is not None or _rounds(node)


def units(gm: fx.GraphModule) -> tuple[float, ...]:
    """Returns numbers at whose multiples or half multiples the graph jumps; empty if it jumps nowhere.

    So `round(x / s)` jumps at half multiples of `s`, `round(x * s)` at those of `1 / s`, and `x * s > t` at `t / s`.
    """
    before = [node for node in gm.graph.nodes if jumps(node)]
    if not before:
        return ()
    for node in before:  # the list grows: all that the jumping operators are computed from
        before += [operand for operand in node.all_input_nodes if operand not in before]
    steps = dict.fromkeys(n for node in before for n in _scales(node))
    pairs = [n for a in steps for b in steps if a != b for n in (a * b, a / b)]
    return tuple(n for n in dict.fromkeys([*steps, *pairs] or [1.0]) if n < _LARGEST)[:_MOST_UNITS]


def _scales(node: fx.Node) -> list[float]:
    """Returns the numbers of a call; of a product, by how much an operand changes where the result changes by 1."""
    found = Points()
    found.name(pytree.tree_leaves((node.args, node.kwargs)))
    return sorted(1 / n if key(node) == "aten::mul" else n for n in found.numbers)


@functools.cache
def _defaults(target: Any) -> tuple[Any, ...]:
    """Returns what arguments of an overload are if they are not given: the target that a loss ignores is -100."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    numbers = (argument.default_value for argument in target._schema.arguments)
    return tuple(n for n in numbers if type(n) is int and _LEAST_DEFAULT < abs(n) < _LARGEST_DEFAULT)


def _rounds(node: fx.Node) -> bool:
    """Whether a call rounds to integers: by its name, or as a cast."""
    if key(node) != "aten::to" or not node.all_input_nodes:
        return key(node) in _ROUNDING
    source, result = value(node.all_input_nodes[0]), value(node)
    are_known = isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)
    return are_known and source.is_floating_point() and not result.is_floating_point()
