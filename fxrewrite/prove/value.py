"""A tensor as a function: the entry at any index, as an expression over entries of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fxrewrite.prove.indices import Expr

At: TypeAlias = Callable[[Sequence[Expr]], Expr]
"""Returns the entry at an index."""


class UnknownError(Exception):
    """Nothing can be said of a value; the message says why."""


class UndefinedError(Exception):
    """A divisor is zero, or what is under a root negative, for every input; the message is the condition that fails."""


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicTensor:
    """A tensor.

    Attributes:
        shape: sizes.
        dtype: of the entries.
        at: the entry at an index.
        name: the text of the call that makes it: equal names are equal values.
    """

    shape: tuple[Expr, ...]
    dtype: torch.dtype
    at: At
    name: str


def tensors_in(value: Any) -> list[SymbolicTensor]:
    """All tensors of an argument, those in lists too."""
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in tensors_in(item)]
    return [value] if isinstance(value, SymbolicTensor) else []


def items_of(value: Any) -> Sequence[Any]:
    """The items of a list; anything else is one item."""
    return value if isinstance(value, (list, tuple)) else (value,)


def is_number(value: Any) -> bool:
    """Whether an argument is a number; a bool is not."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
