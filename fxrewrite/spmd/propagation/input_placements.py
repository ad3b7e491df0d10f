"""What a lowered graph tells of its inputs and outputs: how the ranks of each axis hold them.

`LocalizeShapes` writes it on the placeholders and on the output node, one axis after the other, in
`meta["placements"]`: it is a part of the program, so it outlives the transaction and is copied with the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

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


def output_placements(gm: fx.GraphModule) -> list[Placements]:
    """The placement of every output on every axis that the graph was lowered over, in the order of lowering.

    One entry for each leaf of what the graph returns; it is empty for what is not a tensor.
    """
    output = gm.graph.output_node()
    return output.meta.get(_META, [{} for _ in tree_leaves(output.args[0])])


def write_output_placements(edit: Edit, axis: Axis) -> None:
    """Afterwards `output_placements` tells how the ranks of `axis` hold each output."""
    output = edit.graph.output_node()
    leaves = tree_leaves(output.args[0])
    before: list[Placements] = output.meta.get(_META, [{} for _ in leaves])
    held = [_returned(leaf, axis) for leaf in leaves]
    edit.set_meta(output, _META, [{**of_others, **of_axis} for of_others, of_axis in zip(before, held, strict=True)])


def _returned(leaf: object, axis: Axis) -> Placements:
    if not isinstance(leaf, fx.Node) or not isinstance(leaf.meta.get("val"), torch.Tensor):
        return {}
    return {axis.name: placement_of(leaf)}
