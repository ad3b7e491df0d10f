"""Chains of operators, siblings of one value, parameters; and the hints of near misses."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Param, Pattern, Rule, RuleDefinitionError, RuleSet, cap, chain, op, siblings
from fxrewrite.match import Match, Program, explain
from fxrewrite.pattern import parse, trace

LINEARS = siblings(op("linear", cap("x"), cap("w"), cap("b", "optional")), on="x")


def matches(pattern: Pattern, graph: fx.Graph) -> list[Match]:
    program = Program([("it", pattern)])
    roots = program.roots(graph.nodes)  # a root may match in several readings; the first is the one that is rewritten
    found = [match for match in (next(program.find(node, key), (0, None))[1] for node, key in roots) if match]
    assert explain(pattern, graph.nodes).num_matches == len(found)
    return found


def graph_of(function) -> fx.Graph:
    return fx.symbolic_trace(function).graph


@pytest.mark.parametrize(
    ("function", "length"),
    [
        (lambda x: torch.relu(x), 0),
        (lambda x: torch.relu(x.contiguous()), 1),
        (lambda x: torch.relu(x.view(2, 3).transpose(0, 1).contiguous()), 3),
        (lambda x: torch.relu(torch.tanh(x).contiguous()), 1),
    ],
    ids=itertools.count(),
)
def test_a_chain_is_the_longest_run(function, length: int) -> None:
    pattern = Pattern((op("relu", chain(cap("x"), "view", "transpose", torch.Tensor.contiguous, most=3)),))
    match = matches(pattern, graph_of(function))[0]
    assert len(match.nodes) == 1 + length
    assert match["x"].name in ("x", "tanh")


@pytest.mark.parametrize("length", range(6))
def test_a_chain_has_bounds(length: int) -> None:
    def model(x):
        for _ in range(length):
            x = x + 1
        return torch.relu(x)

    pattern = Pattern((op("relu", chain(op("tanh", cap("x")), "add", least=2, most=4)),))
    graph = graph_of(lambda x: model(torch.tanh(x)))
    assert len(matches(pattern, graph)) == (2 <= length <= 4)


def test_a_value_inside_a_chain_that_is_used_outside_ends_the_match() -> None:
    def model(x):
        y = torch.tanh(x).neg()
        return torch.relu(y.neg()), y

    pattern = Pattern((op("relu", chain(op("tanh", cap("x")), "neg", most=2)),))
    assert matches(pattern, graph_of(model)) == []
    assert "no user of root.self.first operand outside" in str(explain(pattern, graph_of(model).nodes))


def merge() -> Rule:
    def merged(x, w: list, b: list) -> object:
        sizes = [one.shape[0] for one in w]
        bias = None if b[0] is None else torch.cat(b)
        return torch.split(F.linear(x, torch.cat(w), bias), sizes, dim=-1)

    def replacement(match: Match, x, w, b):
        whole = merged(x, w, b)
        return tuple(whole[i] for i in range(len(w)))

    return Rule("linears.merge", Pattern((LINEARS,)), replacement, numerics="reassociates")


def linears(x, *weights):
    return sum(F.linear(torch.relu(x), w) * (i + 1) for i, w in enumerate(weights))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_siblings_are_one_match(count: int) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 2 + i) for i in range(count))

        def forward(self, x):
            return tuple(layer(x).relu() for layer in self.layers)

    model, x = Model().double(), torch.randn(3, 4, dtype=torch.float64)
    gm = torch.export.export(model, (x,)).module()
    report = RuleSet("linears", merge()).apply(gm)
    assert report.rewrites == (count > 1)
    gm.graph.lint()
    for found, expected in zip(gm(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
    assert sum(n.target is torch.ops.aten.linear.default for n in gm.graph.nodes) == 1


def test_siblings_that_differ_are_two_families() -> None:
    def model(x, y, a, b, c, d):
        return F.linear(x, a), F.linear(y, b), F.linear(x, c), F.linear(y, d), F.linear(a, b)

    found = matches(Pattern((LINEARS,)), graph_of(model))
    assert [(m["x"].name, [w.name for w in m["w"]]) for m in found] == [("x", ["a", "c"]), ("y", ["b", "d"])]
    assert found[0]["b"] == [None, None]


def test_siblings_that_need_each_other_are_refused() -> None:
    def model(x, a):
        first = F.linear(x, a)
        return F.linear(x, first.relu())

    gm = fx.symbolic_trace(model)
    report = RuleSet("linears", merge()).apply(gm)
    assert report.rewrites == 0
    (refusal,) = report.refusals
    assert refusal.kind == "convexity"


def test_siblings_in_text() -> None:
    pattern = Pattern((LINEARS,))
    assert str(pattern) == 'siblings(linear(x, w, opt(b)), on="x", least=2)'
    assert parse(str(pattern)) == pattern
    text = 'relu(chain(param(x), "view", "operator.getitem", least=0, most=3))'
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ((LINEARS, op("relu", cap("x"))), "the only output"),
        ((op("relu", LINEARS),), "the only output"),
        ((siblings(op("linear", cap("x"), cap("w")), on="y"),), "captures no node of that name"),
    ],
)
def test_siblings_in_the_wrong_place(outputs, reason: str) -> None:
    with pytest.raises(RuleDefinitionError, match=reason):
        Pattern(outputs)


@pytest.mark.parametrize("wrong", [{"most": 0}, {"least": -1}, {"least": 3, "most": 2}])
def test_bounds_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(RuleDefinitionError, match="chain"):
        chain(cap("x"), "relu", **wrong)


def test_a_parameter_is_told_from_an_input() -> None:
    def pattern(x, w: Param):
        return F.linear(x, w)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 3))

        def forward(self, x, y):
            return F.linear(x, self.w), F.linear(x, y)

    graph = fx.symbolic_trace(Model()).graph
    (match,) = matches(trace(pattern), graph)
    assert match["w"].target == "w"
    why = str(explain(trace(pattern), graph.nodes))
    assert "expected a parameter at root.weight, found placeholder (%y); graphs behind autograd, and" in why
    assert "do not tell parameters from inputs: run the plan by plan.backend" in why


@pytest.mark.parametrize(
    ("pattern", "function", "hint"),
    [
        (lambda x: torch.relu(torch.tanh(x)), lambda x: torch.relu(torch.tanh(x).view(3)), "allow %view with maybe"),
        (lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x, -1, torch.float32), "mention the argument"),
        (lambda x: x * 2.0, lambda x: x * 3.0, "capture it with Literal"),
    ],
)
def test_a_hint_says_what_to_do(pattern, function, hint: str) -> None:
    assert hint in str(explain(trace(pattern), graph_of(function).nodes))
