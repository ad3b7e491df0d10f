"""Equal runs of nodes, such as the layers of a model: a graph's order cut into parts, of which many are equal.

    embed, a b c d, a b c d, a b c d, head     ->   [embed] [a b c d] [a b c d] [a b c d] [head]

Parts are intervals of the graph's order. So each part is convex, and effects, random draws and collectives stay in
order. Two parts are equal (`Part.key`) if they run the same operators with the same literals on values of the same
dtype, shape, stride and device, and read each other and what is before them in the same way. Names do not count.

Repeats are found in the text of the nodes, without their wiring: substrings of 1, 2, 4, 8, ... nodes get numbers that
are equal for equal substrings (Karp, Miller and Rosenberg 1972), from which follows how far two matches extend. A
repeat that touches its next occurrence is periodic; it is cut where the fewest bytes pass from one period to the next.
The selection is greedy: the candidate that saves most first. O(n log n) for n nodes, and the lifetimes of values that
must not pass from part to part.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.graph.bodies import bodies
from fxrewrite.graph.node_keys import decided_names, key_of_node, look_of
from fxrewrite.graph.numbered_text import NumberedText
from fxrewrite.graph.sizes import size_hint
from fxrewrite.ops import (
    is_maybe_view,
    is_view,
    memory_origins,
    mutated,
    nodes_in,
    tensors_of,
    value,
    without_gradients,
)

_PART_COST = 16
"""What compiling a part costs besides its nodes, in nodes: a backend's own work for a graph, forward and backward."""
_CALL_COST = 3
"""What one more call weighs, in nodes that are compiled: each call takes time, and fuses nothing with the next one."""
_LEAST_SAVED = 0.2
"""Smallest share of the cost that makes it worthwhile to cut a graph at all."""
_LEAST_NODES = 3
"""Smallest repeat (nodes)."""
_MOST_CANDIDATES = 64
"""How many candidates are compared in a round: those that could save most."""


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive nodes of a graph, as a function."""

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    """What it reads of the rest of the graph, in the order of the first reads; then inputs that are symbolic sizes."""
    gives: tuple[fx.Node, ...]
    """Which of its nodes are read outside of it, in order."""
    key: Hashable
    """Equal for parts that compute the same function of what they read."""


@dataclass(frozen=True)
class Parts:
    """A graph as a list of parts, in order; one part if nothing repeats."""

    parts: list[Part]
    left_out: list[str] = field(default_factory=list[str])
    """Why repeats that were seen are no parts of their own."""


def cut_repeats(gm: fx.GraphModule) -> Parts:
    """Returns the graph's calls in parts, so that compiling each distinct part once costs least.

    A graph is not cut where that would change what it does or what it holds for the backward pass: where autograd is
    switched off, within a checkpointed region, and where something other than a tensor or a size is passed on, a size
    that depends on data, a value that the backward pass must compute again, or a view of memory that is written to.

    Args:
        gm: a graph with fake values under `meta["val"]` or `meta["example_value"]`.
    """
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    texts = [key_of_node(gm, node) for node in nodes]
    make = _PartMaker(gm, nodes, texts)
    whole = Parts([make(0, len(nodes))] if nodes else [])
    text = NumberedText(texts)
    cuts = _Cuts(nodes)
    chosen, left_out = _choose(text, cuts)
    if not chosen:
        return Parts(whole.parts, left_out)
    parts = [make(start, end) for start, end in _intervals(chosen, len(nodes))]
    cost, before = _cost((part.key, len(part.nodes)) for part in parts), len(nodes) + _PART_COST
    left_out += list(dict.fromkeys(_why_distinct(parts)))
    if cost > (1 - _LEAST_SAVED) * before:
        return Parts(whole.parts, [*left_out, f"parts of {cost} nodes would be compiled where the graph has {before}"])
    return Parts(parts, left_out)


def _cost(parts: Iterator[tuple[Hashable, int]]) -> int:
    """What it costs to compile the distinct ones of these parts, and to call all, in nodes."""
    sizes, calls = dict[Hashable, int](), 0
    for part_key, num_nodes in parts:
        sizes[part_key] = num_nodes
        calls += 1
    return sum(sizes.values()) + _PART_COST * len(sizes) + _CALL_COST * calls


class _Cuts:
    """Where the order of nodes may be cut: what passes each place, in bytes, and why it must not be cut there.

    Place i is before node i.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        at = {node: i for i, node in enumerate(nodes)}
        end = len(nodes)
        passing, self.why = [0] * (end + 2), [""] * (end + 1)
        written = memory_origins(*(target for node in nodes for target in mutated(node)))
        for i, node in enumerate(nodes):
            readers = [at.get(user, end) for user in node.users]
            last = max(readers, default=i)
            num_bytes = sum(size_hint(t.numel()) * t.element_size() for t in tensors_of(node))
            passing[i + 1] += num_bytes
            passing[last + 1] -= num_bytes
            last = max((at[user] for user in node.users if user in at), default=i)  # what is returned may pass
            for why, until in _kept_together(node, last, at, written):
                for place in range(i + 1, until + 1):
                    self.why[place] = why
        self.bytes = list(itertools.accumulate(passing))[: end + 1]
        off = without_gradients(nodes)
        for i, node in enumerate(nodes):
            if node in off or (i and nodes[i - 1] in off):
                self.why[i] = "autograd is switched off there"

    def allow(self, place: int) -> bool:
        return not self.why[place]


def _kept_together(
    node: fx.Node, last: int, at: Mapping[fx.Node, int], written: set[fx.Node]
) -> Iterator[tuple[str, int]]:
    """Yields why the graph must not be cut between a node and some of its readers, and the position of the last."""
    found = value(node)
    if not isinstance(found, (torch.Tensor, int, torch.SymInt)) or isinstance(found, bool):
        yield f"%{node.name} is neither a tensor nor a size", last
    elif free_unbacked_symbols(found):
        yield f"%{node.name} has a size that depends on data", last
    policy, region = node.meta.get("recompute"), node.meta.get("ac_graph_id")
    if policy == CheckpointPolicy.MUST_RECOMPUTE:
        yield f"%{node.name} must be computed again in the backward pass", last
    elif region is not None and policy == CheckpointPolicy.PREFER_RECOMPUTE:
        same = [at[user] for user in node.users if user in at and user.meta.get("ac_graph_id") == region]
        if same:
            yield f"%{node.name} is inside of a checkpointed region", max(same)
    is_written = node in written or (bool(node.args) and node.args[0] in mutated(node))
    if is_written or (written and (is_view(node) or is_maybe_view(node)) and written & memory_origins(node)):
        yield f"%{node.name} is memory that is written to", last


@dataclass(frozen=True)
class _Candidate:
    """[start, end) repeats its own first `period` nodes; or, if it is shorter, it occurs again `period` nodes later."""

    start: int
    end: int
    period: int

    @property
    def is_periodic(self) -> bool:
        return self.end - self.start >= 2 * self.period

    @property
    def could_save(self) -> int:
        return self.end - self.start - (self.period if self.is_periodic else 0)


def _candidates(text: NumberedText) -> list[_Candidate]:
    """The repeats that could save most, first."""
    found: dict[_Candidate, None] = {}
    for a, b in text.pairs():
        length, period = text.common(a, b), b - a
        end = (b if length >= period else a) + length
        found[_Candidate(a, end, period)] = None
        while period < _PART_COST and end - a >= 4 * period:  # several short periods are one part
            period *= 2
            found[_Candidate(a, end, period)] = None
    return sorted(found, key=lambda candidate: -candidate.could_save)[:_MOST_CANDIDATES]


def _choose(text: NumberedText, cuts: _Cuts) -> tuple[list[tuple[int, int]], list[str]]:
    """The intervals that become parts of their own, and why candidates are none."""
    chosen: list[tuple[int, int]] = []
    left_out: dict[_Candidate, str] = {}
    candidates = _candidates(text)
    cost = len(text) + _PART_COST
    while True:
        best: tuple[int, list[tuple[int, int]]] | None = None
        covered = _covered(chosen, len(text))
        for candidate in candidates:
            blocks = _blocks(candidate, text, cuts, covered)
            if len(blocks) < 2:
                if not chosen and candidate.could_save > _LEAST_SAVED * len(text):
                    left_out[candidate] = _why_left_out(candidate, cuts)
                continue
            parts = _intervals([*chosen, *blocks], len(text))
            found = _cost((text.name(start, end), end - start) for start, end in parts)
            if best is None or found < best[0]:
                best = found, blocks
        if best is None or best[0] >= cost:
            break
        cost = best[0]
        chosen = sorted([*chosen, *best[1]])
    return chosen, list(dict.fromkeys(left_out.values())) if not chosen else []


def _covered(chosen: Sequence[tuple[int, int]], length: int) -> list[bool]:
    covered = [False] * length
    for start, end in chosen:
        covered[start:end] = [True] * (end - start)
    return covered


def _blocks(candidate: _Candidate, text: NumberedText, cuts: _Cuts, covered: Sequence[bool]) -> list[tuple[int, int]]:
    """The occurrences of a candidate that the graph can be cut at, without overlap."""
    first = _first_block(candidate, cuts)
    if first is None or first[1] - first[0] < _LEAST_NODES:
        return []
    length, place = first[1] - first[0], 0
    num_covered = list(itertools.accumulate((int(is_covered) for is_covered in covered), initial=0))
    found: list[tuple[int, int]] = []
    for start in text.occurrences(*first):
        end = start + length
        if start >= place and cuts.allow(start) and cuts.allow(end) and num_covered[start] == num_covered[end]:
            found.append((start, end))
            place = end
    return found


def _first_block(candidate: _Candidate, cuts: _Cuts) -> tuple[int, int] | None:
    """The interval that repeats: of a period where most blocks can be cut out, and fewest bytes pass between these."""
    start, end, period = candidate.start, candidate.end, candidate.period
    if not candidate.is_periodic:
        places = [i for i in range(start, end + 1) if cuts.allow(i) and cuts.allow(i + period)]
        margin = (end - start) // 4
        begins, ends = [i for i in places if i <= start + margin], [i for i in places if i >= end - margin]
        return (
            (min(begins, key=cuts.bytes.__getitem__), min(ends, key=cuts.bytes.__getitem__))
            if begins and ends
            else None
        )
    best: tuple[tuple[int, int], tuple[int, int]] | None = None
    for phase in range(start, start + period):
        blocks = [(i, i + period) for i in range(phase, end - period + 1, period)]
        blocks = [block for block in blocks if cuts.allow(block[0]) and cuts.allow(block[1])]
        rank = -len(blocks), sum(cuts.bytes[i] + cuts.bytes[j] for i, j in blocks)
        if blocks and (best is None or rank < best[0]):
            best = rank, blocks[0]
    return best and best[1]


def _intervals(chosen: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """These intervals and those between them."""
    places = sorted({0, length, *(place for interval in chosen for place in interval)})
    return list(itertools.pairwise(places))


def _why_left_out(candidate: _Candidate, cuts: _Cuts) -> str:
    length = candidate.end - candidate.start
    times = max(length // candidate.period, 2)
    said = f"{min(length, candidate.period)} nodes that repeat {times} times cannot be cut out"
    reasons = Counter(cuts.why[candidate.start : candidate.end + 1])
    reasons.pop("", None)
    return f"{said}: {reasons.most_common(1)[0][0]}" if reasons else f"{said}: its occurrences overlap"


def _why_distinct(parts: Sequence[Part]) -> Iterator[str]:
    """Yields why parts of the same operators are compiled apart."""
    alike: dict[Hashable, list[Part]] = {}
    for part in parts:
        assert isinstance(part.key, tuple)
        alike.setdefault(part.key[0], []).append(part)
    for same in alike.values():
        keys = {part.key for part in same}
        if len(keys) > 1:
            yield f"{len(same)} equal runs of {len(same[0].nodes)} nodes are {len(keys)} regions: {_difference(same)}"


def _difference(parts: Sequence[Part]) -> str:
    first, other = parts[0], next(part for part in parts if part.key != parts[0].key)
    if len(first.reads) != len(other.reads):
        return f"they read {len(first.reads)} and {len(other.reads)} values"
    if len(first.gives) != len(other.gives):
        return f"{len(first.gives)} and {len(other.gives)} of their values are read outside"
    return f"%{first.nodes[0].name} and %{other.nodes[0].name} begin runs that read their inputs in another order"


class _PartMaker:
    """Makes parts of the nodes in an interval."""

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[fx.Node], texts: Sequence[Hashable]) -> None:
        self._nodes, self._texts = nodes, texts
        self._sizes: dict[Any, fx.Node] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            found = value(node)
            if isinstance(found, torch.SymInt):
                self._sizes.setdefault(found.node.expr, node)
        self._bodies = {path for path, _ in bodies(gm)}

    def __call__(self, start: int, end: int) -> Part:
        nodes = self._nodes[start:end]
        local = {node: i for i, node in enumerate(nodes)}
        reads: dict[fx.Node, int] = {}
        wiring: list[tuple[int, ...]] = []
        for node in nodes:
            wires: list[int] = []
            for operand in nodes_in((node.args, node.kwargs)):
                if operand in local:
                    wires.append(local[operand])
                elif not (operand.op == "get_attr" and operand.target in self._bodies):
                    wires.append(-1 - reads.setdefault(operand, len(reads)))
            wiring.append(tuple(wires))
        if self._sizes:
            for symbol in sorted({s for node in (*nodes, *reads) for s in _symbols(node)}, key=str):
                if symbol in self._sizes:
                    reads.setdefault(self._sizes[symbol], len(reads))
        gives = tuple(node for node in nodes if any(user not in local for user in node.users))
        looks = tuple(look_of(value(node)) for node in reads)
        texts = tuple(self._texts[start:end])
        names = decided_names(nodes)
        decided = tuple(look_of(value(node), names) for node in nodes) if names else ()
        ids = [node.meta.get("ac_graph_id", -1) for node in nodes]
        order = {number: i for i, number in enumerate(sorted(set(ids)))}
        checkpoints = tuple(order[number] for number in ids)
        part_key = (texts, tuple(wiring), looks, tuple(local[node] for node in gives), checkpoints, decided)
        return Part(tuple(nodes), tuple(reads), gives, part_key)


def _symbols(node: fx.Node) -> set[Any]:
    sizes = [node_value for node_value in (value(node),) if isinstance(node_value, torch.SymInt)]
    for tensor in tensors_of(node):
        sizes += [s for s in (*tensor.shape, *tensor.stride(), tensor.storage_offset()) if isinstance(s, torch.SymInt)]
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}
