"""Mixing along a sharded dimension: where operators need that dimension whole, a region moves to another one.

Propagation keeps every value sharded on the dimension that it was first sharded on. An operator that requires this
dimension whole has its operands gathered: a rank sends (P - 1) chunks. If the operator is independent in another
dimension (heads, channels, the batch), two all-to-alls of (P - 1) / P chunks are enough, one before and one after it,
and none where its neighbours run on that dimension too. So a scan, its convolution, its gates and a loop over its time
steps move as one region, and only edges that cross the region's border communicate.

From each operator that gathers, a region grows along index maps: all nodes that could run with that dimension sharded.
Which of them do is a minimum cut between "as decided" and "moved", where an edge costs the bytes that are sent when its
two ends disagree. Of the candidate dimensions the one that saves most is taken, if any does. Ties keep a node as it is.

Source: one expansion move of Boykov, Veksler and Zabih, "Fast Approximate Energy Minimization via Graph Cuts" (2001).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import networkx as nx
from torch import fx

from fxrewrite.graph.sizes import divide_exactly, size_hint
from fxrewrite.ops import key
from fxrewrite.spmd.layouts.notation import IndexMap, IndexPart
from fxrewrite.spmd.layouts.rule import tensor_of
from fxrewrite.spmd.placement import Axis, Partial, Placement, Replicate, Shard, is_same_placement
from fxrewrite.spmd.price.price import bytes_expected, redistribution_bytes
from fxrewrite.spmd.price.products import is_product
from fxrewrite.spmd.propagation.decision import Decision, operands_of, producer_of, spread, values_of

R = Replicate()
_LARGEST = 4096
"""Most nodes of a region. A larger one stops growing: a cut of some thousand nodes takes about a second."""

Decisions: TypeAlias = Mapping[fx.Node, Decision]
Network: TypeAlias = "nx.DiGraph[object]"
_KEPT, _MOVED = "kept", "moved"
"""The two sides of the cut; nodes outside of the region are kept."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """One placement in which a value is wanted: by users that run as decided, and by users that moved."""

    placement: Placement
    kept: list[object]
    moved: list[object]


class Relocation:
    """Changes decisions where fewer bytes travel when a region runs on another dimension than it was decided to.

    Args:
        decisions: of all nodes; changed in place.
        indices_of: the index map of a node that may run otherwise than decided, None for one that may not.
        derived: the nodes that are computed from sharded values.
        axis: the mesh axis.
    """

    def __init__(
        self,
        decisions: dict[fx.Node, Decision],
        indices_of: Callable[[fx.Node], IndexMap | None],
        derived: set[fx.Node],
        axis: Axis,
    ) -> None:
        self.decisions, self.indices_of, self.derived = decisions, indices_of, derived
        self.num_ranks = axis.size
        self._operands_of = cache(operands_of)
        self._tried: set[tuple[fx.Node, str]] = set()

    def run(self, graph: fx.Graph) -> None:
        """Visit every operator that gathers."""
        for node in graph.nodes:
            if self.decisions[node].gathered:
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        """Move the region around an operator that gathers to the dimension that saves most."""
        # Each candidate is priced with all else as decided; the best replaces the decisions, so that later operators
        # that gather see it. A strict comparison keeps the graph as it is where nothing is saved.
        most, best = 0, dict[fx.Node, Decision]()
        for part in self._candidates(node):
            region = self._grow(node, part)
            moved = self._cheapest(region)
            saved = self._saved(moved)
            if saved > most:
                most, best = saved, moved
        self.decisions.update(best)
        # What takes one of several results of a node follows the node.
        for moved in best:
            for value, index in values_of(moved):
                if value is not moved:
                    self.decisions[value] = best[moved].item(index)
        for moved in best:
            self._say_what_is_gathered(moved)

    def _candidates(self, node: fx.Node) -> Iterator[IndexPart]:
        """Indices of the results that every sharded operand has.

        An operand that lacks the index would still be gathered. One that was tried from another operator of the same
        region is not tried again: the region, and so the cut, would be the same.
        """
        indices = self.indices_of(node)
        if indices is None or not indices.results:
            return
        sharded = [
            terms
            for terms, operand in zip(indices.operands, self._operands_of(node), strict=True)
            if self.decisions[operand].produced[0] != R
        ]
        for index in dict.fromkeys(index for dim in indices.results[0] for index in dim):
            is_in_all = all(indices.has(terms, index) for terms in sharded)
            if is_in_all and (node, index) not in self._tried:
                yield IndexPart(index)

    # what could move

    def _grow(self, seed: fx.Node, part: IndexPart) -> dict[fx.Node, Decision]:
        """The nodes that are connected with `seed` by values that have the sharded index, and how they run on it."""
        region: dict[fx.Node, Decision] = {}
        todo = deque([(seed, part)])
        while todo and len(region) < _LARGEST:
            node, part = todo.popleft()
            indices = self.indices_of(node)
            if node in region or indices is None or not self._can_run(indices, part):
                continue
            if node is not seed and self._is_projection(node, indices):
                continue
            region[node] = spread(indices, part, f"moved to {part.index}")
            if self.decisions[node].gathered:
                self._tried.add((node, part.index))
            # Both ways: a move pays where it takes producers and users along, and their border is further away.
            todo.extend(self._users(node, region[node]))
            todo.extend(self._producers(node, region[node]))
        return region

    def _can_run(self, indices: IndexMap, part: IndexPart) -> bool:
        """Whether a node may run on `part` without partial results, each rank with as many entries as any other."""
        if indices.must_join(part) or not all(indices.has(terms, part.index) for terms in indices.results):
            return False
        runs = divide_exactly(indices.sizes[part.index], part.within)
        return runs is not None and divide_exactly(runs, self.num_ranks) is not None

    def _users(self, node: fx.Node, decision: Decision) -> Iterator[tuple[fx.Node, IndexPart]]:
        for value, result in values_of(node):
            for user in value.users:
                indices = self.indices_of(user)
                if indices is None:
                    continue
                terms = indices.operands[self._operands_of(user).index(value)]
                part = indices.locate(terms, decision.produced[result])
                if part is not None:
                    yield user, part

    def _producers(self, node: fx.Node, decision: Decision) -> Iterator[tuple[fx.Node, IndexPart]]:
        for operand, want in zip(self._operands_of(node), decision.required, strict=True):
            producer, result = producer_of(operand)
            indices = self.indices_of(producer) if producer in self.derived else None
            if indices is not None:
                part = indices.locate(indices.results[result], want)
                if part is not None:
                    yield producer, part

    def _is_projection(self, node: fx.Node, indices: IndexMap) -> bool:
        """Whether the node multiplies sharded values by one replicated matrix, as linear layers do.

        Regions end there. Their features are summed over, so nothing stays sharded on them through the product, and a
        region over the batch would otherwise be the whole model.
        """
        if not is_product(node) or any(isinstance(give, Partial) for give in self.decisions[node].produced):
            return False
        derived, others = set[str](), list[set[str]]()
        for operand, terms in zip(self._operands_of(node), indices.operands, strict=True):
            names = {index for dim in terms for index in dim}
            if operand in self.derived:
                derived |= names
            else:
                others.append(names)
        kept = {index for terms in indices.results for dim in terms for index in dim}
        return any(names.isdisjoint(derived & kept) for names in others)

    # what of it moves

    def _cheapest(self, region: Mapping[fx.Node, Decision]) -> dict[fx.Node, Decision]:
        """The nodes of `region` that move, so that as few bytes as possible are sent."""
        network: Network = nx.DiGraph()
        network.add_nodes_from((_KEPT, _MOVED))
        for value in self._values(region):
            self._add_costs(network, value, region)
        for node in region:
            _connect(network, node, _MOVED, self._halo(node))
        _, (_, moved) = nx.minimum_cut(network, _KEPT, _MOVED)
        return {node: decision for node, decision in region.items() if node in moved}

    def _add_costs(self, network: Network, value: fx.Node, region: Mapping[fx.Node, Decision]) -> None:
        """Edges that are cut, and so are paid, where `value` is sent: once for each placement that any user requires.

        A node on the "kept" side runs as decided. Users that require the same placement share one collective, so its
        price must not be paid for each: they are joined by edges that are never cut. A price of keeping any of them is
        an edge from the joint to "moved"; a price of moving any of them is an edge from "kept" to the joint.
        """
        producer, result = producer_of(value)
        here = self.decisions[value].produced[0]
        there = region[producer].produced[result] if producer in region else here
        source = producer if producer in region else _KEPT
        for demand in self._demands(value, region):
            # What is paid whether the producer moves or not (`at_least`) depends on the users alone; the difference
            # depends on the producer as well.
            stays, goes = (self._travel(value, placement, demand.placement) for placement in (here, there))
            at_least = min(stays, goes)
            if demand.kept:
                _connect(network, demand.kept, _MOVED, at_least)
                if producer in region:
                    _connect(network, demand.kept, producer, goes - at_least)
            if demand.moved:
                _connect(network, _KEPT, demand.moved, at_least)
                _connect(network, source, demand.moved, stays - at_least)

    def _demands(self, value: fx.Node, region: Mapping[fx.Node, Decision]) -> list[_Demand]:
        demands: dict[str, _Demand] = {}

        def demand(want: Placement) -> _Demand:
            return demands.setdefault(str(want), _Demand(want, [], []))

        for user in value.users:
            operands = self._operands_of(user)
            for want in self.decisions[user].required_of(operands, value):
                demand(want).kept.append(user if user in region else _KEPT)
            for want in region[user].required_of(operands, value) if user in region else ():
                demand(want).moved.append(user)
        return list(demands.values())

    # costs

    def _saved(self, moved: Decisions) -> int:
        """How many bytes fewer are sent when the nodes in `moved` run so.

        Of all values that the region reads or makes, before and after: the cut's value is not what it saves.
        """
        after: dict[fx.Node, Decision] = {}
        for node, decision in moved.items():
            after[node] = decision
            after |= {value: decision.item(index) for value, index in values_of(node) if value is not node}
        halos = sum(map(self._halo, moved))
        return halos + sum(self._bytes(value, {}) - self._bytes(value, after) for value in self._values(moved))

    def _halo(self, node: fx.Node) -> int:
        """What the node as decided reads beside its chunk, in the unit of `_travel`; moved, it reads nothing there."""
        indices, wants = self.indices_of(node), self.decisions[node].required
        if indices is None or not indices.beside or self.num_ranks == 1 or not isinstance(want := wants[0], Shard):
            return 0
        part, value = indices.locate(indices.operands[0], want), self._operands_of(node)[0]
        count = 0 if part is None else indices.beside.get(part.index, 0)
        sent = bytes_expected(value) * count / max(1, size_hint(tensor_of(value).shape[want.dim]))
        return round(sent * self.num_ranks**2 / (self.num_ranks - 1)) + (count > 0)

    def _bytes(self, value: fx.Node, changed: Decisions) -> int:
        """The bytes that are sent of `value`: once for each placement that users require."""
        produced = changed.get(value, self.decisions[value]).produced[0]
        required: dict[str, Placement] = {}
        for user in value.users:
            decision = changed.get(user, self.decisions[user])
            required |= {str(want): want for want in decision.required_of(self._operands_of(user), value)}
        return sum(self._travel(value, produced, want) for want in required.values())

    def _travel(self, value: fx.Node, src: Placement, dst: Placement) -> int:
        """The bytes that a rank sends to bring `value` from `src` to `dst`, times P^2 / (P - 1).

        So they are a whole number, as capacities of a minimum cut should be: that of all bytes for an all-to-all. Of
        two ways that send as much the one that leaves no rank with the whole value is cheaper, by one unit.
        """
        if src == R or is_same_placement(src, dst) or self.num_ranks == 1:
            return 0
        sent = redistribution_bytes(bytes_expected(value), src, dst, self.num_ranks)
        return round(sent * self.num_ranks**2 / (self.num_ranks - 1)) + (isinstance(src, Shard) and dst == R)

    def _values(self, region: Decisions) -> list[fx.Node]:
        """All that a node of the region reads or makes."""
        values = dict.fromkeys(value for node in region for value, _ in values_of(node))
        return list(values | dict.fromkeys(operand for node in region for operand in self._operands_of(node)))

    def _say_what_is_gathered(self, node: fx.Node) -> None:
        decision = self.decisions[node]
        placed = [self.decisions[operand].produced[0] for operand in self._operands_of(node)]
        whole = [
            i for i, (have, want) in enumerate(zip(placed, decision.required, strict=True)) if have != R and want == R
        ]
        if whole:
            why = f"{key(node)} {decision.why}; operand {whole} must be whole there"
            self.decisions[node] = replace(decision, gathered=why)


def _connect(network: Network, before: object, after: object, cost: int) -> None:
    """An edge of `cost` from any of `before` to any of `after`; nodes of a list are joined, and pay it once."""
    if cost <= 0:
        return
    for group, outward in ((before, True), (after, False)):
        if isinstance(group, list):
            joint = object()
            ends = [(node, joint) if outward else (joint, node) for node in group]
            network.add_edges_from(ends)  # without a capacity: never cut
            before, after = (joint, after) if outward else (before, joint)
    if network.has_edge(before, after):
        network[before][after]["capacity"] += cost
    else:
        network.add_edge(before, after, capacity=cost)
