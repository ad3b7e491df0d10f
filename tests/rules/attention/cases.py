"""Operands, masks and results for tests of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

B, H, S, D = 2, 4, 7, 4
LOW = torch.finfo(torch.float64).min


def kept(window: int = S, first: int = 0) -> Tensor:
    """Rows in front of `first` keep no key."""
    rows, columns = torch.arange(S)[:, None], torch.arange(S)
    return (columns <= rows) & (columns > rows - window) & (columns >= first)


def added(fill: float = LOW, dtype: torch.dtype = torch.float64, **which: int) -> Tensor:
    return torch.where(kept(**which), 0.0, torch.tensor(fill, dtype=dtype))


def results(function: Callable[..., Any], given: list[Tensor]) -> Any:
    """What the function returns, and the gradients of a weighting of it."""
    out = function(*given)
    values = out if isinstance(out, tuple) else (out,)
    weighted: Any = sum((x * torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).sin()).sum() for x in values)
    return out, torch.autograd.grad(weighted, given, allow_unused=True)


def dense_values(gm: fx.GraphModule) -> list[str]:
    """The nodes that hold a value with rows and columns."""
    length = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[2]
    shapes = {node.name: getattr(node.meta.get("val"), "shape", ()) for node in gm.graph.nodes}
    return [name for name, shape in shapes.items() if sum(str(size) == str(length) for size in shape) > 1]
