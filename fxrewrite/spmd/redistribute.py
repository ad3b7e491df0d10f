"""The operators that say where a value is placed: the identity on whole values, gone when the graph is lowered."""

from __future__ import annotations

import torch

from fxrewrite.spmd.layout import Axis, Layout, Shard
from fxrewrite.spmd.virtual import declare_virtual

__all__ = ["redistribute", "without_padding"]


@declare_virtual(lambda args, _: args[2])
def redistribute(x: torch.Tensor, src: Layout, dst: Layout, axis: Axis) -> torch.Tensor:
    """`x`, placed as `dst` from here on where it was placed as `src`; lowering makes it a slice or a collective."""
    return x


@declare_virtual(lambda args, _: args[1])
def without_padding(x: torch.Tensor, layout: Shard, axis: Axis, fill: float) -> torch.Tensor:
    """`x`, whose padded entries are `fill` from here on; whole values have none."""
    return x
