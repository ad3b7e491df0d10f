"""Lists of values as outputs of a pattern, and results of one operator that the graph need not read."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite import Literal, Pattern, Rule, cap, functional, op
from fxrewrite.match import explain
from fxrewrite.rule_file import dump_rules, parse_rules
from fxrewrite.verify import Draw
from tests.rewriting import apply, made, state, targets, traced

X = torch.randn(4, 6)


def split_of_cat(xs, sizes: Literal):
    return torch.split(torch.cat([*xs]), sizes)


def undone(**options: Any) -> Rule:
    rule = made(split_of_cat, lambda xs: xs, **options)

    @rule.sampler
    def _(draw: Draw) -> dict[str, Any]:
        sizes = [draw.size() for _ in range(draw.integer(1, 4))]
        return {"xs": [draw.tensor(size, 2) for size in sizes], "sizes": sizes}

    return rule


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: [y + 1 for y in torch.split(torch.cat([a, b]), [4, 2])],
        lambda a, b: torch.split(torch.cat([a, b]), [4, 2])[-1] + 1,
        lambda a, b: torch.cat(torch.cat([a, b]).split([4, 2])[::-1]),
        lambda a, b: torch.cat([a, b]).split_with_sizes([4, 2])[0].relu(),
    ],
    ids=itertools.count(),
)
def test_a_list_replaces_a_list(function: Any) -> None:
    gm = traced(function, X, X[:2])
    assert apply(gm, undone()).rewrites == 1
    assert "split" not in str(targets(gm))
    assert all(map(torch.equal, tree_leaves(gm(X, X[:2])), tree_leaves(function(X, X[:2]))))


def test_who_reads_the_whole_list_gets_one_or_it_is_refused() -> None:
    whole = fx.symbolic_trace(lambda a, b: torch.cat(torch.split(torch.cat([a, b]), [4, 2]), 0))
    assert apply(whole, undone()).rewrites == 1
    assert torch.equal(whole(X, X[:2]), torch.cat([X, X[:2]]))
    for function, why in (
        (lambda a, b: torch.split(torch.cat([a, b]), [4, 2]), "the graph returns the list %split as one value"),
        (lambda a, b: torch.split(torch.cat([a, b]), [4, 2])[1:], "takes slice(1, None, None) of the list %split"),
        (lambda a, b: torch.split(torch.cat([a, b]), [4, 2])[5], "takes number 5 of 2 values"),
    ):
        gm = fx.symbolic_trace(function)
        before = state(gm)
        (refusal,) = apply(gm, undone()).refusals
        assert why in refusal.reason
        assert state(gm) == before
    gm = traced(lambda a, b: torch.split(torch.cat([a, b]), [3, 3])[0] + 1, X, X[:2])
    assert "the replacement gives" in apply(gm, undone()).refusals[0].reason
    sliced = fx.symbolic_trace(lambda x: ((parts := x.chunk(2))[1] + 1, parts[0:1]))
    assert apply(sliced, made(lambda x: x.chunk(2)[:2], lambda x: (x, x))).rewrites == 0
    gm = traced(lambda a: torch.unbind(a)[0], X)
    assert (
        "gives 1 values, the original 4"
        in apply(gm, made(lambda x: torch.unbind(x), lambda x: [x[0]])).refusals[0].reason
    )


def test_rules_of_lists_are_verified_and_written() -> None:
    assert undone().verify(samples=4).samples >= 4
    rules = parse_rules(
        '[[rule]]\nid = "a.b"\npattern = "chunk(relu(x), 2)"\n'
        'replace = "[relu(chunk(x, 2)[0]), relu(chunk(x, 2)[1])]"\n',
        "lists.toml",
    )
    assert parse_rules(dump_rules(rules), "lists.toml").once().digest() == rules.once().digest()
    assert next(rules.rules()).verify(samples=2).samples >= 2
    wrong = made(lambda x: torch.unbind(torch.neg(x)), lambda x: [torch.neg(x)[i] for i in range(x.shape[0])][::-1])
    assert not wrong.verify(samples=8, terminates=False).ok


def largest() -> Rule:
    def pattern(x):
        both = torch.max(x, -1)
        return both[0], both[1]

    return made(pattern, lambda x: (torch.amax(x, -1), torch.argmax(x, -1)), numerics="approximate")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a: torch.max(a, -1)[0], ["aten.amax.default"]),
        (lambda a: torch.max(a, -1)[1], ["aten.argmax.default"]),
        (lambda a: tuple(torch.max(a, -1)), ["aten.amax.default", "aten.argmax.default"]),
        (lambda a: tuple(torch.max(a, -1))[::-1], ["aten.amax.default", "aten.argmax.default"]),
    ],
    ids=itertools.count(),
)
def test_a_result_that_nothing_reads_may_be_missing(function: Any, expected: list[str]) -> None:
    gm = traced(function, X)
    gm.graph.eliminate_dead_code()
    assert apply(gm, largest()).rewrites == 1
    assert [name for name in sorted(targets(gm)) if "getitem" not in name] == expected
    assert all(map(torch.equal, tree_leaves(gm(X)), tree_leaves(function(X))))


def test_a_result_is_missing_only_if_nothing_reads_it() -> None:
    three = made(
        lambda x: (torch.exp(x), (z := torch.sort(x))[0], z[1]),
        lambda x: (torch.exp(x) * 1, x.sort()[0], x.sort()[1]),
    )
    one = traced(lambda a: torch.sort(a)[0], X)
    assert apply(one, three).rewrites == 0  # what is computed by another operator must be there
    low_rank = made(lambda x: ((z := torch.sort(x))[0] + 1, z[1]), lambda x: (x, x))
    for function in (lambda a: torch.sort(a)[0] + 1, lambda a: ((z := torch.sort(a))[0] + 2, z[1])):
        assert apply(traced(function, X), low_rank).rewrites == 0
    found = explain(largest().pattern, traced(lambda a: torch.max(a, -1)[0].max(0)[1], X).graph.nodes)
    assert found.num_matches == 2


def test_an_operator_with_one_result_is_indexed_as_a_tensor() -> None:
    rule = made(lambda x: (x * 2)[0], lambda x: x[0] * 2)  # `mul` of TorchScript's lists is none of graphs
    for form in (fx.symbolic_trace, lambda f: traced(f, X)):
        assert apply(form(lambda x: torch.mul(x, 2)[0]), rule).rewrites == 1


@pytest.mark.parametrize("form", ["torch", "aten"])
def test_what_may_be_a_number_is_a_tensor_if_the_pattern_captures_it(form: str) -> None:
    rule = made(lambda x, at, y: torch.scatter(x, 0, at, y), lambda x, at, y: x + y)  # another overload takes a number
    at = torch.zeros(2, 2, dtype=torch.int64)
    trace = fx.symbolic_trace if form == "torch" else lambda f: traced(f, X, at, X)
    assert apply(trace(lambda x, at, y: x.scatter(0, at, y)), rule).rewrites == 1
    of_number = Rule(
        "test.it", Pattern((op("scatter", cap("x"), 0, cap("at"), cap("n", Literal)),)), lambda x, n: x + n
    )
    assert apply(trace(lambda x, at, y: x.scatter(0, at, y)), of_number).rewrites == 0
    assert apply(trace(lambda x, at, y: x.scatter(0, at, 2.0)), of_number).rewrites == 1


def test_a_result_that_is_taken_and_not_read_leaves_with_the_match() -> None:
    rule = made(lambda x: torch.max(x, -1)[0], lambda x: torch.amax(x, -1))
    graph = fx.Graph()
    a = graph.placeholder("a")
    both = graph.call_function(torch.ops.aten.max.dim, (a, -1))
    values, indices = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
    graph.output((values, graph.call_function(operator.getitem, (both, 1))))
    assert indices.users == {}
    read = fx.GraphModule(torch.nn.Module(), graph)
    assert "no user of root.a outside the match, found %getitem_2" in str(explain(rule.pattern, read.graph.nodes))
    gm = traced(lambda a: torch.max(a, -1)[0] + 1, X)
    assert apply(gm, rule).rewrites == 1
    assert targets(gm) == ["aten.amax.default", "aten.add.Tensor"]
    assert torch.equal(gm(X), X.amax(-1) + 1)


def test_missing_results_are_verified() -> None:
    def pattern(x):
        both = torch.aminmax(x, dim=-1)
        return both[0], both[1]

    true = made(pattern, lambda x: (x.amin(-1), x.amax(-1)), gradients=False)
    verdict = true.verify(samples=6)
    assert verdict.ok, verdict
    assert len(verdict.variants) == 3
    assert not made(pattern, lambda x: (x.amin(-1), x.amin(-1))).verify(samples=8).ok


def test_functional_operators_whose_results_are_not_all_read() -> None:
    with torch.library._scoped_library("test_results", "DEF") as library:
        library.define("add_norm_(Tensor(a!) x, Tensor(b!) residual, float eps) -> ()")

        def pattern(x, r, eps: Literal):
            return functional("test_results::add_norm_", x, r, eps)

        rule = made(pattern, lambda x, r, eps: (x + r, x - r))
        auto = torch.ops.higher_order.auto_functionalized
        for first, last in ((1, 3), (1, 2), (2, 3)):
            graph = fx.Graph()
            x, r = graph.placeholder("x"), graph.placeholder("r")
            made_node = graph.call_function(
                auto, (torch.ops.test_results.add_norm_.default,), {"x": x, "residual": r, "eps": 1e-6}
            )
            parts = [graph.call_function(operator.getitem, (made_node, i)) for i in range(first, last)]
            graph.output(tuple(parts))
            gm = fx.GraphModule(torch.nn.Module(), graph)
            assert apply(gm, rule).rewrites == 1
            expected = [X + 1, X - 1][first - 1 : last - 1]
            assert all(map(torch.equal, gm(X, torch.ones(4, 6)), expected))
        graph = fx.Graph()
        x, r = graph.placeholder("x"), graph.placeholder("r")
        graph.output(graph.call_function(torch.ops.test_results.add_norm_.default, (x, r, 1e-6)))
        why = "%add_norm__default calls test_results::add_norm_, which writes; functional() matches what it becomes"
        assert why in str(explain(rule.pattern, graph.nodes))
        assert "which writes" not in str(explain(rule.pattern, gm.graph.nodes))
