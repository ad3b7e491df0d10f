"""An activation written out and its operator are one function, whatever the spelling; other constants stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN, GELUActivation, GELUTanh

from rules.fusions.activations import ACTIVATIONS
from tests.rewriting import calls, check_left_alone, check_rewritten, check_stages, traced

Function = Callable[[torch.Tensor], torch.Tensor]
ROOT, SCALE = math.sqrt(2.0), math.sqrt(2.0 / math.pi)

SPELLINGS: dict[str, tuple[str, Function]] = {
    "silu": ("to_silu", lambda x: x * torch.sigmoid(x)),
    "silu, method in front": ("to_silu", lambda x: x.sigmoid() * x),
    "hf gelu_python": ("to_gelu_erf", GELUActivation(use_gelu_python=True)),
    "erf, half in front": ("to_gelu_erf", lambda x: 0.5 * x * (1 + torch.erf(x / ROOT))),
    "erf, half inside": ("to_gelu_erf", lambda x: x * (0.5 * (1.0 + torch.erf(x / ROOT)))),
    "erf, half last": ("to_gelu_erf", lambda x: x * (torch.erf(x * 0.7071067811865476) + 1) * 0.5),
    "erf, 1 / sqrt(2)": ("to_gelu_erf", lambda x: 0.5 * x * (1 + torch.erf(x * (1 / ROOT)))),
    "hf gelu_new": ("to_gelu_tanh", ACT2FN["gelu_new"]),
    "hf gelu_python_tanh": ("to_gelu_tanh", GELUTanh(use_gelu_tanh_python=True)),
    "hf gelu_accurate": ("to_gelu_tanh", ACT2FN["gelu_accurate"]),
    "tanh, half inside": ("to_gelu_tanh", lambda x: x * (0.5 * (1.0 + torch.tanh(SCALE * (x + 0.044715 * x**3))))),
    "tanh, product": ("to_gelu_tanh_product", lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * x * x * x)))),
    "tanh, cube": (
        "to_gelu_tanh_cube",
        lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * (x * x * x)))),
    ),
    "fast, all digits": (
        "to_gelu_tanh_fast",
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * SCALE * (1.0 + 0.044715 * x * x))),
    ),
}
KEPT: dict[str, tuple[str, Function, str]] = {
    "quick gelu": ("to_silu", ACT2FN["quick_gelu"], "expected the same value at root.other.self as at root.self"),
    "another half": ("to_gelu_erf", lambda x: 0.6 * x * (1 + torch.erf(x / ROOT)), "half is 0.6, not 0.5"),
    "another one": ("to_gelu_erf", lambda x: 0.5 * x * (2 + torch.erf(x / ROOT)), "one is 2, not 1.0"),
    "another divisor": (
        "to_gelu_erf",
        lambda x: 0.5 * x * (1 + torch.erf(x / 1.4142)),
        "divisor is 1.4142, not 1.4142135623730951",
    ),
    "another factor": (
        "to_gelu_erf",
        lambda x: 0.5 * x * (1 + torch.erf(x * 0.7)),
        "factor is 0.7, not 0.7071067811865476",
    ),
    "another scale": (
        "to_gelu_tanh",
        lambda x: 0.5 * x * (1 + torch.tanh(1.702 * (x + 0.044715 * x**3))),
        "scale is 1.702, not 0.7978845608028654",
    ),
    "another coefficient": (
        "to_gelu_tanh",
        lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.0447 * x**3))),
        "c is 0.0447, not 0.044715",
    ),
    "another power": (
        "to_gelu_tanh",
        lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * x**2))),
        "power is 2, not 3.0",
    ),
    "another unit": (
        "to_gelu_tanh_fast",
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * SCALE * (2.0 + 0.044715 * x * x))),
        "unit is 2.0, not 1.0",
    ),
    "hf gelu_fast in float64": (
        "to_gelu_tanh_fast",
        ACT2FN["gelu_fast"],
        "scale is 0.7978845608, not 0.7978845608028654",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_is_one_operator(spelling: str) -> None:
    rule, function = SPELLINGS[spelling]
    gm = check_rewritten(
        ACTIVATIONS, f"activations.{rule}", function, [torch.randn(64, dtype=torch.float64) * 3], 1e-12
    )
    assert len(calls(gm)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", ["silu", "hf gelu_python", "hf gelu_new", "hf gelu_fast"])
def test_is_nearer_to_the_real_number_in_half_precision(spelling: str, dtype: torch.dtype) -> None:
    function = SPELLINGS[spelling][1] if spelling in SPELLINGS else ACT2FN["gelu_fast"]
    x = (torch.randn(4096) * 2).to(dtype)
    gm = traced(lambda x: function(x), x)
    assert ACTIVATIONS.apply(gm).rewrites == 1
    real = function(x.double())
    before, after = (function(x).double() - real).abs(), (gm(x).double() - real).abs()
    assert after.mean() < before.mean()
    bound = torch.finfo(dtype).eps * torch.clamp(real.abs(), min=torch.finfo(dtype).tiny)
    assert (after <= bound + 1e-6).all()


def test_the_fast_gelu_of_hugging_face_in_float32() -> None:
    check_rewritten(ACTIVATIONS, "activations.to_gelu_tanh_fast", ACT2FN["gelu_fast"], [torch.randn(64)], 1e-5)


def test_integers_stay() -> None:
    check_left_alone(ACTIVATIONS, "activations.to_silu", SPELLINGS["silu"][1], [torch.arange(8)], "x has dtype int64")


@pytest.mark.parametrize("case", KEPT)
def test_leaves_alone(case: str) -> None:
    rule, function, reason = KEPT[case]
    check_left_alone(ACTIVATIONS, f"activations.{rule}", function, [torch.randn(8, dtype=torch.float64)], reason)


def test_before_and_after(fx_snapshot: Any) -> None:
    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * torch.sigmoid(x), ACT2FN["gelu_new"](x), GELUActivation(use_gelu_python=True)(x)

    check_stages(traced(block, torch.randn(2, 4, dtype=torch.bfloat16)), fx_snapshot, after=ACTIVATIONS)
