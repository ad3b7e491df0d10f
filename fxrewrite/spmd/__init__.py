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
from fxrewrite.spmd.context import Reduction, SpmdContext, contexts
from fxrewrite.spmd.cotangents import COMPLETE, complete_cotangents
from fxrewrite.spmd.deferred import DeferredGather, deferred_gather
from fxrewrite.spmd.discover import Comparison, Discovery, compare, discover
from fxrewrite.spmd.facts import GLOBAL_SHAPE, PLACEMENT, REQUIRED, global_shape, layout_of
from fxrewrite.spmd.fingerprint import BackgroundComparison, fingerprint, parameter_checksum
from fxrewrite.spmd.gradients import scale_gradients, sum_gradients
from fxrewrite.spmd.group import COLLECTIVES, axis_of, axis_rank, fix_rank, global_ranks
from fxrewrite.spmd.input_placements import Placements, input_placements
from fxrewrite.spmd.layout import (
    AnyPlacement,
    Axis,
    Layout,
    Partial,
    ReduceOp,
    Replicated,
    Shard,
    as_layout,
    is_same_layout,
    local_shape,
    num_entries,
)
from fxrewrite.spmd.lower.bundles import BUNDLE_RULES, bundle
from fxrewrite.spmd.lower.collectives import COLLECTIVE_RULES, moves, redistribution, take_chunk
from fxrewrite.spmd.lower.localize import LocalizeShapes
from fxrewrite.spmd.lower.means import REDUCTIONS
from fxrewrite.spmd.notation import IndexMap, IndexPart, Terms, parse, view_map
from fxrewrite.spmd.place import HELD, Place, inputs, module_input, module_output, outputs, param
from fxrewrite.spmd.price import collective_bytes, redistribution_bytes
from fxrewrite.spmd.products import attention_operations, declare_product
from fxrewrite.spmd.propagate import PropagateLayouts
from fxrewrite.spmd.redistribute import redistribute, without_padding
from fxrewrite.spmd.registered import joined_layouts, registered_layouts
from fxrewrite.spmd.rule import Call, LayoutRule, LayoutRules, Neutral
from fxrewrite.spmd.samples import SampleError, TensorSpec, parse_call
from fxrewrite.spmd.shared_nodes import EntryNodes, entry_nodes, rank_node, size_nodes, size_proxy
from fxrewrite.spmd.table import layout_table, with_table
from fxrewrite.spmd.trial import LayoutTrial, free_dims, try_layout, try_layouts
from fxrewrite.spmd.virtual import declare_virtual

__all__ = [
    "BUNDLE_RULES",
    "COLLECTIVES",
    "COLLECTIVE_RULES",
    "COMPLETE",
    "GLOBAL_SHAPE",
    "HELD",
    "PLACEMENT",
    "REDUCTIONS",
    "REQUIRED",
    "AnyPlacement",
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
    "Place",
    "Placements",
    "PropagateLayouts",
    "ReduceOp",
    "Reduction",
    "Replicated",
    "SampleError",
    "Shard",
    "Size",
    "SizeReader",
    "SpmdContext",
    "TensorSpec",
    "Terms",
    "agree",
    "as_layout",
    "attention_operations",
    "axis_of",
    "axis_rank",
    "bundle",
    "collective_bytes",
    "compare",
    "complete_cotangents",
    "contexts",
    "declare_product",
    "declare_virtual",
    "deferred_gather",
    "discover",
    "divide_exactly",
    "entry_nodes",
    "fingerprint",
    "fix_rank",
    "free_dims",
    "global_ranks",
    "global_shape",
    "input_placements",
    "inputs",
    "is_broadcast",
    "is_divided_by",
    "is_read_from_data",
    "is_same_layout",
    "is_same_size",
    "joined_layouts",
    "layout_of",
    "layout_table",
    "local_shape",
    "module_input",
    "module_output",
    "moves",
    "num_entries",
    "outputs",
    "param",
    "parameter_checksum",
    "parse",
    "parse_call",
    "product",
    "rank_node",
    "redistribute",
    "redistribution",
    "redistribution_bytes",
    "registered_layouts",
    "require_divisible",
    "scale_gradients",
    "size_hint",
    "size_nodes",
    "size_proxy",
    "sum_gradients",
    "take_chunk",
    "try_layout",
    "try_layouts",
    "view_map",
    "with_table",
    "without_padding",
]
