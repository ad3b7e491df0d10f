"""Layouts over a mesh axis: index notation, layout rules, propagation and process groups."""

from fxrewrite.graph.sizes import (
    Size,
    SizeReader,
    divide_exactly,
    is_broadcast,
    is_divided_by,
    is_read_from_data,
    is_same_size,
    product,
    require_divisible,
    size_hint,
)
from fxrewrite.spmd.agree import agree
from fxrewrite.spmd.context import SpmdContext, size_proxy
from fxrewrite.spmd.deferred import DeferredGather, deferred_gather
from fxrewrite.spmd.discover import Comparison, Discovery, compare, discover
from fxrewrite.spmd.fingerprint import BackgroundComparison, fingerprint, parameter_checksum
from fxrewrite.spmd.gradients import scale_gradients, sum_gradients
from fxrewrite.spmd.group import COLLECTIVES, axis_of, axis_rank, fix_rank, global_ranks
from fxrewrite.spmd.layout import Axis, Layout, Partial, Replicated, Shard, is_same_layout, local_shape, num_entries
from fxrewrite.spmd.localize import LocalizeShapes, global_shape
from fxrewrite.spmd.notation import IndexMap, IndexPart, Terms, parse, view_map
from fxrewrite.spmd.padding import EntryNodes
from fxrewrite.spmd.propagate import PropagateLayouts, layout_of, redistribute, without_padding
from fxrewrite.spmd.registered import joined_layouts, registered_layouts
from fxrewrite.spmd.rule import Call, LayoutRule, LayoutRules, Neutral
from fxrewrite.spmd.samples import SampleError, TensorSpec, parse_call
from fxrewrite.spmd.table import layout_table, with_table
from fxrewrite.spmd.trial import LayoutTrial, free_dims, try_layout, try_layouts

__all__ = [
    "COLLECTIVES",
    "Axis",
    "BackgroundComparison",
    "Call",
    "Comparison",
    "DeferredGather",
    "Discovery",
    "EntryNodes",
    "IndexMap",
    "IndexPart",
    "Layout",
    "LayoutRule",
    "LayoutRules",
    "LayoutTrial",
    "LocalizeShapes",
    "Neutral",
    "Partial",
    "PropagateLayouts",
    "Replicated",
    "SampleError",
    "Shard",
    "Size",
    "SizeReader",
    "SpmdContext",
    "TensorSpec",
    "Terms",
    "agree",
    "axis_of",
    "axis_rank",
    "compare",
    "deferred_gather",
    "discover",
    "divide_exactly",
    "fingerprint",
    "fix_rank",
    "free_dims",
    "global_ranks",
    "global_shape",
    "is_broadcast",
    "is_divided_by",
    "is_read_from_data",
    "is_same_layout",
    "is_same_size",
    "joined_layouts",
    "layout_of",
    "layout_table",
    "local_shape",
    "num_entries",
    "parameter_checksum",
    "parse",
    "parse_call",
    "product",
    "redistribute",
    "registered_layouts",
    "require_divisible",
    "scale_gradients",
    "size_hint",
    "size_proxy",
    "sum_gradients",
    "try_layout",
    "try_layouts",
    "view_map",
    "with_table",
    "without_padding",
]
