"""What an operator is: canonical key, argument binding, effects, commutation. The leaf that all others trust."""

from fxrewrite.ops.aten import emit_aten
from fxrewrite.ops.binding import BindingError, Layout, bind, bind_call, layout_of, overload_of
from fxrewrite.ops.effects import (
    declare_pure,
    exchangeable,
    is_barrier,
    is_commutative,
    is_maybe_view,
    is_pure,
    is_random,
    is_view,
    may_be_random,
    may_draw,
    may_have_effects,
    may_write,
    memory_origins,
    mutated,
    mutates,
    sets_mode,
)
from fxrewrite.ops.keys import call_key, key, possible_keys
from fxrewrite.ops.value import MISSING, fake_value, is_parameter, is_scalar, value, value_key

__all__ = [
    "MISSING",
    "BindingError",
    "Layout",
    "bind",
    "bind_call",
    "call_key",
    "declare_pure",
    "emit_aten",
    "exchangeable",
    "fake_value",
    "is_barrier",
    "is_commutative",
    "is_maybe_view",
    "is_parameter",
    "is_pure",
    "is_random",
    "is_scalar",
    "is_view",
    "key",
    "layout_of",
    "may_be_random",
    "may_draw",
    "may_have_effects",
    "may_write",
    "memory_origins",
    "mutated",
    "mutates",
    "overload_of",
    "possible_keys",
    "sets_mode",
    "value",
    "value_key",
]
