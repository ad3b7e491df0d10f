"""Evaluates nodes that depend on sizes only, at any lengths.

A causal mask, positions, a rotary table without its frequencies: they do not depend on an input's data, so computing
them shows what they are, also at lengths with which the graph was not traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite.graph.sizes import Size
from fxrewrite.graph.walk import operands_first
from fxrewrite.ops import is_pure, is_random, value
from fxrewrite.torch_versions import hint_of_expression


class OpenValueError(ValueError):
    """The node's value depends on an input's data or a random number, or cannot be computed in isolation."""


class LargeValueError(OpenValueError):
    """The node's value is too large to be computed while a graph is compiled."""


_MOST_ENTRIES = 1 << 26
"""Largest value (elements) that is computed at compile time: 64 Mi elements take 64 to 512 MiB."""


class ClosedValues:
    """Computes nodes on the CPU, with `lengths` for the graph's symbols; other symbols have their hints."""

    def __init__(self, lengths: Mapping[sympy.Symbol, int]) -> None:
        self._lengths = lengths
        self.others: set[sympy.Symbol] = set()
        """Symbols without a given length whose hints were used."""
        self._known: dict[fx.Node, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        """Returns the value of `node`. Raises OpenValueError, which names the node that is open or too large."""
        order = self._order(node)
        for check in (self._check_closed, self._check_size):
            for current in order:
                check(current)
        for current in order:
            self._known[current] = self._compute(current)
        return self._known[node]

    def _order(self, node: fx.Node) -> list[fx.Node]:
        """What is to be computed for `node`, operands first."""
        order = operands_first(node, lambda n: [] if n in self._known else self._operands(n))
        return [n for n in order if n not in self._known]

    def size(self, size: Size) -> int:
        """Returns the size at the lengths of this object."""
        if isinstance(size, int):
            return size
        self.others |= symbols_of(size) - self._lengths.keys()
        shapes = size.node.shape_env
        lengths = {
            symbol: self._lengths.get(symbol) or hint_of_expression(symbol, shapes, fallback=1)
            for symbol in symbols_of(size)
        }
        return int(size.node.expr.xreplace({symbol: sympy.Integer(length) for symbol, length in lengths.items()}))

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        return [] if isinstance(value(node), (int, torch.SymInt)) else node.all_input_nodes

    def _check_closed(self, node: fx.Node) -> None:
        is_size = isinstance(value(node), (int, torch.SymInt))
        if not is_size and (node.op != "call_function" or is_random(node) or not is_pure(node)):
            raise OpenValueError(f"%{node.name} does not depend on sizes alone")

    def _check_size(self, node: fx.Node) -> None:
        made = value(node)
        entries = math.prod(map(self.size, made.shape)) if isinstance(made, torch.Tensor) else 1
        if entries > _MOST_ENTRIES:
            raise LargeValueError(f"%{node.name} has {entries:,} entries, the limit is {_MOST_ENTRIES:,}")

    def _compute(self, node: fx.Node) -> Any:
        made = value(node)
        if isinstance(made, (int, torch.SymInt)):
            return self.size(made)
        return self.call(node, lambda n: self._known[n])

    def call(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> Any:
        """Calls the node's function on these operands, on the CPU. Raises OpenValueError if the function raises."""
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        try:
            return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]  # a call_function's target
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise OpenValueError(f"%{node.name} cannot be computed at {dict(self._lengths)}: {error}") from error


def expression(node: fx.Node) -> str:
    """Returns the computation of a node as text, from the inputs on; equal texts mean equal values."""
    numbers: dict[fx.Node, int] = {}
    lines: list[str] = []
    for current in operands_first(node):
        numbers[current] = len(numbers)
        args, kwargs = map_arg((current.args, current.kwargs), lambda n: f"%{numbers[n]}")
        given = (args, kwargs) if current.op == "call_function" else value(current)
        lines.append(f"{current.op} {current.target} {given}")
    return "\n".join(lines)


def symbols_of(size: Size) -> set[sympy.Symbol]:
    """Returns the symbols in a size; none for a number."""
    return set() if isinstance(size, int) else {s for s in size.node.expr.free_symbols if isinstance(s, sympy.Symbol)}
