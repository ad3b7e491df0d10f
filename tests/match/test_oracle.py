"""The matcher against a slow oracle: subgraph monomorphisms found by networkx, then the rules of the engine one by one.

The oracle unfolds the graph below a root into a tree, so that a value used twice is two vertices and a capture that
stands twice is two; what must be equal is compared afterwards. It shares only facts about operators with the matcher.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from networkx.algorithms.isomorphism import DiGraphMatcher
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match import Program, explain
from fxrewrite.pattern import Capture, Either, Ignore, ListOf, LiteralValue, Maybe, Op, Pattern, Term, any_, op, shared
from fxrewrite.pattern.terms import Chain, freeze, subterms, twins
from tests.random_graphs import BINARY, UNARY, random_module

Found = tuple[tuple[fx.Node, ...], frozenset[fx.Node], Hashable]
"""Outputs, all matched nodes, captures by name."""


# The oracle


@dataclass(frozen=True, slots=True)
class Step(Term):
    """One step of a chain: a call of one of these operators whose first operand matches."""

    keys: tuple[str, ...]
    base: Term


@dataclass(frozen=True, slots=True)
class OfRank(Op):
    """A call that is the twin of another where this argument has this rank."""

    name: str = ""
    ranks: tuple[int, int] = (0, 0)


def frozen(value: Any) -> Hashable:
    try:
        return freeze(value)
    except TypeError:
        return id(value)


def nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(value, found.append)  # pyright: ignore[reportArgumentType]
    return found


def readings(term: Term) -> Iterator[Term]:
    """The terms without alternatives that a term stands for."""
    if isinstance(term, Maybe):
        yield from readings(term.step)
        yield from readings(term.base)
    elif isinstance(term, Either):
        for option in term.options:
            yield from readings(option)
    elif isinstance(term, Op):
        names = [name for name, _ in term.args]
        for parts in itertools.product(*(list(readings(part)) for _, part in term.args)):
            one = replace(term, args=tuple(zip(names, parts, strict=True)))
            yield one
            for twin, name, ranks in twins(one):
                yield OfRank(twin.key, twin.args, twin.shared, twin.loose, name, ranks) if ranks else twin
    elif isinstance(term, ListOf):
        for parts in itertools.product(*map(readings, term.items)):
            yield ListOf(parts)
    elif isinstance(term, Chain):
        for run in readings(term.base):
            for length in range(term.most + 1):
                if length >= term.least:
                    yield run
                run = Step(term.keys, run)  # noqa: PLW2901
    else:
        yield term


def query_tree(term: Term) -> nx.DiGraph[int]:
    """The term as a tree; an edge has the argument names that its part may stand for."""
    tree: nx.DiGraph[int] = nx.DiGraph()

    def add(part: Term) -> int:
        vertex = tree.number_of_nodes()
        tree.add_node(vertex, term=part, is_root=not vertex)
        if isinstance(part, Op):
            names = {name for name, _ in part.args}
            pair = set(ops.exchangeable(part.key) or ())
            swaps = pair and names == {"self"} | pair and not part.loose
            for name, value in part.args:
                tree.add_edge(vertex, add(value), labels=pair if swaps and name in pair else {name})
        elif isinstance(part, ListOf):
            for index, value in enumerate(part.items):
                tree.add_edge(vertex, add(value), labels={index})
        elif isinstance(part, Step):
            tree.add_edge(vertex, add(part.base), labels={"first operand"})
        return vertex

    add(term)
    return tree


def host_tree(root: fx.Node, height: int) -> nx.DiGraph[int]:
    """What the root is computed from, each use a vertex of its own."""
    tree: nx.DiGraph[int] = nx.DiGraph()

    def add(value: Any, height: int, rank: int | None, floats: bool) -> int:
        vertex = tree.number_of_nodes()
        tree.add_node(vertex, value=value, is_root=not vertex, rank=rank, floats=floats, extra=frozenset())
        if isinstance(value, fx.Node) and value.op in ("call_function", "call_method"):
            bound = ops.bind(value)
            defaults = ops.signature_of(value.target, value.args, value.kwargs).defaults
            of_first = rank_of(next(iter(bound.values()), None))
            ranks = {name: of_first if name in ("dim", "dim0", "dim1", "dims") else None for name in bound}
            floats = any(map(ops.has_inexact, value.all_input_nodes))
            tree.nodes[vertex]["extra"] = frozenset(
                name
                for name, v in bound.items()
                if name not in defaults or normal(v, ranks[name], floats) != normal(defaults[name], ranks[name], floats)
            )
            if height:
                for name, part in bound.items():
                    labels = {name, "first operand"} if name == next(iter(bound)) else {name}
                    tree.add_edge(vertex, add(part, height - 1, ranks[name], floats), labels=labels)
        elif isinstance(value, (list, tuple)) and height:
            for index, part in enumerate(value):
                tree.add_edge(vertex, add(part, height - 1, None, floats=False), labels={index})
        return vertex

    add(root, height, None, floats=False)
    return tree


def rank_of(value: Any) -> int | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    tensor = first.meta.get("val") if isinstance(first, fx.Node) else None
    return tensor.ndim if isinstance(tensor, torch.Tensor) else None


def from_front(value: Any, rank: int | None) -> Any:
    """A dimension, or a list of them, counted from the front where the rank is known."""
    if rank is not None and isinstance(value, list):
        return [from_front(item, rank) for item in value]
    return value + rank if rank is not None and type(value) is int and value < 0 else value


def normal(value: Any, rank: int | None, floats: bool) -> Hashable:
    """A literal as what it is compared by: of calls on floats, 2 is 2.0 except among dimensions."""
    is_number = floats and rank is None and type(value) is int
    return frozen(float(value) if is_number else from_front(value, rank))


def vertex_matches(host: dict[str, Any], query: dict[str, Any]) -> bool:
    value, term = host["value"], query["term"]
    if query["is_root"] and not host["is_root"]:
        return False
    if isinstance(term, Op):
        if not isinstance(value, fx.Node) or ops.key(value) != term.key:
            return False
        if isinstance(term, OfRank):
            rank = rank_of(ops.bind(value)[term.name])
            if rank is None or not term.ranks[0] <= rank <= term.ranks[1]:
                return False
        return term.loose or host["extra"] <= {name for name, _ in term.args}
    if isinstance(term, Step):
        return isinstance(value, fx.Node) and ops.key(value) in term.keys
    if isinstance(term, Capture):
        if term.kind == "node":
            return isinstance(value, fx.Node)
        if term.kind == "param":
            return isinstance(value, fx.Node) and value.op == "get_attr"
        if term.kind == "optional":
            return value is None or isinstance(value, fx.Node)
        return term.kind == "any" or not nodes_in(value)
    if isinstance(term, LiteralValue):
        at = host["rank"], host["floats"]
        return not nodes_in(value) and normal(value, *at) == normal(term.value, *at)
    if isinstance(term, ListOf):
        return isinstance(value, (list, tuple)) and len(value) == len(term.items)
    assert isinstance(term, Ignore)
    return True


@dataclass
class Placed:
    """One reading of one output at one root: what stands where."""

    operators: list[tuple[Op | Step, fx.Node]]
    captures: list[tuple[str, Any]]


def placements(term: Term, root: fx.Node) -> Iterator[Placed]:
    query = query_tree(term)
    host = host_tree(root, nx.dag_longest_path_length(query))
    matcher = DiGraphMatcher(host, query, vertex_matches, lambda h, q: not h["labels"].isdisjoint(q["labels"]))
    for mapping in matcher.subgraph_monomorphisms_iter():
        at = {q: host.nodes[h]["value"] for h, q in mapping.items()}
        placed = [(query.nodes[q]["term"], at[q]) for q in sorted(at)]
        yield Placed(
            [(t, value) for t, value in placed if isinstance(t, (Op, Step))],
            [(t.name, value) for t, value in placed if isinstance(t, Capture)],
        )


def is_same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, fx.Node) or isinstance(b, fx.Node) else frozen(a) == frozen(b)


def settled(parts: Sequence[Placed], names: Iterable[str]) -> Found | None:
    """The match of these placements of the outputs, None where the rules of the engine forbid it."""
    outputs = tuple(part.operators[0][1] for part in parts)
    if len(set(outputs)) < len(outputs):
        return None
    captures: dict[str, Any] = {}
    for name, value in itertools.chain.from_iterable(part.captures for part in parts):
        if not is_same(captures.setdefault(name, value), value):
            return None
    operators = [item for part in parts for item in part.operators]
    drawn: dict[Op, fx.Node] = {}
    for term, node in operators:
        if isinstance(term, Op) and ops.may_be_random(term.key) and drawn.setdefault(term, node) is not node:
            return None
    nodes = frozenset(node for _, node in operators)
    for term, node in operators:
        is_shared = isinstance(term, Op) and term.shared
        readers = [user for user in node.users if user.users or user.target is not operator.getitem]
        if node not in outputs and not is_shared and not nodes.issuperset(readers):
            return None
    return outputs, nodes, tuple((name, frozen(captures.get(name))) for name in names)


def oracle(pattern: Pattern, graph: fx.Graph) -> set[Found]:
    names = [capture.name for capture in pattern.captures]
    per_output: list[list[Placed]] = []
    for output in pattern.outputs:
        terms = [term for term in dict.fromkeys(readings(output)) if isinstance(term, Op)]
        per_output.append(
            [p for term in terms for node in graph.nodes if ops.key(node) == term.key for p in placements(term, node)]
        )
    found = (settled(parts, names) for parts in itertools.product(*per_output))
    return {match for match in found if match is not None}


# The two readers that are under test


def matched(patterns: Sequence[Pattern], graph: fx.Graph) -> list[set[Found]]:
    program = Program(enumerate(patterns))
    found: list[set[Found]] = [set() for _ in patterns]
    for node, key in program.roots(graph.nodes):
        for owner, match in program.find(node, key):
            captures = tuple((capture.name, frozen(match[capture.name])) for capture in patterns[owner].captures)
            found[owner].add((match.outputs, frozenset(match.nodes), captures))
    return found


def check(patterns: Sequence[Pattern], gm: fx.GraphModule) -> int:
    """Compare all three; returns the number of matches."""
    found = matched(patterns, gm.graph)
    for pattern, matches in zip(patterns, found, strict=True):
        expected = oracle(pattern, gm.graph)
        assert matches == expected, f"{pattern}\n{gm.graph}"
        explanation = explain(pattern, gm.graph.nodes)
        roots = {match[0][0] for match in expected}
        keys = {term.key for term in readings(pattern.outputs[0]) if isinstance(term, Op)}
        anchors = {node for node in gm.graph.nodes if ops.key(node) in keys}
        missed = {miss.root for miss in explanation.misses}
        assert explanation.num_matches == len(roots), f"{explanation}\n{gm.graph}"
        assert missed == anchors - roots, f"{explanation}\n{gm.graph}"
        assert explanation.num_anchors == len(anchors)
    return sum(map(len, found))


# Patterns: cut out of the graph, then perturbed; and drawn at random


class Cutter:
    """Turns a part of a graph into a pattern that matches there, but for what the caller then changes."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def term(self, node: fx.Node, depth: int) -> Term:
        rng = self.rng
        if node.op not in ("call_function", "call_method") or depth <= 0 or rng.random() < 0.15:
            return Capture(f"p_{node.name}", "param") if rng.random() < 0.1 else Capture(f"v_{node.name}")
        defaults = ops.signature_of(node.target, node.args, node.kwargs).defaults
        args = [
            (name, self.argument(value, depth - 1))
            for name, value in ops.bind(node).items()
            if name not in defaults or frozen(value) != frozen(defaults[name]) or rng.random() < 0.1
        ]
        key = ops.key(node)
        if ops.is_commutative(key) and {name for name, _ in args} == {"self", "other"} and rng.random() < 0.5:
            args = [("self", args[1][1]), ("other", args[0][1])]
        cut = Op(key, tuple(args), shared=rng.random() < 0.3, loose=rng.random() < 0.1)
        return self.with_alternative(cut, depth)

    def chain(self, node: fx.Node, depth: int) -> Term:
        """A run of operators from the node down, with bounds that hold there or nearly so."""
        rng = self.rng
        keys: list[str] = []
        while node.op in ("call_function", "call_method") and len(keys) < 3 and rng.random() < 0.7:
            first = next(iter(ops.bind(node).values()))
            if not isinstance(first, fx.Node):
                break
            keys.append(ops.key(node))
            node = first
        least = rng.randint(0, len(keys))
        extra = rng.choice((-1, 0, 0, 1))
        named = tuple(dict.fromkeys((*keys, "aten::relu", "aten::neg")))
        return Chain(self.term(node, depth - 1), named, least, max(1, least, len(keys) + extra))

    def with_alternative(self, cut: Op, depth: int) -> Term:
        chance = self.rng.random()
        operand = next((part for _, part in cut.args if not isinstance(part, (LiteralValue, ListOf, Ignore))), None)
        if chance < 0.08 and operand is not None:
            return Maybe(cut, operand)
        if chance < 0.12:
            return Maybe(op(self.rng.choice(list(UNARY)), cut), cut)
        if chance < 0.18:
            return Either((cut, random_term(self.rng, depth)))
        return Either((random_term(self.rng, depth), cut)) if chance < 0.22 else cut

    def argument(self, value: Any, depth: int) -> Term:
        chance = self.rng.random()
        if chance < 0.06:
            return any_
        if isinstance(value, fx.Node):
            return self.chain(value, depth) if chance > 0.85 else self.term(value, depth)
        if nodes_in(value):
            if chance < 0.2:
                return Capture("a_list", "any")
            return ListOf(tuple(self.argument(item, depth) for item in value))
        if chance < 0.16:
            return Capture(self.rng.choice("cd"), "literal")
        if value is None and chance < 0.5:
            return Capture("o_none", "optional")
        return LiteralValue(value)


def random_term(rng: Random, depth: int) -> Term:
    chance = rng.random()
    if depth <= 0 or chance < 0.3:
        return Capture(rng.choice("xyz"))
    if chance < 0.55:
        term = op(rng.choice(list(UNARY)), random_term(rng, depth - 1))
    elif chance < 0.9:
        right = random_term(rng, depth - 1) if rng.random() < 0.85 else LiteralValue(rng.choice((2, 2.0, 0.5)))
        term = op(rng.choice(list(BINARY)), random_term(rng, depth - 1), right)
    else:
        term = op("softmax", random_term(rng, depth - 1), rng.choice((0, 1, -1)))
    return shared(term) if rng.random() < 0.4 else term


def perturbed(rng: Random, term: Term, chance: float) -> Term:
    """The term with some operators, literals, captures or flags changed."""
    hit = rng.random() < chance
    if isinstance(term, Op):
        if hit:
            change = rng.randrange(5)
            kind = next((kind for kind in (UNARY, BINARY) if term.key.removeprefix("aten::") in kind), None)
            if change == 0 and kind is not None:
                term = replace(term, key=f"aten::{rng.choice(list(kind))}")
            elif change == 1:
                term = replace(term, shared=not term.shared)
            elif change == 2:
                term = replace(term, loose=not term.loose)
            elif change == 3 and len(term.args) > 1:
                term = replace(term, args=term.args[:-1])
            elif len(term.args) == 2:
                (a, x), (b, y) = term.args
                term = replace(term, args=((a, y), (b, x)))
        return replace(term, args=tuple((name, perturbed(rng, part, chance)) for name, part in term.args))
    if isinstance(term, ListOf):
        items = term.items[::-1] if hit else term.items
        return ListOf(tuple(perturbed(rng, item, chance) for item in items))
    if isinstance(term, Chain):
        return replace(term, base=perturbed(rng, term.base, chance))
    if isinstance(term, Maybe):
        step = perturbed(rng, term.step, chance)
        return Maybe(step, perturbed(rng, term.base, chance)) if isinstance(step, Op) else term
    if isinstance(term, Either):
        return Either(tuple(perturbed(rng, option, chance) for option in term.options))
    if hit and isinstance(term, Capture) and term.kind == "node":
        return Capture(rng.choice(("x", "v_a", "v_b")))
    if hit and isinstance(term, LiteralValue) and type(term.value) is int:
        return LiteralValue(rng.choice((-term.value, term.value + 1, float(term.value))))
    return term


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def cut_pattern(rng: Random, gm: fx.GraphModule, num_outputs: int = 1) -> Pattern:
    cutter = Cutter(rng)
    roots = [rng.choice(calls(gm))]
    while len(roots) < num_outputs:
        used = rng.choice([node for root in roots for node in root.all_input_nodes] or roots)
        users = [user for user in used.users if user.op != "output"]
        nearby = users + [further for user in users for further in user.users if further.op != "output"]
        roots.append(rng.choice(nearby or calls(gm)))
    outputs = [cutter.term(root, rng.randint(1, 4)) for root in roots]
    chance = rng.choice((0.0, 0.0, 0.1, 0.25))
    return Pattern(tuple(perturbed(rng, output, chance) for output in outputs))


def patterns_of(rng: Random, gm: fx.GraphModule, make: Callable[[], Pattern], count: int) -> list[Pattern]:
    """Patterns that the engine takes: what it refuses is tested elsewhere."""
    found: list[Pattern] = []
    for _ in range(count):
        try:
            pattern = make()
            Program([("it", pattern)])
        except RuleDefinitionError:
            continue
        if all(sum(1 for _ in readings(output)) <= 16 for output in pattern.outputs) and is_linked(pattern):
            found.append(pattern)
    return found


def is_linked(pattern: Pattern) -> bool:
    """Whether every output shares the capture of a node with an earlier one: the matcher climbs from there."""
    for outputs in itertools.product(*map(readings, pattern.outputs)):
        seen: set[Term] = set()
        for index, output in enumerate(outputs):
            names = {term for term in subterms(output) if isinstance(term, Capture) and term.kind == "node"}
            if index and not seen & names:
                return False
            seen |= names
    return True


budget = settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
chance = st.randoms(use_true_random=False)


def cut_out_patterns(rng: Random) -> int:
    gm = random_module(rng, values=rng.random() < 0.7)
    return check(patterns_of(rng, gm, lambda: cut_pattern(rng, gm), 4), gm)


def random_patterns(rng: Random) -> int:
    gm = random_module(rng, values=rng.random() < 0.7)

    def make() -> Pattern:
        name = rng.choice(list(BINARY))
        depth = rng.randint(0, 2)
        return Pattern((op(name, random_term(rng, depth), random_term(rng, depth)),))

    return check(patterns_of(rng, gm, make, 4), gm)


def patterns_of_several_outputs(rng: Random) -> int:
    gm = random_module(rng, values=False)
    return check(patterns_of(rng, gm, lambda: cut_pattern(rng, gm, rng.choice((2, 2, 3))), 8), gm)


@given(chance)
@budget
def test_patterns_cut_out_of_the_graph_match_where_the_oracle_says(rng: Random) -> None:
    cut_out_patterns(rng)


@given(chance)
@budget
def test_random_patterns_match_where_the_oracle_says(rng: Random) -> None:
    random_patterns(rng)


@pytest.mark.slow
@given(chance)
@budget
def test_patterns_of_several_outputs_match_where_the_oracle_says(rng: Random) -> None:
    patterns_of_several_outputs(rng)


@pytest.mark.slow
@pytest.mark.parametrize("generate", [cut_out_patterns, random_patterns, patterns_of_several_outputs])
def test_the_comparison_is_not_vacuous(generate: Callable[[Random], int]) -> None:
    found = [generate(Random(seed)) for seed in range(100)]
    assert sum(found) >= 15
    assert sum(count > 0 for count in found) >= 8
