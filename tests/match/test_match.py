"""Patterns match on meaning: spellings, defaults, operand order, optional steps, several outputs; and nothing else."""

from itertools import count
from operator import (
    abs as abs_,
    add,
    and_,
    eq,
    floordiv,
    ge,
    gt,
    invert,
    le,
    lshift,
    lt,
    matmul,
    mod,
    mul,
    ne,
    neg,
    or_,
    pos,
    rshift,
    sub,
    truediv,
    xor,
)
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match import Match, Program, explain
from fxrewrite.match.lower import lower
from fxrewrite.pattern import Literal, Maybe, either, loose, maybe, op, shared, trace, where

INTS = torch.arange(1, 10).reshape(3, 3)
PYTHON_OPERATORS = [
    *(add, sub, mul, truediv, floordiv, mod, pow, matmul, and_, or_, xor, lshift, rshift, lt, le, gt, ge, eq, ne),
    *(neg, pos, abs_, invert),
]


def graph_of(function) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def matches(pattern, function, *constraints) -> list[Match]:
    program = Program([("it", trace(pattern, constraints))])
    return [
        match for node, key in program.roots(graph_of(function).graph.nodes) for _, match in program.find(node, key)
    ]


def silu(x):
    return x * torch.sigmoid(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sigmoid(x),
        lambda x: torch.sigmoid(x) * x,
        lambda x: x.mul(x.sigmoid()),
        lambda x: torch.mul(F.sigmoid(x), x),
        lambda x: torch.ops.aten.mul.Tensor(x, torch.ops.aten.sigmoid.default(x)),
    ],
    ids=count(),
)
def test_another_spelling_of_the_same_meaning_matches(function) -> None:
    (match,) = matches(silu, function)
    assert match["x"].name == "x"
    assert len(match.nodes) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x * torch.sigmoid(y),
        lambda x, y: x + torch.sigmoid(x),
        lambda x, y: x * torch.tanh(x),
        lambda x, y: 3 * torch.sigmoid(x),
    ],
    ids=count(),
)
def test_another_meaning_does_not_match(function) -> None:
    assert matches(silu, function) == []


@pytest.mark.parametrize(
    ("pattern", "function", "expected"),
    [
        (lambda x: torch.softmax(x, dim=-1), lambda x: x.softmax(-1), True),
        (lambda x: torch.softmax(x, dim=-1), lambda x: F.softmax(x, -1, dtype=torch.float32), False),
        (lambda x: torch.softmax(x, dim=-1), lambda x: F.softmax(x, -1, dtype=None), True),
        (lambda x: torch.softmax(x, dim=-1), lambda x: F.softmax(x, 1), False),
        (lambda x: x + 1, lambda x: torch.add(x, 1, alpha=2), False),
        (lambda x: x + 1, lambda x: torch.add(x, 1, alpha=1), True),
        (lambda x: x + 1, lambda x: 1 + x, True),
        (lambda x: x - 1, lambda x: 1 - x, False),
        (lambda x: x * 1.0, lambda x: x * 1, False),
        (lambda x: x / 8, lambda x: x / 8.0, True),
        (lambda x: x.sum(), lambda x: x.sum(-1), False),
        (lambda x: x.sum(-1), lambda x: torch.sum(x, dim=[-1]), True),
        (lambda x: x.permute(0, 2, 1), lambda x: torch.permute(x, (0, 2, 1)), True),
        (lambda x: x.permute(0, 2, 1), lambda x: x.permute(0, 1, 2), False),
        (lambda x: x[0, 1], lambda x: x[[0, 1]], False),
        (lambda x: x.view(2, ...), lambda x: x.view(2, 3), True),
        (lambda x: x.view(2, ...), lambda x: x.view(3, 3), False),
        (lambda x: x.relu(), lambda x: F.relu(x, inplace=True), False),
        (lambda x: loose(op("softmax", x, ...)), lambda x: F.softmax(x, 3, dtype=torch.half), True),
        (lambda x: loose(op("add", x, 1)), lambda x: torch.add(1, x, alpha=2), False),
        (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, training=True), True),
        (lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x), False),
        (lambda x: torch.cat([x, x], 1), lambda x: torch.cat((x, x), dim=1), True),
        (lambda x: torch.cat([x, x], 1), lambda x: torch.cat((x, x, x), dim=1), False),
    ],
    ids=count(),
)
def test_arguments_are_compared_by_meaning(pattern, function, expected: bool) -> None:
    assert bool(matches(pattern, function)) == expected


@pytest.mark.parametrize("operator", PYTHON_OPERATORS, ids=lambda of: of.__name__)
def test_operators_of_python_match_their_own_text(operator) -> None:
    """As FX records them, and as the overloads that tracing makes of them."""
    functions = [lambda x, y: operator(x, y), lambda x, y: operator(x, 2) + y, lambda x, y: operator(2, x) + y]
    if operator in (neg, pos, abs_, invert):
        functions = [lambda x, y: operator(x) + y]
    for function in functions[: 1 if operator is matmul else None]:
        assert matches(function, function)  # two, where operands commute
        overloads = make_fx(function, pre_dispatch=True, tracing_mode="fake")(INTS, INTS)
        assert explain(trace(function), overloads.graph.nodes).num_matches


@pytest.mark.parametrize(
    ("pattern", "function", "expected"),
    [
        (lambda x: 1.0 - torch.sqrt(x), lambda x: 1.0 - torch.sqrt(x), True),
        (lambda x: 1.0 - torch.sqrt(x), lambda x: torch.sqrt(x) - 1.0, False),
        (lambda x: x * (1 / (1 + torch.exp(-x))), lambda x: x * (1 / (1 + torch.exp(-x))), True),
        (lambda x: 1.0 / torch.sqrt(x), lambda x: torch.reciprocal(torch.sqrt(x)), True),
        (lambda x: 2.0 / torch.sqrt(x), lambda x: 2 / torch.sqrt(x), True),
        (lambda x: 2.0 / torch.sqrt(x), lambda x: 3.0 / torch.sqrt(x), False),
        (lambda x: 2.0 / torch.sqrt(x), lambda x: torch.sqrt(x) / 2.0, False),
    ],
    ids=count(),
)
def test_a_number_on_the_left_is_another_call_in_a_graph_of_overloads(pattern, function, expected: bool) -> None:
    gm = make_fx(function)(torch.rand(2))
    assert bool(explain(trace(pattern), gm.graph.nodes).num_matches) == expected


@pytest.mark.parametrize(("dim", "expected"), [(-1, True), (2, True), (1, False), (-2, False)])
def test_a_dimension_counts_from_both_ends_when_the_rank_is_known(dim: int, expected: bool) -> None:
    gm = graph_of(lambda x: torch.softmax(x, 2))
    with FakeTensorMode():
        next(iter(gm.graph.nodes)).meta["val"] = torch.empty(2, 3, 4)
    assert explain(trace(lambda x: torch.softmax(x, dim)), gm.graph.nodes).num_matches == expected


def test_literals_are_captured_and_compared() -> None:
    def pattern(x, scale: Literal):
        return torch.relu(x * scale)

    (match,) = matches(pattern, lambda x: torch.relu(0.5 * x))
    assert match["scale"] == 0.5
    assert matches(pattern, lambda x, y: torch.relu(x * y)) == []

    def twice(x, c: Literal):
        return (x * c) + c

    assert len(matches(twice, lambda x: x * 2.0 + 2.0)) == 1
    assert matches(twice, lambda x: x * 2.0 + 3.0) == []
    assert matches(twice, lambda x: x * 2.0 + 2) == []


@pytest.mark.parametrize(
    ("pattern", "function", "expected"),
    [
        (lambda x, d: torch.sum(x, d).unsqueeze(d), lambda x: torch.sum(x, 1).unsqueeze(1), 1),
        (lambda x, d: torch.sum(x, d).unsqueeze(d), lambda x: torch.sum(x, [1]).unsqueeze(1), 1),
        (lambda x, d: torch.sum(x, d).unsqueeze(d), lambda x: torch.sum(x, [1, 1]).unsqueeze(1), None),
        (lambda x, d: torch.sum(x, d).unsqueeze(d), lambda x: torch.sum(x, 0).unsqueeze(1), None),
        (lambda x, d: torch.softmax(x, d).sum(d), lambda x: torch.softmax(x, -1).sum(-1), -1),
        (lambda x, d: x.sum(d, keepdim=True).mean(d), lambda x: x.sum((1, 2), keepdim=True).mean((1, 2)), [1, 2]),
    ],
    ids=count(),
)
def test_an_integer_is_the_list_that_it_means(pattern, function, expected) -> None:
    pattern.__annotations__ = {"d": Literal}
    assert [match["d"] for match in matches(pattern, function)] == ([] if expected is None else [expected])


def test_any_captures_lists_with_nodes_in_them() -> None:
    def pattern(x, size: Any):
        return x.view(size)

    (match,) = matches(pattern, lambda x, n: x.view(2, n))
    assert [getattr(item, "name", item) for item in match["size"]] == [2, "n"]


def test_optional_arguments_and_steps() -> None:
    def linear(x, w, bias: Maybe):
        return F.linear(x, w, bias)

    assert matches(linear, lambda x, w: F.linear(x, w))[0]["bias"] is None
    assert matches(linear, lambda x, w, b: F.linear(x, w, bias=b))[0]["bias"].name == "b"

    def scores(q, k, mask):
        return torch.softmax(maybe(torch.matmul(q, k) + mask), -1)

    with_mask = matches(scores, lambda q, k, m: (m + q @ k).softmax(-1))
    assert [match["mask"].name for match in with_mask] == ["m"]
    (without,) = matches(scores, lambda q, k: (q @ k).softmax(-1))
    assert without["mask"] is None
    assert len(without.nodes) == 2


def test_the_first_alternative_wins() -> None:
    def pattern(x, c: Literal):
        return torch.relu(either(x * c, x / c))

    assert matches(pattern, lambda x: torch.relu(x / 4))[0].nodes[1].name == "truediv"
    assert matches(pattern, lambda x: torch.relu(x * 4))[0].nodes[1].name == "mul"


def test_an_inner_value_with_outside_users_is_no_match_unless_shared() -> None:
    def used_outside(x):
        s = torch.sigmoid(x)
        return x * s, s

    assert matches(silu, used_outside) == []
    (match,) = matches(lambda x: x * shared(torch.sigmoid(x)), used_outside)
    assert [node.name for node in match.kept] == ["sigmoid"]


def test_equal_subterms_match_one_node_or_two() -> None:
    def pattern(x):
        return torch.sigmoid(x) + torch.exp(torch.sigmoid(x))

    def once(x):
        s = torch.sigmoid(x)
        return s + torch.exp(s)

    assert len(matches(pattern, once)) == 1
    assert len(matches(pattern, pattern)) == 1


def test_two_random_draws_are_two_values() -> None:
    def pattern(x):
        return F.dropout(x, 0.5) + torch.exp(F.dropout(x, 0.25))

    def once(x):
        s = F.dropout(x, 0.5)
        return s + torch.exp(s)

    assert len(matches(pattern, pattern)) == 1
    assert matches(pattern, once) == []


def test_equal_draws_could_be_one_or_two() -> None:
    with pytest.raises(RuleDefinitionError, match="one draw used twice or two draws"):
        matches(lambda x: F.dropout(x, 0.5) + torch.exp(F.dropout(x, 0.5)), lambda x: x)


def test_several_outputs() -> None:
    def pattern(x, y):
        return torch.sin(x + y), torch.cos(x + y)

    match, _other_order = matches(pattern, lambda x, y: torch.cos(x + y) * torch.sin(y + x))
    assert [node.name for node in match.outputs] == ["sin", "cos"]
    assert matches(pattern, lambda x, y: torch.cos(x + x) * torch.sin(y + x)) == []


def test_parallel_siblings_are_found_from_their_common_input() -> None:
    def qkv(x, wq, wk, wv):
        return F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)

    found = matches(qkv, lambda x, a, b, c: F.linear(x, a) + F.linear(x, b) + F.linear(x, c))
    assert {frozenset(str(match[n]) for n in ("wq", "wk", "wv")) for match in found} == {frozenset("abc")}


def test_constraints_decide_last() -> None:
    gm = graph_of(lambda x, y: (torch.relu(x), torch.relu(y)))
    with FakeTensorMode():
        for node, rank in zip(gm.graph.find_nodes(op="placeholder"), (2, 3), strict=True):
            node.meta["val"] = torch.empty([2] * rank)
    explanation = explain(trace(lambda x: torch.relu(x), [where.rank("x", 3)]), gm.graph.nodes)
    assert explanation.num_matches == 1
    assert "expected rank(x) == 3, found x has rank 2" in str(explanation)


def test_frozen_values_of_ours_compare_with_equality() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Shard:
        dim: int

    def redistribute(x, source, destination): ...

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(redistribute, (x, Shard(1)), {"destination": Shard(2)}))
    for source, expected in ((Shard(1), 1), (Shard(3), 0)):
        pattern = trace(lambda x: op(redistribute, x, source, Shard(2)))  # noqa: B023
        assert explain(pattern, graph.nodes).num_matches == expected


def test_a_number_behind_a_commutative_operator_is_read_in_one_place() -> None:
    """Five constants are one reading, not 32: compile time does not grow with each."""
    pattern = trace(lambda x: 0.5 * (x + 1.0) * (2.0 * x + 3.0) * 4.0)
    assert len(lower(pattern)) == 2  # the one product of two values, and its mirror image

    def model(x):
        return 4.0 * ((3.0 + x * 2.0) * ((1.0 + x) * 0.5))

    program = Program([("it", pattern)])
    found = [m for node, key in program.roots(graph_of(model).graph.nodes) for _, m in program.find(node, key)]
    assert len({m.root for m in found}) == 1
    assert explain(pattern, graph_of(model).graph.nodes).num_matches == 1


def test_a_captured_number_commutes_too() -> None:
    def scaled(x, scale: Literal):
        return torch.tanh(x * scale)

    for function in (lambda x: torch.tanh(2.0 * x), lambda x: torch.tanh(x * 2.0), lambda x: torch.tanh(x.mul(2.0))):
        (match,) = matches(scaled, function)
        assert match["scale"] == 2.0
        assert match["x"].name == "x"
