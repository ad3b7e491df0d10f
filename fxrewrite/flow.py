"""Facts about the nodes of a graph, by worklist: transfer functions run until nothing changes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import fx

from fxrewrite.errors import FxRewriteError

T = TypeVar("T")


class Worklist:
    """Nodes still to visit, each at most once at a time, in topological order (or against it)."""

    def __init__(self, graph: fx.Graph, *, backward: bool = False) -> None:
        sign = -1 if backward else 1
        self._rank = {node: sign * position for position, node in enumerate(graph.nodes)}
        self._heap: list[tuple[int, fx.Node]] = []
        self._waiting: set[fx.Node] = set()

    def push(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node not in self._waiting:
                self._waiting.add(node)
                heapq.heappush(self._heap, (self._rank[node], node))

    def __iter__(self) -> Iterator[fx.Node]:
        while self._heap:
            _, node = heapq.heappop(self._heap)
            self._waiting.discard(node)
            yield node


def solve(
    graph: fx.Graph,
    transfer: Callable[[fx.Node, dict[fx.Node, T]], T],
    *,
    backward: bool = False,
    start: Iterable[fx.Node] | None = None,
    facts: dict[fx.Node, T] | None = None,
    max_visits: int = 64,
) -> dict[fx.Node, T]:
    """The least solution of `facts[node] == transfer(node, facts)` that is reached from `start` (default: every node).

    A changed fact sends the node's users (backward: its inputs) to the worklist again. Raises FxRewriteError naming
    the node when one is visited more than `max_visits` times: the transfer function does not settle.
    """
    facts = {} if facts is None else facts
    work = Worklist(graph, backward=backward)
    work.push(graph.nodes if start is None else start)
    visits: Counter[fx.Node] = Counter()
    for node in work:
        visits[node] += 1
        if visits[node] > max_visits:
            raise FxRewriteError(f"propagation does not settle at %{node.name}: visited {max_visits} times")
        fact = transfer(node, facts)
        if node not in facts or facts[node] != fact:
            facts[node] = fact
            work.push(node.all_input_nodes if backward else node.users)
    return facts
