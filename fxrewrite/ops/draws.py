"""Random draws: whether a call of an operator draws from a generator."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fxrewrite.ops import keys, names
from fxrewrite.ops.binding import is_settled, signature_of, spelling
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.called import (
    CALLERS,
    FUNCTIONAL_BODIES,
    bodies_of,
    called_overload,
    overload_that_runs,
    schema_effects,
)

_RANDOM_FUNCTIONS = frozenset(
    f"torch.nn.functional.{name}"
    for name in [
        "alpha_dropout",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "gumbel_softmax",
        "multi_head_attention_forward",
        "rrelu",
    ]
)
"""Python functions of torch without a schema that draw random numbers."""
_SWITCHES = frozenset({"train", "training", "dropout_p", "p", "dropout"})
_SPELLED: dict[tuple[Any, ...], bool] = {}
"""Whether calls draw, by their spelling, of those whose switches are at their defaults."""
_DRAWS: ByTarget[bool] = ByTarget()


def is_random(node: fx.Node) -> bool:
    """True if the node draws from a random number generator. Dropout in evaluation or with p = 0 does not draw, nor
    does a recurrent network without dropout."""
    if node.op not in ("call_function", "call_method") or not may_draw(node.target):
        return False
    spelled = spelling(node.target, node.args, node.kwargs)
    found = _SPELLED.get(spelled)
    if found is not None:
        return found
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        name = keys.key(node)
        return may_be_random(name, called_overload(node.args)) if name in CALLERS else _body_draws(node)
    overload = overload_that_runs(node)
    if overload is None:
        return keys.key(node) in _RANDOM_FUNCTIONS
    if not schema_effects(overload).draws:
        return False
    signature = signature_of(node.target, node.args, node.kwargs)
    found = not _switches_off(signature.bind(node.args, node.kwargs))
    if _SWITCHES.isdisjoint(signature.given) and is_settled(spelled):
        _SPELLED[spelled] = found
    return found


def may_draw(target: Any) -> bool:
    """False if no call of the target draws random numbers; cached per target."""
    found = _DRAWS.get(target)
    if found is None:
        if isinstance(target, torch._ops.OpOverload):
            found = schema_effects(target).draws
        else:
            found = any(map(may_be_random, keys.possible_keys(target)))
        _DRAWS.set(target, found)
    return found


@functools.cache
def may_be_random(operator_key: str, called: torch._ops.OpOverload | None = None) -> bool:
    """True if some call of the operator draws random numbers; `called` is what a higher-order operator runs."""
    if operator_key in CALLERS:
        return called is None or schema_effects(called).draws
    if operator_key in _RANDOM_FUNCTIONS:
        return True
    packet = names.packet_of(operator_key)
    if packet is None:
        return "::" in operator_key  # unknown, because the subgraph of a higher-order operator decides
    return any(schema_effects(getattr(packet, overload)).draws for overload in packet.overloads())


def _body_draws(node: fx.Node) -> bool:
    """Whether a subgraph of a higher-order operator draws random numbers, or that is unknown."""
    bodies = bodies_of(node) if keys.key(node) in FUNCTIONAL_BODIES else None
    if not bodies:
        return True
    calls = (inner for body in bodies for inner in body.graph.nodes if inner.args)  # what a transaction erased has none
    return any(map(is_random, calls))


def _switches_off(bound: dict[str, Any]) -> bool:
    """Whether the arguments, with their defaults, switch the randomness off."""
    if bound.get("train", True) is False or bound.get("training", True) is False:
        return True
    probability = bound.get("dropout_p", bound.get("p") if "train" in bound or "training" in bound else None)
    if "num_layers" in bound:  # recurrent networks draw between layers
        probability = bound["dropout"]
    return isinstance(probability, (int, float)) and probability == 0
