"""Effects of a call besides its result: what it writes to, whether it is a barrier, whether it may be removed."""

from __future__ import annotations

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
from fxrewrite.ops.draws import is_random, may_draw
from fxrewrite.ops.tables import OPERATORS, parameters_of
from fxrewrite.ops.traits import operators

HOST_WAITS = (torch.Tag.cudagraph_unsafe,)
"""Tags of a custom operator whose host waits for the device, or seeds it: inductor leaves it out of CUDA graphs."""
_PURE: set[Any] = set()
_PURE_MODULES = ("torch.nn.functional.", "torch.functional.", "operator.", "math.", "torch.Tensor.")
_PURE_BUILTINS = frozenset({"builtins.getattr", "builtins.max", "builtins.min", "builtins.len", "builtins.tuple"}) | {
    f"torch.{name}" for name in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum")
}
_WRITES_TO_FIRST = frozenset(
    getattr(operator, f"i{name}")
    for name in ["add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub"]
) | {operator.itruediv, operator.ixor, operator.setitem}
_RENORMALIZING = (F.embedding, F.embedding_bag)
"""Functions of torch that write to their weight if `max_norm` is given."""
_CHECKS = ("assert", "sym_constrain", "record_function", "_sink_tokens")
"""Parts of the names of operators that must not be removed but change nothing."""
_WRITES: ByTarget[bool] = ByTarget()
_STATISTICS = operators("statistics")


def declare_pure(target: Callable[..., Any]) -> Callable[..., Any]:
    """Declares that a Python callable has no effects and returns fresh memory when it is a node target; returns it.

    An undeclared callable is a barrier: no rewrite may match across it.
    """
    _PURE.add(target)
    _WRITES.forget(target)
    return target


def mutates(node: fx.Node) -> bool:
    """True if running the node may change anything besides its own result: memory, or the state of torch."""
    return is_barrier(node) or bool(mutated(node))


def mutated(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the argument nodes that the node writes to; empty for a barrier, whose effects are unknown."""
    if node.op not in ("call_function", "call_method"):
        return ()
    target = node.target
    if node.kwargs.get("out") is not None and may_take_out(target):
        return nodes_in(node.kwargs["out"])
    if not may_write(target):
        return ()
    if target in _WRITES_TO_FIRST or target == "__setitem__":
        return nodes_in(node.args[0])
    written = _written_by_function(node)
    if written is not None:
        return written
    overload = overload_that_runs(node)
    if overload is not None and overload._schema.is_mutable:
        bound = bind(node)
        written = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return tuple(n for name in written if name in bound for n in nodes_in(bound[name]))
    if overload is not None and updates_statistics(node):
        bound = bind(node)
        return nodes_in(bound.get("running_mean")) + nodes_in(bound.get("running_var"))
    name = keys.key(node)
    if (overload is not None or isinstance(target, str)) and name.endswith("_") and not name.endswith("__"):
        return nodes_in(node.args[0] if node.args else next(iter(node.kwargs.values())))  # nothing else says so
    return ()


def _written_by_function(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Returns what a function of torch.nn.functional writes to, if an argument decides that; None for all others."""
    names = _function_parameters(node.target)
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if names and given.get("inplace"):
        return nodes_in(given.get(names[0]))
    if node.target in _RENORMALIZING and given.get("max_norm") is not None:
        return nodes_in(given.get("weight"))
    return None


def _function_parameters(target: Any) -> tuple[str, ...]:
    """Returns the names of the parameters of a function of torch.nn.functional; none for any other target."""
    return tuple(parameters_of(target)) if getattr(target, "__module__", "") == "torch.nn.functional" else ()


def updates_statistics(node: fx.Node) -> bool:
    """True for batch and instance norms that write their running statistics, which they do in training."""
    if keys.key(node) not in _STATISTICS or not node.all_input_nodes:  # what a transaction erased has no arguments
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
    """Whether a subgraph of a higher-order operator writes to more than the buffers that it allocates itself.

    torch.export puts every no_grad region into a subgraph.
    """
    bodies = bodies_of(node)
    return bodies is None or any(_writes_outside(inner) for body in bodies for inner in body.graph.nodes)


def _writes_outside(inner: fx.Node) -> bool:
    return is_barrier(inner) or not all(map(_is_allocated, mutated(inner)))


def _is_allocated(inner: fx.Node) -> bool:
    """Whether the memory of a value was allocated in its graph."""
    if inner.target is operator.getitem:
        return all(map(_is_allocated, nodes_in(inner.args[0])))
    overload = overload_that_runs(inner)
    if overload is None:
        return False
    is_new = not schema_effects(overload).is_view and not mutated(inner)
    return is_new or all(map(_is_allocated, inner.all_input_nodes))


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
    found = _WRITES.get(target)
    return _WRITES.set(target, _possibly_writes(target)) if found is None else found


def _possibly_writes(target: Any) -> bool:
    name = keys.key(target)
    if isinstance(target, torch._ops.OpOverload):
        return schema_effects(target).writes or name in _STATISTICS or target in _side_effectful_functions
    if target in _WRITES_TO_FIRST or target in _RENORMALIZING or "inplace" in _function_parameters(target):
        return True
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None) if name.startswith("aten::") else None
    if packet is not None:
        overloads = (getattr(packet, overload) for overload in packet.overloads())
        return any(may_write(o) for o in overloads if not any(a.is_out for a in o._schema.arguments))
    if target in _PURE or name in _PURE_BUILTINS:
        return False
    return not name.startswith(_PURE_MODULES) or name.endswith("_")


def is_pure(node: fx.Node) -> bool:
    """True if the node may be removed, repeated or moved: no mutation, no randomness, no check that may raise."""
    if node.op in ("placeholder", "output", "call_module") or node.target in _side_effectful_functions:
        return False
    return not mutates(node) and not is_random(node)


def nodes_in(argument: Any) -> tuple[fx.Node, ...]:
    """Returns the nodes in an argument, which may be nested, in order, and one as often as it occurs."""
    found: list[fx.Node] = []
    map_arg(argument, found.append)  # pyright: ignore[reportArgumentType]
    return tuple(found)
