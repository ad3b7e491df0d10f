"""Simulated ranks compute what torch computes, also where LocalTensorMode alone would fail."""

from collections.abc import Callable

import pytest
import torch

from fxrewrite.spmd import Parallelism, Shard, param
from fxrewrite.testing import simulate


class Lengths(torch.nn.Module):
    """The length of what a function makes of a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).abs().sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * (1 + 2j),
        lambda y: (1 - 2j) * torch.complex(y, y) + 1,
        lambda y: (3 - 1j) / (y + 1j),
        lambda y: torch.add(torch.complex(y, y), y, alpha=1 + 2j),
    ],
    ids=["times", "from the left", "divided", "alpha"],
)
def test_complex_numbers_of_python(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    plan = Parallelism("mine", axis="tp", place={param("layer.weight"): Shard(0)})
    found = simulate(Lengths(function), {"x": torch.rand(2, 4)}, plan, {"tp": 2})
    assert found.loss_error < 1e-6
    assert found.grad_error < 1e-6
