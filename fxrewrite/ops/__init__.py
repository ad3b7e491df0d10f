"""Facts about operators: canonical keys, argument binding, effects, commutation. All other packages build on these."""

from fxrewrite.ops.aten import emit_aten as emit_aten, index_steps as index_steps
from fxrewrite.ops.binding import (
    BindingError as BindingError,
    Signature as Signature,
    bind as bind,
    is_settled as is_settled,
    overload_of as overload_of,
    same_number as same_number,
    signature_of as signature_of,
    spelling as spelling,
)
from fxrewrite.ops.called import CALLERS as CALLERS, bodies_of as bodies_of, called_overload as called_overload
from fxrewrite.ops.communicating import (
    bodies_of_communicating as bodies_of_communicating,
    communicates as communicates,
    vjp_inside as vjp_inside,
    without_saved_tensors_hooks as without_saved_tensors_hooks,
)
from fxrewrite.ops.draws import is_random as is_random, may_be_random as may_be_random, may_draw as may_draw
from fxrewrite.ops.effects import (
    HOST_WAITS as HOST_WAITS,
    declare_pure as declare_pure,
    is_barrier as is_barrier,
    is_pure as is_pure,
    may_have_effects as may_have_effects,
    may_take_out as may_take_out,
    may_write as may_write,
    mutated as mutated,
    mutates as mutates,
    nodes_in as nodes_in,
    updates_statistics as updates_statistics,
)
from fxrewrite.ops.keys import (
    call_key as call_key,
    callee as callee,
    is_by_address as is_by_address,
    key as key,
    possible_keys as possible_keys,
)
from fxrewrite.ops.memory import (
    is_maybe_view as is_maybe_view,
    is_view as is_view,
    may_overlap_itself as may_overlap_itself,
    memory_origins as memory_origins,
    memory_written as memory_written,
    viewed as viewed,
)
from fxrewrite.ops.modes import (
    VMAP_CLOSES as VMAP_CLOSES,
    VMAP_OPENS as VMAP_OPENS,
    autocasts_at as autocasts_at,
    modes_at as modes_at,
    modes_now as modes_now,
    says_of_mode as says_of_mode,
    sets_mode as sets_mode,
    switches_gradients as switches_gradients,
    vmap_around as vmap_around,
    without_gradients as without_gradients,
)
from fxrewrite.ops.names import (
    is_imported as is_imported,
    is_of_a_library as is_of_a_library,
    named_operator as named_operator,
    no_operator as no_operator,
    operator_of as operator_of,
    packet_of as packet_of,
)
from fxrewrite.ops.tables import ATTRIBUTES as ATTRIBUTES
from fxrewrite.ops.traits import (
    DIM_ARGUMENTS as DIM_ARGUMENTS,
    Trait as Trait,
    clashing_dtypes as clashing_dtypes,
    exchangeable as exchangeable,
    factors as factors,
    filled_with as filled_with,
    has_trait as has_trait,
    is_commutative as is_commutative,
    operators as operators,
    traits_of as traits_of,
)
from fxrewrite.ops.twins import TWINS as TWINS, Twins as Twins, twins_of as twins_of
from fxrewrite.ops.value import (
    MISSING as MISSING,
    bits_of as bits_of,
    dtype_name as dtype_name,
    fake_value as fake_value,
    has_data as has_data,
    has_inexact as has_inexact,
    held as held,
    is_inexact as is_inexact,
    is_parameter as is_parameter,
    is_scalar as is_scalar,
    is_tensor as is_tensor,
    storages_in as storages_in,
    tensors_in as tensors_in,
    tensors_of as tensors_of,
    value as value,
    value_key as value_key,
)
from fxrewrite.ops.virtual import (
    declare_per_rank as declare_per_rank,
    declare_virtual as declare_virtual,
    is_per_rank as is_per_rank,
    is_virtual as is_virtual,
    tested_by as tested_by,
)
from fxrewrite.ops.wrapped import with_globals as with_globals, wrapped_in as wrapped_in
