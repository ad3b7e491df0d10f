"""Which cotangents are complete on every rank, what that saves, and that every rank's gradients are one device's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxrewrite import RuleSet
from fxrewrite.backends import normalized
from fxrewrite.graph import input_name
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    LocalizeShapes,
    Place,
    Placement,
    PropagatePlacements,
    Reduction,
    Shard,
    contexts,
    input_placements,
    inputs,
    outputs,
    param,
)
from fxrewrite.testing import RankRun, fake_mesh, run_on_ranks
from rules.layouts import LAYOUTS
from tests.autosp.models import build
from tests.autosp.one_device import captured
from tests.spmd.test_mesh import HEADS, IDS, MLP, parallel

RANKS = 2


class Block(nn.Module):
    """What a transformer layer does with its hidden states, twice: a norm, three projections of it, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.randn(8))
        self.q, self.k, self.v = (nn.Linear(8, 12, bias=False) for _ in range(3))
        self.o = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normal = x * (x * x).sum(-1, keepdim=True).rsqrt() * self.norm
        return x + self.o(torch.tanh(self.q(normal)) * self.k(normal) + self.v(normal))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(7, 8), nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.down(nn.functional.softplus(self.up(x))))


ROWS: dict[Any, Placement] = {param("*.{q,k,v}.weight"): Shard(0), param("*.o.weight"): Shard(1)}


def lowered(
    model: nn.Module, given: dict[str, Any], place: Mapping[Any, Placement], mesh: DeviceMesh, gradients: Reduction
) -> tuple[fx.GraphModule, list[Any]]:
    gm, example_inputs = captured(model, given)
    gm = normalized(gm)
    members = (PropagatePlacements("propagate", LAYOUTS), LocalizeShapes("localize", LAYOUTS), COLLECTIVE_RULES)
    plan = RuleSet("plan", Place("place", place), *members, atomic=True).on("tp")
    plan.apply(gm, context=contexts(mesh, gradients=gradients))
    return gm, example_inputs


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def check_ranks(gm: fx.GraphModule, run: RankRun, expected: dict[str, Tensor], scale: float = 1.0) -> None:
    """Each rank has the gradient of what it holds, which is one device's; `scale` times that where all hold it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for rank, grads in enumerate(run.grads):
        for node, placements, grad in zip(placeholders, input_placements(gm), grads, strict=True):
            if input_name(node) not in expected:
                continue
            whole, placement = expected[input_name(node)], placements["tp"]
            is_shard = isinstance(placement, Shard)
            want = whole.chunk(RANKS, placement.dim)[rank] if is_shard else whole * scale
            torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=node: f"{n}: {m}")


def sent(gm: fx.GraphModule, given: list[Any]) -> tuple[Counter[str], Counter[str]]:
    """The collectives of AOTAutograd's forward and backward."""
    found: list[Counter[str]] = []

    def count(graph: fx.GraphModule, _: Any) -> Any:
        names = (key(node).partition("::")[2] for node in graph.graph.nodes if "c10d" in key(node))
        found.append(Counter(name for name in names if "wait" not in name))
        return make_boxed_func(graph.forward)

    local = [
        torch.zeros(node.meta["val"].shape, dtype=x.dtype).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for node, x in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True)
    ]
    aot_function(lambda *args: gm(*args)[0], fw_compiler=count, bw_compiler=count)(*local).backward()
    forward, backward = found
    return forward, backward


@pytest.mark.parametrize("gradients", ["done", "mean", "sum"])
def test_gradients_of_every_rank(gradients: Reduction) -> None:
    model, ids = Net().double(), torch.arange(6).reshape(2, 3)
    model(ids).backward()
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        gm, given = lowered(model, {"ids": ids}, ROWS, mesh, gradients)
        run = run_on_ranks(gm, given, mesh, backward=0)
        forward, backward = sent(gm, given)
    assert forward == backward == {"all_reduce": 2}
    expected = gradients_of(model)
    if gradients == "done":
        check_ranks(gm, run, expected)
    for index, (node, placements) in enumerate(
        zip(gm.graph.find_nodes(op="placeholder"), input_placements(gm), strict=True)
    ):
        if gradients != "done" and input_name(node) in expected and not isinstance(placements["tp"], Shard):
            total = torch.stack([grads[index] for grads in run.grads]).sum(0)  # pyright: ignore[reportArgumentType, reportCallIssue]
            torch.testing.assert_close(
                total / (RANKS if gradients == "mean" else 1), expected[input_name(node)], rtol=1e-10, atol=1e-12
            )


def test_one_sum_behind_a_norm() -> None:
    """q, k and v read one value whose cotangent is complete; the norm and its weight need no sum of their own."""
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        gm, _ = lowered(Net().double(), {"ids": torch.zeros(2, 3, dtype=torch.long)}, ROWS, mesh, "done")
    means = [node for node in gm.graph.nodes if key(node) == "fxrewrite::mean_gradient"]
    assert [len(node.users) for node in means] == [3, 3]
    assert [key(node.args[0]) for node in means] == ["aten::mul", "aten::mul"]


def test_data_parallel_sums_at_the_weights() -> None:
    model, x = Rows().double(), torch.randn(4, 8, dtype=torch.float64)
    loss = model(x).square().sum()
    loss.backward()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().sum()

    with fake_mesh((RANKS,), ("tp",)) as mesh:
        gm, given = lowered(Loss(), {"x": x}, {inputs("x"): Shard(0)}, mesh, "done")
        run = run_on_ranks(gm, given, mesh, backward=0)
        forward, backward = sent(gm, given)
    assert (forward, backward) == ({"all_reduce": 1}, {"all_reduce": 3})
    check_ranks(gm, run, {f"model.{name}": grad for name, grad in gradients_of(model).items()})


def test_outputs_that_leave_in_shards_come_back_with_their_own_gradients() -> None:
    """Each rank's caller computes a loss of its own rows; the losses of all ranks add up to one device's."""
    model, x = Rows().double(), torch.randn(4, 8, dtype=torch.float64)
    model(x).sum().backward()
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        gm, given = lowered(model, {"x": x}, {inputs("x"): Shard(0), outputs(0): Shard(0)}, mesh, "done")
        total = gm.graph.output_node().args[0][0]
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.output_node().args = ((gm.graph.call_function(torch.ops.aten.sum.default, (total,)),),)
        gm.recompile()
        run = run_on_ranks(gm, given, mesh, backward=0)
    check_ranks(gm, run, gradients_of(model))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.up = nn.Parameter(torch.randn(8)), nn.Linear(8, 12, bias=False)


class Writes(Scaled):
    """Autograd runs through memory that is written to by other edges than the graph's: it gets summands."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x * 2
        kept[1].mul_(self.scale)
        return self.up(kept).square().sum() + kept.sum()


class Detached(Scaled):
    """A detached value has no gradient to sum."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(x * self.scale)
        return self.up(kept.detach()).square().sum() + kept.sum()


@pytest.mark.parametrize("of", [Writes, Detached])
def test_no_sum_is_taken_where_autograd_does_not_run_by_the_graph(of: type[Scaled]) -> None:
    model, x = of().double(), torch.randn(4, 8, dtype=torch.float64)
    model(x).backward()
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        gm, given = lowered(model, {"x": x}, {param("up.weight"): Shard(0)}, mesh, "done")
        run = run_on_ranks(gm, given, mesh, backward=0)
    means = [node for node in gm.graph.nodes if key(node) == "fxrewrite::mean_gradient"]
    assert of is Writes or not means
    check_ranks(gm, run, gradients_of(model))


@pytest.mark.slow
def test_megatron_sends_two_sums_a_layer_each_way() -> None:
    model = build("llama_mha")
    model(input_ids=IDS, labels=IDS).loss.backward()
    gm, given = captured(model, {"input_ids": IDS, "labels": IDS})
    gm = normalized(gm)
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        parallel("tensor", HEADS | MLP).on("tp").apply(gm, context=contexts(mesh))
        forward, backward = sent(gm, given)
    layers = model.config.num_hidden_layers
    assert forward == backward == {"all_reduce": 2 * layers}
