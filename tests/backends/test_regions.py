"""Regional compilation: each distinct region is compiled once, and results, gradients, draws and buffers stay equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxrewrite.backends import Regions, regional
from tests.autosp.models import batch, build, with_dropout


class Block(nn.Module):
    """Attention over the first dimension with dropout, an MLP, and running statistics."""

    def __init__(self, *, dropout: float = 0.0, norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(8)) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = norm(), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.dropout = nn.Linear(8, 12), nn.Linear(12, 8), dropout

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.T * 8**-0.5 + mask).softmax(-1)
        x = x + self.out(F.dropout(scores, self.dropout) @ v)
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout)


class Experts(Block):
    """Every row goes to one of three experts, whose numbers of rows depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8) * 0.3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, mask)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for i in range(3):
            (rows,) = torch.where(chosen == i)
            made = made.index_add(0, rows, x[rows] @ self.experts[i] * weight[rows, None])
        return x + made


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], *, checkpointed: bool = False, all_states: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(make() for _ in range(5)), nn.Linear(8, 3)
        self.checkpointed, self.all_states = checkpointed, all_states
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        mask, states = torch.zeros(len(x), len(x), dtype=x.dtype).tril(-1), [x]
        self.seen += 1
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.checkpointed else layer(x, mask)
            states.append(x)
        loss = self.head(torch.tanh(x)).square().mean()
        return (loss, *states) if self.all_states else (loss,)


STACKS: dict[str, Callable[[], nn.Module]] = {
    "dropout, checkpointed": lambda: Stack(lambda: Block(dropout=0.3), checkpointed=True),
    "dropout, running statistics": lambda: Stack(lambda: Block(dropout=0.3, norm=lambda: nn.BatchNorm1d(8))),
    "states returned, one layer shared, one frozen": lambda: _frozen(_shared(Stack(Block, all_states=True), 1, 3), 4),
    "experts": lambda: Stack(Experts),
}


def _frozen(model: Stack, layer: int) -> Stack:
    model.layers[layer].requires_grad_(False)
    return model


def _shared(model: Stack, one: int, other: int) -> Stack:
    model.layers[other] = model.layers[one]
    return model


def step(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Results, gradients and buffers of one step, and the state of the generator after it."""
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = call(**inputs)
    loss = outputs[0]
    for state in outputs[1:]:
        loss = loss + state.square().mean() if isinstance(state, torch.Tensor) and state.is_floating_point() else loss
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [loss.detach(), *grads, *model.buffers(), torch.get_rng_state()]


def assert_equal_to_eager(
    model: nn.Module, steps: Sequence[dict[str, Any]], inner: str = "aot_eager", **how: Any
) -> Regions:
    torch._dynamo.reset()
    reports: list[Regions] = []
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=regional(inner, reports.append), **how)
    for seed, inputs in enumerate(steps):
        expected, found = (step(call, m, inputs, seed) for call, m in ((reference, reference), (compiled, model)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    (report,) = reports  # not compiled again for another length
    return report


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.some(2)
def test_a_stack_equals_eager_and_compiles_a_layer_once(name: str) -> None:
    torch.manual_seed(0)
    steps = [{"x": torch.randn(length, 8, dtype=torch.float64)} for length in (6, 9)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = assert_equal_to_eager(STACKS[name]().double().train(), steps, dynamic=True, fullgraph=True)
    assert max(report.calls) >= 3, report
    assert f"{len(report.calls)} regions are compiled for {sum(report.calls)} calls" in str(report)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_a_model_of_transformers_equals_eager(name: str) -> None:
    model = with_dropout(build(name), 0.2)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers.extend(copy.deepcopy(layers[1]) for _ in range(2))
    model.config.num_hidden_layers = 4  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    report = assert_equal_to_eager(model, [batch(name, "plain")])
    assert max(report.calls) == 4


def test_layers_under_autocast_are_regions() -> None:
    """Around the call: its casts are nodes of the graph. Also where the backward pass runs under it."""
    torch.manual_seed(0)
    model, x, reports = Stack(Block), torch.randn(6, 8), list[Regions]()
    compiled = torch.compile(model, backend=regional("aot_eager", reports.append))
    found: list[list[torch.Tensor]] = []
    for call in (model, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (loss,) = call(x)
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=1e-3)
    assert max(reports[0].calls) >= 3, reports[0]


@pytest.mark.slow
def test_inductor_equals_eager() -> None:
    torch.manual_seed(0)
    steps = [{"x": torch.randn(6, 8, dtype=torch.float64)}] * 2
    report = assert_equal_to_eager(_frozen(Stack(Block), 2).double(), steps, "inductor")
    assert max(report.calls) >= 3


class Slots(nn.Module):
    """Each layer writes to a view of its own of one memory, and reads it through another one."""

    def __init__(self) -> None:
        super().__init__()
        slots = torch.zeros(5, 2, 4, dtype=torch.float64)
        for i in range(5):
            self.register_buffer(f"slot{i}", slots[i])
            self.register_buffer(f"first{i}", slots[i, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(5):
            slot, first = getattr(self, f"slot{i}"), getattr(self, f"first{i}")
            y = x.sin().tanh().exp().cos().neg().sigmoid().sin().tanh().exp().cos().neg().sigmoid()
            first.copy_(y)
            x = x + y.cos().sin().tanh() * (slot[0] + slot[1])
        return x


def test_layers_that_write_to_views_of_one_memory_write_to_their_own() -> None:
    model, x = Slots(), torch.rand(4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    with torch.no_grad():  # AOTAutograd refuses to train with such inputs
        torch.testing.assert_close(torch.compile(model, backend=regional("aot_eager"))(x), reference(x))
    for found, expected in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_graph_without_repeats_is_compiled_whole() -> None:
    reports: list[Regions] = []
    torch.compile(lambda x: x.sin(), backend=regional("eager", reports.append))(torch.ones(3))
    assert str(reports[0]) == "nothing repeats, the graph is compiled whole"
    assert reports[0].calls == (1,)
