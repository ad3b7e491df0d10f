"""From global shapes to local ones: after it, every value's `val` is what one rank holds.

A sharded value keeps the shape that it had before as `meta["global_shape"]`; arguments that state a result's shape
(view, reshape, expand) state the local one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import Size, SizeNodes
from fxrewrite.ops import bind, key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.layout import Shard, local_shape
from fxrewrite.spmd.rule import LayoutRules, tensor_of

__all__ = ["LocalizeShapes", "global_shape"]


def global_shape(node: fx.Node) -> Sequence[Size]:
    """The shape of the whole value of which `node` holds a part."""
    return node.meta.get("global_shape") or node.meta["val"].shape


class LocalizeShapes:
    """The step of a plan that makes shapes local, from the layouts that propagation found."""

    def __init__(self, name: str, rules: LayoutRules) -> None:
        self.name = name
        self.rules = rules

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        num_ranks = SpmdContext.required(context, self.name).axis.size
        values = _LocalValues(num_ranks)
        changed = 0
        for node in edit.nodes():
            layouts = node.meta.get("layout")
            if layouts is None:
                continue
            value = node.meta.get("val")
            if isinstance(layouts, tuple) and isinstance(value, (list, tuple)):
                local = [values.of(v, layout) for v, layout in zip(value, layouts, strict=True)]
                edit.set_meta(node, "val", type(value)(local))
            elif isinstance(layouts, Shard):
                changed += self._localize_shape_arg(edit, node, layouts, context.size_nodes(edit), num_ranks)
                whole = tensor_of(node)
                edit.set_meta(node, "global_shape", tuple(whole.shape))
                edit.set_meta(node, "val", values.of(whole, layouts))
        return changed

    def _localize_shape_arg(self, edit: Edit, node: fx.Node, layout: Shard, sizes: SizeNodes, num_ranks: int) -> int:
        rule = self.rules.get(key(node))
        if rule is None or not rule.shape_arg:
            return 0
        args = bind(node)
        first = args.get("dim", 0)  # unflatten states sizes from `dim` of its input on
        if first < 0:
            first += len(global_shape(node.all_input_nodes[0]))
        stated, at = list(args[rule.shape_arg]), layout.dim - first
        if not 0 <= at < len(stated) or stated[at] == -1:
            return 0
        stated[at] = sizes(local_shape(node.meta["val"].shape, layout, num_ranks)[layout.dim])
        position = list(args).index(rule.shape_arg)
        if position < len(node.args):
            edit.set_args(node, (*node.args[:position], stated, *node.args[position + 1 :]))
        else:
            edit.set_args(node, node.args, {**node.kwargs, rule.shape_arg: stated})
        return 1

    def text(self) -> str:
        return "values and stated shapes become local (S -> S/P)"


class _LocalValues:
    """Local fake values, one for all global ones that look alike: most values of a model do, layer by layer."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._made: dict[Any, torch.Tensor] = {}

    def of(self, value: torch.Tensor, layout: object) -> torch.Tensor:
        if not isinstance(layout, Shard):
            return value
        looks = (value.dtype, value.device, layout.dim, *map(_term, (layout.outer, *value.shape, *value.stride())))
        if looks not in self._made:
            size = local_shape(value.shape, layout, self._num_ranks)[layout.dim]
            shape_env = value.fake_mode.shape_env  # pyright: ignore[reportAttributeAccessIssue]
            with shape_env.suppress_guards() if shape_env is not None else nullcontext():
                self._made[looks] = value.detach().narrow(layout.dim, 0, size)
        return self._made[looks]


def _term(size: Size) -> Any:
    return size if isinstance(size, int) else size.node.expr
