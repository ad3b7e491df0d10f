"""onnxscript's rewriter, whose patterns are functions too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Literal, Match, Maybe, Pattern, Rule, any_, cap, either, op, rule
from fxrewrite.graph import Edit
from tests.peers.cases import Suite
from tests.rewriting import apply, made, traced

ONNX = Suite("pattern_test")
X, Y = torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.5


def rewritten(one: Rule, model: Any, expected: int) -> fx.GraphModule:
    gm = fx.symbolic_trace(model)
    assert apply(gm, one).rewrites == expected
    inputs = (X, Y)[: len(gm.graph.find_nodes(op="placeholder"))]
    torch.testing.assert_close(gm(*inputs), model(*inputs))
    return gm


RECIPROCAL = made(lambda x, y: (1 / x) * y, lambda x, y: y / x)


def reciprocals(x: Any, y: Any) -> Any:
    kept = 1 / x  # read twice
    return (1 / y) * ((1 / x) * y) + kept * y + kept / x


ONNX.add("test_single_match", lambda: rewritten(RECIPROCAL, lambda x, y: (1 / x) * y + 0.5, 1) and None)
ONNX.add(
    "test_failed_match",
    lambda: rewritten(RECIPROCAL, lambda x, y: (0.9 / x) * y, 0) and None,
    "better",
    "each condition that failed, by `explain`",
)
ONNX.add("test_multiple_matches", lambda: rewritten(RECIPROCAL, reciprocals, 2) and None)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))


FAST = made(gelu, lambda x: F.gelu(x, approximate="tanh"), numerics="approximate")


@ONNX.case("better", "operands may be exchanged at every operator, without a rule for each order")
def test_short_rule() -> None:
    gm = fx.symbolic_trace(lambda x: (x * 0.5) * (torch.tanh((x + x**3 * 0.044715) * 0.79788) + 1.0))
    assert apply(gm, FAST).rewrites == 1
    torch.testing.assert_close(gm(X), gelu(X), atol=1e-3, rtol=1e-3)


@ONNX.case()
def test_long_rule() -> None:
    x = cap("x")
    inner = op("mul", 0.79788, op("add", x, op("mul", 0.044715, op("pow", x, 3))))
    long = op("mul", op("mul", 0.5, x), op("add", 1.0, op("tanh", inner)))
    one = Rule("test.it", Pattern((long,)), lambda x: F.gelu(x, approximate="tanh"))
    assert apply(fx.symbolic_trace(gelu), one).rewrites == 1


def joined(x, y, dim: Literal):
    return torch.stack([x, y], dim)


STACK = made(joined, lambda x, y, dim: torch.cat([x.unsqueeze(dim), y.unsqueeze(dim)], dim))
ONNX.add("test_concat", lambda: rewritten(STACK, lambda x, y: torch.stack([x, y], 1), 1) and None)


@ONNX.case()
def test_concat_in_function() -> None:
    from torch.utils.checkpoint import checkpoint

    from fxrewrite.backends import capture

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return checkpoint(lambda x, y: torch.stack([x, y], 1), x, y, use_reentrant=False)

    gm = capture(Model(), {"x": X, "y": Y})
    assert apply(gm, STACK).rewrites == 1
    assert any("checkpoint" in str(node.target) for node in gm.graph.nodes)


@ONNX.case("better", "without an option")
def test_commute() -> None:
    rewritten(
        made(lambda x, y: x.exp() + y.sin(), lambda x, y: y.sin() + x.exp()),
        lambda x, y: torch.sin(y) + torch.exp(x),
        1,
    )


@ONNX.case()
def test_const_value() -> None:
    one = Rule("test.it", Pattern((op("reshape", cap("x"), ...),), ("shape(x) == shape(root)",)), lambda x: x)
    for shape, expected in (((3, 4), 1), ((3, -1), 1), ((4, 3), 0)):
        gm = traced(lambda x: torch.reshape(x, shape) + 1, X)  # noqa: B023
        assert apply(gm, one).rewrites == expected


@ONNX.case()
def test_delayed_run_provides_correct_bindings_for_multiple_matches() -> None:
    def filled(x, dtype: Literal):
        return torch.ones_like(x).to(dtype)

    gm = fx.symbolic_trace(lambda x: (torch.ones_like(x).to(torch.float16), torch.ones_like(x).to(torch.int64)))
    assert apply(gm, made(filled, lambda x, dtype: torch.ones_like(x, dtype=dtype))).rewrites == 2
    assert [part.dtype for part in gm(X)] == [torch.float16, torch.int64]


ONNX.add("test_opset_import", None, "n/a", "a graph of torch has no list of the operator sets that it uses")
ONNX.add("test_opset_import_in_function", None, "n/a", "a graph of torch has no list of the operator sets that it uses")


@ONNX.case()
def test_optional_attribute() -> None:
    def joined(x, y, dim: Literal):
        return torch.cat([x, y], dim)

    seen: list[int] = []
    one = made(joined, lambda x, y, dim: seen.append(dim) or torch.concat([x, y], dim))
    rewritten(one, lambda x, y: torch.cat([x, y], dim=1), 1)
    rewritten(one, lambda x, y: torch.cat([x, y]), 1)
    assert seen == [1, 0]


def clamps(x: Any) -> Any:
    return torch.clamp(torch.clamp(x, None, 0.9), 0.1 * x.sum(), x.sum())


@ONNX.case()
def test_match_none_input() -> None:
    one = Rule(
        "test.it", Pattern((op("clamp", cap("x"), None, cap("high", "any")),)), lambda x, high: torch.clamp(x, max=high)
    )
    rewritten(one, clamps, 1)


@ONNX.case()
def test_match_optional_input() -> None:
    seen: list[bool] = []

    def clamp(x, low: Any, high: Any):
        return torch.clamp(x, low, high)

    one = made(clamp, lambda x, low, high: seen.append(low is None) or torch.clamp(x, low, high))
    rewritten(one, clamps, 2)
    assert sorted(seen) == [False, True]


@ONNX.case()
def test_match_trailing_optional_input() -> None:
    seen: list[bool] = []

    def linear(x, w, b: Maybe):
        return F.linear(x, w, b)

    one = made(linear, lambda x, w, b: seen.append(b is None) or F.linear(x, w, b))
    rewritten(one, lambda x, y: F.linear(x, y, None) + F.linear(x, y) + F.linear(x, y, y[:, 0]), 3)
    assert sorted(seen) == [False, True, True]


ONNX.add("test_pattern_builder_context", None, "n/a", "tests how its patterns are built")


@ONNX.case(name="or-patterns, backtracking and any_value")
def alternatives() -> None:
    x = cap("x")
    pattern = Pattern((op("relu", either(op("add", op("exp", x), any_), op("add", op("exp", op("sin", x)), 1))),))
    one = Rule("test.it", pattern, lambda match, x: match.call(torch.relu, match.proxy(match.nodes[1])))
    gm = fx.symbolic_trace(lambda x: torch.relu(torch.exp(torch.sin(x)) + 1))
    found = one.explain(gm)
    assert found.num_matches == 1


@ONNX.case(
    "better", "undone with the transaction; `match.once` computes one of the graph's own", name="test_new_initializer"
)
def new_parameter() -> None:
    @rule("test.it")
    def doubled(x):
        return torch.relu(x)

    @doubled.replacement
    def _(match: Match, x):
        edit: Edit = match.edit
        return x * match.proxy(edit.attach(torch.nn.Parameter(torch.ones(4)), "ones"))

    gm = fx.symbolic_trace(lambda x: torch.relu(x))
    assert apply(gm, doubled).rewrites == 1
    assert isinstance(gm.ones, torch.nn.Parameter)
    torch.testing.assert_close(gm(X), X)
