"""Keys of arguments: when two calls get the same, as far as whoever asks can tell."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import EllipsisType, NoneType
from typing import Any

import torch

_LITERALS = frozenset(
    {bool, int, str, EllipsisType, NoneType, torch.device, torch.dtype, torch.layout, torch.memory_format}
)


def argument_key(argument: Any, of_leaf: Callable[[Any], Hashable]) -> Hashable:
    """Returns a key that is equal for arguments that are nested alike, with equal literals and equal keys of leaves.

    Args:
        argument: a value, or nested lists, tuples, dicts and slices of values.
        of_leaf: the key of what is neither nested nor a literal: nodes, tensors, symbolic sizes, other objects.
    """
    kind = type(argument)
    if kind in _LITERALS:
        return kind, argument
    if kind is float or kind is complex:
        return kind, repr(argument)  # nan equals itself, and -0.0 is not 0.0
    if isinstance(argument, (list, tuple)):
        return kind.__name__, tuple(argument_key(item, of_leaf) for item in argument)
    if isinstance(argument, dict):
        return kind.__name__, tuple((name, argument_key(item, of_leaf)) for name, item in argument.items())
    if isinstance(argument, slice):
        return "slice", argument_key((argument.start, argument.stop, argument.step), of_leaf)
    return of_leaf(argument)


def identity_of(value: Any) -> Hashable:
    """Returns a key of arguments, tensors and symbols by address; layers that repeat the same call compute it once."""
    return argument_key(value, id)
