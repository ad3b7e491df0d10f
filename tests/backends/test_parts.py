"""Inner backends that do not compile every graph, by stand-ins: no gradients, no custom operators, no numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from fxrewrite.backends import in_parts, is_custom, under_autograd
from fxrewrite.errors import FxRewriteError
from tests.backends.plans import SILU, plan


@torch.library.custom_op("fxrewrite_tests::twice", mutates_args=())
def twice(x: torch.Tensor, times: int) -> list[torch.Tensor]:
    return [x * times, x + times]


@twice.register_fake
def _(x: torch.Tensor, times: int) -> list[torch.Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


def _twice_backward(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, None]:
    return grads[0] * ctx.times + grads[1], None


twice.register_autograd(_twice_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "times", inputs[1]))


class Narrow:
    """An inference compiler as others write them: whole graphs of aten, tensors only, detached contiguous results."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        assert all(isinstance(value, torch.Tensor) for value in example_inputs)
        assert not any(is_custom(node) for node in gm.graph.nodes)
        assert all(isinstance(node, fx.Node) for node in gm.graph.output_node().args[0])
        self.graphs.append(gm)
        return lambda *values: [result.detach().contiguous() for result in gm(*values)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = self.up(x[index])
        first, second = torch.ops.fxrewrite_tests.twice(y * torch.sigmoid(y), x.shape[0])
        return self.down(first.transpose(0, 1) + second.transpose(0, 1)).flatten()


INDEX = torch.tensor([[0, 2], [1, 1], [2, 0]])


def gradients(function: Callable[..., torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    y = function(x, INDEX)
    y.square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(grad is not None for grad in found)
    return y.detach(), [grad for grad in found if grad is not None]


@pytest.mark.parametrize("graph", ["torch", "aten"])
def test_a_compiler_of_inference_graphs_without_custom_operators_trains(graph: Any) -> None:
    model, inner = Model(), Narrow()
    backend = plan(SILU).backend(under_autograd(in_parts(inner)), graph=graph)
    torch.testing.assert_close(
        gradients(torch.compile(model, backend=backend, fullgraph=True), model), gradients(model, model)
    )
    assert backend.reports[0].rewrites == 1
    assert len(inner.graphs) == 3  # forward before and after the custom operator, and the backward graph
    assert any("silu" in str(node.target) for node in inner.graphs[0].graph.nodes)


def test_each_part_is_compiled_once_for_each_shape() -> None:
    model, inner = Model(), Narrow()
    backend = plan(SILU).backend(in_parts(inner))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for size in (3, 5, 3):
            x = torch.randn(size, 4)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x, INDEX), model(x, INDEX))
    assert len(backend.reports) == 1
    assert len(inner.graphs) == 3  # only the first part has an input of another shape in the second call


def test_what_takes_apart_a_node_that_is_left_is_left_too() -> None:
    inner = Narrow()
    seen: list[str] = []

    def leave(node: fx.Node) -> bool:
        seen.append(str(node.target))
        return "var_mean" in str(node.target)

    def function(x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x * 2)
        return F.relu(x - mean) / variance

    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(function, backend=in_parts(inner, leave))(x), function(x))
    assert len(inner.graphs) == 2
    assert not any(node.target is operator.getitem for gm in inner.graphs for node in gm.graph.nodes)
    assert seen


def test_an_error_of_the_inner_backend_comes_out_of_the_call() -> None:
    def refuses(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        raise NotImplementedError("no kernel for sin")

    with pytest.raises(NotImplementedError, match="no kernel for sin"):
        torch.compile(torch.sin, backend=in_parts(refuses))(torch.ones(2))


@pytest.mark.parametrize("adapter", [in_parts, under_autograd])
def test_an_inner_backend_that_does_not_exist_is_refused_at_once(adapter: Any) -> None:
    with pytest.raises(FxRewriteError, match="inner backend 'openvine' does not exist"):
        adapter("openvine")
    assert adapter("eager").__qualname__ == f"{adapter.__name__}(eager)"
