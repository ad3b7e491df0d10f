"""Order as data: in which sweep of a set each of its members runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import networkx as nx

from fxrewrite.errors import RuleDefinitionError

__all__ = ["generations"]


def generations(
    name: str, labels: Sequence[str], rules: Mapping[int, tuple[Sequence[str], Sequence[str]]]
) -> list[list[int]]:
    """The members of a set by sweep, each sweep in the order of the set.

    Args:
        name: of the set, for the message.
        labels: of all members, in order.
        rules: for each member that may move, by index, the labels that run before it and after it; one that is not
            among `labels` orders nothing. The other members stay where they are, and no rule moves across one.

    Raises:
        RuleDefinitionError: what runs before what has a cycle, which is printed.
    """
    place = {label: index for index, label in enumerate(labels)}
    fixed = [index for index in range(len(labels)) if index not in rules]
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(labels)))
    order.add_edges_from(pairwise(fixed))
    for index, (after, before) in rules.items():
        order.add_edges_from((place[label], index) for label in after if label in place)
        order.add_edges_from((index, place[label]) for label in before if label in place)
        order.add_edges_from((index, later) for later in fixed if later > index)
        order.add_edges_from((earlier, index) for earlier in fixed if earlier < index)
    try:
        return [sorted(generation) for generation in nx.topological_generations(order)]
    except nx.NetworkXUnfeasible:
        cycle = " before ".join(str(labels[a]) for a, _ in nx.find_cycle(order))
        first = cycle.partition(" before ")[0]
        raise RuleDefinitionError(f"set {name}: the order has a cycle: {cycle} before {first}") from None
