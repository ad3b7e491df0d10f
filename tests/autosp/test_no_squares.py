"""No value of a Hugging Face model has two sequence-sized dimensions, whatever its mask: not in a rank's program, and
not in the forward and backward graphs that AOTAutograd makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from autosp_rules import AutoSPConfig
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh
from tests.autosp.one_device import captured
from tests.autosp.partition import Partition
from tests.zoo.models import build

LENGTH, RANKS = 26, 2
"""Neither the length nor a rank's share of it is another size of these models."""
LONG = {LENGTH, LENGTH // RANKS}


def _padded(left: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : LENGTH // 3] = 0
    return {"attention_mask": mask if left else mask.flip(1)}


PACKED = {"position_ids": torch.cat([torch.arange(11), torch.arange(LENGTH - 11)]).repeat(2, 1)}
CASES: dict[str, tuple[str, dict[str, torch.Tensor], str]] = {
    "causal": ("LlamaForCausalLM", {}, ""),
    "left padding": ("LlamaForCausalLM", _padded(left=True), "causal and key padding"),
    "window": ("MistralForCausalLM", {}, "window 6 and causal"),
    "window and not": ("Gemma3ForCausalLM", {}, "window 6 and causal"),
    "sinks, window and not": ("GptOssForCausalLM", {}, "window 6 and causal; causal"),
    "softcap, window and not": ("Gemma2ForCausalLM", {}, "window 6 and causal; causal"),
    "softcap and left padding": (
        "VaultGemmaForCausalLM",
        _padded(left=True),
        "window 6 and causal and key padding; causal and key padding",
    ),
    "documents": ("Qwen2ForCausalLM", PACKED, "order of given positions and documents"),
    "padding": ("BertForMaskedLM", _padded(left=False), "causal and key padding"),
}


def _squares(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else [values]:
            if isinstance(value, torch.Tensor) and sum(size in LONG for size in value.shape) > 1:
                yield f"{node.name} {tuple(value.shape)}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(2)
def test_no_value_has_rows_and_columns(name: str) -> None:
    model_name, given, kinds = CASES[name]
    torch.manual_seed(0)
    is_eager = name.startswith(("sinks", "softcap"))
    dtype = torch.float32 if name.startswith("softcap") else torch.float64  # as the softmax of the model is
    model: Any = build(model_name, "eager" if is_eager else "sdpa", dtype)
    ids = torch.randint(1, 64, (2, LENGTH))
    gm, inputs = captured(model.train(), {"input_ids": ids, "labels": ids, **given})
    with fake_mesh((RANKS,), ("sp",)) as mesh:
        program, report = transform(gm, AutoSPConfig(strict=True), axis_of(mesh, "sp"))
        partition = Partition(program, inputs)
    for graph in (program, partition.forward, partition.backward):
        assert list(_squares(graph)) == []
    masks = [line for line in report.lines if line.startswith("masks: ")]
    for line, kind in zip(masks, filter(None, kinds.split("; ")), strict=True):
        assert f" x {kind}, computed by rows" in line
