"""What each stage does to a one-layer Llama, as graphs to read."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import fx

from autosp_rules import RULES
from autosp_rules.rule_set import rule_set
from fxrewrite import RuleSet
from fxrewrite.backends import capture
from fxrewrite.graph import normalize
from fxrewrite.spmd import Axis, Layout, Replicated, Shard, SpmdContext

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
    "tiled_loss",
    "tile_mlps",
    "checkpoint",
)
_MEMBERS = rule_set("ulysses").members
"""For so few tokens it is cheaper to gather k and v."""
STAGES = ("captured", *(member.name for member in _MEMBERS if member.name not in _NOT_SHOWN))


@cache
def _llama() -> fx.GraphModule:
    """Captured once: a stage works on a normalized copy."""
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        max_position_embeddings=64,
    )
    ids = torch.arange(32).reshape(2, 16)
    for tensor in (labels := ids.clone(), ids):
        torch._dynamo.mark_dynamic(tensor, 1)
    return capture(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": labels})


def _keep(node: fx.Node, layout: Layout) -> Layout:
    return layout if isinstance(layout, Shard) else Replicated()


@pytest.mark.parametrize("stage", STAGES)
def test_llama_after(stage: str, fx_snapshot: Any) -> None:
    """The graph after the stage and all before it, with symbolic length, over an axis of two ranks."""
    gm = normalize(_llama())
    names = ["captured", *(member.name for member in _MEMBERS)]
    so_far = _MEMBERS[: names.index(stage)]
    RuleSet("autosp", *so_far, atomic=True).apply(gm, context=SpmdContext(Axis("sp", 2, "0"), output_layout=_keep))
    assert gm == fx_snapshot


def test_the_set_on_a_page(fx_snapshot: Any) -> None:
    assert str(RULES) == fx_snapshot
