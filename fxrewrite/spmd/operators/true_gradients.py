"""A custom backward that is not linear is given the gradients that one device would give it.

What arrives as a gradient is P times the gradient's chunk where the result is sharded, and a summand of P times the
gradient where every rank has it whole (`fxrewrite.spmd.propagation.cotangents`). Backwards that are linear never
notice. One that is not, since it clips or takes a sign, gets

    sharded    backward(dy / P) * P
    own        the same: where each rank has a batch of its own, the loss is the mean of theirs
    whole      backward(all_reduce(dy) / P)
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite.capture.custom_backward import CustomFunction
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.linear import is_linear
from fxrewrite.spmd.facts import PLACEMENT, placement_of
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.placement import Axis, Replicate, Shard

aten = torch.ops.aten


def give_true_gradients(edit: Edit, function: CustomFunction, axis: Axis, *, own: bool = False) -> bool:
    """Afterwards the backward body is right whatever it computes; False where no gradient had to be changed for it.

    Its nodes carry placements where it runs on chunks, and none where it runs whole. With `own` each rank runs it on
    values of its own: it is right where it computes each row of the batch from that row.
    """
    arrives = [node for index, node in enumerate(function.incoming) if index not in function.non_differentiable]
    incoming = [node for node in arrives if node.users]
    if is_linear(edit.graph, incoming):
        return False
    for gradient in incoming:
        users = list(gradient.users)
        first, given = min(users), gradient  # another axis may have put readers before what the body began with
        if not own and not isinstance(PLACEMENT.of(gradient), Shard):
            sent = edit.call(COLLECTIVES["all_reduce"], (gradient, "sum", axis.group), before=first)
            edit.set_meta(sent, "axis", axis.name)
            given = edit.call(COLLECTIVES["wait"], (sent,), before=first)
        true = _like(edit, edit.call(aten.div.Tensor, (given, axis.size), before=first), gradient)
        edit.replace_uses(gradient, true, users)
    _multiply_outgoing(edit, axis, own=own)
    return bool(incoming)


def _multiply_outgoing(edit: Edit, axis: Axis, *, own: bool) -> None:
    output = edit.graph.output_node()
    made: dict[fx.Node, fx.Node] = {}

    def multiplied(node: fx.Node) -> fx.Node:
        if node not in made:
            is_whole = not own and placement_of(node) == Replicate()
            product = node if is_whole else edit.call(aten.mul.Tensor, (node, axis.size), before=output)
            made[node] = node if is_whole else _like(edit, product, node)
        return made[node]

    edit.set_args(output, map_arg(output.args, multiplied))


def _like(edit: Edit, node: fx.Node, other: fx.Node) -> fx.Node:
    """The node, with the placement of the other one."""
    placement = PLACEMENT.of(other)
    if placement is not None:
        edit.set_fact(node, PLACEMENT, placement)
    return node
