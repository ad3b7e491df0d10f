"""Registers our custom operators that run collectives or autograd inside.

A library operator is opaque: simulated ranks would run it rank by rank, and each would wait for the others. If its body
is registered, they run the body instead, and simulate its collectives. An operator that differentiates inside must find
autograd in the state in which callers of operators find it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from fxrewrite.errors import RuleDefinitionError

__all__ = ["bodies_of_communicating", "communicates", "differentiates", "differentiating", "vjp_inside"]

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


def vjp_inside(
    function: Callable[..., Any], *primals: torch.Tensor
) -> tuple[Any, Callable[[Any], tuple[torch.Tensor, ...]]]:
    """Returns `torch.func.vjp(function, *primals)`, for the body of an operator that `differentiates`.

    It works also where the caller has hooks for saved tensors, such as those of `save_on_cpu` and of checkpoints, under
    which torch.func refuses to run. Hooks are for what the caller's graph saves, not for what lives inside of one
    operator. The second result may be called once, since it frees what it reads.
    """
    with _without_hooks():
        made: Any = torch.func.vjp(function, *primals)
    results, pull_back = made

    def pull_back_once(cotangents: Any) -> tuple[torch.Tensor, ...]:
        with _without_hooks():
            # By default it keeps what it has read, and records itself for another derivative.
            return pull_back(cotangents, retain_graph=False, create_graph=False)

    return results, pull_back_once


@contextmanager
def _without_hooks() -> Generator[None]:
    """Takes all hooks for saved tensors off their stack for the duration of the block."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    hooks: list[Any] = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
