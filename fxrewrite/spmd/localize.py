"""From global shapes to local ones: after it, every value's `val` is what one rank holds.

A sharded value keeps the shape that it had before as `meta["global_shape"]`; arguments that state a result's shape
(view, reshape, expand) state the local one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import Size, SizeNodes
from fxrewrite.ops import bind, key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.layout import Shard, local_shape
from fxrewrite.spmd.rule import LayoutRules

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
        num_ranks = context.axis.size
        changed = 0
        for node in list(edit.graph.nodes):
            layouts = node.meta.get("layout")
            if layouts is None or node in edit.erased:
                continue
            value = node.meta.get("val")
            if isinstance(layouts, tuple) and isinstance(value, (list, tuple)):
                local = [_local(v, layout, num_ranks) for v, layout in zip(value, layouts, strict=True)]
                edit.set_meta(node, "val", type(value)(local))
            elif isinstance(layouts, Shard):
                changed += self._localize_shape_arg(edit, node, layouts, context.size_nodes(edit), num_ranks)
                edit.set_meta(node, "global_shape", tuple(value.shape))
                edit.set_meta(node, "val", _local(value, layouts, num_ranks))
        return changed

    def _localize_shape_arg(self, edit: Edit, node: fx.Node, layout: Shard, sizes: SizeNodes, num_ranks: int) -> int:
        rule = self.rules.get(key(node))
        if rule is None or not rule.shape_arg:
            return 0
        args = bind(node)
        stated, at = list(args[rule.shape_arg]), layout.dim - args.get("dim", 0)  # unflatten states sizes from `dim` on
        if not 0 <= at < len(stated) or stated[at] == -1:
            return 0
        stated[at] = sizes(local_shape(node.meta["val"].shape, layout, num_ranks)[layout.dim])
        edit.set_args(node, (), {**args, rule.shape_arg: stated})
        return 1

    def text(self) -> str:
        return "values and stated shapes become local (S -> S/P)"


def _local(value: torch.Tensor, layout: object, num_ranks: int) -> torch.Tensor:
    if not isinstance(layout, Shard):
        return value
    quiet = value.fake_mode.shape_env.suppress_guards() if value.fake_mode.shape_env is not None else None  # pyright: ignore
    size = local_shape(value.shape, layout, num_ranks)[layout.dim]
    if quiet is None:
        return value.detach().narrow(layout.dim, 0, size)
    with quiet:
        return value.detach().narrow(layout.dim, 0, size)
