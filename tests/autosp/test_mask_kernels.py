"""`mask_kernel`: flex attention in place of blocks of rows is exact on simulated ranks, is kept, and is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from autosp_rules import AutoSPConfig, AutoSPError, AutoSPReport
from autosp_rules.config import AttentionOption
from autosp_rules.masks import DescribeMasks
from autosp_rules.transform import transform
from fxrewrite import RuleSet
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh
from rules.attention.by_rows import ATTENTION_BY_ROWS, BY_ROWS
from rules.attention.flex import MaskKernel, flex_rules
from rules.attention.flex_operator import FLEX_ATTENTION
from tests.autosp.attention_layer import IDS, Layer, LayerOnOneDevice
from tests.autosp.models import batch, build
from tests.autosp.one_device import assert_equal_to_one_device, captured
from tests.autosp.partition import Partition
from tests.autosp.test_masks import MASKS_OF, Mask, attend_with_sinks, kinds
from tests.rules.attention.test_flex import ON_CUDA, on_cuda

HOLDS = "mask_kernel: flex attention is a kernel in inner='inductor' on CUDA; here it may hold all scores"
RUNS: dict[str, tuple[int, AttentionOption, int, bool]] = {
    "right padding": (3, "gather_kv", 4, False),
    "window": (4, "ulysses", 2, False),
    "chunks": (2, "gather_kv", 2, True),
    "documents": (2, "ulysses", 2, False),
    "prefix": (2, "ulysses", 4, False),
    "alibi": (2, "ulysses", 4, False),
}
"""Ranks, how attention runs, heads of k and v, and whether the length is a symbol."""


def attend_with(mask: Mask) -> Callable[..., torch.Tensor]:
    def attend(layer: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(x.shape[1])
        made = mask(columns[:, None], columns, layer.slopes.detach())
        return F.scaled_dot_product_attention(q, k, v, made, enable_gqa=True)

    return attend


def config(mask_kernel: MaskKernel = "flex", inner: str = "eager", **how: object) -> AutoSPConfig:
    return AutoSPConfig.model_validate({"mask_kernel": mask_kernel, "inner": inner, **how})


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.some(2)
def test_exact(name: str) -> None:
    num_ranks, attention, kv_heads, dynamic = RUNS[name]
    mask, kind = MASKS_OF[name]
    one_device = LayerOnOneDevice(Layer(attend_with(mask), 4, kv_heads), dynamic=dynamic)
    report = one_device.report(num_ranks, config(strict=True, attention=attention))
    assert kinds(report) == [f"{kind}, by flex attention"]
    assert HOLDS in report.lines


@pytest.mark.parametrize("attention", ["ulysses", "gather_kv"])
def test_softcap(attention: AttentionOption) -> None:
    def attend(layer: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        mask = torch.zeros(columns.shape * 2, dtype=q.dtype).masked_fill(columns > rows, -torch.inf)
        return torch.softmax(torch.tanh(q @ k.transpose(-2, -1) / 0.3) * 0.3 + mask, -1) @ v

    report = LayerOnOneDevice(Layer(attend, 12, 12)).report(3, config(attention=attention))
    assert kinds(report) == ["causal, by flex attention"]


@pytest.mark.parametrize("attention", ["ulysses", "gather_kv"])
def test_sinks(attention: AttentionOption) -> None:
    """In float32, as the logsumexp is."""
    report = assert_equal_to_one_device(
        Layer(attend_with_sinks, 12, 12).float(),
        {"ids": IDS, "memory": IDS},
        ranks=(3,),
        config=config(attention=attention),
        loss=1e-6,
        grads=1e-6,
    )
    assert [kind.endswith("by flex attention") for kind in kinds(report)] == [True]


def program_of(mask: Mask, how: AutoSPConfig) -> tuple[list[object], AutoSPReport]:
    """What the nodes of a program on two ranks call."""
    gm, _ = captured(Layer(attend_with(mask), 4, 2), {"ids": IDS, "memory": IDS})
    with fake_mesh((2,), ("sp",)) as mesh:
        program, report = transform(gm, how, axis_of(mesh, "sp"))
    return [node.target for node in program.graph.nodes], report


@pytest.mark.parametrize(("kernel", "inner"), [("auto", "inductor"), ("auto", "eager"), ("rows", "inductor")])
def test_on_the_cpu_masks_are_computed_by_rows(kernel: MaskKernel, inner: str) -> None:
    called, report = program_of(MASKS_OF["window"][0], config(kernel, inner))
    assert ATTENTION_BY_ROWS in called
    assert FLEX_ATTENTION not in called
    assert kinds(report) == ["causal and window 4, computed by rows"]


@pytest.mark.parametrize("case", ON_CUDA)
def test_the_report_says_why_masks_stay_by_rows_on_cuda(case: str) -> None:
    report = RuleSet("masks", BY_ROWS, flex_rules("auto"), DescribeMasks("auto", "inductor")).apply(on_cuda(case))
    (line,) = report.lines
    assert f", computed by rows: {ON_CUDA[case][-1]}" in line


def test_what_is_refused() -> None:
    with pytest.raises(AutoSPError, match="inductor has no backward pass of flex attention on the CPU") as caught:
        program_of(MASKS_OF["window"][0], config(inner="inductor"))
    assert "mask_kernel='auto'" in caught.value.hint
    lowest = torch.finfo(torch.float64).min
    with pytest.raises(AutoSPError, match=r"the mask adds -1.8e\+308, and a row of it alone attends"):
        program_of(lambda r, c, _: (0 * (c - r)).double().masked_fill((c > r) | (c <= r - 4), lowest), config())


def test_layers_keep_its_result() -> None:
    """The result and the logsumexp are kept, as by rows; tiles are found once, forward and backward, for all layers."""
    gm, args = captured(build("llama_gqa"), batch("llama_gqa", "right_padding"))
    with fake_mesh((2,), ("sp",)) as mesh:
        program, report = transform(gm, config(inner="aot_eager", checkpoint="attention"), axis_of(mesh, "sp"))
        partition = Partition(program, args)
    (line,) = [line for line in report.lines if line.startswith("checkpoint")]
    assert "recomputed are 12 x linear" in line, "and no attention"
    assert "sent again are 2 values" in line, "q, k and v of each layer"
    assert partition.num_again("flex_attention") == 0
    assert partition.num_again("mask_tiles") == 1
