"""Tagged layers keep what was asked for, compute the rest again, and give the same gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from autosp_rules import AutoSPConfig, AutoSPReport, dry_run, prepare_autosp_inputs, tiled_compute
from autosp_rules.memory.checkpoint import TagCheckpoints, is_recomputed
from autosp_rules.transform import transform
from fxrewrite import RuleSet, normalize
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh
from tests.autosp.models import BATCH, LENGTH, batch, build
from tests.autosp.one_device import assert_equal_to_one_device, captured
from tests.autosp.partition import Partition

HIDDEN_BYTES = BATCH * LENGTH // 2 * 32 * 8
"""Of a rank's hidden states between two layers, on two ranks in float64."""


def partition_of(name: str, option: Any, *, dynamic: bool = False, **how: bool) -> tuple[Partition, AutoSPReport]:
    model, inputs = build(name, **how), batch(name, "plain")
    if dynamic:
        prepare_autosp_inputs(inputs["input_ids"], inputs["labels"])
    gm, args = captured(model, inputs)
    with fake_mesh((2,), ("sp",)) as mesh:
        program, report = transform(gm, AutoSPConfig(attention="ulysses", checkpoint=option), axis_of(mesh, "sp"))
        return Partition(program, args), report


@pytest.mark.parametrize(
    ("name", "option", "dynamic", "least", "most"),
    [
        ("llama_gqa", "attention", True, 2, 3),
        ("gpt2", "attention", False, 2, 3),
        ("llama_gqa", "full", False, 1, 2),
    ],
)
@pytest.mark.some(1)
def test_layers_keep_few_hidden_sizes(name: str, option: Any, dynamic: bool, least: float, most: float) -> None:
    partition, report = partition_of(name, option, dynamic=dynamic)
    assert least <= partition.kept(r"\.(layers|h)\.0\b") / HIDDEN_BYTES <= most
    again, back = (num_sent(report, direction) for direction in ("again", "backward"))
    assert again > 0
    assert partition.num_again("all_to_all") == again + back
    if option != "full":
        assert partition.num_again("scaled_dot_product") == 0


def num_sent(report: AutoSPReport, direction: str) -> int:
    return sum(c.count for c in report.collectives if c.direction == direction and c.kind == "all_to_all")


@cache
def untagged(name: str, **how: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The model's own graph, and what it is called with."""
    gm, args = captured(build(name, **how), batch(name, "right_padding"))
    return normalize(gm), args


def one_device(name: str, option: Any, **how: Any) -> tuple[fx.GraphModule, list[Any], list[str]]:
    """The same, tagged."""
    gm, args = untagged(name, **how)
    tagged, report = RuleSet("tag", TagCheckpoints(option)).once().applied(gm)
    return tagged, args, report.lines


def grads_of(args: Sequence[Any]) -> list[torch.Tensor]:
    leaves = [arg for arg in args if isinstance(arg, nn.Parameter)]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return grads


def test_gradients_are_those_of_the_untagged_graph() -> None:
    gm, args = untagged("qwen3", layers=1)
    plain = Partition(gm, args)
    expected = grads_of(args)
    for option in ("attention", "full", 20_000):
        tagged, _, _ = one_device("qwen3", option, layers=1)
        assert any(is_recomputed(node) for node in tagged.graph.nodes)
        assert torch.equal(Partition(tagged, args).loss, plain.loss)
        for grad, want in zip(grads_of(args), expected, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-14)


def test_a_budget_keeps_what_costs_most_and_fits() -> None:
    kept = {}
    for budget in (0, 40_000, 10**9):
        gm, _, (line,) = one_device("llama_gqa", budget)
        saved = [n for n in gm.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
        kept[budget] = (sum(n.meta["val"].numel() * 8 for n in saved), line)
    assert "more than the budget" in kept[0][1]
    assert kept[0][0] < kept[40_000][0] <= 40_000 < kept[10**9][0]
    assert "recomputed are cheap values" in kept[10**9][1]


def test_auto_keeps_all_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _, (line,) = one_device("llama_gqa", "auto")
    assert line.startswith("checkpoint='auto': nothing is recomputed")
    assert not any(is_recomputed(node) for node in gm.graph.nodes)
    monkeypatch.setattr("autosp_rules.memory.checkpoint._memory_of", lambda device: 1000)
    (line,) = RuleSet("tag", TagCheckpoints("auto")).apply(gm).lines
    share = re.search(r"([\d.]+)% of the step", line)
    assert share
    assert 0 < float(share[1]) <= 8


def test_a_model_that_checkpoints_keeps_its_own_choice() -> None:
    gm, _, (line,) = one_device("llama_gqa", "attention", checkpointing=True)
    assert line == "checkpoint='attention': the model checkpoints by itself and keeps its own choice"
    assert not any(n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE for n in gm.graph.nodes)


@pytest.mark.parametrize(("checkpointing", "frozen"), [(False, False), (True, False), (False, True)])
def test_nothing_is_tagged_where_nothing_goes_backward(checkpointing: bool, frozen: bool) -> None:
    """AOTAutograd stops at tags of attention in a graph without a backward pass: torch says that it may draw."""
    model, config = build("llama_gqa", checkpointing=checkpointing), AutoSPConfig(checkpoint="full", inner="aot_eager")
    model.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        program, report = dry_run(model, batch("llama_gqa", "plain"), num_ranks=2, config=config)
    assert not any(map(is_recomputed, program.graph.nodes))
    assert "checkpoint='full': nothing is recomputed: nothing goes backward" in report.lines


@pytest.mark.parametrize(("option", "dynamic", "fits"), [("auto", False, True), (10**6, True, False)])
def test_a_program_for_any_length_is_tagged_for_a_long_one(
    option: Any, dynamic: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosp_rules.memory.checkpoint._memory_of", lambda device: 10**7)
    inputs = batch("llama_gqa", "plain")
    if dynamic:
        prepare_autosp_inputs(inputs["input_ids"], inputs["labels"])
    gm = normalize(captured(build("llama_gqa"), inputs)[0])
    (line,) = RuleSet("tag", TagCheckpoints(option)).apply(gm).lines
    assert (" (for a length of 32,768, as it is a symbol): " in line) == dynamic
    assert any(n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE for n in gm.graph.nodes) != fits
    assert ("more than the budget" in line) == (option == 10**6)


class _Layers(nn.Module):
    """Two towers, of which the first may checkpoint by itself, or a layer of the second a part of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(8, 8), how
        self.first, self.second = (nn.ModuleList(_Mlp() for _ in range(2)) for _ in range(2))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.first:
            x = checkpoint(layer, x, use_reentrant=False) if self.how == "tower" else layer(x)
        x = self.second[0](x)
        return self.second[1](x, in_tiles=self.how == "part").square().mean()


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, *, in_tiles: bool = False) -> torch.Tensor:
        def mlp(x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))

        cut = {"seqlen": x.shape[1], "shards": 2, "kwargs_to_shard": {"x": x}, "output_reduction": None}
        return x + (tiled_compute(mlp, **cut) if in_tiles else mlp(x))


@pytest.mark.parametrize(("how", "num_own", "num_again"), [("none", 0, 4), ("tower", 2, 4), ("part", 1, 5)])
@pytest.mark.some(1)
def test_layers_that_checkpoint_by_themselves_keep_their_choice_and_all_others_are_tagged(
    how: str, num_own: int, num_again: int
) -> None:
    model, ids = _Layers(how), torch.arange(32).reshape(2, 16) % 8
    report = assert_equal_to_one_device(model, {"ids": ids}, ranks=(2,), config=AutoSPConfig(checkpoint="full"))
    line = next(line for line in report.lines if line.startswith("checkpoint"))
    assert f": {4 - num_own} layers keep" in line
    assert line.endswith(f"; {num_own} x a layer that checkpoints by itself keeps its own choice") == (num_own > 0)
    gm, args = captured(model, {"ids": ids})
    gm = normalize(gm)
    RuleSet("tag", TagCheckpoints("full")).apply(gm)
    regions = [node.meta["ac_graph_id"] for node in gm.graph.nodes if is_recomputed(node)]
    assert regions == sorted(regions), "what a region reads of an earlier one is kept"
    assert len(set(regions)) == num_again
    assert Partition(gm, args).num_again("tanh") == num_again
    leaves = list(model.parameters())
    for leaf, want in zip(leaves, torch.autograd.grad(model(ids), leaves), strict=True):
        torch.testing.assert_close(leaf.grad, want, rtol=1e-12, atol=1e-14)


def test_a_model_without_layers_is_not_tagged() -> None:
    gm = normalize(captured(nn.Linear(4, 4), {"input": torch.rand(2, 4)})[0])
    (line,) = RuleSet("tag", TagCheckpoints("full")).apply(gm).lines
    assert "no layer found" in line


@pytest.mark.parametrize("own", [False, True])
def test_a_backend_that_reads_no_tags_is_told(own: bool) -> None:
    model, inputs = build("llama_gqa", layers=1, checkpointing=own), batch("llama_gqa", "plain")
    for inner, is_told in (("eager", True), ("aot_eager", False)):
        config = AutoSPConfig(inner=inner, checkpoint="none" if own else "full")
        _, report = dry_run(model, inputs, num_ranks=2, config=config)
        assert any("inner='eager' reads no tags" in line for line in report.lines) == is_told


class _SharedOperands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return x + nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def test_attention_whose_operands_are_one_value() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), _SharedOperands(), _SharedOperands()).double()
    ids = torch.arange(32).reshape(2, 16) % 8
    report = assert_equal_to_one_device(
        nn.Sequential(model, _MeanSquare()), {"input": ids}, config=AutoSPConfig(checkpoint="attention")
    )
    assert "layers keep" in next(line for line in report.lines if line.startswith("checkpoint"))


class _MeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()
