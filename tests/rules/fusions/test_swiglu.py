"""A gated activation becomes one node and comes back, bit for bit; pairs that no kernel takes stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from rules.fusions.activations import ACTIVATIONS
from rules.fusions.swiglu import INLINE_SWIGLU, SWIGLU, swiglu
from tests.rewriting import calls, check_left_alone, check_rewritten, check_stages, traced

Gated = Callable[[torch.Tensor, torch.Tensor], Any]

SPELLINGS: dict[str, Gated] = {
    "gate first": lambda gate, up: F.silu(gate) * up,
    "up first": lambda gate, up: up * F.silu(gate),
    "module": lambda gate, up: torch.nn.SiLU()(gate) * up,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_there_and_back(spelling: str, dtype: torch.dtype) -> None:
    args = torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)
    gm = check_rewritten(SWIGLU, "swiglu.fuse", SPELLINGS[spelling], args)
    assert calls(gm) == [swiglu]
    check_rewritten(INLINE_SWIGLU, "swiglu.inline", gm, args)
    assert calls(gm) == [torch.ops.aten.silu.default, torch.ops.aten.mul.Tensor]


def test_a_gate_written_out() -> None:
    args = torch.randn(3, 4), torch.randn(3, 4)
    gm = traced(lambda gate, up: gate * torch.sigmoid(gate) * up, *args)
    expected = gm(*args)
    assert (ACTIVATIONS >> SWIGLU).apply(gm).rewrites == 2
    assert calls(gm) == [swiglu]
    torch.testing.assert_close(gm(*args), expected)


@pytest.mark.parametrize(
    ("gated", "up", "reason"),
    [
        (SPELLINGS["gate first"], torch.rand(4), "shapes are (2, 4) and (4,)"),
        (SPELLINGS["gate first"], torch.rand(2, 4).bfloat16(), "dtypes are float32, bfloat16"),
        (lambda gate, up: [s := F.silu(gate), s * up], torch.rand(2, 4), "no user of root.self outside the match"),
        (lambda gate, up: F.gelu(gate) * up, torch.rand(2, 4), "aten::silu"),
    ],
)
def test_leaves_alone(gated: Gated, up: torch.Tensor, reason: str) -> None:
    check_left_alone(SWIGLU, "swiglu.fuse", gated, (torch.rand(2, 4), up), reason)


def test_before_and_after(fx_snapshot: Any) -> None:
    gm = traced(SPELLINGS["up first"], torch.rand(2, 4).bfloat16(), torch.rand(2, 4).bfloat16())
    check_stages(gm, fx_snapshot, after=SWIGLU, inlined=INLINE_SWIGLU)
