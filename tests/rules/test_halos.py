"""Images and volumes in strips: convolutions read what is beside a strip, on one axis and on two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxrewrite.spmd import HALO, Parallelism, Shard, inputs, module_output
from fxrewrite.testing import simulate

CONVOLVE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Stack(nn.Module):
    """Two convolutions, with an activation between, and a loss."""

    def __init__(self, num_spatial: int, **options: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = CONVOLVE[num_spatial]
        self.first, self.second = conv(3, 4, 3, padding=1).double(), conv(4, 2, **options).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def strips(axis: str, dim: int) -> Parallelism:
    return Parallelism(axis, axis=axis, place={inputs("x"): Shard(dim)})


SECOND: dict[str, dict[str, int]] = {
    "the same size": {"kernel_size": 3, "padding": 1},
    "half the size": {"kernel_size": 3, "padding": 1, "stride": 2},
    "half, of an even kernel": {"kernel_size": 4, "padding": 1, "stride": 2},
    "every second entry": {"kernel_size": 1, "stride": 2},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "patches": {"kernel_size": 2, "stride": 2},
    "larger than a strip": {"kernel_size": 7, "padding": 3},
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("num_spatial", [1, 2, 3])
@pytest.mark.some(12)
def test_strips_stay_strips(num_spatial: int, name: str, num_ranks: int) -> None:
    size = (8, 6, 4)[:num_spatial]
    found = simulate(
        Stack(num_spatial, **SECOND[name]),
        {"x": torch.randn(2, 3, *size, dtype=torch.float64)},
        strips("images", 2),
        {"images": num_ranks},
    )
    assert found.error < 1e-12
    assert {c.kind for c in found.report.collectives} == {"all_reduce", "halo"}
    halos = [node for node in found.program.graph.nodes if node.target is HALO]
    assert len(halos) == (1 if name in ("patches", "every second entry") else 2)


def test_what_is_convolved_is_sent_elsewhere() -> None:
    """Its strips become rows of the batch, as a sum along each image needs these whole."""

    class Sums(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).cumsum(2).square().mean()

    x = torch.randn(4, 3, 8, 6, dtype=torch.float64)
    for place in ({}, {module_output("first"): Shard(2)}):
        plan = Parallelism("images", axis="images", place={inputs("x"): Shard(2), **place})
        found = simulate(Sums(2, kernel_size=3), {"x": x}, plan, {"images": 4})
        assert found.error < 1e-12


def test_tiles_over_two_axes() -> None:
    """The second axis sends columns with the rows that came over the first, so that corners are read too."""
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    plan = strips("rows", 2) | strips("columns", 3)
    found = simulate(Stack(2, kernel_size=5, padding=2), {"x": x}, plan, {"rows": 2, "columns": 3})
    assert found.error < 1e-12
    assert {c.kind for c in found.report.collectives} == {"all_reduce", "halo"}


def test_channels_last_stay_last() -> None:
    """Kernels of convolutions are chosen by that."""
    model = Stack(2, kernel_size=3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    found = simulate(model, {"x": x}, strips("images", 2), {"images": 4})
    assert found.error < 1e-12
    halos = [node.meta["val"] for node in found.program.graph.nodes if node.target is HALO]
    assert [halo.is_contiguous(memory_format=torch.channels_last) for halo in halos] == [True, True]


@pytest.mark.parametrize("first", [0, 2])
def test_more_padding_than_windows_read(first: int) -> None:
    """What a slice cuts off the end of a convolution is not computed: windows would read more than the padding."""

    class Causal(Stack):
        def forward(self, x: Tensor) -> Tensor:
            found = nn.functional.conv1d(x, self.first.weight, self.first.bias, padding=4)
            return found[..., first : first + x.shape[-1]].square().mean()

    x = torch.randn(2, 3, 8, dtype=torch.float64)
    found = simulate(Causal(1, kernel_size=3), {"x": x}, strips("images", 2), {"images": 4})
    assert found.error < 1e-12
    assert {c.kind for c in found.report.collectives} == {"all_reduce", "halo"}
