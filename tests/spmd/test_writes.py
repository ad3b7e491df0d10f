"""What a program writes to in place, by plans: read before or after as on one device, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxrewrite import RefusedError
from fxrewrite.spmd import Parallelism, Replicate, Shard, Stored, inputs, module_input, module_output, param
from fxrewrite.testing import simulate
from rules.parallel import ZERO2, ZERO3

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Observer(nn.Module):
    """It reads a buffer together with a weight, and writes to the buffer before the result is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(8, 8, dtype=torch.float64)) for _ in range(2))
        self.register_buffer("seen", torch.rand(8, dtype=torch.float64) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = self.second - self.seen
        hidden = torch.tanh(x @ self.first)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.abs().amax(0), alpha=0.1)
        return (hidden @ shifted).square().mean()


STORED = Parallelism("stored", axis="dp", place={param("*"): Stored(Shard(0))})


@pytest.mark.parametrize("plan", [STORED, ZERO2, ZERO3], ids=lambda plan: plan.name)
def test_what_is_read_before_a_write_is_not_read_behind_it(plan: Parallelism) -> None:
    """Values of gathered parameters are computed where they are read, but not those of what is written to."""
    found = simulate(Observer(), {"x": X}, plan, {"dp": 2})
    assert found.error < 1e-12, str(found)


class Teacher(nn.Module):
    """A parameter without a gradient that follows another one, as in BYOL and DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4, dtype=torch.float64))
        self.follows = nn.Parameter(torch.zeros(8, 4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.follows.lerp_(self.weight, 0.5)
        return (x @ self.weight - x @ self.follows).square().mean()


@pytest.mark.parametrize("plan", [STORED, ZERO2, ZERO3], ids=lambda plan: plan.name)
def test_a_write_to_what_is_gathered_of_shards_is_refused(plan: Parallelism) -> None:
    with pytest.raises(RefusedError, match=r"in-place operation on a sharded value at %lerp_ .* hold it whole"):
        simulate(Teacher(), {"x": X}, plan, {"dp": 2})
    whole = Parallelism("but", axis="dp", place={param("*", but="follows"): Stored(Shard(0))})
    assert simulate(Teacher(), {"x": X}, whole, {"dp": 2}).grad_error < 1e-12


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum(0)


class Calls(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.doubles, self.width = Doubles(), width
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = self.doubles(x[:, : self.width])
        return (x @ self.weight).square().sum() + (doubled * self.weight[0, : self.width]).sum()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("width", [4, 8])
def test_a_write_within_a_module_whose_input_is_stated_is_refused(width: int, dim: int) -> None:
    place: dict[Any, Any] = {inputs("x"): Shard(dim), module_input("doubles"): Replicate()}
    with pytest.raises(RefusedError, match=r"in-place operation on a sharded value at %mul_"):
        simulate(Calls(width), {"x": X}, Parallelism("stated", axis="tp", place=place), {"tp": 2})


class Scales(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5


class Histogram(nn.Module):
    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(7, 8)), Scales()
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.scale(self.weight)
        signs = (scaled.detach() > 0).long()
        return scaled.sum() + torch.zeros(5).index_put((signs,), self.counts, accumulate=True).max()


@pytest.mark.parametrize("counts", [torch.ones(()), torch.ones(8), torch.ones(7, 1)], ids=["one", "columns", "rows"])
def test_counts_that_broadcast_over_padding(counts: torch.Tensor) -> None:
    plan = Parallelism("uneven", axis="tp", place={module_output("scale"): Shard(0, uneven=True)})
    assert simulate(Histogram(counts), {"x": X}, plan, {"tp": 2}).loss_error < 1e-6
