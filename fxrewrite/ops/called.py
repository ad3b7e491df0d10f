"""What a call runs: an overload, whose schema says what it does, or the bodies of a higher-order operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fxrewrite.ops import keys
from fxrewrite.ops.binding import BindingError, signature_of
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.traits import operators
from fxrewrite.ops.value import held

FUNCTIONAL_BODIES = frozenset(
    f"higher_order::{name}"
    for name in [
        "associative_scan",
        "autograd_function_apply",
        "cond",
        "custom_function_call",
        "flex_attention",
        "flex_attention_backward",
        "foreach_map",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "tag_activation_checkpoint",
        "while_loop",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    ]
)
"""Higher-order operators that only run their subgraphs, so their effects are those of the subgraphs."""
CALLERS = frozenset(f"higher_order::{name}" for name in ["auto_functionalized", "auto_functionalized_v2", "out_dtype"])
"""Higher-order operators that run the overload in their first argument, and write to copies alone."""
MAYBE_VIEW = torch.Tag.maybe_aliasing_or_mutating
"""The tag of operators whose result is a view for some arguments."""
_MAYBE_VIEWS = operators("maybe_view")
_EFFECTS: ByTarget[SchemaEffects] = ByTarget()


class SchemaEffects(NamedTuple):
    """What schema and tags of an overload say of its calls."""

    writes: bool
    draws: bool
    is_view: bool


def overload_that_runs(node: fx.Node) -> torch._ops.OpOverload | None:
    """The overload that a node runs; None for a Python callable, or if nothing is known."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target
    if "::" not in keys.key(node):
        return None
    try:
        return signature_of(node.target, node.args, node.kwargs).schema.overload
    except BindingError:
        return None  # a higher-order operator, or a call that would fail when run: nothing is known


def schema_effects(overload: torch._ops.OpOverload) -> SchemaEffects:
    """Returns what schema and tags say; cached per overload."""
    found = _EFFECTS.get(overload)
    if found is None:
        schema = overload._schema
        shares = any(r.alias_info is not None for r in schema.returns)  # also an argument that it wrote to and returns
        is_view = shares or MAYBE_VIEW in overload.tags or overload.is_view or keys.key(overload) in _MAYBE_VIEWS
        draws = torch.Tag.nondeterministic_seeded in overload.tags
        found = _EFFECTS.set(overload, SchemaEffects(writes=schema.is_mutable, draws=draws, is_view=is_view))
    return found


def called_overload(args: Sequence[Any]) -> torch._ops.OpOverload | None:
    """The overload that a higher-order operator without a body is given to run; None if it is not given one."""
    first = args[0] if args else None
    return first if isinstance(first, torch._ops.OpOverload) else None


def bodies_of(node: fx.Node) -> list[fx.GraphModule] | None:
    """Returns the subgraphs that a node reads; None for a graph without a module, which has no access to them."""
    attributes = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
    owner = node.graph.owning_module
    found: list[fx.GraphModule] = []
    if owner is None:
        return None if attributes else found
    for attribute in attributes:
        body = held(owner, attribute)
        if isinstance(body, fx.GraphModule):
            found.append(body)
    return found
