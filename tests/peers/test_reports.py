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

from fxrewrite.errors import Reason, RefusedError
from fxrewrite.pattern import parse
from rules.canonical.normal_forms import NORMAL_FORMS
from tests.rewriting import apply, made, silu, state, targets, traced

X = torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4)


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


# Graphs that are not valid any more


def test_matches_back_to_back_through_a_list() -> None:
    # pytorch 159613 (open): the generated code reads an erased node
    def model(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.cat([a, b]), c])

    respell = made(lambda x, y: torch.cat([x, y]), lambda x, y: torch.concat([x, y]))
    for gm in (fx.symbolic_trace(model), traced(model, X, X + 1, X + 2)):
        assert apply(gm, respell).rewrites == 2
        assert torch.equal(gm(X, X + 1, X + 2), model(X, X + 1, X + 2))


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


def test_the_time_for_parallel_siblings_grows_with_the_graph_alone() -> None:
    # subgraph_rewriter: 0.013, 0.044, 0.174, 0.706 s at 34, 66, 130, 258 nodes, four times for each doubling
    merge = made(lambda x, wq, wk, wv: (F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)), lambda x, wq, wk, wv: x)

    def seconds(count: int) -> float:
        gm = three_linears(count)
        costs: list[float] = []
        for _ in range(5):
            started = time.process_time()
            assert merge.explain(gm).num_matches == 3 * count
            costs.append(time.process_time() - started)
        return min(costs)

    assert seconds(64) < 24 * seconds(8), "eight times when it is linear, 64 times when it is quadratic"
