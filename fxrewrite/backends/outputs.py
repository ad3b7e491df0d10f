"""Rewriting on behalf of a compiler, which holds a graph to what it promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.outputs import Promise

__all__ = ["Apply", "rewrite"]

R = TypeVar("R")
Apply: TypeAlias = Callable[[fx.GraphModule, Any], R]
"""What rewrites a module in place and says what it did: `plan.apply`."""


def rewrite(apply: Apply[R], gm: fx.GraphModule, context: Any) -> R:
    """`apply(gm, context)`; afterwards `gm`, and every body of a higher-order operator in it, keeps what it promised.

    Raises:
        InvariantError: the number of inputs or outputs is another one; `gm` is not usable any more.
    """
    promises = [(module, Promise(module)) for module in gm.modules() if isinstance(module, fx.GraphModule)]
    report = apply(gm, context)
    for module, promise in promises:
        with Edit(module) as edit:
            promise.keep(edit)
    return report
