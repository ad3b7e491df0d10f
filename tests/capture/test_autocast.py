"""Autocast in the normal form: casts are nodes, the numbers are autocast's bit for bit, and no mode is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxrewrite.capture import normalize
from fxrewrite.graph import source_line
from tests.dynamo import caught

aten = torch.ops.aten
_enter = torch.amp.autocast_mode._enter_autocast


def bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Block(nn.Module):
    """Operators that cast, that do not, that are made of such that do, and a region that is exempt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.proj, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        q = self.proj(self.norm(x)).view(2, 6, 2, 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 6, 8)
        with bfloat16(enabled=False):
            angle = torch.matmul(x.detach(), self.norm.weight[:, None])
        return x + mixed * angle.cos() + torch.einsum("bsd,de->bse", x, self.proj.weight)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.embed(ids))
        h[:, 0] = 0.5
        return F.cross_entropy(self.proj(h).view(-1, 8), targets.view(-1))


class Region(Block):
    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            return super().forward(ids, targets)


class Checkpointed(Block):
    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().layer, x, use_reentrant=False)


IDS = torch.arange(12).reshape(2, 6) % 11


def dynamo_and_normal(model: Callable[..., Any], *inputs: Any, ambient: bool, **options: Any) -> tuple[Any, ...]:
    with bfloat16() if ambient else nullcontext():
        graphs, given = caught(model, *inputs, inside=lambda gm: (gm, normalize(gm)), **options)
    return *graphs, given


def loss_and_grads(gm: fx.GraphModule, inputs: list[Any], *, ambient: bool) -> list[torch.Tensor]:
    params = [v for v in inputs if isinstance(v, nn.Parameter)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient, cache_enabled=False):
        (loss, *_) = gm(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, params)]


def targets(gm: fx.GraphModule) -> set[Any]:
    return {node.target for node in gm.graph.nodes}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("model", "ambient"), [(Block, True), (Checkpointed, True), (Region, False), (Region, True)], ids=str
)
def test_loss_and_gradients_are_bitwise_equal(model: type[Block], ambient: bool, dynamic: bool) -> None:
    gm, normal, inputs = dynamo_and_normal(model(), IDS, IDS % 8, ambient=ambient, dynamic=dynamic or None)
    want, got = (loss_and_grads(program, inputs, ambient=ambient) for program in (gm, normal))
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert any(n.target is aten.to.dtype and n.args[1] == torch.bfloat16 for n in normal.graph.nodes)


def test_casts_are_nodes_with_source_lines() -> None:
    _, normal, _ = dynamo_and_normal(Block(), IDS, IDS % 8, ambient=True)
    linear, *_ = normal.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert {operand.meta["val"].dtype for operand in linear.all_input_nodes} == {torch.bfloat16}
    cast = next(n for n in linear.all_input_nodes if n.target is aten.to.dtype)
    assert source_line(cast).startswith("test_autocast.py:")
    (product,) = normal.graph.find_nodes(op="call_function", target=aten.matmul.default)
    assert product.meta["val"].dtype == torch.float32, "its region is exempt"


def test_an_operator_whose_parts_cast_is_taken_apart() -> None:
    _, normal, _ = dynamo_and_normal(Block(), IDS, IDS % 8, ambient=True)
    assert aten.einsum.default not in targets(normal)
    assert aten.bmm.default in targets(normal)
    assert {aten.layer_norm.default, aten.cross_entropy_loss.default} <= targets(normal), "these are left whole"


def test_the_program_runs_without_autocast() -> None:
    _, normal, _ = dynamo_and_normal(Block(), IDS, IDS % 8, ambient=True)
    switches = [node.args for node in normal.graph.nodes if node.target is _enter]
    assert [(kind, enabled) for kind, _, enabled, _ in switches] == [("cpu", False)]
    _, normal, _ = dynamo_and_normal(Region(), IDS, IDS % 8, ambient=False)
    assert _enter not in targets(normal)


def test_checkpoint_tags_are_kept() -> None:
    _, normal, _ = dynamo_and_normal(Checkpointed(), IDS, IDS % 8, ambient=True)
    tagged = [node for node in normal.graph.nodes if "recompute" in node.meta]
    assert {node.meta["recompute"] for node in tagged} == {CheckpointPolicy.PREFER_RECOMPUTE}
    assert {aten.bmm.default, aten.to.dtype} <= {node.target for node in tagged}


def test_a_region_in_a_body_is_inlined() -> None:
    def body(x: torch.Tensor, w: nn.Parameter) -> Any:
        wrapped = torch.ops.higher_order.wrap_with_autocast
        return wrapped("cpu", torch.bfloat16, True, False, lambda a, b: a @ b, x, w).float().sum()

    gm, normal, inputs = dynamo_and_normal(body, torch.rand(2, 4), nn.Parameter(torch.rand(4, 4)), ambient=False)
    (product,) = normal.graph.find_nodes(op="call_function", target=aten.matmul.default)
    assert product.meta["val"].dtype == torch.bfloat16
    assert _enter not in targets(normal)
    want, got = (loss_and_grads(program, inputs, ambient=False) for program in (gm, normal))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return 2 * grads[0].to(w.dtype) @ w.t(), None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself does so
def test_a_custom_function_in_a_region_is_refused() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            return Double.apply(x, w)  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="autograd_function_apply in an autocast region has no normal form"):
        dynamo_and_normal(body, torch.ones(2, 4, requires_grad=True), torch.ones(4, 4), ambient=False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself does so
def test_a_custom_function_under_autocast_casts_in_its_body() -> None:
    gm, normal, inputs = dynamo_and_normal(
        lambda x, w: Double.apply(x, w), torch.rand(2, 4, requires_grad=True), torch.rand(4, 4), ambient=True
    )
    outcomes: list[list[torch.Tensor]] = []
    for program in (gm, normal):
        leaves = [v.detach().requires_grad_(v.requires_grad) for v in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            (out, *_) = program(*leaves)
        out.float().sum().backward()
        outcomes.append([out.detach(), *(v.grad for v in leaves if v.grad is not None)])
    for a, b in zip(*outcomes, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_torch_still_has_what_this_reads() -> None:
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert kernel("aten::linear", torch._C.DispatchKey.AutocastCPU)
    assert kernel("aten::linear", torch._C.DispatchKey.AutocastCUDA)
    assert not kernel("aten::view", torch._C.DispatchKey.AutocastCPU)


def test_flex_attention_casts_its_operands() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: torch.Tensor) -> Any:
        return flex_attention(q, q.bfloat16(), q, lambda score, b, h, i, j: score + (i - j))

    with bfloat16():
        gm, inputs = caught(attend, torch.rand(1, 2, 16, 8))
        normal = normalize(gm)
    (call,) = normal.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    assert {operand.meta["val"].dtype for operand in call.args[:3]} == {torch.bfloat16}
    with bfloat16():
        assert torch.equal(normal(*inputs)[0], gm(*inputs)[0])
