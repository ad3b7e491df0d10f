"""The rewriter and the matchers of torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite.adapters.subgraph_rewriter import pattern_rule, replace_pattern, replace_pattern_with_filters
from fxrewrite.ops import declare_pure
from tests.peers.cases import Suite
from tests.rewriting import traced

REWRITER, MATCHER, PASSES = Suite("test_subgraph_rewriter"), Suite("test_matcher_utils"), Suite("test_fx_passes")
CASES = (REWRITER, MATCHER, PASSES)
X, Y, Z = (torch.linspace(-2, 2, 12).reshape(3, 4) + shift for shift in (0, 1, 2))


def rewritten(
    model: Callable[..., Any],
    pattern: Any,
    replacement: Any,
    expected: Callable[..., Any],
    count: int,
    *inputs: torch.Tensor,
) -> fx.GraphModule:
    """The traced model after `count` replacements; it computes what `expected` does."""
    gm = fx.symbolic_trace(model)
    found = replace_pattern(gm, pattern, replacement)
    gm.graph.lint()
    assert len(found) == count
    for match in found:
        assert match.anchor in match.nodes_map.values()
        assert all(match.nodes_map[node] is not None for node in match.nodes_map)
    results, wanted = gm(*inputs), expected(*inputs)
    torch.testing.assert_close(results, wanted)
    return gm


def simple(name: str, *args: Any, **said: Any) -> None:
    REWRITER.add(f"test_subgraph_rewriter_{name}", lambda: void(rewritten(*args)), **said)


def void(_: Any) -> None:
    """For checks that are expressions."""


@fx.wrap
def gated(a: Any, w: Any, b: Any) -> Any:
    gate = F.linear(a, w, b)
    return gate, gate * a


declare_pure(gated)


def sum_of(x: Any) -> Any:
    return torch.neg(x) + torch.relu(x)


simple("preserves_logic", lambda x: sum_of(x).exp(), sum_of, sum_of, lambda x: sum_of(x).exp(), 1, X)
simple(
    "with_oneliner_pattern",
    lambda x: x.exp() * 2,
    lambda x: torch.exp(x),
    lambda x: x.cos(),
    lambda x: x.cos() * 2,
    1,
    X,
)
simple("single_pattern_match", lambda x: sum_of(x) * x, sum_of, lambda x: x.sin(), lambda x: x.sin() * x, 1, X)
simple(
    "multiple_pattern_match",
    lambda x, u, v: x + torch.cat([u, v]).sum() * torch.cat([u, v]).sum(),
    lambda u, v: torch.cat([u, v]).sum(),
    lambda u, v: torch.stack([u, v]).amax(),
    lambda x, u, v: x + torch.stack([u, v]).amax() ** 2,
    2,
    *(X, Y, Z),
)
simple(
    "graph_argument_order",
    lambda x, y: x @ y.t(),
    lambda a, b: a @ b,
    lambda a, b: a @ b,
    lambda x, y: x @ y.t(),
    1,
    X,
    Y,
)
simple(
    "correct_output_replacement",
    lambda x, y: torch.neg(y) + torch.relu(x),
    lambda x: torch.relu(x),
    lambda x: torch.neg(x),
    lambda x, y: -y - x,
    *(1, X, Y),
)
simple("pattern_is_entire_graph", sum_of, sum_of, lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x]), 1, X)
simple(
    "pattern_output_pattern_node_can_have_users_that_are_not_matched",
    lambda x: (y := torch.relu(x)).neg() - y,
    lambda x: torch.relu(x),
    lambda x: torch.sin(x),
    lambda x: torch.sin(x) * -2,
    *(1, X),
)
simple(
    "internal_pattern_nodes_cannot_have_users_that_are_not_matched",
    lambda x, y: ((z := torch.cat([x, y])).sum() + 1) * z.exp(),
    lambda x, y: torch.cat([x, y]).sum() + 1,
    lambda x, y: x.sum() + y.sum() + 1,
    lambda x, y: (torch.cat([x, y]).sum() + 1) * torch.cat([x, y]).exp(),
    *(0, X, Y),
)
simple(
    "placeholder_matching",
    lambda x: torch.sigmoid((x + 3).dequantize()).to(torch.float16),
    lambda x: torch.sigmoid(x.dequantize()).to(torch.float16),
    lambda x: x * 1,
    lambda x: x + 3,
    *(1, X),
)
simple(
    "replace_consecutive_submodules",
    lambda x: x.sigmoid().sigmoid().sigmoid(),
    lambda x: torch.sigmoid(x),
    lambda x: torch.exp(x),
    lambda x: x.exp().exp().exp(),
    *(3, X - 3),
)
simple(
    "with_overlapping_matches",
    lambda x: x.sigmoid().sigmoid().sigmoid().sigmoid(),
    lambda x: torch.sigmoid(torch.sigmoid(x)),
    lambda x: torch.neg(x),
    lambda x: x,
    *(2, X),
)
simple(
    "replace_with_multiple_outputs",
    lambda x: torch.sigmoid(x) + torch.relu(x),
    lambda a: (torch.sigmoid(a), torch.relu(a)),
    lambda x: (torch.exp(x), torch.abs(x)),
    lambda x: torch.exp(x) + torch.abs(x),
    *(1, X),
)
simple(
    "replace_with_duplicated_outputs",
    lambda x, y: (d := x - y).sigmoid() + d.relu(),
    lambda a, b: ((c := a - b).sigmoid(), c.relu(), c),
    lambda x, y: (r := y.abs(), r, x.exp()),
    lambda x, y: y.abs() * 2,
    *(1, X, Y),
)
simple(
    "with_unused_args", lambda x, y, z: x + y, lambda x, y: x + y, lambda x, y: x - y, lambda x, y, z: x - y, 1, X, Y, Z
)
simple(
    "call_method", lambda x: x.exp().sigmoid(), lambda x: x.exp().sigmoid(), lambda x: x.cos(), lambda x: x.cos(), 1, X
)


@REWRITER.case()
def test_subgraph_rewriter_traced_as_callable() -> None:
    class Pattern(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return sum_of(x)

    class Replacement(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sigmoid(x)

    for prepare in (fx.symbolic_trace, lambda module: module):
        rewritten(lambda x: sum_of(x) * 2, prepare(Pattern()), prepare(Replacement()), lambda x: x.sigmoid() * 2, 1, X)


@REWRITER.case("better", "modules are found by class and options, and not by name")
def test_subgraph_rewriter_replaces_referenced_submodules() -> None:
    class Layers(torch.nn.Module):
        def __init__(self, first: torch.nn.Module, *, adds: bool = False) -> None:
            super().__init__()
            self.add_module(type(first).__name__.lower(), first)
            self.first, self.submod, self.adds = [first], torch.nn.ReLU(), adds

        def forward(self, x: Any) -> Any:
            return self.submod(self.first[0](x + 1 if self.adds else x))

    model, other = Layers(torch.nn.Sigmoid(), adds=True), Layers(torch.nn.Tanh())
    gm = rewritten(model, Layers(torch.nn.Sigmoid()), other, lambda x: other(x + 1), 1, X)
    assert {name: type(module) for name, module in gm.named_children()} == {
        "submod": torch.nn.ReLU,
        "tanh": torch.nn.Tanh,
    }
    assert gm.submod is model.submod
    assert isinstance(model.sigmoid, torch.nn.Sigmoid)  # the model that was traced is as it was
    sequence = torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.ReLU())
    rewritten(model, sequence, lambda x: x * 2, lambda x: (x + 1) * 2, 1, X)
    rewritten(model, torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.ReLU6()), lambda x: x, model, 0, X)
    leaky = torch.nn.Sequential(torch.nn.LeakyReLU(0.5))
    rewritten(leaky, torch.nn.Sequential(torch.nn.LeakyReLU(0.25)), lambda x: x, leaky, 0, X)


REWRITER.add("test_subgraph_rewriter_annotations_int", None, "n/a", "tests the tracer")


@REWRITER.case()
def test_subgraph_rewriter_nodes_with_kwargs() -> None:
    gm = rewritten(
        lambda x, w, b: (gate := F.linear(x, w, bias=b)) + x * gate,
        lambda a, w, bias: (gate := F.linear(a, w, bias=bias), a * gate),
        lambda a, w, bias: ((both := gated(a, w, bias))[0], both[1]),
        lambda x, w, b: F.linear(x, w, b) * (1 + x),
        *(1, X, torch.rand(4, 4), torch.rand(4)),
    )
    assert [node.target for node in gm.graph.nodes].count(gated) == 1


@REWRITER.case()
def test_subgraph_rewriter_local_revert() -> None:
    # three anchors: a product of a linear, but the second is of one that a sigmoid reads
    def model(x: Any, y: Any, w: Any) -> Any:
        first = x * F.linear(F.linear(x, w), w)
        other = F.linear(first, w)
        second = other * torch.sigmoid(other)
        return first + second + y * F.linear(F.linear(y, w), w)

    w = torch.rand(4, 4)
    rewritten(
        model,
        lambda a, b, w: a * F.linear(F.linear(b, w), w),
        lambda a, b, w: F.linear(b, w @ w) * a,
        model,
        *(2, X, Y, w),
    )


def filtered(accepts: Any) -> int:
    def model(x: Any) -> Any:
        return torch.add(x.exp(), torch.add(x.sin(), 2).relu()).relu()

    gm = fx.symbolic_trace(model)
    found = replace_pattern_with_filters(
        gm, lambda x, n: torch.add(x, n).relu(), lambda x, n: torch.mul(x, n), [accepts] if accepts else None
    )
    new = [node for node in gm.graph.nodes if node.target is torch.mul]
    assert [made for one in found for made in one.replacements] == new
    return len(found)


@REWRITER.case()
def test_replace_pattern_with_filters() -> None:
    def second_is_a_number(match: Any, graph: fx.Graph, pattern: fx.Graph) -> bool:
        _, number = pattern.find_nodes(op="placeholder")
        return isinstance(match.nodes_map[number], int)

    assert filtered(None) == 2
    assert filtered(second_is_a_number) == 1


@REWRITER.case()
def test_matching_pattern_with_list_type_arg() -> None:
    alias = torch.ops.aten._reshape_alias_copy.default
    gm = fx.symbolic_trace(lambda x: alias(x, [1, 2], [3, 4]))
    found = replace_pattern(gm, lambda x, a, b: alias(x, a, b), lambda x, a, b: alias(x, b, a))
    (call,) = gm.graph.find_nodes(op="call_function", target=alias)
    assert len(found) == 1
    assert list(call.args[1:]) == [[3, 4], [1, 2]]


@REWRITER.case()
def test_replacement_with_attrs() -> None:
    class Model(torch.nn.Module):
        def __init__(self, value: float, *, subtracts: bool = False) -> None:
            super().__init__()
            self.value, self.subtracts = torch.tensor([value]), subtracts

        def forward(self, x: Any) -> Any:
            return x - self.value if self.subtracts else x + self.value

    rewritten(Model(1), Model(1), Model(3, subtracts=True), lambda x: x - 3, 1, X)


def count(model: Callable[..., Any], pattern: Callable[..., Any], *inputs: torch.Tensor) -> int:
    """How often the pattern is replaced by itself; the model's results stay."""
    gm = fx.symbolic_trace(model)
    found = len(replace_pattern(gm, pattern, pattern))
    gm.graph.lint()
    torch.testing.assert_close(gm(*inputs), model(*inputs))
    return found


@MATCHER.case()
def test_subgraph_matcher_with_attributes() -> None:
    class Linear(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.w, self.b = torch.nn.Parameter(torch.ones(size, size)), torch.nn.Parameter(torch.ones(size))

        def forward(self, x: Any) -> Any:
            return torch.ops.aten.addmm.default(self.b, x, self.w)

    assert pattern_rule(Linear(5), lambda x: x).explain(fx.symbolic_trace(Linear(4))).num_matches == 1


@MATCHER.case()
def test_subgraph_matcher_with_list() -> None:
    gm = fx.symbolic_trace(lambda x, y: torch.ops.aten.view(x, [5, y.shape[0]]))
    rule = pattern_rule(lambda x, y, z: torch.ops.aten.view(x, [z, y.shape[0]]), lambda x, y, z: x)
    assert rule.explain(gm).num_matches == 1


@MATCHER.case()
def test_subgraph_matcher_with_list_bad() -> None:
    gm = fx.symbolic_trace(lambda x, y: torch.ops.aten.view(x, [1, y.shape[0]]))
    rule = pattern_rule(lambda x, y, z: torch.ops.aten.view(x, [z, y.shape[0], y.shape[1]]), lambda x, y, z: x)
    why = rule.explain(gm)
    assert why.num_matches == 0
    assert "expected a list of 3" in str(why)


@MATCHER.case("better", "`...` ignores one literal, and `explain` says which one differs")
def test_subgraph_matcher_ignore_literals() -> None:
    gm = traced(lambda x: x + 1, X)
    exact = pattern_rule(lambda x: x + 2, lambda x: x)
    assert exact.explain(gm).num_matches == 0
    assert "expected the literal 2 at root.other, found 1" in str(exact.explain(gm))
    assert len(replace_pattern_with_filters(gm, lambda x: x + 2, lambda x: x - 2, ignore_literals=True)) == 1


def diamond(a: Any) -> Any:
    a = torch.relu(a)
    return torch.sigmoid(a) + torch.relu(a)


def quantized(x: Any, s: Any) -> Any:
    return torch.ops.quantized_decomposed.quantize_per_tensor(x, s, 0, -128, 127, torch.int8)


MATCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "SingleNodePattern": (lambda x: torch.neg(x) + 1, lambda a: torch.neg(a), 1),
    "SimplePattern": (
        lambda x, y: (m := torch.cat([x, y]).sum(), torch.cat([y, x]).sum() + m)[1],
        lambda a, b: torch.cat([a, b]).sum(),
        2,
    ),
    "SimpleFullGraphMatching": (lambda x: (x + 1).neg().sum(), lambda x: (x + 1).neg().sum(), 1),
    "DiamondShapePatternTestCase": (lambda x: diamond(torch.neg(x)) * 2, diamond, 1),
    "NonFullyContainedMatches": (
        lambda x, y: ((s := torch.cat([x, y])).t() @ s, s.neg())[0],
        lambda a, b: torch.cat([a, b]).t(),
        0,
    ),
    "ChainRepeatedPattern": (
        lambda x: x.sigmoid().sigmoid().sigmoid().sigmoid(),
        lambda x: torch.sigmoid(torch.sigmoid(x)),
        2,
    ),
    "QuantizationModel": (
        lambda x: torch.sigmoid((x + 3).dequantize()).half(),
        lambda x: torch.sigmoid(x.dequantize()),
        1,
    ),
    "MultipleOutputsWithDependency": (
        lambda x: (y := x.exp().sigmoid()) + y.sum(),
        lambda a: (b := a.sigmoid(), b.sum()),
        1,
    ),
    "MultipleOutputsWithoutDependency": (
        lambda x: x.sigmoid() @ x.relu().t(),
        lambda a: (a.sigmoid(), a.relu()),
        1,
    ),
    "MultipleOutputsMultipleOverlappingMatches": (
        lambda x: x.sum() + x.sum() + x.mean() + x.mean(),
        lambda a: (a.sum(), a.mean()),
        2,
    ),
    "MultipleOutputsMultipleNonOverlappingMatches": (
        lambda x, y: x.sum() + x.mean() + y.sum() + y.mean(),
        lambda a: (a.sum(), a.mean()),
        2,
    ),
    "MultipleOutputsIdenticalAnchor": (
        lambda x: x.sum() + x.exp().sum(),
        lambda a: (a.sum(), a.exp().sum()),
        1,
    ),
    "MultipleOutputsHorizontalPattern": (
        lambda x, y: (x * y).relu() + x * y.exp(),
        lambda a, b, c: ((a * b).relu(), a * c),
        1,
    ),
    "QuantizationFp8Pattern": (
        lambda x, y: (x.to(torch.float8_e4m3fn).float() * 2 + y.to(torch.float8_e4m3fn).float() * 3).to(
            torch.float8_e4m3fn
        ),
        lambda x, y, s, t: (x.float() * s + y.float() * t).to(torch.float8_e4m3fn),
        1,
    ),
    "NoAnchorFound": (lambda x: x.relu(), lambda a: a.exp(), 0),
}
for _name, (_model, _pattern, _count) in MATCHES.items():

    def _check(model: Any = _model, pattern: Any = _pattern, expected: int = _count) -> None:
        gm = fx.symbolic_trace(model)
        assert len(replace_pattern(gm, pattern, pattern)) == expected
        inputs = (X, Y)[: len(gm.graph.find_nodes(op="placeholder"))]
        results, wanted = gm(*inputs), model(*inputs)
        assert torch.equal(results.float(), wanted.float())

    PASSES.add(_name, _check)


@PASSES.case("better", "the true match is found; greedy anchors miss it")
def MultiOutputWithWithInvalidMatches() -> None:  # noqa: N802
    def model(x: Any, y: Any) -> Any:
        return x.sum() * y.mean() + y.sum() * 2

    assert count(model, lambda a: (a.sum(), a.mean()), X, Y) == 1
