"""What is reported of other rewriters and no suite of theirs asserts; every test names the report that it answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite.errors import Reason, RefusedError, RuleDefinitionError
from fxrewrite.pattern import Literal, Maybe, functional, maybe, parse, where
from fxrewrite.rule import Rule
from rules.canonical.normal_forms import NORMAL_FORMS
from tests.rewriting import apply, made, silu, state, targets, traced

X = torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4)


def exported(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    class Model(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    return torch.export.export(Model(), inputs).module()


# Wrong numbers


def test_a_match_across_a_write_is_refused() -> None:
    # torch.fx.subgraph_rewriter rewrites it and computes something else (probe on torch 2.13)
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        s = torch.sigmoid(y)
        y.add_(1)
        return y * s

    gm = fx.symbolic_trace(model)
    before = state(gm)
    (refusal,) = apply(gm, silu()).refusals
    assert refusal.kind is Reason.EFFECT
    assert str(refusal) == (
        "test.it: %add_ (aten::add_) may write to memory of the match between %sigmoid and %mul at %mul; "
        "functionalize the graph before rewriting it"
    )
    assert state(gm) == before
    assert torch.equal(gm(X), model(X))


def test_an_argument_called_out_is_no_write() -> None:
    # pytorch 132867, 137229: mutation found by a regular expression on names rejects matches
    gm = fx.symbolic_trace(lambda out, add_: out * torch.sigmoid(out) + add_)
    assert apply(gm, silu()).rewrites == 1


def test_a_literal_that_is_written_must_be_equal() -> None:
    # pytorch 195320: integers were wildcards, a wrong permutation matched, the result was 0.49 off
    def attention(permutation: tuple[int, ...]) -> Callable[..., Any]:
        return lambda q, k, v: torch.softmax(q @ k.permute(permutation), -1) @ v

    fuse = made(attention((0, 1, 3, 2)), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0))
    q, v = torch.rand(2, 3, 3, 3, dtype=torch.float64), torch.rand(2, 3, 3, 3, dtype=torch.float64)
    k = torch.rand(2, 3, 3, 3, dtype=torch.float64)
    for permutation, expected in (((0, 1, 3, 2), 1), ((0, 2, 3, 1), 0), ((0, 1, 2, 3), 0)):
        gm = traced(attention(permutation), q, k, v)
        assert apply(gm, fuse).rewrites == expected
        assert torch.allclose(gm(q, k, v), attention(permutation)(q, k, v))


# Graphs that are not valid any more


def test_matches_back_to_back_through_a_list() -> None:
    # pytorch 159613 (open): the generated code reads an erased node
    def model(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.cat([a, b]), c])

    respell = made(lambda x, y: torch.cat([x, y]), lambda x, y: torch.concat([x, y]))
    for gm in (fx.symbolic_trace(model), traced(model, X, X + 1, X + 2)):
        assert apply(gm, respell).rewrites == 2
        assert torch.equal(gm(X, X + 1, X + 2), model(X, X + 1, X + 2))


@pytest.mark.parametrize("num_layers", [2, 5])
def test_matches_in_a_row_feed_each_other(num_layers: int) -> None:
    # pytorch 159613 again, each match reads the result of the one before
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_layers):
            x = x * torch.sigmoid(x)
        return x

    gm = traced(model, X)
    assert apply(gm, silu()).rewrites == num_layers
    assert torch.allclose(gm(X), model(X))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_outputs_go_where_all_their_inputs_are_known(order: tuple[int, ...]) -> None:
    # pytorch 162019, 148751: inserted at the first output, so a later capture is read before it is computed
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        outputs: dict[int, torch.Tensor] = {}
        for index in order:
            outputs[index] = [lambda: torch.sin(x), lambda: x * torch.exp(y), lambda: torch.cos(x)][index]()
        return outputs[0] + 1, outputs[1], outputs[2] + 2

    both = made(
        lambda x, z: (torch.sin(x), x * z, torch.cos(x)),
        lambda x, z: (torch.sin(x) * 1, z * x, torch.cos(x) * 1),
    )
    gm = traced(model, X, X + 1)
    assert apply(gm, both).rewrites == 1
    assert all(map(torch.allclose, gm(X, X + 1), model(X, X + 1)))


# Half a rewrite


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replacement_that_raises_at_its_second_match_is_refused_there(when: str) -> None:
    # torch._inductor.pattern_matcher leaves the graph half rewritten (probe)
    called: list[str] = []

    def replacement(match: Any, x: Any) -> Any:
        called.append(match.root.name)
        if len(called) == 2 and when == "before":
            raise KeyError("second")
        result = F.silu(x)
        if len(called) == 2:
            raise KeyError("second")
        return result

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x + (y := torch.exp(x)) * torch.sigmoid(y)

    gm = traced(model, X)
    before = state(gm)
    (refusal,) = apply(gm, made(lambda x: torch.sigmoid(x) * x, replacement)).refusals
    assert refusal.kind is Reason.RAISED
    assert str(refusal).startswith("test.it: the replacement raised KeyError: 'second' at %mul; let the pattern or")
    assert len(called) == 2
    assert targets(gm).count("aten.silu.default") == 1
    assert torch.allclose(gm(X), model(X))

    called.clear()
    gm = traced(model, X)
    with pytest.raises(RefusedError, match="the replacement raised KeyError: 'second' at %mul"):
        apply(gm, made(lambda x: torch.sigmoid(x) * x, replacement), atomic=True)
    assert gm.code == before[0]


def test_dtypes_that_the_kernel_refuses_are_refused_before_it_runs() -> None:
    # inductor's test_addmm_dtype_mismatch: meta kernels of addmm, mm, convolution ... compare no dtypes
    a, b = torch.rand(4, 4), torch.rand(4, 4).half()
    cases: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (lambda a, b: torch.mm(b, b) + a, lambda a, b: torch.addmm(a, b, b)),
        (lambda a, b: torch.mm(a, b.to(torch.float32)), lambda a, b: torch.mm(a, b)),
        (lambda a, b: torch.mm(a, b.to(torch.float32)), lambda a, b: F.linear(a, b.t())),
    ]
    for pattern, replacement in cases:
        gm = traced(pattern, a, b)
        (refusal,) = apply(gm, made(pattern, replacement)).refusals
        assert refusal.kind is Reason.VALUE
        assert "takes one dtype, found " in refusal.reason
        assert "float16" in refusal.reason
        assert torch.equal(gm(a, b), pattern(a, b))
        with pytest.raises((RuntimeError, ValueError)):
            replacement(a, b)


# Metadata


def test_new_nodes_of_an_exported_program_have_value_and_source() -> None:
    # pytorch 187945 (open): `meta == {}`, and later passes silently reject the node
    gm = exported(lambda x: torch.relu(x * torch.sigmoid(x)), X)
    before = set(gm.graph.nodes)
    old = next(node for node in gm.graph.nodes if "mul" in str(node.target))
    value, stack_trace = old.meta["val"], old.meta["stack_trace"]
    assert apply(gm, silu()).rewrites == 1
    (new,) = set(gm.graph.nodes) - before
    assert (new.meta["val"].shape, new.meta["val"].dtype) == (value.shape, value.dtype)
    assert new.meta["stack_trace"] == stack_trace
    assert "test_reports.py" in stack_trace
    assert new.meta["fxrewrite"] == ("test.it",)
    assert torch.allclose(gm(X), torch.relu(F.silu(X)))


# Higher-order operators without a body

fixed = torch.library.Library("tests_peers", "FRAGMENT")
fixed.define("norm(Tensor(a!) out, Tensor x, Tensor w) -> ()")
fixed.define("add_norm(Tensor(a!) x, Tensor(b!) residual, Tensor w) -> ()")
fixed.define("silu_and_norm(Tensor(a!) out, Tensor x, Tensor w) -> ()")
OPS = torch.ops.tests_peers


@torch.library.impl(fixed, "norm", "CompositeExplicitAutograd")
def _norm(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w)


@torch.library.impl(fixed, "add_norm", "CompositeExplicitAutograd")
def _add_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> None:
    residual.add_(x)
    _norm(x, residual, w)


@torch.library.impl(fixed, "silu_and_norm", "CompositeExplicitAutograd")
def _silu_and_norm(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    _norm(out, F.silu(x), w)


def test_what_a_functionalized_operator_computes_is_no_random_draw() -> None:
    # vllm's fusions of auto_functionalized operators, two into one; and one operator with two results
    hop = torch.ops.higher_order.auto_functionalized

    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        normed = hop(OPS.norm.default, out=torch.empty_like(x), x=F.silu(x), w=w)[1]
        both = hop(OPS.add_norm.default, x=normed, residual=x, w=w)
        return both[1], both[2]

    gm = traced(model, X, X[0])
    gm.graph.eliminate_dead_code()
    expected = gm(X, X[0])
    fuse = made(
        lambda x, w, out: hop(OPS.norm.default, out=out, x=F.silu(x), w=w)[1],
        lambda x, w, out: hop(OPS.silu_and_norm.default, out=out, x=x, w=w)[1],
    )
    assert apply(gm, fuse).rewrites == 1

    def split(x: Any, r: Any, w: Any) -> Any:
        total = x + r
        return hop(OPS.norm.default, out=torch.empty_like(x), x=total, w=w)[1], total

    def both(x, r, w):
        results = hop(OPS.add_norm.default, x=x, residual=r, w=w)
        return results[1], results[2]

    assert apply(gm, made(both, split)).rewrites == 1
    assert all(map(torch.allclose, gm(X, X[0]), expected))


def test_one_view_of_an_operator_that_writes_in_all_functional_forms() -> None:
    # vllm 14703, pytorch 152441: patterns of operators that write, whichever way the graph was made functional
    first, second = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2

    def one(x: torch.Tensor, w: torch.Tensor) -> Any:
        normed = first(OPS.norm.default, out=torch.empty_like(x), x=x + 1, w=w)[1]
        both = first(OPS.add_norm.default, x=normed, residual=x, w=w)
        return both[1] * 2, both[2]

    def two(x: torch.Tensor, w: torch.Tensor) -> Any:
        normed = second(OPS.norm.default, x=x + 1, w=w, _out_base_index=0, _all_bases=[torch.empty_like(x)])[1]
        options = {"_x_base_index": 0, "_residual_base_index": 1, "_all_bases": [normed, x]}
        both = second(OPS.add_norm.default, w=w, **options)
        return both[1] * 2, both[2]

    def rms(x: Any, w: Any) -> Any:
        return F.rms_norm(x, (4,), w, 1e-6)

    norm = made(lambda x, w: functional("tests_peers::norm", ..., x, w), rms)
    added = made(lambda x, r, w: functional(OPS.add_norm, x, residual=r, w=w), lambda x, r, w: (rms(x + r, w), x + r))
    assert parse(str(added.pattern).join("()")) == added.pattern  # the text form has the overload
    for model in (one, two):
        gm = traced(model, X, X[0])
        gm.graph.eliminate_dead_code()
        expected = gm(X, X[0])
        assert apply(gm, norm).rewrites == 1
        assert apply(gm, added).rewrites == 1
        assert not any("auto_functionalized" in str(node.target) for node in gm.graph.nodes)
        assert all(map(torch.allclose, gm(X, X[0]), expected))
    for wrong in (lambda x: functional("aten::relu", x), lambda x, w: functional(OPS.norm, x, w)):
        with pytest.raises(RuleDefinitionError, match=r"functional\("):
            made(wrong, wrong)


# Functions that are leaves


@fx.wrap
def thrice(x: Any) -> Any:
    return x * 3


def test_a_wrapped_function_is_a_call_on_both_sides() -> None:
    # subgraph_rewriter's test_subgraph_rewriter_nodes_with_kwargs and _local_revert
    gm = traced(lambda x: torch.relu(x), X)
    assert apply(gm, made(lambda x: torch.relu(x), lambda x: thrice(torch.relu(x)))).rewrites == 1
    assert any(node.target is thrice for node in gm.graph.nodes)
    assert torch.equal(gm(X), 3 * torch.relu(X))
    assert apply(gm, made(lambda x: thrice(torch.relu(x)), lambda x: x + thrice(2) * len("a"))).rewrites == 1
    assert torch.equal(gm(X), X + 6)


# Silence: zero matches for another spelling


INDICES: list[Any] = [
    (..., slice(None, 2)),
    (..., 1),
    (..., None),
    (..., None, slice(1, None), None),
    (..., 0, slice(None, None, 2)),
    (slice(None), 1),
    (0, ..., slice(-2, None)),
    (None, slice(1, 3)),
    slice(1, 3),
    1,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_matches_slices_in_a_graph_of_overloads(index: Any) -> None:
    # vllm's and torchao's patterns of `x[..., :n]`
    neg = made(lambda x: torch.relu(x[index]), lambda x: x[index].clamp(min=0))
    for x in (X, torch.stack([X, X + 1])):
        for gm in (fx.symbolic_trace(lambda x: torch.relu(x[index])), traced(lambda x: torch.relu(x[index]), x)):
            assert made(lambda x: torch.relu(x[..., 3:]), lambda x: x).explain(gm).num_matches == 0
            assert apply(gm, neg).rewrites == 1
            assert torch.equal(gm(x), torch.relu(x[index]))


def test_an_index_by_tensors_matches_in_a_graph_of_overloads() -> None:
    x, order = torch.rand(2, 3, 4), torch.tensor([1, 0])
    for one, other in (
        (lambda x, i, j: torch.relu(x[:, i, j]), lambda x, i, j: torch.relu(x[i, :, j])),
        (lambda x, i, j: torch.relu(x[i + j]), lambda x, i, j: torch.relu(x[:, i + j])),
    ):
        for pattern, gm in itertools.product((one, other), (fx.symbolic_trace(one), traced(one, x, order, order))):
            rule = made(pattern, lambda x, i, j: x + i + j)
            assert rule.explain(gm).num_matches == (pattern is one), rule.pattern
            assert parse(str(rule.pattern)) == rule.pattern


def glu(dim: int) -> Callable[..., Any]:
    return lambda x: F.glu(x, dim)


def test_a_default_that_is_written_is_the_default() -> None:
    # inductor's test_match_equivalent_function_invocations1, 2 and 3
    fuse = made(lambda a, b, c: torch.relu(torch.addmm(a, b, c)), lambda a, b, c: torch.relu(b @ c + a))
    for beta, alpha, expected in ((1, 1, 1), (1, 1.0, 1), (1.0, 1.0, 1), (1, 2, 0), (0.5, 1.0, 0)):
        gm = fx.symbolic_trace(torch.nn.Identity())
        gm.graph = graph = fx.Graph()
        a, b, c = (graph.placeholder(name) for name in "abc")
        product = graph.call_function(torch.ops.aten.addmm.default, (a, b, c), {"beta": beta, "alpha": alpha})
        graph.output(graph.call_function(torch.relu, (product,)))
        assert apply(gm, fuse).rewrites == expected
    twice = made(lambda a, b: torch.add(a, b, alpha=2.0), lambda a, b: a + b + b)
    assert apply(traced(lambda a, b: torch.add(a, b, alpha=2), X, X), twice).rewrites == 1
    gate = made(lambda x: torch.ops.aten.glu(x), lambda x: x[:, :2] * torch.sigmoid(x[:, 2:]))
    for dim, expected in ((-1, 1), (1, 1), (0, 0), (-2, 0)):  # of rank 2, the last dimension is 1
        gm = traced(glu(dim), X)
        assert apply(gm, gate).rewrites == expected
        torch.testing.assert_close(gm(X), F.glu(X, dim))


SPELLINGS: dict[str, tuple[Callable[..., Any], list[Callable[..., Any]]]] = {
    "softmax": (
        lambda x: torch.softmax(x, dim=-1),
        [
            lambda x: torch.softmax(x, -1),
            lambda x: x.softmax(-1),
            lambda x: x.softmax(dim=-1),
            lambda x: F.softmax(x, dim=-1),
            lambda x: torch.ops.aten.softmax.int(x, -1),
        ],
    ),
    "relu": (
        lambda x: torch.relu(x),
        [lambda x: x.relu(), lambda x: F.relu(x), lambda x: torch.ops.aten.relu.default(x)],
    ),
    "mul": (
        lambda x, y: torch.mul(x, torch.exp(y)),
        [
            lambda x, y: x * torch.exp(y),
            lambda x, y: torch.exp(y) * x,
            lambda x, y: x.mul(y.exp()),
            lambda x, y: torch.ops.aten.mul.Tensor(torch.exp(y), x),
        ],
    ),
    "silu": (
        lambda x: x * torch.sigmoid(x),
        [lambda x: torch.sigmoid(x) * x, lambda x: x * x.sigmoid(), lambda x: torch.multiply(F.sigmoid(x), x)],
    ),
}


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n, (_, models) in SPELLINGS.items() for i in range(len(models))]
)
def test_every_spelling_of_one_call_matches(name: str, index: int) -> None:
    # subgraph_rewriter finds none of them, inductor's matcher none with operands swapped (probes)
    pattern, models = SPELLINGS[name]
    gm = fx.symbolic_trace(models[index])
    report = apply(gm, made(pattern, {"mul": lambda x, y: x * y.exp()}.get(name, lambda x: pattern(x))))
    assert report.rewrites == 1


def test_the_same_layer_in_a_sequential_matches() -> None:
    # pytorch 78201: nothing matches once a model sits in nn.Sequential, the module path is part of the target
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.ReLU()).double()
    gm = torch.export.export(model, (X,)).module()
    fuse = made(lambda x, w, b: torch.relu(F.linear(x, w, b)), lambda x, w, b: torch.relu(torch.addmm(b, x, w.t())))
    assert apply(gm, fuse).rewrites == 1
    assert torch.allclose(gm(X), model(X))


def test_a_pattern_with_reshape_and_a_graph_with_view() -> None:
    # pytorch 151649: they are two operators, and a view that tracing left is silently no match; after the normal forms
    # there is one of them, and the graph means the same
    flatten = made(lambda x: torch.relu(x.reshape(16)), lambda x: x.reshape(16).clamp(min=0))
    gm = traced(lambda x: torch.relu(x.view(16)), X)
    missed = flatten.explain(gm)
    assert missed.num_matches == 0
    assert "expected operator aten::reshape at root.self, found aten::view (%view)" in str(missed)
    assert NORMAL_FORMS.apply(gm)["normal_forms.view_to_reshape"].rewrites == 1
    assert apply(gm, flatten).rewrites == 1
    assert torch.equal(gm(X), torch.relu(X.view(16)))


# Literals, optional arguments, defaults


def test_a_placeholder_may_capture_a_literal() -> None:
    # pytorch 68393, 100419, 143147: literals cannot be variables of a pattern
    def scaled(x, scale: Literal):
        return torch.relu(x * scale)

    def padded(x, w, b: Maybe, stride: Literal, padding: Literal):
        return F.relu(F.conv1d(x, w, b, stride, padding))

    gm = traced(lambda x: torch.relu(x * 3.0) + torch.relu(0.5 * x), X)
    fold = made(scaled, lambda x, scale: torch.relu(x) * scale, where=[positive])
    assert apply(gm, fold).rewrites == 2
    assert torch.allclose(gm(X), torch.relu(X * 3.0) + torch.relu(0.5 * X))
    seen: list[tuple[Any, ...]] = []
    note = made(
        padded,
        lambda x, w, b, stride, padding: seen.append((stride, padding)) or F.conv1d(x, w, b, stride, padding).relu(),
    )
    gm = fx.symbolic_trace(lambda x, w: F.relu(F.conv1d(x, w, stride=2, padding=1)))
    assert apply(gm, note).rewrites == 1
    assert seen == [([2], [1])]


@where.predicate("scale", text="positive")
def positive(scale: float) -> bool:
    return scale > 0


def test_arguments_left_at_their_defaults() -> None:
    # pytorch PR 99431: omitted default arguments do not match given ones
    pattern = made(lambda x: torch.add(torch.sum(x, dtype=None), 1, alpha=1), lambda x: x.sum() + 1.0)
    assert apply(fx.symbolic_trace(lambda x: x.sum() + 1), pattern).rewrites == 1
    assert apply(fx.symbolic_trace(lambda x: torch.add(x.sum(), 1, alpha=2)), pattern).rewrites == 0


def test_one_rule_for_a_step_that_may_be_missing() -> None:
    # TensorRT-LLM and inductor write eight and thirty patterns of attention for what is optional in it
    def attention(q, k, v, mask: Maybe):
        return torch.softmax(maybe(q @ k.transpose(-2, -1) + mask), -1) @ v

    fuse = made(attention, lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0))
    q = torch.rand(1, 2, 4, 4, dtype=torch.float64)
    plain = traced(lambda q: torch.softmax(q @ q.transpose(-2, -1), -1) @ q, q)
    masked = traced(lambda q, m: torch.softmax(m + q @ q.transpose(-2, -1), -1) @ q, q, X)
    for gm, inputs in ((plain, (q,)), (masked, (q, X))):
        expected = gm(*inputs)
        assert apply(gm, fuse).rewrites == 1
        assert torch.allclose(gm(*inputs), expected)


# Time


def three_linears(count: int) -> fx.GraphModule:
    """`count` times q, k and v of one value."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in ("x", "wq", "wk", "wv"))
    for _ in range(count):
        q, k, v = (graph.call_function(F.linear, (x, w)) for w in weights)
        x = graph.call_function(torch.add, (graph.call_function(torch.mul, (q, k)), v))
    graph.output(x)
    return fx.GraphModule(torch.nn.Module(), graph)


def merged(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
    parts = torch.chunk(F.linear(x, torch.cat([wq, wk, wv])), 3, -1)
    return parts[0], parts[1], parts[2]


def merge_linears() -> Rule:
    return made(lambda x, wq, wk, wv: (F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)), merged)


def test_the_time_for_parallel_siblings_grows_with_the_graph_alone() -> None:
    # subgraph_rewriter: 0.013, 0.044, 0.174, 0.706 s at 34, 66, 130, 258 nodes, four times for each doubling
    merge = merge_linears()

    def seconds(count: int) -> float:
        gm = three_linears(count)
        costs: list[float] = []
        for _ in range(5):
            started = time.process_time()
            assert merge.explain(gm).num_matches == 3 * count
            costs.append(time.process_time() - started)
        return min(costs)

    assert seconds(64) < 24 * seconds(8), "eight times when it is linear, 64 times when it is quadratic"


def test_siblings_are_merged_once_and_truly() -> None:
    gm = three_linears(3)
    weights = [torch.rand(4, 4, dtype=torch.float64) for _ in range(3)]
    expected = gm(X, *weights)
    assert apply(gm, merge_linears()).rewrites == 3
    assert [node.target for node in gm.graph.nodes].count(F.linear) == 3
    assert torch.allclose(gm(X, *weights), expected)
