"""The normal form is the same whether equal calls are traced once or each time; further layers are not traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxrewrite.capture import normalize
from fxrewrite.capture.equal_calls import EqualCalls, Once
from fxrewrite.graph import graph_text, source_line
from fxrewrite.ops import tensors_of
from tests.dynamo import caught

Body = Callable[[torch.Tensor, torch.Tensor], Any]
_TAGS = ("recompute", "nn_module_stack", "original_aten")


def described(gm: fx.GraphModule) -> str:
    """What a normal form says: its nodes, their values, and where they come from; symbols that data decide numbered."""
    regions: dict[Any, int] = {}
    symbols: dict[str, str] = {}
    rows: list[Any] = [graph_text(gm)]
    for node in gm.graph.nodes:
        region = regions.setdefault(node.meta.get("ac_graph_id"), len(regions))
        looks = [(str(t.shape), str(t.stride()), t.dtype, str(t.storage_offset())) for t in tensors_of(node)]
        rows.append((node.name, source_line(node), region, looks, *(str(node.meta.get(tag)) for tag in _TAGS)))
    return re.sub(r"\bu\d+\b", lambda u: symbols.setdefault(u[0], f"u{len(symbols)}"), "\n".join(map(str, rows)))


def both_forms(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """The normal form with equal calls traced once, and without; and how many calls were not traced."""
    repeated = 0
    call = Once._repeated

    def counted(*args: Any) -> Any:
        nonlocal repeated
        repeated += 1
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Once, "_repeated", counted)
        once = normalize(gm)
        patch.setattr(EqualCalls, "is_written", lambda *_: True)
        each = normalize(gm)
    return once, each, repeated


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + F.silu(F.linear(F.layer_norm(x, (6,)), w)).to(x.dtype).contiguous()
    return x


def retyped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`to` of the own dtype returns its operand, which another node has from then on."""
    for _ in range(3):
        x = F.linear(x, w.to(torch.float64)).to(torch.float64) + x
        x = x.to(torch.float64) * x
    return x


def several_results(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        a, b = torch.chunk(F.linear(x, torch.cat([w, w])), 2, dim=-1)
        values, _ = torch.max(a, -1, keepdim=True)
        x = torch.stack([a, b * values]).unbind()[1]
    return x


def drawing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.dropout(F.linear(x, w), 0.5) + torch.rand_like(x)
    return x


def constants(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = x * torch.tensor(2.0) + torch.full((), 0.0) * -0.0 + torch.full((), -0.0) * i + torch.tensor([1.0 * i] * 6)
    return F.linear(x, w)


def without_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        with torch.no_grad():
            scale = F.linear(x, w).amax(-1, keepdim=True)
        x = F.linear(x, w) * scale
    return x


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Layers that write to what they made; two that look alike share nothing."""
    for _ in range(3):
        y = F.linear(x, w)
        z = y.view(-1)
        z.mul_(2.0)
        q = torch.zeros_like(x)
        q[..., :2] = y[..., 2:4]
        x = F.relu(y, inplace=True) + q.add_(1.0)
    return x


def written_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Values of equal calls, of which one is written to, and another is read after that."""
    a, b, c = F.linear(x, w), F.linear(x, w), F.linear(x, w)
    b.add_(1.0)
    return a * b + c * b.view(-1).sum()


def statistics(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    for _ in range(3):
        x = F.batch_norm(F.linear(x, w).reshape(-1, 6), mean, var, training=True).view_as(x)
    return x + mean


def chosen_by_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sizes that data decide: two that look alike are not equal."""
    first, second = torch.nonzero(x > 0), torch.nonzero(w > 0)
    return F.linear(x, w).sum() + first.sum() * second.sum() + x[x > 0].sum() + x[x > 1].sum()


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = checkpoint(lambda x, w: F.gelu(F.linear(x, w)) + x, x, w, use_reentrant=False)
    return x


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.float(), w.float()
    for on in (True, False, True, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            x = F.gelu(F.linear(x, w)).float() + x.softmax(-1)
    return x


def sized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        n = x.shape[0]
        x = F.linear(x, w).reshape(2, n // 2, 6).transpose(0, 1).reshape(n, -1) + torch.arange(n)[:, None] / (n + 1)
    return x


BODIES = [
    *(layers, retyped, several_results, drawing, constants, without_gradient, written, written_later, statistics),
    *(chosen_by_data, checkpointed, under_autocast, sized),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("body", BODIES)
def test_the_form_is_that_of_tracing_each_call(body: Body, dynamic: bool) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (once, each, num_repeated), inputs = caught(body, x, w, inside=both_forms, dynamic=dynamic)
    assert described(once) == described(each)
    assert num_repeated or body in (written, chosen_by_data)
    outcomes: list[list[torch.Tensor]] = []
    for gm in (once, each):
        torch.manual_seed(0)
        outputs = [out for out in gm(*inputs) if isinstance(out, torch.Tensor) and out.requires_grad]
        outcomes.append([*outputs, *torch.autograd.grad([out.sum() for out in outputs], [x, w], allow_unused=True)])
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a, b)


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def calls_traced(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    counted = 0
    run: Callable[..., Any] = fx.Interpreter.run_node

    def count(*args: Any) -> Any:
        nonlocal counted
        counted += args[1].op.startswith("call_")
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fx.Interpreter, "run_node", count)
        caught(Stack(num_layers), torch.randn(3, 8), inside=normalize)
    return counted


def test_a_further_layer_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < calls_traced(2, monkeypatch) == calls_traced(5, monkeypatch)


def test_repeated_nodes_have_the_source_of_their_layer() -> None:
    normal, _ = caught(Stack(3), torch.randn(3, 8), inside=normalize)
    linears = normal.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    paths = [[path for path, _ in node.meta["nn_module_stack"].values()][-1] for node in linears]
    assert len(set(paths)) == 3
    assert linears[1].meta["val"] is linears[2].meta["val"]
