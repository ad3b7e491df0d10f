"""The operators that say where a value is placed: the identity on whole values, gone when the graph is lowered."""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.spmd.placement import AnyPlacement, Axis, Partial, Placement, Replicate, Shard, as_placement
from fxrewrite.spmd.virtual import declare_virtual


@declare_virtual(lambda args, _: as_placement(args[2]), tested_by="fxrewrite.testing.redistributed:OnRanks")
def redistribute(x: torch.Tensor, src: AnyPlacement, dst: AnyPlacement, axis: Axis) -> torch.Tensor:
    """`x`, placed as `dst` from here on where it was placed as `src`; lowering makes it a slice or a collective."""
    return x


@declare_virtual(lambda args, _: args[1])
def without_padding(x: torch.Tensor, placement: Shard, axis: Axis, fill: float) -> torch.Tensor:
    """`x`, whose padded entries are `fill` from here on; whole values have none."""
    return x


def is_added_once(node: fx.Node) -> bool:
    """Whether the node makes a whole value a summand: one rank adds it, and its gradient is that of the sum."""
    return node.target is redistribute and node.args[1:3] == (Replicate(), Partial())


def convert_placements(edit: Edit) -> None:
    """Afterwards the redistributions of the graph hold placements of `fxrewrite.spmd` in place of torch's."""
    for node in edit.graph.find_nodes(op="call_function", target=redistribute):
        if node not in edit.erased:
            value, src, dst, axis = node.args
            stated: tuple[Placement, Placement] = (as_placement(src), as_placement(dst))
            if stated != (src, dst):
                edit.set_args(node, (value, *stated, axis))
