"""What a node of a program costs: floating-point operations, bytes, and what its backward pass reads.

A program for any length costs what it does at a long one (`fxrewrite.graph.planned_size`): what is decided stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fxrewrite.graph import PLANNED_LENGTH, planned_size, product, size_hint
from fxrewrite.ops import bind, is_view, key
from fxrewrite.spmd import COLLECTIVES

__all__ = [
    "ATTENTION",
    "backward_reads",
    "base_of",
    "bytes_of",
    "computed_again",
    "cost_of",
    "flops_of",
    "is_received",
    "is_sent",
    "kept_bytes",
    "planned_for",
    "read_in_backward",
]

ATTENTION = frozenset(
    {
        "aten::scaled_dot_product_attention",
        "fxrewrite_rules::aten_scaled_dot_product_attention_by_rank",
        "autosp::ring_attention",
        "fxrewrite_rules::attention_by_rows",
        "higher_order::flex_attention",
    }
)
"""Operators that are attention, by their keys: `op(q, k, v, ...)` with q [..., L, D] and k, v [..., S, D]."""

FLOPS_PER_BYTE_SENT = 2000.0
"""How many operations take as long as sending a byte: half of 1e15 a second by 250 GB a second, an H100 on NVLink."""

_PRODUCTS = {
    "aten::linear": "input",
    "aten::matmul": "self",
    "aten::mm": "self",
    "aten::bmm": "self",
    "aten::addmm": "mat1",
    "aten::baddbmm": "batch1",
    "aten::_grouped_mm": "self",
    "aten::grouped_mm": "self",
}
"""Products of matrices, and the operand whose last dimension is contracted."""

_READS_NOTHING = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "add_", "sub", "rsub", "neg", "to", "_to_copy", "clone", "contiguous", "cat", "stack", "sum", "mean"),
        *("reshape", "pad", "constant_pad_nd", "expand", "repeat", "repeat_interleave", "roll", "flip", "dropout"),
        *("copy", "ones_like", "zeros_like", "ones", "zeros", "arange", "full", "eq", "ne", "lt", "le", "gt", "ge"),
    )
)
_READS_RESULT = frozenset(
    f"aten::{name}"
    for name in ("softmax", "_softmax", "exp", "tanh", "sigmoid", "relu", "sqrt", "rsqrt", "log_softmax")
)
_COLLECTIVES = frozenset(COLLECTIVES.values())
_EXCHANGES = frozenset({"autosp::exchange"})
"""Operators that send and wait in one."""


def is_sent(node: fx.Node) -> bool:
    """Whether the node sends its operands to other ranks."""
    return key(node) in _EXCHANGES or (node.target in _COLLECTIVES and node.target is not COLLECTIVES["wait"])


def is_received(node: fx.Node) -> bool:
    """Whether the node's value has come from other ranks."""
    return key(node) in _EXCHANGES or node.target is COLLECTIVES["wait"]


def bytes_of(node: fx.Node) -> int:
    """Bytes of the node's tensors; of a symbolic size those that a program is planned for."""
    value = node.meta.get("val")
    tensors: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    return sum(planned_size(t.numel()) * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def planned_for(nodes: Iterable[fx.Node]) -> str:
    """For which length the costs of the nodes are, where that is not the one at hand; else empty."""
    sizes = (value.numel() for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    is_longer = any(planned_size(size) != size_hint(size) for size in sizes)
    return f" (for a length of {PLANNED_LENGTH:,}, as it is a symbol)" if is_longer else ""


def flops_of(node: fx.Node) -> float:
    """Multiplications and additions of products of matrices, convolutions and attention; 0 for what is cheap."""
    name = key(node)
    if name in ATTENTION:
        return _attention_flops(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0.0
    if name == "fxrewrite_rules::tiled_mlp":
        x, weights = bind(node)["x"].meta["val"], [weight.meta["val"] for weight in bind(node)["weights"]]
        return 2.0 * planned_size(product(x.shape[:-1])) * sum(planned_size(w.numel()) for w in weights)
    if name == "fxrewrite_rules::tiled_cross_entropy":
        x, weight = (operand.meta["val"] for operand in _operands(node, 2))
        return 2.0 * planned_size(x.shape[0]) * planned_size(weight.numel())
    if name in _PRODUCTS:
        operand = bind(node)[_PRODUCTS[name]].meta["val"]
        return 2.0 * planned_size(value.numel()) * planned_size(operand.shape[-1])
    if name.startswith("aten::conv"):
        weight = bind(node)["weight"].meta["val"]
        return 2.0 * planned_size(value.numel()) * planned_size(product(weight.shape[1:]))
    return 0.0


def cost_of(node: fx.Node) -> float:
    """Operations of the node, with what it sends counted as the operations that take as long."""
    return flops_of(node) + (FLOPS_PER_BYTE_SENT * bytes_of(node) if is_sent(node) else 0.0)


def backward_reads(node: fx.Node) -> list[fx.Node]:
    """The values that the node's backward pass reads: never fewer than it does."""
    name = key(node)
    if is_view(node) or name in _READS_NOTHING or node.target in _COLLECTIVES or name in _EXCHANGES:
        return []
    if name in _READS_RESULT:
        return [node]
    scales = name in ("aten::mul", "aten::div") and len(node.all_input_nodes) == 1 and None not in node.args[1:2]
    return [] if scales and not isinstance(node.args[1], fx.Node) else node.all_input_nodes


def read_in_backward(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What the backward passes of the nodes read: the nodes that made the memory of it."""
    return {base_of(read) for node in nodes for read in backward_reads(node)}


def computed_again(nodes: Iterable[fx.Node], is_kept: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What the backward passes of the nodes compute again, when they find what is kept."""
    found = set[fx.Node]()
    todo = [read for node in nodes for read in backward_reads(node)]
    while todo:
        node = todo.pop()
        if node not in found and not is_kept(node):
            found.add(node)
            todo += node.all_input_nodes
    return found


def kept_bytes(node: fx.Node) -> int:
    """Bytes of a value, of attention with the log-sum-exp, a number of at least four bytes for each of its rows."""
    if key(node) not in ATTENTION or not isinstance(node.meta["val"], torch.Tensor):
        return bytes_of(node)
    out = node.meta["val"]
    return bytes_of(node) + planned_size(out.numel()) // planned_size(out.shape[-1]) * max(4, out.element_size())


def base_of(node: fx.Node) -> fx.Node:
    """The node that made the memory which the node shows."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _attention_flops(node: fx.Node) -> float:
    q, k, v = (operand.meta["val"] for operand in _operands(node, 3))
    scores = planned_size(q.numel()) // planned_size(q.shape[-1]) * planned_size(k.shape[-2])
    flops = 2.0 * scores * (planned_size(q.shape[-1]) + planned_size(v.shape[-1]))
    is_causal = any(argument is True for argument in (*node.args, *node.kwargs.values()))
    return flops / 2 if is_causal else flops


def _operands(node: fx.Node, count: int) -> list[fx.Node]:
    """The first operands, which may be one value."""
    return [operand for operand in node.args[:count] if isinstance(operand, fx.Node)]
