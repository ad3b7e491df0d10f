"""Whether a graph is linear in some of its inputs, decided from a table of operators; unknown operators are not linear.

Gradients over a mesh axis are either Partial, so that their sum over the ranks is the gradient, or multiples of it. A
backward that is linear in them accepts either; one that is not (it clips, it takes a sign) needs the gradient itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeAlias

from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite import ops

Linearity: TypeAlias = Literal["zero", "constant", "linear", "other"]
"""A value as a function of the inputs: zero, independent of them, linear in them, or not known to be linear."""

_MOVES = ops.operators("same", "detach", "cast", "reshape", "squeeze", "expand", "permute", "slice", "split")
_SUMS = """
    cumsum diagonal expand_as flip gather index index_select mean movedim neg repeat roll select sum sum_to_size
    swapaxes t tril triu unbind unfold
"""
_JOINTLY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_MOVES, ("self",)),
    **{f"aten::{name}": ("self",) for name in _SUMS.split()},
    **{f"aten::{name}": ("self", "other") for name in ("add", "sub", "rsub", "where")},
    **{f"aten::{name}": ("self", "src") for name in ("scatter_add", "slice_scatter", "select_scatter")},
    **{f"aten::{name}": ("tensors",) for name in ("cat", "stack")},
    "aten::div": ("self",),
    "aten::masked_fill": ("self", "value"),
    "aten::index_add": ("self", "source"),
    "aten::index_put": ("self", "values"),
    "operator.getitem": ("a",),
}
"""Arguments in which an operator is linear jointly, if its other arguments are constant."""
_EACH: dict[str, tuple[str, ...]] = {
    **{name: ops.factors(name) or () for name in ops.operators("product")},
    "aten::mul": ("self", "other"),
    "aten::outer": ("self", "vec2"),
}
"""The arguments in each of which an operator is linear while its others are constant."""


def is_linear(graph: fx.Graph, inputs: Collection[fx.Node]) -> bool:
    """Whether every output of the graph is a linear function of `inputs`, for fixed other inputs.

    The graph must be ATen with fake values; False if linearity is not known.
    """
    facts: dict[fx.Node, Linearity] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            facts[node] = "linear" if node in inputs else "constant"
        elif node.op == "output":
            return all(facts[value] in ("linear", "zero") for value in node.all_input_nodes)
        elif node.users:
            facts[node] = _fact(node, facts)
    return False


def is_linear_in(node: fx.Node, operands: Collection[fx.Node]) -> bool:
    """Whether a call is linear in `operands`, for fixed other operands; False if that is not known."""
    return _fact(node, {n: "linear" if n in operands else "constant" for n in node.all_input_nodes}) == "linear"


def _fact(node: fx.Node, facts: dict[fx.Node, Linearity]) -> Linearity:
    name = ops.key(node)
    filled = ops.filled_with(node)
    if node.op == "get_attr" or name == "aten::sym_size":
        return "constant"
    if filled is not None and not isinstance(filled, fx.Node):
        return "zero" if filled == 0 else "constant"
    if node.op != "call_function" or not ops.is_pure(node):
        return "other"
    found: Linearity = "other"
    if _is_float(node) and (name in _JOINTLY or name in _EACH):
        found = _combined(node, name, facts)
    is_constant = all(facts[operand] in ("constant", "zero") for operand in node.all_input_nodes)
    return "constant" if found == "other" and is_constant else found


def _combined(node: fx.Node, name: str, facts: dict[fx.Node, Linearity]) -> Linearity:
    """What an operator makes of its operands, which the tables have under its name."""
    names = _JOINTLY.get(name) or _EACH[name]
    args = ops.bind(node)
    found = [_of(value, facts) for name in names for value in tree_leaves(args.get(name))]
    others = {facts[used] for name, given in args.items() if name not in names for used in ops.nodes_in(given)}
    if name not in _JOINTLY:
        if "zero" in found and not others:
            return "zero"
        is_product = found.count("linear") == 1 and "other" not in found
        return "linear" if is_product and not others else "other"
    if args.get("rounding_mode") is not None or not others <= {"constant", "zero"}:
        return "other"
    if not set(found) <= {"linear", "zero"}:
        return "other"
    return "linear" if "linear" in found else "zero"


def _of(value: Any, facts: dict[fx.Node, Linearity]) -> Linearity:
    if isinstance(value, fx.Node):
        return facts[value]
    return "zero" if value == 0 else "constant"


def _is_float(node: fx.Node) -> bool:
    """Whether the node returns floating-point or complex tensors; a cast to integers is not linear."""
    return all(map(ops.is_inexact, ops.tensors_of(node)))
