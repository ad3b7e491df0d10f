"""Shared memory: whether a result is a view of an argument, and what a write to it may change."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fxrewrite.ops import keys
from fxrewrite.ops.binding import BindingError, bind
from fxrewrite.ops.called import CALLERS, MAYBE_VIEW, overload_that_runs, schema_effects
from fxrewrite.ops.effects import is_declared_pure, mutated, nodes_in
from fxrewrite.ops.traits import operators
from fxrewrite.ops.value import MISSING, is_scalar, value

_MAYBE_VIEWS = operators("maybe_view")
_STATISTICS = operators("statistics")
_CASTS = ("aten::to", "aten::type_as")
_REPEATING = {f"aten::{name}" for name in ("expand", "expand_as", "broadcast_to", "broadcast_tensors", "unfold")}


def is_view(node: fx.Node) -> bool:
    """True if the result may share memory with an argument: views, `reshape`, `getitem`, dropout in evaluation,
    and operators that write to an argument.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    overload = overload_that_runs(node)
    if overload is None:
        return not is_declared_pure(node.target) and keys.key(node) not in CALLERS
    if keys.key(node) in _STATISTICS:
        return False  # the result is new, although running statistics are written
    return (schema_effects(overload).is_view and not _is_new_dtype(node)) or bool(mutated(node))


def _is_new_dtype(node: fx.Node) -> bool:
    """True for a cast to another dtype, which copies."""
    if keys.key(node) not in _CASTS or not node.all_input_nodes:
        return False
    source, result = value(node.all_input_nodes[0]), value(node)
    are_known = isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)
    return are_known and source.dtype != result.dtype


def viewed(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the argument nodes whose memory the result may share; all but numbers if no schema says which."""
    if not is_view(node):
        return ()
    overload = overload_that_runs(node)
    if overload is None and keys.key(node) == "operator.getitem":
        return nodes_in(node.args[:1])  # an erased node has no arguments until its transaction is committed
    names = None if overload is None else _viewed_arguments(overload)
    if names is not None:
        try:
            bound = bind(node)
        except BindingError:
            names = None
        else:
            written = () if overload is None or overload._schema.is_mutable else mutated(node)  # out=, inplace=True
            found = [n for name in names for n in nodes_in(bound.get(name))]
            return tuple(dict.fromkeys((*found, *written)))
    return tuple(n for n in node.all_input_nodes if not is_scalar(n))


@functools.cache
def _viewed_arguments(overload: torch._ops.OpOverload) -> tuple[str, ...] | None:
    """Names of the arguments that a result aliases by the schema; None if the schema does not say which."""
    schema = overload._schema
    returned = [r.alias_info for r in schema.returns if r.alias_info is not None]
    if torch.Tag.inplace_view in overload.tags:
        return None  # `x.set_(y)` gives x the memory of y
    if not returned:
        return None if schema_effects(overload).is_view else ()
    shown = [r.before_set for r in returned]
    if any("*" in names for names in shown):
        return None

    def is_shown(argument: torch._C.Argument) -> bool:
        mine = argument.alias_info
        return mine is not None and any(not names or not mine.before_set or names & mine.before_set for names in shown)

    return tuple(argument.name for argument in schema.arguments if is_shown(argument))


def memory_origins(*nodes: fx.Node) -> set[fx.Node]:
    """Returns the nodes and everything of which one of them may be a view."""
    found: set[fx.Node] = set()
    stack = [*nodes]
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            stack += viewed(current)
    return found


def is_maybe_view(node: fx.Node) -> bool:
    """True if strides or arguments at run time decide whether the result shares memory, or nothing is known."""
    if not is_view(node) or mutated(node) or keys.key(node) == "operator.getitem":
        return False
    overload = overload_that_runs(node)
    return overload is None or MAYBE_VIEW in overload.tags or keys.key(node) in _MAYBE_VIEWS


def may_overlap_itself(node: fx.Node) -> bool:
    """True if two entries of the result may be one place in memory, as those of `expand` are: a write to one is a
    write to both.
    """
    found = value(node)
    if found is MISSING:
        return any(keys.key(origin) in _REPEATING for origin in memory_origins(node))
    return isinstance(found, torch.Tensor) and found.layout == torch.strided and _overlaps_itself(found)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Judges by strides, and adds no guard; of symbolic strides only 0 is known to repeat an entry."""
    dims: list[tuple[Any, Any]] = [*zip(tensor.stride(), tensor.shape, strict=True)]
    if any(size == 0 for _, size in dims if isinstance(size, int)):
        return False
    repeated = [dim for dim in dims if not (isinstance(dim[1], int) and dim[1] == 1)]
    if any(isinstance(stride, int) and stride == 0 for stride, _ in repeated):
        return True
    if not all(isinstance(number, int) for dim in repeated for number in dim):
        return False
    last = 0
    for stride, size in sorted(repeated):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def memory_written(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that may share memory with what any node writes to."""
    written = memory_origins(*(value for node in graph.nodes for value in mutated(node)))
    if written:
        for node in graph.nodes:
            if not written.isdisjoint(viewed(node)):
                written.add(node)
    return written
