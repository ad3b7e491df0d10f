"""Our custom operators that run collectives or autograd inside.

A library operator is opaque: simulated ranks would run it rank by rank, and each would wait for the others. If its body
is registered, they run the body instead, and simulate its collectives. An operator that differentiates inside does so
by `vjp_inside`, for which autograd is in the state in which callers of operators find it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fxrewrite.errors import RuleDefinitionError

_BODIES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


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


def vjp_inside(
    function: Callable[..., Any], *primals: torch.Tensor
) -> tuple[Any, Callable[..., tuple[torch.Tensor, ...]]]:
    """Returns what `torch.func.vjp` does of a function of tensors: its results, and their pull-back to the primals.

    For the body of an operator, wherever that is called: also among hooks for saved tensors, as of `save_on_cpu` and of
    checkpoints, under which torch.func refuses to run. They are for what the caller's graph saves, not for what lives
    inside of one operator. The pull-back takes a gradient of each result; it frees what it reads, so call it once.
    """
    with _with_autograd(), torch.enable_grad():
        leaves = [primal.detach().requires_grad_() for primal in primals]
        results = function(*leaves)
    outputs = [results] if isinstance(results, torch.Tensor) else list(results)

    def pull_back(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        depend = [output.requires_grad for output in outputs]
        with _with_autograd():
            return torch.autograd.grad(
                list(compress(outputs, depend)), leaves, list(compress(cotangents, depend)), materialize_grads=True
            )

    return tree_map(torch.Tensor.detach, results), pull_back


@contextmanager
def _with_autograd() -> Generator[None]:
    """Switches autograd on, which is off in the body of an operator, and takes hooks for saved tensors off."""
    with (
        without_saved_tensors_hooks(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
    ):
        yield


@contextmanager
def without_saved_tensors_hooks() -> Generator[None]:
    """Takes the caller's hooks for saved tensors off, which are for what its own computation saves."""
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
