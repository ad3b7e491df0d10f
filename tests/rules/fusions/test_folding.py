"""A batch norm is part of the weight before it; where it is not, the graph stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from rules.fusions.folding import FOLDING
from tests.rewriting import check_left_alone, exported

PRODUCTS: dict[str, tuple[nn.Module, int]] = {
    "Conv1d": (nn.Conv1d(4, 6, 3, padding="same"), 1),
    "Conv2d": (nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), 2),
    "Conv3d": (nn.Conv3d(4, 6, 2, dilation=2), 3),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), 1),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, bias=False), 2),
    "ConvTranspose3d": (nn.ConvTranspose3d(4, 6, 2), 3),
    "grouped ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, groups=2), 2),
    "Linear": (nn.Linear(4, 6), 0),
}


def norm(dims: int, **options: Any) -> nn.Module:
    """A norm whose statistics and weights are those of no new one."""
    made = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims](6, **options)
    state = {name: torch.arange(6) / 8 + len(name) / 16 for name, v in made.state_dict().items() if v.ndim}
    made.load_state_dict(state, strict=False)
    return made


@pytest.mark.parametrize("case", PRODUCTS)
def test_folded(case: str, fx_snapshot: Any) -> None:
    product, dims = PRODUCTS[case]
    after = norm(dims, affine=case != "Conv3d")
    model = nn.Sequential(product, after).double().eval()
    x = torch.rand(3, 4, *([7] * dims), dtype=torch.float64)
    gm = exported(model, x)
    if case == "Conv2d":
        assert gm == fx_snapshot(name="before")
    assert FOLDING.apply(gm).rewrites == 1
    if case == "Conv2d":
        assert gm == fx_snapshot(name="after")
    torch.testing.assert_close(gm(x), model(x), rtol=1e-9, atol=1e-9)
    assert {"folded_weight", "folded_bias"} == {name for name in gm.state_dict() if not name.endswith("tracked")}
    if "grouped" not in case and case != "Conv3d":  # torch's own function is wrong, or takes no such norm
        fused: Any = fuse_linear_bn_eval if case == "Linear" else fuse_conv_bn_eval
        options = {"transpose": True} if "Transpose" in case else {}
        torch.testing.assert_close(gm(x), fused(product, after, **options)(x), rtol=1e-9, atol=1e-9)
    assert FOLDING.apply(gm).rewrites == 0


class Rows(nn.Module):
    """A norm that takes another dimension than the one that the linear makes for channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 5), norm(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize(
    ("model", "shape", "rule", "reason"),
    [
        (
            nn.Sequential(nn.Conv2d(4, 6, 1), norm(2)).train(),
            (2, 4, 3, 3),
            "fold_conv",
            "expected the literal False at root.training",
        ),
        (Rows().eval(), (2, 6, 4), "fold_linear", "x has rank 3"),
    ],
)
def test_left_alone(model: nn.Module, shape: tuple[int, ...], rule: str, reason: str) -> None:
    x = torch.rand(shape)
    check_left_alone(FOLDING, f"folding.{rule}", exported(model, x), [x], reason)
