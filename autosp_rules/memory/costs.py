"""Costs of a program's nodes: FLOPs, bytes, and what the backward pass reads.

A program for any length has the costs of a long one (`autosp_rules.lengths.planned_size`), because decisions are final.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import fx

from autosp_rules.lengths import PLANNED_LENGTH, planned_size
from fxrewrite import Edit
from fxrewrite.graph import reached, size_hint
from fxrewrite.ops import bind, has_inexact, has_trait, is_maybe_view, is_random, is_view, key, mutated, tensors_of
from fxrewrite.spmd import (
    ATTENTION_BACKWARD,
    COLLECTIVE_KINDS,
    COLLECTIVES,
    FLOPS_PER_BYTE_SENT,
    HALO,
    PRICE,
    Price,
    Size,
    collective_bytes,
    operations,
)
from rules.attention.flops import ATTENTION_KEYS

ATTENTION_PASSES = 1 + ATTENTION_BACKWARD
"""FLOPs of forward and backward in units of the forward."""

_EXCHANGE = "autosp::exchange"
_SAVES_NOTHING = {_EXCHANGE, *map(key, (HALO, *COLLECTIVES.values()))}
_OF_A_NUMBER = {"aten::mul": "other", "aten::div": "other", "aten::repeat_interleave": "repeats"}
"""Operators whose backward reads nothing if this argument is a number."""
_MANY = 1024
"""Ranks assumed for an all-reduce, whose call does not state them; with many, each sends about twice what it holds."""


def set_sends(edit: Edit, node: fx.Node, forward: int, backward: int) -> None:
    """Records what a rank sends inside an operator, in bytes at the traced size, the most of any rank."""
    flops = ATTENTION_PASSES * operations(node) if key(node) in ATTENTION_KEYS else 0.0
    edit.set_meta(node, PRICE, Price(forward, backward, flops))


def sends_of(node: fx.Node) -> Price | None:
    """Returns what an operator sends inside; None for one that does not."""
    return node.meta.get(PRICE)


def bytes_sent(node: fx.Node) -> int:
    """Returns how many bytes a rank sends in the node: a collective, or an operator that sends inside."""
    sends = sends_of(node)
    if sends is not None:
        return round(sends.forward) * bytes_of(node) // bytes_of(node, size_hint)
    kind = COLLECTIVE_KINDS.get(node.target)
    if kind is None:
        return 0
    given, held = bind(node), bytes_of(node.all_input_nodes[0])
    num_ranks = given.get("group_size") or len(given.get("input_split_sizes", ())) or _MANY
    return round(collective_bytes(kind, held, num_ranks))


def is_received(node: fx.Node) -> bool:
    """Whether the node's value came from other ranks."""
    return key(node) == _EXCHANGE or node.target is COLLECTIVES["wait"]


def bytes_of(node: fx.Node, size: Callable[[Size], int] = planned_size) -> int:
    """Returns the bytes of the node's tensors; symbolic sizes are by default those that a program is planned for."""
    return sum(size(t.numel()) * t.element_size() for t in tensors_of(node))


def planned_for(nodes: Iterable[fx.Node]) -> str:
    """Says for which length the costs of the nodes are, if it is not the traced one; else empty."""
    sizes = (value.numel() for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    is_longer = any(planned_size(size) != size_hint(size) for size in sizes)
    return f" (for a length of {PLANNED_LENGTH:,}, as it is a symbol)" if is_longer else ""


def flops_of(node: fx.Node) -> float:
    """Returns the FLOPs of matrix products, convolutions and attention; 0 for cheap operators."""
    return operations(node, planned_size)


def cost_of(node: fx.Node) -> float:
    """Returns the node's FLOPs, plus its communication converted to FLOPs."""
    return flops_of(node) + FLOPS_PER_BYTE_SENT * bytes_sent(node)


def backward_reads(node: fx.Node) -> list[fx.Node]:
    """Returns the values that the node's backward pass reads, or a superset: operands and result if nothing is known.

    Values that an operator makes and saves by itself, such as the statistics of a norm, are not nodes of the graph.
    """
    name = key(node)
    other = _OF_A_NUMBER.get(name)
    if (
        not has_inexact(node)
        or (_shows(node) and not mutated(node))
        or name in _SAVES_NOTHING
        or has_trait(name, "saves_nothing")
        or (other is not None and not isinstance(bind(node)[other], fx.Node))
    ):
        return []
    if has_trait(name, "saves_result"):
        return [node]
    is_known = has_trait(name, "saves_operands") or name == "fxrewrite_rules::tiled_mlp"
    return node.all_input_nodes if is_known else [*node.all_input_nodes, node]


def read_in_backward(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the values that the backward passes of the nodes read, each once."""
    return list(dict.fromkeys(read for node in nodes for read in backward_reads(node)))


def computed_again(reads: Iterable[fx.Node], is_kept: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Returns what backward passes that read these values compute again, when they find what is kept."""
    is_kept = functools.cache(is_kept)
    walk = reached(reads, lambda node: [] if is_kept(node) else node.all_input_nodes)
    return {node for node in walk if not is_kept(node)}


def kept_bytes(node: fx.Node) -> int:
    """Returns the bytes of a value; for attention including the log-sum-exp, at least four bytes per row."""
    if key(node) not in ATTENTION_KEYS or not isinstance(node.meta["val"], torch.Tensor):
        return bytes_of(node)
    out = node.meta["val"]
    return bytes_of(node) + planned_size(out.numel()) // planned_size(out.shape[-1]) * max(4, out.element_size())


def bases_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns for each of a graph's nodes, in its order, the node that made the memory of which it is a view."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        shown = node.all_input_nodes[0] if node.all_input_nodes and _shows(node) else node
        found[node] = found.get(shown, shown)
    return found


def _shows(node: fx.Node) -> bool:
    """Whether the node shows the memory of its first operand, or a copy where that is not possible."""
    is_operand = has_trait(node, "same", "cast", "reshape") or key(node) == "aten::dropout"  # in evaluation
    return is_view(node) and not is_random(node) and (is_operand or not is_maybe_view(node))
