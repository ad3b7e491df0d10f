"""Linears of quantized inputs and weights multiply integers; quantizations meet across what only moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rules.fusions.integers import INTEGER_LINEARS, QUANTIZED_MOVES
from tests.rewriting import count, exported

quantized = torch.ops.quantized_decomposed
ROWS = ({0: torch.export.Dim.AUTO},)
INT8, UINT8 = (-128, 127, torch.int8), (0, 255, torch.uint8)


class Quantized(nn.Linear):
    """A linear as `convert_pt2e` writes it, of an input that is quantized to `given` before."""

    def __init__(self, inputs: int, outputs: int, given: Any, *, bias: bool = True, shifted: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        scales = self.weight.detach().abs().amax(1) / 127
        rounded = (self.weight.detach() / scales[:, None]).round().to(torch.int8)
        del self.weight
        self.register_buffer("weight", rounded)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.full((outputs,), int(shifted)))
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = quantized.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        x = quantized.quantize_per_tensor(x, *self.given)
        return nn.functional.linear(quantized.dequantize_per_tensor(x, *self.given), weight, self.bias)


class Dynamic(Quantized):
    """The same, where the graph computes the scale and the zero point."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = quantized.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        low, high, dtype = self.given
        scale, zero = quantized.choose_qparams.tensor(x, low, high, 1e-5, dtype)
        x = quantized.quantize_per_tensor.tensor(x, scale, zero, *self.given)
        x = quantized.dequantize_per_tensor.tensor(x, scale, zero, *self.given)
        return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize(
    ("model", "num_linears"),
    [
        (Quantized(16, 8, (0.02, 3, *INT8)), 1),
        (nn.Sequential(Quantized(16, 24, (0.02, 120, *UINT8)), nn.ReLU(), Quantized(24, 8, (0.01, 0, *INT8))), 2),
        (Dynamic(16, 8, INT8, bias=False), 1),
        (Dynamic(16, 8, UINT8), 1),
    ],
    ids=["int8", "uint8 and int8", "dynamic int8", "dynamic uint8"],
)
@torch.no_grad()
def test_a_linear_multiplies_integers(model: nn.Module, num_linears: int, fx_snapshot: Any) -> None:
    x = torch.randn(5, 7, 16)
    gm = exported(model.eval(), x, dynamic_shapes=ROWS)
    expected = model(x)
    assert INTEGER_LINEARS.apply(gm).rewrites == num_linears
    assert count(gm, "_int_mm") == num_linears
    assert count(gm, "linear") == 0
    torch.testing.assert_close(gm(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gm(x[:2]), model(x[:2]), rtol=1e-5, atol=1e-5)
    if num_linears == 1 and isinstance(model, Quantized) and not isinstance(model, Dynamic):
        assert gm == fx_snapshot


def test_what_the_kernel_cannot_compute_is_refused() -> None:
    x = torch.randn(5, 16)
    gm = exported(Quantized(16, 8, (0.02, 3, *INT8), shifted=True).eval(), x, dynamic_shapes=ROWS)
    report = INTEGER_LINEARS.apply(gm)
    assert report.rewrites == 0
    assert "a zero point of the weight is not 0" in str(report)
    one = exported(Quantized(1, 8, (0.02, 3, *INT8)).eval(), x[:, :1], dynamic_shapes=ROWS)
    assert INTEGER_LINEARS.apply(one).rewrites == 0


def moved(x: torch.Tensor) -> torch.Tensor:
    x = quantized.dequantize_per_tensor(quantized.quantize_per_tensor(x, 0.1, 3, *INT8), 0.1, 3, *INT8)
    x = x.view(4, 2, 3).transpose(1, 2).relu()
    return quantized.dequantize_per_tensor(quantized.quantize_per_tensor(x, 0.1, 3, *INT8), 0.1, 3, *INT8)


def test_quantizations_meet_across_moves(fx_snapshot: Any) -> None:
    x = torch.randn(4, 6) * 10
    gm = torch.fx.experimental.proxy_tensor.make_fx(moved)(x)
    assert QUANTIZED_MOVES.fixpoint().apply(gm).rewrites == 4
    assert count(gm, "quantized_decomposed::quantize_per_tensor") == 1
    assert torch.equal(gm(x), moved(x))
    assert gm == fx_snapshot


def test_other_numbers_are_another_quantization() -> None:
    def narrower(x: torch.Tensor) -> torch.Tensor:
        x = quantized.dequantize_per_tensor(x, 0.1, 3, *INT8)
        return quantized.quantize_per_tensor(x, 0.1, 3, -127, 127, torch.int8)

    def coarser(x: torch.Tensor) -> torch.Tensor:
        return quantized.quantize_per_tensor(quantized.dequantize_per_tensor(x, 0.1, 3, *INT8), 0.2, 3, *INT8)

    for function in (narrower, coarser):
        gm = torch.fx.experimental.proxy_tensor.make_fx(function)(torch.randint(-128, 128, (9,), dtype=torch.int8))
        assert QUANTIZED_MOVES.apply(gm).rewrites == 0
