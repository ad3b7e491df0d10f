"""Walks over a graph: what a node is computed from, what is computed from it, and in which order.

A walk follows the edges that a function gives, which says so where it ends: `lambda node: ()` is a node alone.

>>> import operator
>>> graph = fx.Graph()
>>> x = graph.placeholder("x")
>>> y = graph.call_function(operator.neg, (x,))
>>> [node.name for node in reached([y])], [node.name for node in operands_first(y)]
(['neg', 'x'], ['x', 'neg'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from torch import fx

Edges: TypeAlias = "Callable[[fx.Node], Iterable[fx.Node]]"


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads."""
    return node.all_input_nodes


def reached(starts: Iterable[fx.Node], edges: Edges = inputs_of) -> Iterator[fx.Node]:
    """The starts and all nodes that edges lead to from there, each once, in no order; found as they are asked for.

    Args:
        starts: the nodes to start from.
        edges: where to go from a node; by default to what it reads, so that its ancestors are reached.
    """
    todo, seen = list(starts), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo.extend(edges(node))


def operands_first(node: fx.Node, edges: Edges = inputs_of) -> Iterator[fx.Node]:
    """The node and all that edges lead to, each once, and after those that edges lead to from it.

    The order depends on the edges alone, not on that of the graph, so equal computations are walked alike.
    """
    done, todo = set[fx.Node](), [node]
    while todo:
        current = todo[-1]
        missing = [] if current in done else [operand for operand in edges(current) if operand not in done]
        if missing:
            todo += missing
            continue
        todo.pop()
        if current not in done:
            done.add(current)
            yield current
