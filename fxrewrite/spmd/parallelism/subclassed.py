"""Classes of modules that are made at run time, with names and instances as those of the class below have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def subclassed(
    make: Callable[..., type[nn.Module]], cls: type[nn.Module], given: tuple[Any, ...], members: Mapping[str, Any]
) -> type[nn.Module]:
    """A class under the name of `cls` with these members, whose instances can be copied and pickled.

    Args:
        make: the caller, a function of a module that gives the same class for the same `cls` and `given`.
        cls: the class below.
        given: can be pickled.
        members: attributes of the class.
    """

    def reduced(module: nn.Module, protocol: Any) -> Any:
        return _unpickled, (make, cls, given), module.__getstate__()

    made = type(cls.__name__, (cls,), {**members, "__reduce_ex__": reduced})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def _unpickled(make: Callable[..., type[nn.Module]], cls: type[nn.Module], given: tuple[Any, ...]) -> nn.Module:
    """A module of the class that is made so, without state."""
    made = make(cls, *given)
    return made.__new__(made)
