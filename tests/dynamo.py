"""Dynamo's graph of a call, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxrewrite.graph import size_hint


def caught(
    function: Callable[..., Any],
    *args: Any,
    inside: Callable[[fx.GraphModule], Any] = lambda gm: gm,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, list[Any]]:
    """What `inside` makes, in the backend, of the one graph of a call, and the inputs, with sizes as numbers."""
    found: list[tuple[Any, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        found.append((inside(gm), list(inputs)))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    ((made, inputs),) = found
    return made, [size_hint(v) if isinstance(v, torch.SymInt) else v for v in inputs]
