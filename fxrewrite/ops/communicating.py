"""Registers our custom operators that run collectives or autograd inside.

A library operator is opaque: simulated ranks would run it rank by rank, and each would wait for the others. If its body
is registered, they run the body instead, and simulate its collectives. An operator that differentiates inside must find
autograd in the state in which callers of operators find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bodies_of_communicating", "communicates", "differentiates", "differentiating"]

_BODIES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_DIFFERENTIATING: set[torch._ops.OpOverload] = set()


def communicates(operator: torch.library.CustomOpDef, body: Callable[..., Any]) -> None:
    """Registers that `operator` runs `body`, whose operators and collectives work on any tensors."""
    _BODIES[operator._opoverload] = body


def bodies_of_communicating() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Returns the operators that run collectives inside, with their bodies."""
    return dict(_BODIES)


def differentiates(operator: torch.library.CustomOpDef) -> None:
    """Registers that `operator` runs autograd inside."""
    _DIFFERENTIATING.add(operator._opoverload)


def differentiating() -> frozenset[torch._ops.OpOverload]:
    """Returns the operators that run autograd inside."""
    return frozenset(_DIFFERENTIATING)
