"""What each stage does to a one-layer Llama, as graphs to read."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from autosp_rules import RULES, AutoSPConfig
from autosp_rules.rule_set import rule_set
from fxrewrite.backends import capture
from fxrewrite.capture import normalize
from fxrewrite.graph import graph_text
from fxrewrite.spmd import Axis, Placement, Replicate, Shard, SpmdContext
from fxrewrite.testing import recorded
from tests.autosp.models import build

_NOT_SHOWN = (
    "fuse_slots",
    "choose_attention",
    "mean_over_shards",
    "bundles",
    "lower_ring",
    "shard_label_ids, shard_position_ids",
    "write_out_slots",
    "attention_by_rows",
    "flex_attention",
    "attention_repeat_heads",
    "lower_attention",
    "name_masks",
    "describe_masks",
    "draw_by_rank",
    "exchange_pairs",
    "tiled_loss",
    "tile_mlps",
    "checkpoint",
)
_ULYSSES = rule_set(AutoSPConfig(attention="ulysses"))
"""For so few tokens it is cheaper to gather k and v."""
STAGES = ("captured", *(member.name for member in _ULYSSES.members if member.name not in _NOT_SHOWN))


def _llama() -> fx.GraphModule:
    ids = torch.arange(32).reshape(2, 16)
    for tensor in (labels := ids.clone(), ids):
        torch._dynamo.mark_dynamic(tensor, 1)
    return capture(build("llama_gqa", layers=1).float(), {"input_ids": ids, "labels": labels})


def _keep(position: int, node: fx.Node, placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else Replicate()


@cache
def _texts() -> dict[str, str]:
    """The graph after each stage, with symbolic length, over an axis of two ranks."""
    gm = normalize(_llama())
    texts = {"captured": graph_text(gm)}
    rules, recorders = recorded(_ULYSSES)
    rules.apply(gm, context=SpmdContext(Axis("sp", 2, "0"), output_placement=_keep, gradients="mean"))
    return texts | {stage: recorder.text_there for stage, recorder in recorders.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_llama_after(stage: str, fx_snapshot: Any) -> None:
    assert _texts()[stage] == fx_snapshot


def test_the_set_on_a_page(fx_snapshot: Any) -> None:
    assert str(RULES) == fx_snapshot
