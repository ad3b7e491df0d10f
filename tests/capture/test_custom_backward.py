"""A custom autograd function in the normal graph: its own backward, bit for bit, in every backend; refusals."""

# autograd calls forward and backward with a context
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fxrewrite import RefusedError, RuleSet, ops
from fxrewrite.capture import normalize
from fxrewrite.capture.custom_backward import APPLY, CustomFunction, custom_function
from fxrewrite.graph import graph_text
from tests.capture.test_normalize import compile_and_keep, loss_and_grads

# Dynamo makes the context of a custom function by calling its class, and inductor loads old parts of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
]


class Thrice(Function):
    """GELU with a wrong gradient on purpose: whatever differentiates the forward gives another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * g * x.cos()


class Everything(Function):
    """Two results, one without a gradient; saves tensors, a size and a number; writes in place to what it made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.scale, ctx.length = scale, x.shape[1]
        y = (x.view(x.shape[0], x.shape[1], 2, -1) * scale).reshape(x.shape) @ w
        y.add_(1)
        positive = y > 0
        ctx.mark_non_differentiable(positive)
        return y, positive

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w = ctx.saved_tensors
        dx = 3 * (g.view(-1, ctx.length, g.shape[-1]) @ w.t())
        dx.mul_(ctx.scale)
        return dx, x.flatten(0, 1).t() @ g.flatten(0, 1), None


@torch.compiler.allow_in_graph
class OpaqueThrice(Thrice):
    """Dynamo does not look into it."""


@torch.compiler.allow_in_graph
class OpaqueEverything(Everything):
    """Dynamo does not look into it."""


class Model(nn.Module):
    def __init__(self, *, checkpointed: bool = False, opaque: bool = False) -> None:
        super().__init__()
        self.functions: Any = (OpaqueThrice, OpaqueEverything) if opaque else (Thrice, Everything)
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 8, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.checkpointed = checkpointed

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        thrice, everything = self.functions
        y, positive = everything.apply(thrice.apply(x), self.weight, 0.5)
        return y * positive

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        return y.square().mean()


IDS = torch.arange(32).reshape(2, 16) % 8


def functions_of(gm: fx.GraphModule) -> list[CustomFunction]:
    return [function for node in gm.graph.nodes if (function := custom_function(node)) is not None]


def eager(model: Model) -> list[torch.Tensor]:
    """The loss and the gradients, in the order in which Dynamo's graph takes the parameters."""
    loss = model(IDS)
    return [loss.detach(), *torch.autograd.grad(loss, [model.embed.weight, model.weight])]


@pytest.mark.parametrize("marked", [False, True], ids=["static", "marked"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
def test_its_own_backward_runs(checkpointed: bool, marked: bool, opaque: bool) -> None:
    ids, model = IDS.clone(), Model(checkpointed=checkpointed, opaque=opaque)
    if marked:
        torch._dynamo.mark_dynamic(ids, 1)
    _, normal, inputs = compile_and_keep(model, ids)
    assert len(functions_of(normal)) == 2
    for found, expected in zip(loss_and_grads(normal, inputs), eager(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("inner", "checkpointed"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
def test_backends_run_it_too(inner: str, checkpointed: bool) -> None:
    model = Model(checkpointed=checkpointed)
    loss = torch.compile(model, backend=RuleSet("none").once().backend(inner, graph="aten"), fullgraph=True)(IDS)
    found = [loss.detach(), *torch.autograd.grad(loss, [model.embed.weight, model.weight])]
    for one, expected in zip(found, eager(model), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-13, atol=1e-13)


def test_its_bodies_are_functional_aten_with_values_and_source_lines() -> None:
    _, normal, _ = compile_and_keep(Model(), IDS)
    node = next(node for node in normal.graph.nodes if node.target is APPLY)
    assert "thrice.apply" in node.meta["stack_trace"]
    for function in functions_of(normal):
        for body in (function.forward, function.backward):
            for inner in body.graph.nodes:
                if inner.op == "call_function":
                    assert ops.key(inner).startswith("aten::")
                    assert not ops.mutates(inner)
                    assert "val" in inner.meta
    text = graph_text(normal)
    assert "aten.gelu" in text
    assert "_set_grad_enabled" not in text
    assert not any(ops.mutates(node) or ops.is_random(node) for node in normal.graph.nodes)


def test_what_goes_in_and_comes_out_is_told_by_role() -> None:
    _, normal, _ = compile_and_keep(Model(), IDS)
    first, second = functions_of(normal)
    assert [len(first.inputs), len(first.results), len(first.saved), len(first.outgoing)] == [1, 1, 1, 1]
    assert [len(second.inputs), len(second.results), len(second.incoming)] == [2, 2, 2]
    assert second.non_differentiable == {1}
    assert len(second.saved) == len(second.restored) == 2


def test_a_checkpoint_recomputes_what_is_in_the_forward_body() -> None:
    _, normal, _ = compile_and_keep(Model(checkpointed=True), IDS)
    for function in functions_of(normal):
        assert all("recompute" in node.meta for node in function.forward.graph.nodes)
        assert not any("recompute" in node.meta for node in function.backward.graph.nodes)


def test_a_function_in_a_function_runs() -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return Thrice.apply(x) * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 5

    class Nested(Model):
        def layer(self, x: torch.Tensor) -> torch.Tensor:
            return Outer.apply(x @ self.weight)

    model = Nested()
    _, normal, inputs = compile_and_keep(model, IDS)
    for found, expected in zip(loss_and_grads(normal, inputs), eager(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@torch.compiler.allow_in_graph
def weighs(x: torch.Tensor) -> torch.Tensor:
    """Dynamo does not look into it: it calls a function with its own backward, and operators."""
    return Thrice.apply(x) * x.sin()


@torch.compiler.allow_in_graph
def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin().square()


def test_a_function_that_dynamo_does_not_look_into_keeps_the_backward_that_is_in_it() -> None:
    class Weighs(Model):
        def layer(self, x: torch.Tensor) -> torch.Tensor:
            return plain(weighs(x @ self.weight))

    model = Weighs()
    _, normal, inputs = compile_and_keep(model, IDS)
    assert len(functions_of(normal)) == 1, "what a tracer sees in full stays operators"
    for found, expected in zip(loss_and_grads(normal, inputs), eager(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    with torch.no_grad():
        _, normal, inputs = compile_and_keep(model, IDS)
        torch.testing.assert_close(normal(*inputs)[0], model(IDS), rtol=1e-14, atol=0)


def test_an_opaque_function_that_writes_to_its_input_is_refused() -> None:
    @torch.compiler.allow_in_graph
    class Writes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 2

    with pytest.raises(Exception, match="does not look into writes to its input"):
        compile_and_keep(lambda x: Writes.apply(x * 1).sum(), torch.ones(3, requires_grad=True))


class Randomly(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


def test_a_body_that_draws_is_known() -> None:
    class Draws(Model):
        def layer(self, x: torch.Tensor) -> torch.Tensor:
            return Randomly.apply(x @ self.weight)

    _, normal, _ = compile_and_keep(Draws(), IDS)
    node = next(node for node in normal.graph.nodes if node.target is APPLY)
    assert ops.is_random(node)
    assert not ops.mutates(node)


def test_a_function_that_writes_to_its_input_is_refused() -> None:
    class Doubled(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            x.mul_(2)
            return x

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return 2 * g

    class Writes(Model):
        def layer(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(x @ self.weight)

    with pytest.raises(Exception, match="a custom autograd function writes to its input"):
        compile_and_keep(Writes(), IDS)


def test_another_calling_convention_is_refused_by_name() -> None:
    gm, _, _ = compile_and_keep(Model(), IDS)
    node = next(node for node in gm.graph.nodes if node.target is APPLY)
    node.kwargs = {**node.kwargs, "args_tensor_mask": [True]}
    with pytest.raises(RefusedError, match=r"called with unsupported options \(args_tensor_mask\)"):
        normalize(gm)
