"""Callables that are declared to be placeholders for rules to replace, or to differ between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

from fxrewrite.ops.effects import declare_pure

_PER_RANK: set[Any] = set()
_VIRTUAL: dict[Any, str] = {}
"""Callables, and their keys, with where rules on them are tested."""


def declare_per_rank(target: Callable[..., Any]) -> Callable[..., Any]:
    """Declares that a callable has no effects and returns another value on each rank, so it must not be precomputed."""
    _PER_RANK.add(target)
    return declare_pure(target)


def is_per_rank(target: object) -> bool:
    """Whether the callable returns another value on each rank."""
    return target in _PER_RANK


def declare_virtual(target: Callable[..., Any], *, tested_by: str = "") -> Callable[..., Any]:
    """Declares that a callable is a placeholder without effects, which rules replace before a graph is complete.

    What it computes on one device does not define its meaning, so a rule on it cannot be verified there.

    Args:
        target: the callable. What is returned calls it, and may be in patterns and replacements like a torch function.
        tested_by: "module:name" of a `fxrewrite.verify.TestBed`, which runs graphs where the callable has its meaning.
    """

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = [item for value in given for item in (value if isinstance(value, (list, tuple)) else [value])]
        if has_torch_function(tensors):  # a pattern or a replacement is being written down
            return handle_torch_function(call, tensors, *args, **kwargs)
        return target(*args, **kwargs)

    _VIRTUAL.update(dict.fromkeys((call, f"{target.__module__}.{target.__qualname__}"), tested_by))
    return declare_pure(call)


def tested_by(target: object) -> str:
    """Where rules on a virtual operator are tested, as it was declared; else ""."""
    return _VIRTUAL.get(target, "")


def is_virtual(target: object) -> bool:
    """Whether the callable, or the operator with this key, is such a placeholder."""
    return target in _VIRTUAL
