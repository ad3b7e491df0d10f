"""An activation written out and its operator are one function, whatever the spelling; other constants stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.activations import ACT2FN, GELUActivation, GELUTanh

from rules.fusions.activations import ACTIVATIONS

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


def traced(function: Function, x: torch.Tensor) -> fx.GraphModule:
    return make_fx(lambda x: function(x), tracing_mode="fake", pre_dispatch=True)(x)


def value_and_gradient(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.double().square().sum(), x)[0]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_is_one_operator(spelling: str) -> None:
    rule, function = SPELLINGS[spelling]
    x = torch.randn(64, dtype=torch.float64) * 3
    gm = traced(function, x)
    assert ACTIVATIONS.apply(gm)[f"activations.{rule}"].rewrites == 1
    assert sum(n.op == "call_function" for n in gm.graph.nodes) == 1
    torch.testing.assert_close(value_and_gradient(gm, x), value_and_gradient(function, x), rtol=1e-11, atol=1e-13)
    assert ACTIVATIONS.apply(gm).rewrites == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", ["silu", "hf gelu_python", "hf gelu_new", "hf gelu_fast"])
def test_is_nearer_to_the_real_number_in_half_precision(spelling: str, dtype: torch.dtype) -> None:
    function = SPELLINGS[spelling][1] if spelling in SPELLINGS else ACT2FN["gelu_fast"]
    x = (torch.randn(4096) * 2).to(dtype)
    gm = traced(function, x)
    assert ACTIVATIONS.apply(gm).rewrites == 1
    real = function(x.double())
    before, after = (function(x).double() - real).abs(), (gm(x).double() - real).abs()
    assert after.mean() < before.mean()
    bound = torch.finfo(dtype).eps * torch.clamp(real.abs(), min=torch.finfo(dtype).tiny)
    assert (after <= bound + 1e-6).all()


def test_the_fast_gelu_of_hugging_face_in_float32() -> None:
    x = torch.randn(64)
    gm = traced(ACT2FN["gelu_fast"], x)
    assert ACTIVATIONS.apply(gm)["activations.to_gelu_tanh_fast"].rewrites == 1
    torch.testing.assert_close(gm(x), ACT2FN["gelu_fast"](x))


def test_integers_stay() -> None:
    gm = traced(lambda x: x * torch.sigmoid(x), torch.arange(8))
    assert ACTIVATIONS.apply(gm).rewrites == 0
    assert "x has dtype int64" in str(ACTIVATIONS.once().explain(gm, "activations.to_silu"))


@pytest.mark.parametrize("case", KEPT)
def test_leaves_alone(case: str) -> None:
    rule, function, reason = KEPT[case]
    gm = traced(function, torch.randn(8, dtype=torch.float64))
    code = gm.code
    assert ACTIVATIONS.apply(gm).rewrites == 0
    assert gm.code == code
    assert reason in str(ACTIVATIONS.once().explain(gm, f"activations.{rule}"))


def test_before_and_after(fx_snapshot: Any) -> None:
    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * torch.sigmoid(x), ACT2FN["gelu_new"](x), GELUActivation(use_gelu_python=True)(x)

    gm = make_fx(block, tracing_mode="fake", pre_dispatch=True)(torch.randn(2, 4, dtype=torch.bfloat16))
    assert gm == fx_snapshot(name="before")
    ACTIVATIONS.apply(gm)
    assert gm == fx_snapshot(name="after")
