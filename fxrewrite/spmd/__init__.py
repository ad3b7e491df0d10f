"""Layouts over a mesh axis: index notation, layout rules, propagation and process groups."""

from fxrewrite.graph.sizes import (
    Size,
    divide_exactly,
    is_broadcast,
    is_same_size,
    product,
    require_divisible,
    size_hint,
)
from fxrewrite.spmd.agree import agree
from fxrewrite.spmd.context import SpmdContext, size_proxy
from fxrewrite.spmd.group import COLLECTIVES, axis_of, axis_rank
from fxrewrite.spmd.layout import Axis, Layout, Partial, Replicated, Shard, is_same_layout, local_shape
from fxrewrite.spmd.localize import LocalizeShapes, global_shape
from fxrewrite.spmd.notation import IndexMap, IndexPart, Terms, parse, view_map
from fxrewrite.spmd.propagate import PropagateLayouts, layout_of, redistribute
from fxrewrite.spmd.rule import Call, LayoutRule, LayoutRules
from fxrewrite.spmd.trial import LayoutTrial, try_layouts

__all__ = [
    "COLLECTIVES",
    "Axis",
    "Call",
    "IndexMap",
    "IndexPart",
    "Layout",
    "LayoutRule",
    "LayoutRules",
    "LayoutTrial",
    "LocalizeShapes",
    "Partial",
    "PropagateLayouts",
    "Replicated",
    "Shard",
    "Size",
    "SpmdContext",
    "Terms",
    "agree",
    "axis_of",
    "axis_rank",
    "divide_exactly",
    "global_shape",
    "is_broadcast",
    "is_same_layout",
    "is_same_size",
    "layout_of",
    "local_shape",
    "parse",
    "product",
    "redistribute",
    "require_divisible",
    "size_hint",
    "size_proxy",
    "try_layouts",
    "view_map",
]
