"""Heads that the ranks do not divide are refused, where features in shards are viewed as heads.

    view(x, [B, S, H, d])       x [B, S, H * d] sharded on its last dimension over P ranks, and P does not divide H

Without this step propagation gathers what it cannot cut: exact, but every rank then computes whole attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import refuse
from fxrewrite.graph import Edit, module_names
from fxrewrite.ops import has_trait
from fxrewrite.report import Report
from fxrewrite.spmd import LOCAL_SHAPES, PLACEMENTS, Shard, SpmdContext, placement_of, redistribute


class WholeHeads:
    """The step that refuses a view of sharded features as heads that the ranks do not divide."""

    name = "whole_heads"
    needs, precedes = (PLACEMENTS,), (LOCAL_SHAPES,)

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        axis = SpmdContext.required(context, self.name).axis
        for node in edit.nodes():
            if not has_trait(node, "reshape") or not node.all_input_nodes:
                continue
            features = node.all_input_nodes[0]
            if features.target is redistribute and _is_of_propagation(features):
                features = features.all_input_nodes[0]
            value, viewed = features.meta.get("val"), node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not isinstance(viewed, torch.Tensor):
                continue
            heads = _heads(value.shape, viewed.shape)
            if heads is not None and placement_of(features) == Shard(value.dim() - 1) and heads % axis.size:
                module = next(reversed(list(module_names(node))), "the model")
                refuse(
                    f"{module} views {value.shape[-1]} features as {heads} heads, and {axis.size} ranks of axis "
                    f"{axis.name} do not divide {heads} heads",
                    node=node,
                    hint="use a number of ranks that divides the heads of queries, keys and values",
                )
        return 0

    def text(self) -> str:
        return "features in shards are viewed as heads that the ranks divide"


WHOLE_HEADS = WholeHeads()


def _heads(before: Sequence[Any], after: Sequence[Any]) -> int | None:
    """Into how many parts the last dimension is split, if it is."""
    if len(after) == len(before) + 1 and after[-2] == 1 and after[-1] == before[-1]:
        return 1
    size, dim = 1, len(after)
    while dim and isinstance(before[-1], int) and isinstance(after[dim - 1], int) and size < before[-1]:
        dim -= 1
        size *= after[dim]
    is_split = size == before[-1] and dim < len(after) - 1
    return after[dim] if is_split else None


def _is_of_propagation(node: fx.Node) -> bool:
    """Whether propagation made the redistribution, and nobody stated it."""
    return any(str(rule).endswith(".propagate") for rule in node.meta.get("fxrewrite", ()))
