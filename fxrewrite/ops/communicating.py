"""Operators of ours that communicate inside, with the bodies that say how, and those that differentiate inside.

An operator in a library is opaque: simulated ranks would run it rank by rank, each waiting for the others. Where its
body is known they run that instead, and its collectives are theirs. One that differentiates inside must find autograd
as a caller of operators does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bodies_of_communicating", "communicates", "differentiates", "differentiating"]

_BODIES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_DIFFERENTIATING: set[torch._ops.OpOverload] = set()


def communicates(operator: torch.library.CustomOpDef, body: Callable[..., Any]) -> None:
    """From now on it is known that `operator` runs `body`, whose operators and collectives work on any tensors."""
    _BODIES[operator._opoverload] = body


def bodies_of_communicating() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The operators that communicate inside, and what they run."""
    return dict(_BODIES)


def differentiates(operator: torch.library.CustomOpDef) -> None:
    """From now on it is known that `operator` runs autograd inside."""
    _DIFFERENTIATING.add(operator._opoverload)


def differentiating() -> frozenset[torch._ops.OpOverload]:
    """The operators that run autograd inside."""
    return frozenset(_DIFFERENTIATING)
