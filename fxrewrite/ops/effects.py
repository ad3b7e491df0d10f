"""Effects of a call besides its result: what it writes to, whether it is a barrier, whether it may be removed."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx
from torch.fx.node import _side_effectful_functions, map_arg  # pyright: ignore[reportPrivateUsage]

from fxrewrite.ops import keys
from fxrewrite.ops.binding import bind
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.called import CALLERS, FUNCTIONAL_BODIES, bodies_of, overload_that_runs, schema_effects
from fxrewrite.ops.draws import is_random
from fxrewrite.ops.tables import OPERATORS
from fxrewrite.ops.traits import operators

__all__ = [
    "HOST_WAITS",
    "declare_pure",
    "is_barrier",
    "is_declared_pure",
    "is_pure",
    "may_draw",
    "may_have_effects",
    "may_take_out",
    "may_write",
    "mutated",
    "mutates",
    "nodes_in",
    "updates_statistics",
]

HOST_WAITS = (torch.Tag.cudagraph_unsafe,)
"""Tags of a custom operator whose host waits for the device, or seeds it: inductor leaves it out of CUDA graphs."""
_PURE: set[Any] = set()
_PURE_MODULES = ("torch.nn.functional.", "torch.functional.", "operator.", "math.", "torch.Tensor.")
_PURE_BUILTINS = frozenset({"builtins.getattr", "builtins.max", "builtins.min", "builtins.len", "builtins.tuple"}) | {
    f"torch.{name}" for name in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum")
}
_INPLACE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in ["add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub"]
) | {operator.itruediv, operator.ixor}
_CHECKS = ("assert", "sym_constrain", "record_function", "_sink_tokens")
"""Parts of the names of operators that must not be removed but change nothing."""
_EFFECTS: ByTarget[tuple[bool, bool]] = ByTarget()
_STATISTICS = operators("statistics")


def declare_pure(target: Callable[..., Any]) -> Callable[..., Any]:
    """Declares that a Python callable has no effects and returns fresh memory when it is a node target; returns it.

    An undeclared callable is a barrier: no rewrite may match across it.
    """
    _PURE.add(target)
    _EFFECTS.forget(target)
    return target


def mutates(node: fx.Node) -> bool:
    """True if running the node may change anything besides its own result: memory, or the state of torch."""
    return is_barrier(node) or bool(mutated(node))


def mutated(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the argument nodes that the node writes to; empty for a barrier, whose effects are unknown."""
    if node.op not in ("call_function", "call_method"):
        return ()
    if node.kwargs.get("out") is not None and may_take_out(node.target):
        return nodes_in(node.kwargs["out"])
    if not may_write(node.target):
        return ()
    if keys.key(node).startswith("operator.set") or node.target == "__setitem__":
        return nodes_in(node.args[0])
    if node.target in _INPLACE_OPERATORS:
        return nodes_in(node.args[0])
    written = _written_by_function(node)
    if written is not None:
        return written
    overload = overload_that_runs(node)
    if overload is None:
        inplace = isinstance(node.target, str) and node.target.endswith("_") and not node.target.endswith("__")
        return nodes_in(node.args[0]) if inplace else ()
    if overload._schema.is_mutable:
        bound = bind(node)
        written = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return tuple(n for name in written if name in bound for n in nodes_in(bound[name]))
    if keys.key(node).endswith("_") and not keys.key(node).endswith("__"):  # a wrapper called with inplace=True
        return nodes_in(node.args[0] if node.args else next(iter(node.kwargs.values())))
    if updates_statistics(node):
        bound = bind(node)
        return nodes_in(bound.get("running_mean")) + nodes_in(bound.get("running_var"))
    return ()


_WRITING_FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.batch_norm: ("training", ("running_mean", "running_var")),
    F.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
    F.embedding: ("max_norm", ("weight",)),
    F.embedding_bag: ("max_norm", ("weight",)),
}
"""Functions of torch that write if an argument says so: the name of that argument, and what they write to."""


def _written_by_function(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Returns what a function of torch.nn.functional writes to, if an argument decides that; None for all others."""
    target = node.target
    if isinstance(target, str) or getattr(target, "__module__", "") != "torch.nn.functional":
        return None
    names = _parameters(target)
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if target in _WRITING_FUNCTIONS:
        switch, written = _WRITING_FUNCTIONS[target]
        return tuple(n for name in written for n in nodes_in(given.get(name))) if given.get(switch) else None
    if "inplace" in names and given.get("inplace"):
        return nodes_in(given.get(names[0]))
    return None


def _python_parameters(target: Any) -> tuple[str, ...]:
    return _parameters(target) if getattr(target, "__module__", "") == "torch.nn.functional" else ()


@functools.cache
def _parameters(target: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: its schema says what it writes
        return ()


def updates_statistics(node: fx.Node) -> bool:
    """True for batch and instance norms that write their running statistics, which they do in training."""
    if keys.key(node) not in _STATISTICS:
        return False
    bound = bind(node)
    return bound.get("running_mean") is not None and bool(bound.get("training", bound.get("use_input_stats")))


def is_declared_pure(target: object) -> bool:
    """Whether the callable was declared to have no effects."""
    return target in _PURE


def is_barrier(node: fx.Node) -> bool:
    """True if the node's effects are unknown: unknown callables, changes of torch's state, submodules."""
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if target in _PURE:
        return False
    if target in _side_effectful_functions:
        return not any(part in str(target) for part in _CHECKS) and not keys.key(node).startswith("operator.")
    if target in OPERATORS or isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    name = keys.key(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return name not in CALLERS and (name not in FUNCTIONAL_BODIES or _body_writes(node))
    return "::" not in name and not name.startswith(_PURE_MODULES) and name not in _PURE_BUILTINS


def _body_writes(node: fx.Node) -> bool:
    """Whether a subgraph of a higher-order operator writes; torch.export puts every no_grad region into a subgraph."""
    bodies = bodies_of(node)
    return bodies is None or any(mutates(inner) for body in bodies for inner in body.graph.nodes)


def may_have_effects(target: Any) -> bool:
    """False if no call of the target mutates, draws or is a barrier, except calls with `out=`."""
    return may_write(target) or may_draw(target)


def may_take_out(target: Any) -> bool:
    """False if no call of the target writes to a keyword `out=`, or its schema says so, as overloads' schemas do."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return keys.key(target) not in CALLERS  # there it is an argument of the operator that they run
    return isinstance(target, str) or not (isinstance(target, torch._ops.OpOverload) or target in OPERATORS)


def may_write(target: Any) -> bool:
    """False if no call of the target mutates or is a barrier, except calls with `out=`; cached per target."""
    return (_EFFECTS.get(target) or _EFFECTS.set(target, _possible_effects(target)))[0]


def may_draw(target: Any) -> bool:
    """False if no call of the target draws random numbers; cached per target."""
    return (_EFFECTS.get(target) or _EFFECTS.set(target, _possible_effects(target)))[1]


def _possible_effects(target: Any) -> tuple[bool, bool]:
    """(may write, may draw)"""
    name = keys.key(target)
    if (
        target in _INPLACE_OPERATORS
        or target in _WRITING_FUNCTIONS
        or (not isinstance(target, str) and "inplace" in _python_parameters(target))
    ):
        return True, True
    if isinstance(target, torch._ops.OpOverload):
        said = schema_effects(target)
        writes = said.writes or name in _STATISTICS or target in _side_effectful_functions
        return writes, said.draws
    if not name.startswith("aten::") or not hasattr(torch.ops.aten, name.removeprefix("aten::")):
        if target in _PURE or name in ("operator.getitem", "builtins.getattr") or name.startswith("math."):
            return False, False
        return not name.startswith(_PURE_MODULES) or name == "operator.setitem" or name.endswith("_"), True
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    effects = [_possible_effects(o) for o in overloads if not any(a.is_out for a in o._schema.arguments)]
    wrapper = keys.wrapper_of(target)
    inplace = bool(wrapper and wrapper.inplace)
    return inplace or any(writes for writes, _ in effects), any(draws for _, draws in effects)


def is_pure(node: fx.Node) -> bool:
    """True if the node may be removed, repeated or moved: no mutation, no randomness, no check that may raise."""
    if node.op in ("placeholder", "output", "call_module") or node.target in _side_effectful_functions:
        return False
    return not mutates(node) and not is_random(node)


def nodes_in(argument: Any) -> tuple[fx.Node, ...]:
    """Returns the nodes in an argument, which may be a list."""
    found: list[fx.Node] = []
    map_arg(argument, found.append)  # pyright: ignore[reportArgumentType]
    return tuple(found)
