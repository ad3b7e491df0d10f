"""Graphs over the axes of a mesh: placements, layout rules, propagation, lowering, what runs on ranks, prices."""

from fxrewrite.graph.sizes import (
    Size as Size,
    divide_exactly as divide_exactly,
    is_broadcast as is_broadcast,
    is_divided_by as is_divided_by,
    is_read_from_data as is_read_from_data,
    is_same_size as is_same_size,
    product as product,
    require_divisible as require_divisible,
    size_hint as size_hint,
)
from fxrewrite.spmd.context import Reduction as Reduction, SpmdContext as SpmdContext, contexts as contexts
from fxrewrite.spmd.discovery.discover import (
    Comparison as Comparison,
    Discovery as Discovery,
    compare as compare,
    discover as discover,
)
from fxrewrite.spmd.discovery.free_dims import free_dims as free_dims
from fxrewrite.spmd.discovery.samples import (
    SampleError as SampleError,
    TensorSpec as TensorSpec,
    parse_call as parse_call,
)
from fxrewrite.spmd.events import (
    AtBorder as AtBorder,
    Drawn as Drawn,
    Gathered as Gathered,
    OutputSharded as OutputSharded,
    ProductsWhole as ProductsWhole,
    ProgramIsLast as ProgramIsLast,
    ReadOwn as ReadOwn,
    RegionsCompiled as RegionsCompiled,
    Summed as Summed,
    ZerosHeld as ZerosHeld,
    grouped as grouped,
)
from fxrewrite.spmd.facts import (
    GLOBAL_SHAPE as GLOBAL_SHAPE,
    PLACEMENT as PLACEMENT,
    REQUIRED as REQUIRED,
    global_shape as global_shape,
    placement_of as placement_of,
)
from fxrewrite.spmd.group import (
    COLLECTIVE_KINDS as COLLECTIVE_KINDS,
    COLLECTIVES as COLLECTIVES,
    axis_of as axis_of,
    axis_rank as axis_rank,
    fix_rank as fix_rank,
    global_ranks as global_ranks,
    is_of_rank as is_of_rank,
)
from fxrewrite.spmd.layouts.notation import (
    IndexMap as IndexMap,
    IndexPart as IndexPart,
    Lookup as Lookup,
    Section as Section,
    Terms as Terms,
    parse as parse,
    view_map as view_map,
)
from fxrewrite.spmd.layouts.registered import joined_layouts as joined_layouts, registered_layouts as registered_layouts
from fxrewrite.spmd.layouts.rule import (
    Call as Call,
    LayoutRule as LayoutRule,
    LayoutRules as LayoutRules,
    Neutral as Neutral,
)
from fxrewrite.spmd.layouts.table import layout_table as layout_table, with_table as with_table
from fxrewrite.spmd.lower.bundles import BUNDLE_RULES as BUNDLE_RULES, bundle as bundle
from fxrewrite.spmd.lower.collectives import (
    COLLECTIVE_RULES as COLLECTIVE_RULES,
    moves as moves,
    redistribution as redistribution,
    take_chunk as take_chunk,
)
from fxrewrite.spmd.lower.halos import exchange_halo as exchange_halo
from fxrewrite.spmd.lower.localize import LocalizeShapes as LocalizeShapes
from fxrewrite.spmd.lower.means import REDUCTIONS as REDUCTIONS
from fxrewrite.spmd.operators.draws import (
    DRAWS_APART as DRAWS_APART,
    RefuseShardedDraws as RefuseShardedDraws,
    draws_alike as draws_alike,
    draws_on_chunk as draws_on_chunk,
)
from fxrewrite.spmd.operators.halo import HALO as HALO, one_if_equal as one_if_equal
from fxrewrite.spmd.operators.send_rows import SEND_ROWS as SEND_ROWS, read_size as read_size
from fxrewrite.spmd.operators.shared_nodes import (
    entry_nodes as entry_nodes,
    rank_node as rank_node,
    size_nodes as size_nodes,
    size_proxy as size_proxy,
)
from fxrewrite.spmd.operators.traced import traced as traced
from fxrewrite.spmd.parallelism.accumulate import no_sync as no_sync, reduce_gradients as reduce_gradients
from fxrewrite.spmd.parallelism.alternatives import choose_alternatives as choose_alternatives
from fxrewrite.spmd.parallelism.backend import (
    Program as Program,
    SpmdBackend as SpmdBackend,
    lowered as lowered,
    spmd as spmd,
)
from fxrewrite.spmd.parallelism.expect import (
    Fires as Fires,
    Sends as Sends,
    fires as fires,
    sends as sends,
)
from fxrewrite.spmd.parallelism.parallelism import (
    Alternatives as Alternatives,
    Parallelism as Parallelism,
    Parallelisms as Parallelisms,
)
from fxrewrite.spmd.parallelism.parameters import (
    shard_parameters as shard_parameters,
    whole_parameters as whole_parameters,
)
from fxrewrite.spmd.placement import (
    AnyPlacement as AnyPlacement,
    Axis as Axis,
    Partial as Partial,
    Placement as Placement,
    Replicate as Replicate,
    Shard as Shard,
    Zigzag as Zigzag,
    as_placement as as_placement,
    is_same_placement as is_same_placement,
    local_shape as local_shape,
)
from fxrewrite.spmd.price.choice import Chosen as Chosen, choose as choose
from fxrewrite.spmd.price.price import (
    FLOPS_PER_BYTE_SENT as FLOPS_PER_BYTE_SENT,
    PRICE as PRICE,
    Price as Price,
    bytes_held as bytes_held,
    collective_bytes as collective_bytes,
    redistribution_bytes as redistribution_bytes,
)
from fxrewrite.spmd.price.products import (
    ATTENTION_BACKWARD as ATTENTION_BACKWARD,
    declare_convolution as declare_convolution,
    declare_product as declare_product,
    operations as operations,
)
from fxrewrite.spmd.price.report import ProgramReport as ProgramReport, SpmdReport as SpmdReport
from fxrewrite.spmd.price.sent import Collective as Collective, collectives_of as collectives_of
from fxrewrite.spmd.propagation.decompose import DecomposeUnknown as DecomposeUnknown
from fxrewrite.spmd.propagation.input_placements import Placements as Placements, input_placements as input_placements
from fxrewrite.spmd.propagation.place import (
    Place as Place,
    held_as as held_as,
    hold_chunks as hold_chunks,
)
from fxrewrite.spmd.propagation.propagate import PropagatePlacements as PropagatePlacements
from fxrewrite.spmd.propagation.sites import (
    Stored as Stored,
    inputs as inputs,
    module_input as module_input,
    module_output as module_output,
    outputs as outputs,
    param as param,
)
from fxrewrite.spmd.properties import (
    COLLECTIVE_CALLS as COLLECTIVE_CALLS,
    LOCAL_SHAPES as LOCAL_SHAPES,
    PLACEMENTS as PLACEMENTS,
)
from fxrewrite.spmd.redistribute import redistribute as redistribute, without_padding as without_padding
from fxrewrite.spmd.runtime.agree import agree as agree
from fxrewrite.spmd.runtime.borders import Border as Border
from fxrewrite.spmd.runtime.chunked_tensor import (
    ChunkedTensor as ChunkedTensor,
    chunked as chunked,
)
from fxrewrite.spmd.runtime.deferred import (
    Cut as Cut,
    DeferredGather as DeferredGather,
    deferred_gather as deferred_gather,
)
from fxrewrite.spmd.runtime.fingerprint import (
    fingerprint as fingerprint,
    parameter_checksum as parameter_checksum,
)
from fxrewrite.spmd.runtime.gradients import (
    change_gradients as change_gradients,
    hooked_here as hooked_here,
    hooked_on_any_rank as hooked_on_any_rank,
)
from fxrewrite.spmd.runtime.rank_checks import (
    Advice as Advice,
    RankChecks as RankChecks,
    is_due as is_due,
)
from fxrewrite.spmd.virtual import declare_virtual as declare_virtual
