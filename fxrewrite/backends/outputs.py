"""Rewrites on behalf of a compiler, and keeps the graph's promises to its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.outputs import Promise

R = TypeVar("R")
Apply: TypeAlias = Callable[[fx.GraphModule, Any], R]
"""Rewrites a module in place, and returns what it did: `plan.apply`."""


def rewrite(apply: Apply[R], gm: fx.GraphModule, context: Any) -> R:
    """Returns `apply(gm, context)`; afterwards `gm` and all its HOP subgraphs keep the promises about their outputs.

    Raises:
        InvariantError: the number of inputs or outputs changed; `gm` must not be used any more.
    """
    promises = [(module, Promise(module)) for module in gm.modules() if isinstance(module, fx.GraphModule)]
    report = apply(gm, context)
    for module, promise in promises:
        with Edit(module) as edit:
            promise.keep(edit)
    return report
