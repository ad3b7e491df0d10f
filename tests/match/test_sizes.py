"""Sizes, dtypes and devices of values as arguments in patterns: literals, symbolic sizes, calls that read them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx

from fxrewrite import Literal, RuleDefinitionError, loose, rule
from fxrewrite.match import Program, explain
from fxrewrite.pattern import Pattern, parse, trace
from fxrewrite.rule_file import dump_rules, parse_rules
from tests.rewriting import apply, made, traced

X, Y = torch.randn(4, 6), torch.randn(6, 4)


def graphs(function: Any, *inputs: torch.Tensor) -> list[fx.GraphModule]:
    """With numbers, with symbolic sizes, and without values."""
    return [traced(function, *inputs), traced(function, *inputs, mode="symbolic"), fx.symbolic_trace(function)]


@pytest.mark.parametrize(
    ("pattern", "function", "inputs", "expected"),
    [
        (lambda x: torch.reshape(x, [x.shape[0], -1]), lambda x: x.reshape(x.shape[0], -1), [X], [1, 1, 1]),
        (lambda x: torch.reshape(x, [x.shape[0], -1]), lambda x: x.reshape(x.size(0), -1), [X], [1, 1, 1]),
        (lambda x: torch.reshape(x, [x.shape[-2], -1]), lambda x: x.reshape(x.size(0), -1), [X], [1, 1, 0]),
        (lambda x: torch.reshape(x, [x.size(0), -1]), lambda x: x.reshape(x.shape[1], -1), [X], [0, 0, 0]),
        (lambda x, y: x.view(y.shape[0], 4) + y, lambda x, y: x.view(y.shape[0], 4) + y, [X, Y], [1, 1, 1]),
        # nothing but a call that reads it tells whose size it is
        (lambda x, y: x.view(y.shape[0], 4), lambda x, y: x.view(y.size(0), 4), [X, Y], [0, 1, 1]),
        (lambda x: loose(torch.zeros(x.shape)), lambda x: torch.zeros(x.shape), [X], [0, 1, 0]),
        (lambda x: loose(torch.zeros(x.shape)) + x, lambda x: torch.zeros(x.shape) + x, [X], [1, 1, 1]),
        (lambda x: x.view(x.numel()), lambda x: x.view(x.numel()), [X], [1, 1, 0]),
        (lambda x: x.view(x.shape[0] * 2, -1), lambda x: x.view(x.shape[0] * 2, -1), [X], [1, 1, 0]),
        (lambda x: x.view(x.shape[0] * 2, -1), lambda x: x.view(x.shape[0] // 2, -1), [X], [0, 0, 0]),
        # a captured number: of the graph's own product without values, nothing is known
        (lambda x, n: x.view(x.shape[0] * n, -1) * n, lambda x: x.view(x.shape[0] * 2, -1) * 2, [X], [1, 1, 0]),
        (lambda x, n: x.view(x.shape[0] * n, -1) * n, lambda x: x.view(12, -1) * 2, [X], [0, 0, 0]),
        (
            lambda x: torch.relu(x).view(torch.relu(x).shape[0], 2, -1),
            lambda x: torch.relu(x).view(x.shape[0], 2, -1),
            [X],
            [1, 1, 0],
        ),
        (lambda x, y: x.expand(y.shape) * y, lambda x, y: x.expand(y.shape) * y, [X[:1], X], [1, 1, 1]),
        (lambda x, y: x.to(y.dtype) * y, lambda x, y: x.to(y.dtype) * y, [X, X.double()], [1, 1, 1]),
        (lambda x, y: x.to(y.dtype) * y, lambda x, y: x.to(torch.float64) * y, [X, X.double()], [1, 1, 0]),
        (lambda x, y: x.to(y.dtype) * y, lambda x, y: x.to(torch.float16) * y, [X, X.double()], [0, 0, 0]),
        (lambda x, y: x.to(y.device) * y, lambda x, y: x.to(y.device) * y, [X, X], [0, 0, 1]),
    ],
    ids=itertools.count(),
)
def test_what_sizes_match(pattern: Any, function: Any, inputs: list[torch.Tensor], expected: list[int]) -> None:
    pattern.__annotations__ = {"n": Literal} if "n" in pattern.__code__.co_varnames else {}
    it = trace(pattern)
    assert parse(str(it)) == it
    program = Program([("it", it)])
    for gm, count in zip(graphs(function, *inputs), expected, strict=True):
        found = [
            m for node, key in program.roots(gm.graph.nodes) for _, m in itertools.islice(program.find(node, key), 1)
        ]
        assert (len(found), explain(it, gm.graph.nodes).num_matches) == (count, count)
        assert all(match["x"].name.startswith("x") for match in found)


def test_sizes_stay_where_others_read_them() -> None:
    gm = traced(lambda x: torch.reshape(x, [x.shape[0], -1]) * x.shape[0], X, mode="symbolic")
    rule = made(lambda x: torch.reshape(x, [x.shape[0], -1]), lambda x: torch.flatten(x, 1), shapes="changes")
    assert apply(gm, rule).rewrites == 1
    assert torch.equal(gm(Y), Y * 6)


def test_mistakes() -> None:
    for pattern, said in (
        (lambda x: x.view(x.shape[:-1]), "of a shape; for any rank, capture the whole argument, as shape: Any"),
        (lambda x: x.view(*x.shape), "cannot unpack a value of unknown length"),
        (lambda x: x.view(torch.tanh(x).shape[0], -1), "is of tanh(x), which the pattern has nowhere else"),
        (parse("view(x, [mul(size(x, 0), lit(n)), -1])"), "is of lit(n), which the pattern has nowhere else"),
    ):
        with pytest.raises(RuleDefinitionError) as error:
            Program([("it", pattern if isinstance(pattern, Pattern) else trace(pattern))])
        assert said in str(error.value)


def test_a_rule_of_repeated_heads_is_verified() -> None:
    """`x.shape[1] * n` was a product that no graph with numbers has, and samples had one that returns a tensor."""

    def pattern(x: Any, n: Literal) -> Any:
        repeated = torch.relu(x)[:, :, None].expand(-1, -1, n, -1, -1)
        return repeated.reshape(x.shape[0], x.shape[1] * n, x.shape[2], x.shape[3])

    it = rule("heads.repeat", where=["rank(x) == 4", "n > 1"])(pattern)
    it.replacement(lambda x, n: torch.relu(x).repeat_interleave(n, 1))
    verdict = it.verify(samples=12)
    assert verdict.ok, verdict
    wrong = rule("heads.tile", where=["rank(x) == 4"])(pattern)
    wrong.replacement(lambda x, n: torch.relu(x).repeat(1, n, 1, 1))
    found = wrong.verify().counterexample
    assert found is not None
    assert "aten.mul" not in found.snippet


def test_rules_of_sizes_are_verified_and_written() -> None:
    rules = parse_rules(
        """
[[rule]]
id = "views.flatten"
pattern = "reshape(x, [size(x, 0), mul(size(x, 1), size(x, 2))])"
replace = "flatten(x, 1)"
where = ["rank(x) == 3"]
[[rule]]
id = "views.wrong"
pattern = "mul(expand(x, size(y)), y)"
replace = "mul(x, x)"
[[rule]]
id = "casts.late"
pattern = "mul(to(x, dtype(y)), y)"
replace = "mul(y, to(x, dtype(y)))"
terminates = false
""",
        "sizes.toml",
    )
    assert parse_rules(dump_rules(rules), "sizes.toml").once().digest() == rules.once().digest()
    flatten, wrong, late = rules.rules()
    verdict = flatten.verify(samples=4)
    assert verdict.ok, verdict
    assert not wrong.verify(samples=8).ok
    gm = traced(lambda x, y: x.to(y.dtype) * y, X, X.double())
    assert apply(gm, late).rewrites == 1
    assert torch.equal(gm(X, X.double()), X.double() * X.double())
