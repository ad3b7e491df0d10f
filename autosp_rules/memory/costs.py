"""What a node of a program costs: floating-point operations, bytes, and what its backward pass reads.

A program for any length costs what it does at a long one (`autosp_rules.lengths.planned_size`): what is decided stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autosp_rules.lengths import PLANNED_LENGTH, planned_size
from fxrewrite import Edit
from fxrewrite.graph import Fact, product, reached, size_hint
from fxrewrite.ops import bind, has_trait, is_maybe_view, is_random, is_view, key, mutated
from fxrewrite.spmd import COLLECTIVES, Size, collective_bytes, operations
from rules.attention.operator import ATTEND
from rules.masks.kinds import kind_of
from rules.random import by_rank

__all__ = [
    "ATTENTION",
    "Sends",
    "attention_flops",
    "backward_reads",
    "base_of",
    "bytes_of",
    "bytes_sent",
    "computed_again",
    "cost_of",
    "flops_of",
    "hides_later_keys",
    "is_received",
    "kept_bytes",
    "planned_for",
    "read_in_backward",
    "sends_of",
    "set_sends",
]

ATTENTION = frozenset(
    {
        "aten::scaled_dot_product_attention",
        key(by_rank(torch.ops.aten.scaled_dot_product_attention.default)),
        key(ATTEND),
        "autosp::ring_attention",
        "fxrewrite_rules::attention_by_rows",
        "higher_order::flex_attention",
    }
)
"""Operators that are attention, by their keys; their first operands are q [..., L, E], k [..., S, E], v [..., S, D]."""

FLOPS_PER_BYTE_SENT = 2000.0
"""How many operations take as long as sending a byte: half of 1e15 a second by 250 GB a second, an H100 on NVLink."""

_EXCHANGES = frozenset({"autosp::exchange"})
"""Operators that send and wait in one."""
_SAVES_NOTHING = _EXCHANGES | set(map(key, COLLECTIVES.values()))
_OF_A_NUMBER = {"aten::mul": "other", "aten::div": "other", "aten::repeat_interleave": "repeats"}
"""Operators that read nothing where this argument is a number."""
_KINDS: dict[Any, Any] = {target: kind for kind, target in COLLECTIVES.items() if kind != "wait"}
_MANY = 1024
"""Ranks of an all-reduce, whose call does not say how many take part: of many, each sends about twice what it has."""


@dataclass(frozen=True, slots=True)
class Sends:
    """What an operator that communicates inside sends: bytes of a rank at the size at hand, the most that any sends."""

    kind: str
    forward: int
    backward: int


_SENDS = Fact[Sends]("sends")


def set_sends(edit: Edit, node: fx.Node, sends: Sends) -> None:
    """Write down what the operator sends, for its costs and the report."""
    edit.set_fact(node, _SENDS, sends)


def sends_of(node: fx.Node) -> Sends | None:
    """What an operator sends inside; None for one that does not."""
    return _SENDS.of(node)


def bytes_sent(node: fx.Node) -> int:
    """Bytes that a rank sends to others in the node, a collective or an operator that sends inside."""
    sends = sends_of(node)
    if sends is not None:
        return sends.forward * bytes_of(node) // bytes_of(node, size_hint)
    kind = _KINDS.get(node.target)
    if kind is None:
        return 0
    given, held = bind(node), bytes_of(node.all_input_nodes[0])
    num_ranks = given.get("group_size") or len(given.get("input_split_sizes", ())) or _MANY
    return round(collective_bytes(kind, held, num_ranks))


def is_received(node: fx.Node) -> bool:
    """Whether the node's value has come from other ranks."""
    return key(node) in _EXCHANGES or node.target is COLLECTIVES["wait"]


def bytes_of(node: fx.Node, size: Callable[[Size], int] = planned_size) -> int:
    """Bytes of the node's tensors; of a symbolic size those that a program is planned for."""
    value = node.meta.get("val")
    tensors: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    return sum(size(t.numel()) * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def planned_for(nodes: Iterable[fx.Node]) -> str:
    """For which length the costs of the nodes are, where that is not the one at hand; else empty."""
    sizes = (value.numel() for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor))
    is_longer = any(planned_size(size) != size_hint(size) for size in sizes)
    return f" (for a length of {PLANNED_LENGTH:,}, as it is a symbol)" if is_longer else ""


def flops_of(node: fx.Node) -> float:
    """Multiplications and additions of products of matrices, convolutions and attention; 0 for what is cheap."""
    name = key(node)
    if name in ATTENTION:
        return attention_flops(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0.0
    if name == "fxrewrite_rules::tiled_mlp":
        x, weights = bind(node)["x"].meta["val"], [weight.meta["val"] for weight in bind(node)["weights"]]
        return 2.0 * planned_size(product(x.shape[:-1])) * sum(planned_size(w.numel()) for w in weights)
    if name == "fxrewrite_rules::tiled_cross_entropy":
        x, weight = (operand.meta["val"] for operand in _operands(node, 2))
        return 2.0 * planned_size(x.shape[0]) * planned_size(weight.numel())
    if name.startswith("aten::conv"):
        weight = bind(node)["weight"].meta["val"]
        return 2.0 * planned_size(value.numel()) * planned_size(product(weight.shape[1:]))
    return operations(node, planned_size)


def cost_of(node: fx.Node) -> float:
    """Operations of the node, with what it sends counted as the operations that take as long."""
    return flops_of(node) + FLOPS_PER_BYTE_SENT * bytes_sent(node)


def attention_flops(node: fx.Node, size: Callable[[Size], int] = planned_size) -> float:
    """Multiplications and additions of attention, forward, without what a causal mask hides.

    Of a call on whole values those of one device; on a rank's, those of that rank, on average over the ranks, with all
    keys that come round a ring.
    """
    given = bind(node)
    q, k, v = (operand.meta["val"] for operand in list(given.values())[:3])
    num_keys = size(k.shape[-2]) * (given.get("num_ranks", 1) // given.get("per_group", 1))
    flops = 2.0 * size(product(q.shape[:-1])) * num_keys * (size(q.shape[-1]) + size(v.shape[-1]))
    return flops / 2 if hides_later_keys(node) else flops


def hides_later_keys(node: fx.Node) -> bool:
    """Whether rows of attention read no key behind them, the first rows the fewest: by `is_causal`, or the mask."""
    given = bind(node)
    mask = given.get("attn_mask", node)  # where it is no operand, the node says what it means
    kind = None if mask is None else kind_of(mask)
    return given.get("is_causal", False) or (kind is not None and kind.hides_later_keys)


def backward_reads(node: fx.Node) -> list[fx.Node]:
    """The values that the node's backward pass reads, never fewer than it does: operands and result, where nothing else
    is known.

    What an operator makes and keeps to itself, such as the statistics of a norm, is no value of the graph.
    """
    name = key(node)
    other = _OF_A_NUMBER.get(name)
    if (
        not _has_gradient(node)
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


def read_in_backward(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What the backward passes of the nodes read: the nodes that made the memory of it."""
    return {base_of(read) for node in nodes for read in backward_reads(node)}


def computed_again(nodes: Iterable[fx.Node], is_kept: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What the backward passes of the nodes compute again, when they find what is kept."""
    reads = (read for node in nodes for read in backward_reads(node))
    walk = reached(reads, lambda node: [] if is_kept(node) else node.all_input_nodes)
    return {node for node in walk if not is_kept(node)}


def kept_bytes(node: fx.Node) -> int:
    """Bytes of a value, of attention with the log-sum-exp, a number of at least four bytes for each of its rows."""
    if key(node) not in ATTENTION or not isinstance(node.meta["val"], torch.Tensor):
        return bytes_of(node)
    out = node.meta["val"]
    return bytes_of(node) + planned_size(out.numel()) // planned_size(out.shape[-1]) * max(4, out.element_size())


def base_of(node: fx.Node) -> fx.Node:
    """The node that made the memory which the node shows."""
    while _shows(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _shows(node: fx.Node) -> bool:
    """Whether the node shows the memory of its first operand, or a copy where that is not possible."""
    is_operand = has_trait(node, "same", "cast", "reshape") or key(node) == "aten::dropout"  # in evaluation
    return is_view(node) and not is_random(node) and (is_operand or not is_maybe_view(node))


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    tensors: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    return any(t.is_floating_point() or t.is_complex() for t in tensors if isinstance(t, torch.Tensor))


def _operands(node: fx.Node, count: int) -> list[fx.Node]:
    """The first operands, which may be one value."""
    return [operand for operand in node.args[:count] if isinstance(operand, fx.Node)]
