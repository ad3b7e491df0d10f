"""Chooses which of several matches to rewrite if they consume the same nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import networkx as nx

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match.match import Match

Overlap: TypeAlias = Literal["first", "largest", "best_cover"]
_MAX_EXACT = 40
"""Largest group of connected conflicts that is solved exactly, in matches; an exact cover takes exponential time."""


def check_overlap(policy: str) -> None:
    """Raises RuleDefinitionError if there is no such policy."""
    if policy not in get_args(Overlap):
        raise RuleDefinitionError(f"overlap={policy!r} is not one of {', '.join(map(repr, get_args(Overlap)))}")


def choose(matches: Sequence[Match], policy: Overlap) -> list[int]:
    """Returns indices of matches, in order, such that no two consume the same node.

    Args:
        matches: in the order in which they were found.
        policy: "first" takes each match whose nodes are still free; "largest" considers matches that consume most
            nodes first; "best_cover" maximizes the number of consumed nodes (greedily in groups of more than 40
            connected conflicts).
    """
    consumed = [frozenset(match.nodes) - match.kept for match in matches]
    if policy == "first":
        return _greedy(range(len(matches)), consumed)
    by_size = sorted(range(len(matches)), key=lambda index: -len(consumed[index]))
    if policy == "largest":
        return sorted(_greedy(by_size, consumed))
    conflicts = _conflicts(consumed)
    chosen: list[int] = []
    for knot in nx.connected_components(conflicts):
        if len(knot) == 1:
            chosen += knot
        elif len(knot) > _MAX_EXACT:
            chosen += _greedy([index for index in by_size if index in knot], consumed)
        else:
            chosen += _heaviest(conflicts.subgraph(knot), consumed)
    return sorted(chosen)


def _greedy(order: Sequence[int], consumed: Sequence[frozenset[object]]) -> list[int]:
    taken: set[object] = set()
    chosen: list[int] = []
    for index in order:
        if taken.isdisjoint(consumed[index]):
            taken |= consumed[index]
            chosen.append(index)
    return chosen


def _conflicts(consumed: Sequence[frozenset[object]]) -> nx.Graph[int]:
    """Returns the graph of conflicts: an edge connects two matches that consume the same node."""
    conflicts: nx.Graph[int] = nx.Graph()
    conflicts.add_nodes_from(range(len(consumed)))
    by_node: dict[object, list[int]] = {}
    for index, nodes in enumerate(consumed):
        for node in nodes:
            earlier = by_node.setdefault(node, [])
            conflicts.add_edges_from((other, index) for other in earlier)
            earlier.append(index)
    return conflicts


def _heaviest(conflicts: nx.Graph[int], consumed: Sequence[frozenset[object]]) -> list[int]:
    """Returns the independent set that consumes most nodes, as the heaviest clique of the complement."""
    compatible: nx.Graph[int] = nx.complement(conflicts)
    for index in compatible.nodes:
        compatible.nodes[index]["weight"] = len(consumed[index])
    clique, _ = nx.max_weight_clique(compatible, weight="weight")
    return list(clique)
