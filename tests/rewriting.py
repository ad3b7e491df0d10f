"""Small graphs and rules, for tests of rewriting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import Report, Rule, RuleSet, rule

__all__ = ["Halved", "apply", "calls", "made", "silu", "state", "targets", "traced", "value_and_gradients"]


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
    return make_fx(function, tracing_mode=mode, pre_dispatch=True)(*inputs)


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
    grads = torch.autograd.grad(value, trained, weights, allow_unused=True)
    return [value.detach(), *(grad for grad in grads if grad is not None)]


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
