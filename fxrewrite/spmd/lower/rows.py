"""What a rank does for a call that takes entries of a sharded dimension: it takes those that it has.

    slice(x, dim, a, b)      x: the entries stay where they are (`Shard.before`); what was cut off gets no gradient
    gather(x, dim, ids)      masked_fill(gather(x, dim, ids - first), those of other ranks, 0): a summand

Propagation decides that (`Decision.stays`, `Decision.lookup`); `LocalizeShapes` writes it. Numerics: exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite.graph.differentiable import is_differentiable
from fxrewrite.graph.edit import Edit
from fxrewrite.ops import bind, is_tensor
from fxrewrite.spmd.facts import GLOBAL_SHAPE, PLACEMENT, global_shape
from fxrewrite.spmd.layouts.notation import Lookup
from fxrewrite.spmd.layouts.rule import tensor_of
from fxrewrite.spmd.operators.shared_nodes import entry_nodes, size_nodes
from fxrewrite.spmd.placement import Axis, Partial, Shard, num_entries

aten = torch.ops.aten


def keep_section(edit: Edit, node: fx.Node, placement: Shard, axis: Axis, rule: str) -> None:
    """Makes the slice all of its operand's chunk, of which it is a section."""
    value: fx.Node = node.all_input_nodes[0]
    where: dict[str, Any] = {"before": node, "like": node, "rule": rule}
    if is_differentiable(node):
        entries = num_entries(global_shape(node), placement)
        cut_off = entry_nodes(edit, axis).is_padding(entries, placement, tensor_of(value).device)
        ones = [1] * (tensor_of(value).dim() - placement.dim - 1)
        cut_off = edit.call(aten.view.default, (cut_off, [-1, *ones]), **where)
        constant = edit.call(aten.detach.default, (value,), **where)
        kept = edit.call(aten.where.self, (cut_off, constant, value), **where)
    else:
        kept = edit.call(aten.alias.default, (value,), **where)
    edit.set_meta(kept, "val", tensor_of(node))
    edit.set_fact(kept, PLACEMENT, placement)
    edit.set_fact(kept, GLOBAL_SHAPE, tuple(global_shape(node)))
    edit.replace_uses(node, kept)
    edit.erase(node)


def look_up(edit: Edit, node: fx.Node, lookup: Lookup, axis: Axis, rule: str) -> None:
    """Makes the call one of the rank's chunk, with zeros for entries that other ranks have."""
    args, sizes = bind(node), size_nodes(edit)
    value, given = args["self"], args[lookup.ids]
    placement = PLACEMENT.of(value)
    assert isinstance(placement, Shard), "it is looked up where its operand is in chunks"
    size = num_entries(global_shape(value), placement)
    chunk, first = entry_nodes(edit, axis).first(size, placement)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return edit.call(target, args, kwargs, before=node, like=node, rule=rule)

    ids = given if lookup.place is None else given[lookup.place]
    is_number = not (isinstance(ids, fx.Node) and is_tensor(ids))
    if is_number:
        ids = call(aten.full.default, [1], ids, dtype=torch.int64, device=tensor_of(value).device, pin_memory=False)
    if is_number or lookup.place is not None:  # these may count from the end
        ids = call(aten.where.self, call(aten.lt.Scalar, ids, 0), call(aten.add.Tensor, ids, sizes(size)), ids)
    at = call(aten.sub.Tensor, ids, first)
    missing = call(aten.logical_or.default, call(aten.lt.Scalar, at, 0), call(aten.ge.Scalar, at, sizes(chunk)))
    near = call(aten.clamp_min.default, call(aten.clamp_max.default, at, sizes(chunk - 1)), 0)
    for _ in range(lookup.after):
        missing = call(aten.unsqueeze.default, missing, -1)
    if is_number:
        found = call(aten.squeeze.dim, call(aten.index_select.default, value, args["dim"], near), args["dim"])
    else:
        listed = near if lookup.place is None else [*given[: lookup.place], near, *given[lookup.place + 1 :]]
        found = edit.call(
            node.target, *_with_argument(node, args, lookup.ids, listed), before=node, like=node, rule=rule
        )
    found = call(aten.masked_fill.Scalar, found, missing, 0)
    edit.set_meta(found, "val", tensor_of(node))
    edit.set_fact(found, PLACEMENT, Partial())
    edit.replace_uses(node, found)
    edit.erase(node)


def set_argument(edit: Edit, node: fx.Node, args: dict[str, Any], name: str, value: Any) -> None:
    """Gives a call another value for one of its bound arguments."""
    edit.set_args(node, *_with_argument(node, args, name, value))


def _with_argument(
    node: fx.Node, args: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = list(args).index(name)
    if position < len(node.args):
        return (*node.args[:position], value, *node.args[position + 1 :]), dict(node.kwargs)
    return node.args, {**node.kwargs, name: value}
