"""What a lowered graph tells of its inputs: how the ranks of each axis hold them.

`LocalizeShapes` writes it on the placeholders, one axis after the other, in `meta["placements"]`: it is a part of the
program, so it outlives the transaction and is copied with the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.spmd.facts import placement_of
from fxrewrite.spmd.placement import AnyPlacement, Axis, Zigzag

ZIGZAG = Fact[Zigzag]("zigzag")
"""Of an input that is placed in chunks: which entries of the caller's value these are, where they are not in order."""
Placements: TypeAlias = "Mapping[str, AnyPlacement | Zigzag]"
"""How the ranks of a mesh hold one value, by axis; of two axes that shard one dimension the first has the outer
chunks. Ranks of an axis that is not named hold it whole."""
_META = "placements"


def input_placements(gm: fx.GraphModule) -> list[Placements]:
    """The placement of every input on every axis that the graph was lowered over, in the order of lowering.

    One entry for each placeholder; it is empty where the graph was not lowered, and for inputs that are not tensors.

        plan.on("tp").apply(gm, context=contexts(mesh))
        input_placements(gm)[0]     {"tp": Shard(0)}
    """
    return [placements_of(node) for node in gm.graph.find_nodes(op="placeholder")]


def placements_of(placeholder: fx.Node) -> Placements:
    """The placement of one input on every axis that its graph was lowered over so far."""
    return placeholder.meta.get(_META, {})


def write_input_placements(edit: Edit, axis: Axis) -> None:
    """Afterwards `input_placements` tells how the ranks of `axis` hold each input, as propagation decided."""
    for node in edit.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            held = ZIGZAG.of(node) or placement_of(node)
            edit.set_meta(node, _META, {**placements_of(node), axis.name: held})
