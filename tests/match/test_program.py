"""One program for all rules: the same answers as reading the tests one by one, and no slower for more rules."""

import pytest
import torch
from torch import fx

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match import Program
from fxrewrite.match.compile import Tree, _Writer
from fxrewrite.match.values import Candidate
from fxrewrite.pattern import Literal, Pattern, trace


def attention(constant: float) -> Pattern:
    return trace(lambda q, k, m, v: torch.matmul(torch.softmax(torch.matmul(q, k) / constant + m, dim=-1), v))


def blocks(count: int) -> fx.Graph:
    def f(h, m):
        for _ in range(count):
            h = torch.matmul(torch.softmax(torch.matmul(h, h.mT) / 8.0 + m, -1), h)
        return h

    return fx.symbolic_trace(f).graph


def test_earlier_owners_have_priority() -> None:
    program = Program([("a", trace(lambda x: torch.relu(x))), ("b", trace(lambda x: torch.relu(torch.neg(x))))])
    graph = fx.symbolic_trace(lambda x: torch.relu(torch.neg(x))).graph
    ((node, key),) = program.roots(graph.nodes)
    assert [owner for owner, _ in program.find(node, key)] == ["a", "b"]


def scaled(inner: float, outer: float) -> Pattern:
    return trace(lambda x: torch.clamp(torch.clamp(x, max=inner), max=outer))


def test_rules_that_differ_in_two_literals_are_told_apart() -> None:
    choices = [(inner, outer) for inner in (2.0, 3.0, 4.0) for outer in (5.0, 6.0)]
    program = Program([(choice, scaled(*choice)) for choice in choices])
    for inner, outer in choices:
        graph = fx.symbolic_trace(lambda x: torch.clamp(torch.clamp(x, max=inner), max=outer)).graph  # noqa: B023
        found = [owner for node, key in program.roots(graph.nodes) for owner, _ in program.find(node, key)]
        assert found == [(inner, outer)]


def test_what_follows_an_operator_is_compiled_when_a_graph_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Tree] = []
    write = _Writer.write
    monkeypatch.setattr(_Writer, "write", lambda self, tree, known: written.append(tree) or write(self, tree, known))
    alike = [(f, trace(lambda x: torch.relu(f(x)))) for f in (torch.neg, torch.exp)]  # noqa: B023
    other = torch.sub, trace(lambda x, y: torch.relu(torch.sub(x, y)))
    program = Program([("tanh", trace(lambda x: torch.tanh(x))), *alike, other])
    assert written == []
    for count, f in zip((2, 2, 3), (torch.neg, torch.exp, torch.sub), strict=True):  # relu is one of them
        graph = fx.symbolic_trace(lambda x: torch.relu(f(x, x) if f is torch.sub else f(x))).graph  # noqa: B023
        assert [owner for node, key in program.roots(graph.nodes) for owner, _ in program.find(node, key)] == [f]
        assert len(written) == count


def test_time_at_a_node_does_not_grow_with_the_number_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = blocks(3)
    asked: list[int] = []
    original = Candidate.value
    monkeypatch.setattr(Candidate, "value", lambda self, path: asked.append(1) or original(self, path))
    costs: list[int] = []
    for num_rules in (1, 100):
        patterns = [(i, attention(8.0 if i == num_rules - 1 else 100.0 + i)) for i in range(num_rules)]
        program = Program(patterns)
        asked.clear()
        found = [owner for node, key in program.roots(graph.nodes) for owner, _ in program.find(node, key)]
        assert found == [num_rules - 1] * 3
        costs.append(len(asked))
    assert costs[1] == costs[0]


def test_a_pattern_with_too_many_readings_is_refused() -> None:
    def deep(x, y):
        for _ in range(10):
            x = x * y + torch.relu(x)
        return x

    with pytest.raises(RuleDefinitionError, match="more than 1024 readings"):
        Program([("deep", trace(deep))])


def of_one_literal(x, y, c: Literal):
    return torch.sin(x * c), torch.cos(y * c)


@pytest.mark.parametrize("pattern", [lambda x, y: (torch.relu(x), torch.relu(y)), of_one_literal])
def test_outputs_without_a_common_value_are_refused(pattern) -> None:
    with pytest.raises(RuleDefinitionError, match="output 1 captures no value of the graph that an earlier"):
        Program([("apart", trace(pattern))])
