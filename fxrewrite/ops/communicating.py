"""Registers our custom operators that run collectives or autograd inside.

A library operator is opaque: simulated ranks would run it rank by rank, and each would wait for the others. If its body
is registered, they run the body instead, and simulate its collectives. An operator that differentiates inside must find
autograd in the state in which callers of operators find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxrewrite.errors import RuleDefinitionError

_BODIES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_DIFFERENTIATING: set[torch._ops.OpOverload] = set()


def communicates(operator: torch.library.CustomOpDef, body: Callable[..., Any]) -> None:
    """Registers that `operator` runs `body`, whose operators and collectives work on any tensors.

    Its schema has `str group_name`, as those of torch's collectives: ranks have groups of other names, and the texts of
    their programs must be equal.

    Raises:
        RuleDefinitionError: it has not.
    """
    overload = operator._opoverload
    if not any(argument.name == "group_name" for argument in overload._schema.arguments):
        raise RuleDefinitionError(f"{overload._schema} communicates; name the argument of its process group group_name")
    _BODIES[overload] = body


def bodies_of_communicating() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Returns the operators that run collectives inside, with their bodies."""
    return dict(_BODIES)


def differentiates(operator: torch.library.CustomOpDef) -> None:
    """Registers that `operator` runs autograd inside."""
    _DIFFERENTIATING.add(operator._opoverload)


def differentiating() -> frozenset[torch._ops.OpOverload]:
    """Returns the operators that run autograd inside."""
    return frozenset(_DIFFERENTIATING)
