"""Equal runs of nodes are found by what they compute, and cut only where that changes nothing."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxrewrite.backends import normalized
from fxrewrite.graph.repeats import Parts, cut_repeats
from tests.dynamo import caught


def cut(function: Callable[..., Any], *args: Any, **how: Any) -> tuple[fx.GraphModule, Parts]:
    gm, _ = caught(function, *args, inside=normalized, **how)
    return gm, cut_repeats(gm)


def calls(parts: Parts) -> list[int]:
    """How often each distinct part occurs, in the order of the first ones."""
    keys = [part.key for part in parts.parts]
    return [keys.count(key) for key in dict.fromkeys(keys)]


class Layer(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0, *, gated: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)
        self.scale, self.gated = scale, gated

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.up(self.norm(x))
        y = torch.tanh(y) * torch.sigmoid(y) if self.gated else F.gelu(y)
        y = self.down(y * torch.cos(y) + torch.sin(y))
        y = y if mask is None else y * mask
        y = y.sin().tanh().exp().cos().neg().sigmoid() + y.cos().exp().sin().tanh().relu().neg()
        return x + torch.relu(y).exp().neg() * self.scale


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(8, 8), nn.ModuleList(layers), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(x), x > 0
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).sum()


STACKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "equal": (lambda: Stack(*(Layer() for _ in range(8))), 1, 8),
    "two kinds in turn": (lambda: Stack(*(Layer(gated=i % 2 == 1) for i in range(8))), 2, 4),
    "two kinds, irregular": (lambda: Stack(*(Layer(gated=i in (2, 3, 6, 9)) for i in range(12))), 2, 8),
    "one differs": (lambda: Stack(*(Layer(scale=0.5 if i == 3 else 1.0) for i in range(8))), 2, 7),
}
"""A model -> how many kinds of layers it has, and how often the part occurs that occurs most, at least."""


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.some(2)
def test_parts_are_the_graph_in_order_and_each_kind_of_layer_counts_once(name: str) -> None:
    make, kinds, most = STACKS[name]
    model: Any = make()
    gm, found = cut(model, torch.randn(4, 8))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [node for part in found.parts for node in part.nodes] == nodes
    distinct = {part.key: len(part.nodes) for part in found.parts}
    assert sum(distinct.values()) <= 6 + kinds * (len(nodes) // len(model.layers) + 1)
    assert max(calls(found)) >= most
    for part in found.parts:
        assert {operand for node in part.nodes for operand in node.all_input_nodes} <= {*part.reads, *part.nodes}
    assert not found.left_out


def test_a_literal_or_a_wire_that_differs_makes_another_part() -> None:
    def steps(x: torch.Tensor, *literals: float) -> torch.Tensor:
        for literal in literals:
            y = x.sin().cos().tanh().exp().neg().relu().sigmoid().sin() * literal
            x = (x if literal == 5.0 else y) - (2.0 * y).exp().cos().sin().neg().tanh().relu().cos().sin()
        return x.sum()

    def graph(*literals: float) -> Parts:
        return cut(lambda x: steps(x, *literals), torch.randn(3))[1]

    assert max(calls(graph(2.0, 2.0, 2.0, 2.0))) == 4
    for other in (3.0, 5.0):
        found = graph(2.0, 2.0, 2.0, 2.0, other, 2.0, 2.0, 2.0, 2.0)
        keys = {part.key for part in found.parts if len(part.nodes) > 8}
        assert len(keys) == 2, found.left_out
        assert max(calls(found)) == 8
    # 0.0 and -0.0 are equal, and so are 1 and True
    assert max(calls(graph(0.0, -0.0, 0.0, -0.0)), default=1) < 4

    def products(x: torch.Tensor) -> torch.Tensor:
        for i in range(16):
            y, z = x.sin().cos().tanh().exp().neg().relu().sigmoid(), x.cos().sin().exp().tanh().sin().neg()
            x = torch.addcmul(y, y, z) if i < 8 else torch.addcmul(y, z, z)  # both read y, then z
        return x.sum()

    _, found = cut(products, torch.randn(3))
    assert len({part.key for part in found.parts if len(part.nodes) > 8}) == 2, found.left_out
    assert max(calls(found)) >= 4


@pytest.mark.slow
def test_regions_that_cannot_be_cut_out_are_said() -> None:
    stack: Any = nn.ModuleList(Layer() for _ in range(6))

    def whole_checkpoint(x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            for layer in stack:
                x = layer(x)
            return x

        return checkpoint(run, x, use_reentrant=False).sum()

    def each_checkpointed(x: torch.Tensor) -> torch.Tensor:
        for layer in stack:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()

    def without_gradients(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer in stack:
                x = layer(x)
        return (x * stack[0].norm.weight).sum()

    x = torch.randn(4, 8)
    for function, why in ((whole_checkpoint, "is inside of a checkpointed region"), (without_gradients, "autograd is")):
        _, found = cut(function, x)
        assert len(found.parts) == 1
        (said,) = found.left_out
        assert "nodes that repeat 6 times cannot be cut out" in said, said
        assert why in said, said
    _, found = cut(each_checkpointed, x)
    assert max(calls(found)) == 6
    assert all(len({node.meta.get("ac_graph_id") for node in part.nodes}) <= 1 for part in found.parts[:-1])


@pytest.mark.slow
def test_layers_that_write_to_buffers_are_parts_and_write_to_inputs_alone() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(Layer(), nn.BatchNorm1d(8), Layer()) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    gm, found = cut(Counted(), torch.randn(4, 8))
    assert max(calls(found)) == 5
    written = {node for node in gm.graph.nodes if node.op == "placeholder"}
    for part in found.parts:
        for node in part.nodes:
            if "add_" in str(node.target):
                assert node.args[0] in written


@pytest.mark.slow
def test_work_grows_with_nodes() -> None:
    gm, _ = caught(Stack(*(Layer() for _ in range(8))), torch.randn(4, 8), inside=normalized)
    body = [node for node in gm.graph.nodes if node.op == "call_function"]

    def num_calls(copies: int) -> int:
        graph, at = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                at[node] = graph.node_copy(node)
        for _ in range(copies):
            at.update((node, graph.node_copy(node, at.__getitem__)) for node in body)
        graph.output(at[body[-1]])
        module = fx.GraphModule(gm, graph)
        profile = cProfile.Profile()
        parts = profile.runcall(cut_repeats, module).parts
        assert len(parts) >= copies
        return sum(entry.callcount for entry in profile.getstats())

    few, many = num_calls(4), num_calls(32)
    assert many < 12 * few, (few, many)  # eight times the nodes
