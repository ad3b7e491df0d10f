"""Runs an operator as the operators that torch makes of it before autograd, so that a tracer records these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def run_decomposed(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what the operator returns, of which torch must have a decomposition (`target._can_decompose()`)."""
    with torch._C.DisableTorchFunction():  # a tracer's mode would call the operator itself
        return target.decompose(*args, **kwargs)


class TooManyCallsError(Exception):
    """More operators ran than `at_most` allows."""


class at_most(TorchDispatchMode):  # noqa: N801  # a context manager, named as those of torch
    """Stops what runs more operators of ATen than this.

    Raises:
        TooManyCallsError: at the first call that is too many.
    """

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self._left = num_calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooManyCallsError
        return func(*args, **(kwargs or {}))
