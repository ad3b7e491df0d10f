"""MLPs in tiles: one device's loss and gradients, nothing of inner width held, and chosen where that costs nothing."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from autosp_rules import AutoSPConfig, dry_run
from autosp_rules.memory.checkpoint import CheckpointOption, TagCheckpoints
from autosp_rules.memory.costs import bases_of
from autosp_rules.memory.mlps import tile_mlps
from fxrewrite import Report, RuleSet, normalize
from tests.autosp.models import BATCH, LENGTH, batch, build
from tests.autosp.one_device import assert_equal_to_one_device, captured
from tests.autosp.partition import Partition

INNER = 128
TILE = INNER * 8 * 7
"""Bytes of seven rows of GPT-2's MLP in float64, of three of Llama's, whose gate and up are two."""


def wide(name: str, *, layers: int = 1, **how: Any) -> nn.Module:
    """A model with MLPs four times as wide as its hidden states."""
    model = build(name, layers=layers, **how)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, LlamaMLP):
            module.__init__(LlamaConfig(hidden_size=32, intermediate_size=INNER))
    return model.double()


@pytest.mark.parametrize(
    ("name", "kind", "checkpoint"),
    [("llama_gqa", "right_padding", "none"), ("llama_gqa", "plain", "attention"), ("gpt2", "uneven_labels", "full")],
)
@pytest.mark.some(1)
def test_loss_and_gradients_are_those_of_one_device(name: str, kind: str, checkpoint: CheckpointOption) -> None:
    config = AutoSPConfig(mlp_tile=TILE, checkpoint=checkpoint)
    report = assert_equal_to_one_device(wide(name), batch(name, kind), ranks=(2,), config=config, loss=1e-6)
    assert report.rewrites["tiled_mlp.tile"] == 1
    assert any(line.startswith(f"mlp_tile={TILE}: 1 x an MLP in tiles of ") for line in report.lines)


def partition_of(name: str, *members: Any, **how: Any) -> tuple[Partition, list[torch.Tensor | None], Report]:
    """The model's own graph after these steps, cut into forward and backward; its gradients, and what was reported."""
    gm, args = captured(wide(name, **how), batch(name, "plain", length=LENGTH + 4))
    gm = normalize(gm)
    report = RuleSet("steps", *members).apply(gm)
    partition = Partition(gm, args)
    leaves = [arg for arg in args if isinstance(arg, nn.Parameter)]
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return partition, grads, report


def inner_values(*graphs: fx.GraphModule) -> list[str]:
    """What has the inner width for all rows."""
    size = BATCH * (LENGTH + 4) * INNER
    values = {node.name: node.meta.get("val") for gm in graphs for node in gm.graph.nodes}
    return [name for name, value in values.items() if isinstance(value, torch.Tensor) and value.numel() == size]


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_auto_tiles_what_is_computed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosp_rules.memory.mlps.TILE_BYTES", TILE)
    tags = TagCheckpoints("attention")
    before, expected, _ = partition_of(name, tags)
    after, grads, report = partition_of(name, tags, tile_mlps("auto"))
    assert inner_values(before.forward, before.backward)
    assert not inner_values(after.forward, after.backward)
    assert after.kept() <= before.kept()
    assert after.num_again("tiled_mlp.default") == 0
    assert "1 x an MLP in tiles of" in report.lines[-1]
    torch.testing.assert_close(after.loss, before.loss)
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-14)


def test_auto_and_a_model_that_checkpoints_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last layer's result is computed again, for the norm after it, which is in no checkpoint."""
    monkeypatch.setattr("autosp_rules.memory.mlps.TILE_BYTES", TILE)
    partition, _, report = partition_of("llama_gqa", tile_mlps("auto"), layers=2, checkpointing=True)
    whole, tiled = sorted(report.lines, reverse=True)
    assert "1 x an MLP whole: the backward pass computes its result again too" in whole
    assert "1 x an MLP in tiles of" in tiled
    assert partition.num_again("tiled_mlp.default") == 0
    assert partition.num_again("aten.silu.default") == 1


def test_auto_leaves_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosp_rules.memory.mlps.TILE_BYTES", TILE)
    _, _, report = partition_of("llama_gqa", TagCheckpoints(10**9), tile_mlps("auto"))
    assert "1 x an MLP whole: the backward pass does not compute its inside again" in report.lines[-1]
    assert not report["tiled_mlp.tile"].rewrites


class _Layer(nn.Module):
    """Attention of width 8, and an MLP with an inner width to choose and dropout inside."""

    def __init__(self, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, inner), nn.Linear(inner, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(self.dropout(torch.relu(self.up(x))))


def lines_of(layer: nn.Module, config: AutoSPConfig, length: int = 16, *, dynamic: bool = False) -> list[str]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 8), nn.ModuleList([layer])[0]).to("meta")
        ids = torch.zeros(1, length, dtype=torch.int64)
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    _, report = dry_run(model, {"input": ids}, num_ranks=2, config=config)
    return [line for line in report.lines if line.startswith("mlp_tile")]


@pytest.mark.parametrize(("inner", "is_tiled"), [(64, True), (8, False)])
def test_auto_weighs_the_inside_against_the_rest_of_a_layer(inner: int, is_tiled: bool) -> None:
    (line,) = lines_of(_Layer(inner), AutoSPConfig(checkpoint="full"), length=2**24)
    assert ("an MLP in tiles of" in line) == is_tiled
    assert is_tiled or "of the rest of its layer" in line


def test_any_length_is_tiled_and_described_for_a_long_one() -> None:
    (line,) = lines_of(_Layer(64), AutoSPConfig(mlp_tile=2**20), dynamic=True)
    assert line.startswith(
        f"mlp_tile={2**20} (for a length of 32,768, as it is a symbol): 1 x an MLP in tiles of 4,096"
    )
    assert line.endswith("of all 16,384 rows")


@pytest.mark.parametrize(
    ("layer", "option", "why"),
    [
        (_Layer(64), 2**20, "no MLP is computed in tiles: the largest, at %linear_2"),
        (_Layer(64, dropout=0.5), 2**8, "fxrewrite_rules::aten_dropout_by_rank, is not a pointwise operator"),
        (_Layer(64), None, ""),
        (_Layer(64), "auto", ""),
    ],
)
def test_what_is_not_tiled_and_why(layer: nn.Module, option: Any, why: str) -> None:
    lines = lines_of(layer, AutoSPConfig(mlp_tile=option))
    assert len(lines) == bool(why)
    assert why in " ".join(lines)


def test_what_reads_nothing_made_its_own_memory() -> None:
    graph = fx.Graph()
    compared = graph.call_function(operator.eq, (30, 30))
    assert bases_of([compared]) == {compared: compared}
