"""What AOTAutograd makes again outside of a program keeps a gradient of its own: by a copy, or outside of a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxrewrite.spmd  # noqa: F401  # its operators
from fxrewrite.backends import Regions, compile_regions, find_backend, inner_compiler, regional
from fxrewrite.backends.replayed_views import copy_replayed
from tests.rewriting import Halved, traced

X = torch.linspace(-1, 1, 6, dtype=torch.float64)
scale: Any = torch.ops.fxrewrite.scale_gradient

RESULTS: dict[str, tuple[Callable[..., Any], int]] = {
    "a value and its identity": (lambda x: ((y := x * 1), scale(y, 0.5)), 1),
    "two identities of a value": (lambda x: ((y := x * 1), (scale(y, 0.5), scale(y, 0.25)))[1], 2),
    "a view of an identity of an input": (lambda x: (scale(x, 0.5).view(3, 2).contiguous(),), 1),
    "one of a value that is not returned": (lambda x: (scale(x * 1, 0.5),), 0),
    "plain views": (lambda x: ((y := x * 1), y.view(2, 3), x.view(3, 2)), 0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_gradients_of_results_are_kept(name: str) -> None:
    function, copies = RESULTS[name]
    program = traced(function, X)
    copy_replayed(program)
    assert sum(node.target is torch.ops.aten.clone.default for node in program.graph.nodes) == copies
    inputs = X.clone().requires_grad_(), X.clone().requires_grad_()
    for run, x in zip((function, find_backend("aot_eager")(program, [inputs[1]])), inputs, strict=True):
        sum((i + 1) * result.sin().sum() for i, result in enumerate(run(x))).backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=1e-15)


def test_regions_leave_identities_to_the_program() -> None:
    """Of weights that are scaled before layers read them, and of a value that two regions read."""
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(6)]

    def layers(h: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        used = [scale(w, 0.5).view(2, 8).view(4, 4).contiguous() for w in weights]
        for w in used:
            for _ in range(4):
                h = torch.tanh(h @ w).cos() + h.sin() * 0.3
            h = scale(h, 0.9)
        return h.square().sum()

    h = torch.randn(3, 4, dtype=torch.float64)
    gm = make_fx(layers, tracing_mode="fake", pre_dispatch=True)(h, *weights)
    output = gm.graph.output_node()
    output.args = ((output.args[0],),)
    gm.recompile()
    run, report = compile_regions(gm, [h, *weights], inner_compiler("aot_eager"))
    assert max(report.calls) >= 5, report
    expected = torch.autograd.grad(layers(h, *weights), weights)
    for one, other in zip(torch.autograd.grad(run(h, *weights)[0], weights), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself does so
@pytest.mark.parametrize("seen", [lambda y, h: y, lambda y, h: h[:, 1:]], ids=["before it", "a view of it"])
def test_regions_give_copies_of_what_a_function_of_the_user_gives(seen: Callable[..., Any]) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(8)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = []
            for layer in self.layers:
                y = x + layer(x).sin().cos() * layer(x).sigmoid().square()
                x = Halved.apply(y)
                states.append(seen(y, x))
            return x.square().sum() + sum(state.sin().square().sum() for state in states)

    model, x, reports = Stack().double(), torch.randn(3, 8, dtype=torch.float64), list[Regions]()
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    compiled = torch.compile(model, backend=regional("aot_eager", reports.append), fullgraph=True)
    found = torch.autograd.grad(compiled(x), list(model.parameters()))
    assert max(reports[0].calls) >= 6, reports[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_region_is_compiled_for_the_strides_that_its_inputs_have() -> None:
    """A program of local shapes says dense strides of a view of a chunk; inductor refuses others when it runs."""
    weights = [torch.randn(8, 8) for _ in range(6)]

    def layers(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        h = x.narrow(1, 0, 8)
        for w in weights:
            for _ in range(4):
                h = torch.tanh(h @ w).cos() + h.sin() * 0.3
            h = torch.cat([h, h], 1).narrow(1, 0, 8)
        return (h.sum(),)

    x = torch.randn(5, 16)
    gm = make_fx(layers, tracing_mode="fake", pre_dispatch=True)(x, *weights)
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor) and node.op == "call_function":
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape)
    run, report = compile_regions(gm, [x, *weights], inner_compiler("inductor"))
    assert max(report.calls) >= 4, report
    torch.testing.assert_close(run(x, *weights)[0], layers(x, *weights)[0], rtol=1e-4, atol=1e-4)
