"""What a layout rule is tried on: arguments for sizes that the test chooses, and the dimensions that must be whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Args = Callable[[int, int, int], tuple[Any, ...]]
"""The arguments of a call for three sizes, each a multiple of the number of ranks."""


@dataclass(frozen=True)
class Case:
    """One call: `whole` says which (operand, dimension) the rule must not shard ("0.1 2.0"); all others are free."""

    args: Args
    whole: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def whole_dims(self) -> set[tuple[int, int]]:
        pairs = (pair.split(".") for pair in self.whole.split())
        return {(int(operand), int(dim)) for operand, dim in pairs}


Cases = dict[str, list[Case]]


def case(args: Args, whole: str = "", **kwargs: Any) -> Case:
    return Case(args, whole, kwargs)


def many(names: str, *cases: Case) -> Cases:
    """The same cases for several operators."""
    return {name: list(cases) for name in names.split()}


def f(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Floats that are differentiated."""
    return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).requires_grad_()


def g(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Floats that are not."""
    return f(*shape, low=low, high=high).detach()


def i(high: int, *shape: int) -> torch.Tensor:
    """Integers from 0 to below `high`."""
    return torch.randint(0, high, shape)


def b(*shape: int) -> torch.Tensor:
    """Booleans."""
    return torch.rand(shape) > 0.5


def z(*shape: int) -> torch.Tensor:
    """Complex numbers."""
    return torch.complex(g(*shape), g(*shape)).requires_grad_()
