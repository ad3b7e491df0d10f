"""Classes of modules that are made at run time, with names and instances as those of the class below have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

__all__ = ["subclassed"]

_MADE: dict[type[nn.Module], tuple[Callable[..., type[nn.Module]], type[nn.Module], Any]] = {}
"""Of each class that was made, what made it: a function of the class below and of one value more."""


def subclassed(
    make: Callable[[type[nn.Module], Any], type[nn.Module]],
    cls: type[nn.Module],
    given: Any,
    members: Mapping[str, Any],
) -> type[nn.Module]:
    """A class under the name of `cls` with these members, whose instances can be copied and pickled.

    Args:
        make: the caller, a function of a module that gives the same class for the same `cls` and `given`.
        cls: the class below, which may be made so itself.
        given: can be pickled.
        members: attributes of the class.
    """
    made = type(cls.__name__, (cls,), {**members, "__reduce_ex__": _reduced})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    _MADE[made] = make, cls, given
    return made


def _reduced(module: nn.Module, protocol: Any) -> Any:
    cls, steps = type(module), []
    while cls in _MADE:
        make, cls, given = _MADE[cls]
        steps.append((make, given))
    return _unpickled, (cls, *reversed(steps)), module.__getstate__()


def _unpickled(cls: type[nn.Module], *steps: tuple[Callable[..., type[nn.Module]], Any]) -> nn.Module:
    """A module of the class that these steps make, without state."""
    for make, given in steps:
        cls = make(cls, given)
    return cls.__new__(cls)
