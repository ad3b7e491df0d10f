"""Canonical text: what it shows, what it leaves out, and that equal graphs give equal text everywhere."""

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.text import GraphWriter, graph_digest, graph_text
from tests.dynamo import caught

aten = torch.ops.aten


def chain(*targets: Any, names: str = "") -> fx.GraphModule:
    """x -> target(x) -> ..., every node named after `names`."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for i, target in enumerate(targets):
        value = graph.create_node("call_function", target, (value,), name=f"{names}{i}" if names else None)
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.register_buffer("inv_freq", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.inv_freq
        return x[:, 1:].to(torch.float64)


def test_a_dynamo_graph_reads_in_short_names_symbols_and_slices() -> None:
    x = torch.ones(2, 7, 8)
    torch._dynamo.mark_dynamic(x, 1)
    text = graph_text(caught(Attention(), x, dynamic=False)[0])
    assert text == (
        "%layers.0.weight: f32[8, 8] = input\n"
        "%layers.0.bias: f32[8] = input\n"
        "%s0: s0 = input\n"
        "%x: f32[2, s0, 8] = input\n"
        "%inv_freq: f32[8] = input\n"
        "%layers.1.weight: f32[8, 8] = input\n"
        "%layers.1.bias: f32[8] = input\n"
        "%0: f32[2, s0, 8] = torch._C._nn.linear(%x, %layers.0.weight, %layers.0.bias)\n"
        "%1: f32[2, s0, 8] = mul(%0, %inv_freq)\n"
        "%2: f32[2, s0, 8] = torch._C._nn.linear(%1, %layers.1.weight, %layers.1.bias)\n"
        "%3: f32[2, s0, 8] = mul(%2, %inv_freq)\n"
        "%4: f32[2, s0 - 1, 8] = getitem(%3, (:, 1:))\n"
        "%5: f64[2, s0 - 1, 8] = %4.to(f64)\n"
        "return (%5,)"
    )


def test_names_of_values_do_not_matter() -> None:
    one, two = chain(torch.relu, aten.neg.default, names="a"), chain(torch.relu, aten.neg.default, names="other")
    assert graph_text(one) == graph_text(two)
    assert graph_digest(one) == graph_digest(two)
    assert graph_digest(one) != graph_digest(chain(torch.relu, aten.exp.default))


def test_names_of_symbols_do_not_matter_nor_does_their_order_in_the_shape_environment() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y, y])

    def add_renamed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat([first, second, second])

    texts = []
    for function in (add, add_renamed):
        x, y = torch.ones(5), torch.ones(7)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
        texts.append(graph_text(caught(function, x, y, dynamic=False)[0]))
    assert "f32[s0 + 2*s1] = torch.cat" in texts[0]
    assert texts[0] == texts[1].replace("first", "x").replace("second", "y")


class Policy(Enum):
    KEEP = 1


@dataclass(frozen=True)
class Shard:
    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


def redistribute(x: Any, *_: Any, **__: Any) -> Any:
    return x


def test_literals() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    literals = (torch.bfloat16, torch.device("cpu"), torch.strided, torch.contiguous_format, Policy.KEEP, Shard(1))
    node = graph.call_function(
        redistribute, (x, *literals), {"b": (..., None, 2**63 - 1), "a": [True, 0.5, "sum", float("-inf")]}
    )
    graph.output(node)
    line = graph_text(fx.GraphModule(torch.nn.Module(), graph)).splitlines()[1]
    assert line.split("redistribute")[1] == (
        "(%x, bf16, cpu, strided, contiguous_format, Policy.KEEP, S(1), a=[True, 0.5, 'sum', -inf], b=(..., None, end))"
    )


def test_no_memory_address() -> None:
    graph = fx.Graph()
    node = graph.call_function(redistribute, (graph.placeholder("x"),))
    graph.output(node)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    node.kwargs = {"function": torch.relu, "handle": object()}
    assert graph_text(gm).splitlines()[1].endswith("(%x, function=torch.relu, handle=<object object>)")


def all_reduce(group: str, **meta: Any) -> fx.GraphModule:
    graph = fx.Graph()
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (graph.placeholder("x"), "sum", group))
    node.meta.update(meta)
    graph.output(node)
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_process_group_prints_as_its_mesh_axis() -> None:
    assert "all_reduce(%x, 'sum', sp)" in graph_text(all_reduce("5", axis="sp"))
    assert graph_text(all_reduce("5")) == graph_text(all_reduce("17"))


def test_comments_show_what_is_asked_for() -> None:
    gm = chain(torch.relu)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.relu)
    node.meta["fxrewrite"] = ("sp.attention", "sp.loss")
    with Edit(gm) as edit:
        edit.set_fact(node, Fact("placement", shown=True), Shard(1))
    line = "%0 = torch.relu(%x)"
    assert graph_text(gm).splitlines()[1] == f"{line}  # S(1)"
    assert [text for _, text in GraphWriter(gm, facts=False).lines()][1] == line
    assert graph_text(gm, rules=True).splitlines()[1] == f"{line}  # S(1); sp.attention, sp.loss"


def test_bodies_of_higher_order_ops_follow_the_graph() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.nn.functional.relu, x, use_reentrant=False)

    text = graph_text(caught(layer, torch.ones(3), dynamic=False)[0])
    assert text == (
        "%x: f32[3] = input\n"
        "%0: (f32[3]) = higher_order.tag_activation_checkpoint(@0, %x, use_reentrant=False)\n"
        "%1: f32[3] = getitem(%0, 0)\n"
        "return (%1,)\n"
        "@0:\n"
        "  %x: f32[3] = input\n"
        "  %2: f32[3] = torch.nn.functional.relu(%x)\n"
        "  return (%2,)"
    )


def test_small_constants_show_their_elements_and_parameters_do_not() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([0.5, 0.25])
            self.weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * self.weight

    text = graph_text(fx.symbolic_trace(Scale()))
    assert "self.scale [0.5, 0.25]" in text
    assert "self.weight\n" in text


@pytest.mark.slow
def test_another_process_writes_the_same_text() -> None:
    program = (
        "import torch\n"
        "from torch import fx\n"
        "from fxrewrite.graph import graph_digest\n"
        "graph = fx.Graph()\n"
        "x = graph.placeholder('x')\n"
        "graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.call_function(torch.relu, (x,)),)),))\n"
        "print(graph_digest(fx.GraphModule(torch.nn.Module(), graph)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == graph_digest(chain(torch.relu, aten.neg.default))


def test_in_canonical_order_only_what_has_effects_keeps_its_place() -> None:
    def text(function: Any) -> str:
        x, y = torch.ones(3), torch.ones(3)
        return graph_text(make_fx(function, tracing_mode="fake")(x, y), canonical_order=True)

    def one(x: Any, y: Any) -> Any:
        a, b = x.sin(), y.cos()
        return a.exp() * b, torch.rand(3), torch.randn(3)

    def other(x: Any, y: Any) -> Any:
        b = y.cos()
        a = x.sin()
        return a.exp() * b, torch.rand(3), torch.randn(3)

    def draws_otherwise(x: Any, y: Any) -> Any:
        normal, uniform = torch.randn(3), torch.rand(3)
        return x.sin().exp() * y.cos(), uniform, normal

    def reads_before(x: Any, y: Any) -> Any:
        z = x.clone()
        read = z * 2
        z.add_(1)
        return read, z

    def reads_behind(x: Any, y: Any) -> Any:
        z = x.clone()
        z.add_(1)
        return z * 2, z

    assert text(one) == text(other) != text(draws_otherwise)
    assert text(reads_before) != text(reads_behind)
    assert text(one).count("\n") == len(text(one).splitlines()) - 1 == 8, "every node"
