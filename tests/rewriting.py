"""Small graphs and rules, for tests of rewriting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import Report, Rule, RuleSet, rule
from fxrewrite.ops import key


class Halved(torch.autograd.Function):
    """The identity, with half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 0.5


def traced(
    function: Callable[..., Any], *inputs: torch.Tensor, mode: Literal["fake", "symbolic"] = "fake"
) -> fx.GraphModule:
    """Pre-dispatch ATen."""
    is_module = isinstance(function, torch.nn.Module)  # of whose forward make_fx would count `self`
    of_inputs = (lambda *given: function(*given)) if is_module else function
    return make_fx(of_inputs, tracing_mode=mode, pre_dispatch=True)(*inputs)


def exported(model: torch.nn.Module, *inputs: torch.Tensor, **how: Any) -> fx.GraphModule:
    """The module that torch.export makes, which has its parameters."""
    gm = torch.export.export(model, inputs, **how).module()
    assert isinstance(gm, fx.GraphModule)
    return gm


def state(gm: fx.GraphModule) -> list[Any]:
    """All that a rewrite that fails must leave as it was."""
    return [gm.code, *((n, n.name, n.args, dict(n.kwargs), dict(n.meta)) for n in gm.graph.nodes)]


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op.startswith("call")]


def calls(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def value_and_gradients(function: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The (first) value, and the gradients of a weighting of it, of all floating-point inputs that it depends on."""
    leaves = [arg.detach().clone().requires_grad_(arg.is_floating_point()) for arg in args]
    value = function(*leaves)
    value = value[0] if isinstance(value, tuple) else value
    weights = torch.linspace(-1, 1, value.numel()).reshape(value.shape).to(value.dtype)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(value, trained, weights, allow_unused=True) if value.requires_grad else []
    return [value.detach(), *(grad for grad in grads if grad is not None)]


def count(gm: fx.GraphModule, name: str) -> int:
    """How many calls of an operator the graph has: one of ATen of this name, or one with this key."""
    wanted = name if "::" in name or "." in name else f"aten::{name}"
    return sum(node.op == "call_function" and key(node) == wanted for node in gm.graph.nodes)


def check_rewritten(
    rules: RuleSet, rule: str, function: Callable[..., Any], args: Sequence[torch.Tensor], tolerance: float = 0.0
) -> fx.GraphModule:
    """The rule fires once in the function's graph, which computes the same, gradients too; a second run: nothing."""
    gm = function if isinstance(function, fx.GraphModule) else traced(function, *args)
    expected = value_and_gradients(function, args)
    assert rules.apply(gm)[rule].rewrites == 1
    torch.testing.assert_close(value_and_gradients(gm, args), expected, rtol=tolerance, atol=tolerance)
    assert rules.apply(gm).rewrites == 0
    return gm


def check_left_alone(
    rules: RuleSet, rule: str, function: Callable[..., Any], args: Sequence[torch.Tensor], reason: str
) -> None:
    """No rule fires in the function's graph, and the one says why."""
    gm = function if isinstance(function, fx.GraphModule) else traced(function, *args)
    code = gm.code
    assert rules.apply(gm).rewrites == 0
    assert gm.code == code
    assert reason in str(rules.once().explain(gm, rule))


def check_stages(gm: fx.GraphModule, snapshot: Any, **stages: RuleSet) -> None:
    """The graph before, and after each set of rules, is that of the snapshot of this name."""
    assert gm == snapshot(name="before")
    for name, rules in stages.items():
        rules.apply(gm)
        assert gm == snapshot(name=name)


def made(pattern: Callable[..., Any], replacement: Callable[..., Any], **options: Any) -> Rule:
    """The rule test.it."""
    it = rule("test.it", **options)(pattern)
    it.replacement(replacement)
    return it


def apply(gm: fx.GraphModule, *rules: Rule, **options: Any) -> Report:
    report = RuleSet("test", *rules, **options).apply(gm)
    gm.graph.lint()
    return report


def silu() -> Rule:
    return made(lambda x: x * torch.sigmoid(x), lambda x: F.silu(x))
