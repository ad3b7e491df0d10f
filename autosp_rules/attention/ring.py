"""Attention over a ring: every rank keeps its rows of q, and keys are sent around; or over groups that share the heads.

    attention(q, k, v, mask, sinks)  ->  attend_over_ring(q, k, v, leaves, mask, sinks)       before propagation
    attend_over_ring(...)            ->  exchange(ring_attention(exchange(q, k, v, sinks)))   on local shapes
                                     ->  attention_by_rows(...)     where every rank holds the rows

`ring` serves any number of heads and takes k and v before they are repeated. It holds one chunk of k and v where
gather_kv holds all of them, and balances causal work. `ring_ulysses` treats P = R x U ranks as R groups of U:
all-to-all over the heads within a group, a ring over the groups, so that P may exceed the number of heads; U is the
largest divisor of P below P that divides the heads. The mask must be an expression of rows and columns
(`rules.masks.reading`); is_causal becomes the comparison of their positions. If P does not divide the length, the mask
also hides the padding of the last chunks. If groups have an odd number of rows, halves cannot be traded, and the last
group does most of the causal work. Sinks stay with the rows of q; each row includes its sink once, after all keys.
Refuses, in these words: "q has rank 3"; "queries and keys have lengths 16 and 24"; "dropout draws in the scores";
without sinks "the mask is added to the scores"; "5 heads are not a multiple of 2 kv heads"; why a mask cannot be read;
"3 ranks cannot be split into two or more groups of two or more that share 4 heads". Then another strategy is chosen.
Numerics: reassociates; rows that keep no key are 0, as from the operator.
Source: Ring Attention (arXiv 2310.01889), USP (arXiv 2405.07719).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from autosp_rules.attention.exchange import EXCHANGE
from autosp_rules.attention.ring_kernel import RING_ATTENTION
from autosp_rules.attention.strategy import (
    AttentionCall,
    AttentionStrategy,
    Choice,
    needs,
    serve,
)
from autosp_rules.memory.costs import bytes_of, set_sends
from fxrewrite import Literal, Match, Maybe, Pattern, Rule, RuleSet, cap, op
from fxrewrite.ops import fake_value, key
from fxrewrite.spmd import (
    COLLECTIVE_CALLS,
    GLOBAL_SHAPE,
    LOCAL_SHAPES,
    Axis,
    Call,
    IndexMap,
    LayoutRule,
    Price,
    Shard,
    SpmdContext,
    collective_bytes,
    declare_virtual,
    entry_nodes,
    global_shape,
    is_divided_by,
    is_same_size,
    local_shape,
    placement_of,
    rank_node,
    size_hint,
)
from rules.attention.by_rows import ATTENTION_BY_ROWS, attention_by_rows, mask_of
from rules.attention.operator import attention_rule
from rules.masks.expressions import parse_mask
from rules.masks.kinds import kind_of, name_mask
from rules.masks.meanings import keeps_own_keys
from rules.masks.reading import read_mask

aten = torch.ops.aten


@declare_virtual()
def attend_over_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    leaves: list[torch.Tensor],
    mask: str,
    scale: float,
    softcap: float,
    per_group: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention on whole values; sharded on the sequence, it is lowered to a ring over groups of `per_group` ranks."""
    return attention_by_rows(q, k, v, leaves, mask, scale, softcap, sinks, None)[0]


def _rows_are_independent(call: Call) -> IndexMap:
    """b h s d, b g s d, b g s v, whole leaves, b h s 1? -> b h s v"""
    q, k, v, *rest = (call.shape(i) for i in range(len(call.operands)))
    sizes = {"b": q[0], "h": q[1], "s": q[2], "d": q[3], "g": k[1], "v": v[3]}
    of_q, of_k, of_v, result = (tuple((name,) for name in names) for names in ("bhsd", "bgsd", "bgsv", "bhsv"))
    sinks = () if call.args["sinks"] is None else ((("b",), ("h",), ("s",), ()),)
    leaves = (((),) * len(shape) for shape in rest[: len(rest) - len(sinks)])
    operands = (of_q, of_k, of_v, *leaves, *sinks)
    return IndexMap(operands, (result,), sizes, frozenset("bhdgv"), in_one_run=frozenset("s"))


RING_LAYOUTS = (LayoutRule("layout.ring", (key(attend_over_ring),), _rows_are_independent),)


def _to_ring(name: str) -> Rule:
    # Where scores overflow, parts of the keys cannot be joined by the difference of their maxima: inf - inf is NaN.
    made = attention_rule(f"autosp.{name}", needs(f"autosp.{name}"), domain="moderate")

    @made.replacement
    def _(match: Match, q: Any, k: Any, v: Any, sinks: Any, scale: Any, softcap: float) -> fx.Proxy:
        """attend_over_ring(q, k, v, leaves, mask, sinks)"""
        size = SpmdContext.required(match.context, made.id).axis.size
        heads, depth = (match["q"].meta["val"].shape[dim] for dim in (1, 3))
        per_group = 1 if name == "ring_of_ranks" else _per_group(heads, size)
        scale = 1 / math.sqrt(depth) if scale is None else float(scale)
        leaves, text, kind = mask_of(match)
        mask = match["mask"]
        if mask is not None and (dtype := fake_value(mask).dtype) != torch.bool:
            # A number as low as this hides in every row, and -inf says so for parts of the keys too.
            text = f"where(gt({text}, {torch.finfo(dtype).min / 2}), {text}, -inf)"
        attended = match.call(attend_over_ring, q, k, v, leaves, text, scale, float(softcap), per_group, sinks)
        name_mask(match.edit, attended.node, kind)
        return serve(match, attended)

    return made


ring_of_ranks = _to_ring("ring_of_ranks")
ring_in_groups = _to_ring("ring_in_groups")


lower_ring = Rule(
    "autosp.lower_ring",
    Pattern(
        (
            op(
                attend_over_ring,
                *(cap("q"), cap("k"), cap("v"), cap("leaves", "any")),
                *(cap(name, Literal) for name in ("mask", "scale", "softcap", "per_group")),
                cap("sinks", Maybe),
            ),
        ),
    ),
    numerics="reassociates",
)


@lower_ring.replacement
def _(
    match: Match,
    q: Any,
    k: Any,
    v: Any,
    leaves: Any,
    mask: str,
    scale: float,
    softcap: float,
    per_group: int,
    sinks: Any,
) -> Any:
    """exchange(ring_attention(exchange(q, k, v, sinks))), or attention_by_rows of what every rank holds whole"""
    context = SpmdContext.required(match.context, lower_ring.id)
    axis, placement = context.axis, placement_of(match.root)
    if not isinstance(placement, Shard):
        whole = match.call(ATTENTION_BY_ROWS, q, k, v, leaves, mask, scale, softcap, sinks, None)
        name_mask(match.edit, whole.node, kind_of(match.root))
        return match.call(operator.getitem, whole, 0)
    held = local_shape(global_shape(match["q"]), placement, axis.size)[2] * axis.size
    zigzag = axis.size > per_group and bool(mask) and is_divided_by(held, 2 * axis.size // per_group)
    rank = match.proxy(rank_node(match.edit, axis))
    how = (rank, axis.size, per_group, zigzag, axis.group)
    if placement.uneven:
        leaves, mask = _without_padding(match, leaves, mask, placement)
    if per_group > 1:
        kv_heads = match["k"].meta["val"].shape[1]
        k, v = (aten.repeat_interleave(x, math.lcm(kv_heads, per_group) // kv_heads, 1) for x in (k, v))
    is_moved = zigzag or per_group > 1
    if is_moved:
        q, k, v, *moved = _moved(match, [q, k, v] if sinks is None else [q, k, v, sinks], how, back=False)
        sinks = moved[0] if moved else None
    attended = match.call(RING_ATTENTION, q, k, v, leaves, mask, scale, softcap, sinks, *how)
    name_mask(match.edit, attended.node, kind_of(match.root))
    _say(match, attended, *_sends_of_ring(k, v, axis.size // per_group))
    out = match.call(operator.getitem, attended, 0)
    if is_moved:
        (out,) = _moved(match, [out], how, back=True)
    match.edit.set_meta(out.node, "val", match.root.meta["val"])
    match.edit.set_fact(out.node, GLOBAL_SHAPE, tuple(global_shape(match.root)))
    return out


def _without_padding(match: Match, leaves: Any, mask: str, placement: Shard) -> tuple[list[fx.Proxy], str]:
    """Extends the mask to the rows and columns of all chunks; of these, no row keeps padding."""
    device, length = match["q"].meta["val"].device, global_shape(match["q"])[2]
    nodes = entry_nodes(match.edit, SpmdContext.required(match.context, lower_ring.id).axis)
    entries = match.proxy(nodes.of_all_chunks(length, placement, device))

    def padded(leaf: fx.Proxy) -> fx.Proxy:
        shape = leaf.node.meta["val"].shape
        for dim in (-2, -1):
            if len(shape) >= -dim and not is_same_size(shape[dim], 1):
                leaf = aten.index_select(leaf, dim, entries)
        return leaf

    is_real = aten.logical_not(match.proxy(nodes.is_padding_of_all(length, placement, device)))
    last = f"x{len(leaves)}"
    if not mask:
        return [is_real], last
    is_bool = parse_mask(mask).dtype([leaf.dtype for leaf in leaves]) == torch.bool
    kept = f"bitwise_and({mask}, {last})" if is_bool else f"where({last}, {mask}, -inf)"
    return [*map(padded, leaves), is_real], kept


def _moved(match: Match, values: list[Any], how: tuple[Any, ...], *, back: bool) -> list[Any]:
    """Moves the values to their placement in the ring, or back."""
    moved = match.call(EXCHANGE, values, *how, back)
    _, _, per_group, zigzag, _ = how
    held = sum(_bytes(x) for x in values)
    sent = round(collective_bytes("all_to_all", held, per_group) + zigzag * held)
    _say(match, moved, sent, sent)
    return [match.call(operator.getitem, moved, i) for i in range(len(values))]


def _sends_of_ring(k: Any, v: Any, num_groups: int) -> tuple[int, int]:
    """k and v go to all other groups forward, and again in the backward, where their gradients return in float32."""
    chunk, size = _bytes(k) + _bytes(v), k.node.meta["val"].element_size()
    forward = round(collective_bytes("all_gather", chunk, num_groups))
    return forward, forward + num_groups * chunk * max(4, size) // size


def _bytes(x: fx.Proxy) -> int:
    return bytes_of(x.node, size_hint)


def _say(match: Match, sent: fx.Proxy, forward: int, backward: int) -> None:
    axis = SpmdContext.required(match.context, lower_ring.id).axis
    match.edit.set_meta(sent.node, "axis", axis.name)
    set_sends(match.edit, sent.node, forward, backward)


RING_RULES = RuleSet("lower_ring", lower_ring, needs=(LOCAL_SHAPES,), precedes=(COLLECTIVE_CALLS,))


def _why_no_ring(call: AttentionCall) -> str:
    """Says why no kind of ring can serve the call; empty if one can."""
    length, num_keys = call.q.shape[-2], call.k.shape[-2]
    heads, kv_heads = (size_hint(n) for n in (call.heads, call.kv_heads))
    if any(x.dim() != 4 for x in (call.q, call.k, call.v)):
        return f"q has rank {call.q.dim()}"
    if not all(is_same_size(x.shape[0], call.q.shape[0]) for x in (call.k, call.v)):
        return "k or v broadcasts over the batch"
    if not is_same_size(length, num_keys):
        return f"queries and keys have lengths {size_hint(length)} and {size_hint(num_keys)}"
    if heads % kv_heads or not is_same_size(call.v.shape[1], call.kv_heads):
        return f"{heads} heads are not a multiple of {kv_heads} kv heads"
    return f"dropout draws in the scores (p = {call.dropout_p})" if call.dropout_p else _why_no_mask(call)


def _why_no_mask(call: AttentionCall) -> str:
    if call.mask is None:
        return ""
    is_added = call.mask.meta["val"].dtype != torch.bool
    if is_added and call.sinks is None and keeps_own_keys(call.mask) is not True:
        return "the mask is added to the scores, and may hide all keys of a row by a finite number"
    read = read_mask(call.mask)
    return f"the mask cannot be read as an expression of rows and columns: {read}" if isinstance(read, str) else ""


def _per_group(heads: int, num_ranks: int) -> int:
    """Returns the largest number of ranks, fewer than all, that can share the heads; 1 if there is none."""
    return max((u for u in range(1, num_ranks) if num_ranks % u == 0 and heads % u == 0), default=1)


def _halves(call: AttentionCall, axis: Axis, per_group: int) -> str:
    """Returns whether groups trade halves of rows: "none" without a mask, "traded", or "odd" if rows have no halves."""
    if not call.is_causal and call.mask is None:
        return "none"
    return "odd" if _rows(call, axis) * per_group % 2 else "traded"


def _rows(call: AttentionCall, axis: Axis) -> int:
    """Rows per rank, padding included."""
    return -(-size_hint(call.q.shape[2]) // axis.size)


def _cost(call: AttentionCall, axis: Axis, per_group: int) -> Price:
    """Returns the cost: keys of a group go around the ring, q, k, v and the result are exchanged, dk and dv return in
    float32."""
    num_groups, heads = axis.size // per_group, math.lcm(size_hint(call.kv_heads), per_group)
    share, halves = _rows(call, axis) / max(1, size_hint(call.q.shape[2])), _halves(call, axis, per_group)
    qo, chunk = call.qo_bytes * share, call.kv_bytes(heads) * share  # U times the rows, 1 / U of the heads
    to_heads = collective_bytes("all_to_all", qo + chunk, per_group)
    to_halves = qo + chunk if halves == "traded" else 0
    wide = max(4, call.q.element_size()) / call.q.element_size()
    forward = to_heads + to_halves + collective_bytes("all_gather", chunk, num_groups)
    busiest = 2 - 1 / num_groups if halves == "odd" and call.hides_later_keys else 1
    return Price(forward, forward + num_groups * wide * chunk, busiest * call.flops / axis.size)


def _unequal(call: AttentionCall, axis: Axis, per_group: int) -> str:
    if _halves(call, axis, per_group) != "odd":
        return ""
    rows = _rows(call, axis) * per_group
    return f", {rows} rows have no halves to trade, so the last ranks may compute more than the first"


def _strategy(name: str, rule: Rule, *, in_groups: bool) -> AttentionStrategy:
    """Returns the strategy of a ring over all ranks, or over groups of ranks that share the heads."""

    def per_group_of(call: AttentionCall, axis: Axis) -> int:
        return _per_group(size_hint(call.heads), axis.size) if in_groups else 1

    def why_not(call: AttentionCall, axis: Axis) -> str:
        if in_groups and per_group_of(call, axis) == 1:
            shared = f"share {size_hint(call.heads)} heads"
            return f"{axis.size} ranks cannot be split into two or more groups of two or more that {shared}"
        return _why_no_ring(call)

    def choose(call: AttentionCall, axis: Axis, asked: bool) -> Choice:
        per_group = per_group_of(call, axis)
        how = f"{axis.size // per_group} groups of {per_group} ranks" if in_groups else "keys travel"
        sent = round(_cost(call, axis, per_group).forward)
        return Choice(name, f"{how}{_unequal(call, axis, per_group)}", rule.id, sent=sent)

    def cost(call: AttentionCall, axis: Axis) -> Price:
        return _cost(call, axis, per_group_of(call, axis))

    return AttentionStrategy(name, why_not, choose, cost, rules=(rule,))


RING = _strategy("ring", ring_of_ranks, in_groups=False)
RING_ULYSSES = _strategy("ring_ulysses", ring_in_groups, in_groups=True)
