"""Attention by all-to-all (Ulysses): each rank has whole sequences of some heads, if the heads divide over the axis.

    attention(q, k, v, enable_gqa=True)  ->  attention(q, repeat_kv(k), repeat_kv(v), enable_gqa=True)

Attention needs whole sequences, but its heads are independent. So propagation moves q, k, v and the result between
sequence and heads. Where the user asks for this strategy, the placement of the result is required: propagation keeps
to it, or refuses. k and v move before they are repeated for grouped queries (`rules.attention.groups`), which is 0.625
of the bytes with 32 / 8 heads. KV heads that do not divide over the axis are repeated to lcm(KV, P) heads, the fewest
with which each rank gets those that its queries read.
The three operands share one coalesced collective (`together`), so a layer has two.
Shapes: k [B, KV, S, D] -> [B, lcm(KV, P), S, D].
Numerics: reassociates; a gradient of k or v is summed over the repeats. Source: DeepSpeed-Ulysses (arXiv 2309.14509,
section 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autosp_rules.attention.strategy import AttentionCall, AttentionStrategy, Choice, needs, serve
from fxrewrite import Match
from fxrewrite.spmd import (
    Axis,
    Price,
    Shard,
    SpmdContext,
    is_same_size,
    redistribution_bytes,
    require_divisible,
    size_hint,
)
from rules.attention.operator import attend_with, attention_rule

aten = torch.ops.aten

# Where scores overflow, kernels make NaN with some numbers of heads, and 0 with others.
repeat_kv_heads = attention_rule(
    "autosp.repeat_kv_heads", needs("autosp.repeat_kv_heads"), domain="moderate", enable_gqa=True
)


@repeat_kv_heads.replacement
def _(match: Match, q: Any, k: Any, v: Any) -> fx.Proxy:
    """attention(q, repeat_kv(k), repeat_kv(v), enable_gqa=True), with as many kv heads as divide over the axis"""
    size = SpmdContext.required(match.context, repeat_kv_heads.id).axis.size
    heads, *kv_heads = (x.node.meta["val"].shape[-3] for x in (q, k, v))
    repeated = [math.lcm(n, size) for n in kv_heads]
    k, v = (aten.repeat_interleave(x, to // n, -3) for x, n, to in zip((k, v), kv_heads, repeated, strict=True))
    enable_gqa = not all(is_same_size(n, heads) for n in repeated)
    return serve(match, attend_with(match, key=k, value=v, enable_gqa=enable_gqa))


def _why_not(call: AttentionCall, axis: Axis) -> str:
    if require_divisible(call.heads, axis.size):
        return ""
    return f"{size_hint(call.heads)} heads do not divide over axis {axis.name} (size {axis.size})"


def _choose(call: AttentionCall, axis: Axis, asked: bool) -> Choice:
    why = f"{size_hint(call.heads)} heads divide over axis {axis.name} (size {axis.size})"
    required = Shard(call.q.dim() - 3) if asked and call.q.dim() > 2 else None  # by the heads
    if require_divisible(call.kv_heads, axis.size) or not call.enable_gqa:
        return Choice("ulysses", why, required=required)
    kv_heads = size_hint(call.kv_heads)
    why += f", {kv_heads} kv heads are sent as {math.lcm(kv_heads, axis.size)}"
    return Choice("ulysses", why, repeat_kv_heads.id, required=required)


def _cost(call: AttentionCall, axis: Axis) -> Price:
    whole = call.qo_bytes + call.kv_bytes(math.lcm(size_hint(call.kv_heads), axis.size))
    sent = redistribution_bytes(whole, Shard(-2), Shard(-3), axis.size)
    return Price(sent, sent, call.flops / axis.size)


ULYSSES = AttentionStrategy("ulysses", _why_not, _choose, _cost, rules=(repeat_kv_heads,))
