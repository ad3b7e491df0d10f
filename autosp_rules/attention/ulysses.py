"""Attention by all-to-all (Ulysses): whole sequences of some heads each, where the heads divide over the axis.

    sdpa(q, k, v, enable_gqa=True)  ->  sdpa(q, repeat_kv(k), repeat_kv(v), enable_gqa=True)

Propagation finds that attention needs the sequence whole and its heads do not need each other, and so moves q, k, v
and the result between sequence and heads: k and v before they are repeated for grouped queries
(`rules.attention_groups`), 0.625 of the bytes with 32 / 8 heads. KV heads that do not divide over the axis are repeated
to lcm(KV, P) heads, the fewest that give each rank those that its queries read; with sinks beside the keys too.
What the three operands need goes in one collective (`together`), two a layer.
Shapes: k [B, KV, S, D] -> [B, lcm(KV, P), S, D].
Numerics: reassociates; a gradient of k or v is summed over the repeats. Source: DeepSpeed-Ulysses (arXiv 2309.14509,
section 3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autosp_rules.attention.strategy import AttentionCall, AttentionStrategy, Choice, Cost, divides, needs, serve
from fxrewrite import Match, Pattern, Rule
from fxrewrite.spmd import Axis, SpmdContext, is_same_size, size_hint
from rules.attention_parts import attend_with_sinks, attention_call, sinks_call

__all__ = ["ULYSSES", "repeat_kv_heads", "repeat_kv_heads_beside_sinks"]

aten = torch.ops.aten

repeat_kv_heads = Rule(
    "autosp.repeat_kv_heads",
    Pattern((attention_call(enable_gqa=True),), (needs("autosp.repeat_kv_heads"),)),
    numerics="reassociates",
    domain="finite",
)
repeat_kv_heads_beside_sinks = Rule(
    "autosp.repeat_kv_heads_beside_sinks",
    Pattern((sinks_call(),), (needs("autosp.repeat_kv_heads_beside_sinks"),)),
    numerics="reassociates",
    domain="finite",
)


@repeat_kv_heads.replacement
def _(match: Match, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any) -> fx.Proxy:
    """sdpa(q, repeat_kv(k), repeat_kv(v), enable_gqa=True), with as many kv heads as divide over the axis"""
    k, v = _divisible(match, k, v)
    gqa = not all(is_same_size(x.node.meta["val"].shape[-3], match["q"].meta["val"].shape[-3]) for x in (k, v))
    attend = aten.scaled_dot_product_attention
    return serve(match, attend(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa))


@repeat_kv_heads_beside_sinks.replacement
def _(match: Match, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float) -> fx.Proxy:
    """attend_with_sinks(q, repeat_kv(k), repeat_kv(v), ...), with as many kv heads as divide over the axis"""
    return serve(match, match.call(attend_with_sinks, q, *_divisible(match, k, v), mask, sinks, scale))


def _divisible(match: Match, *values: fx.Proxy) -> list[fx.Proxy]:
    size = SpmdContext.required(match.context, repeat_kv_heads.id).axis.size
    kv_heads = [x.node.meta["val"].shape[-3] for x in values]
    return [aten.repeat_interleave(x, math.lcm(n, size) // n, -3) for x, n in zip(values, kv_heads, strict=True)]


def _why_not(call: AttentionCall, axis: Axis) -> str:
    if divides(call.heads, axis):
        return ""
    return f"{size_hint(call.heads)} heads do not divide over axis {axis.name} (size {axis.size})"


def _choose(call: AttentionCall, axis: Axis, asked: bool) -> Choice:
    why = f"{size_hint(call.heads)} heads divide over axis {axis.name} (size {axis.size})"
    if divides(call.kv_heads, axis) or not call.enable_gqa:
        return Choice("ulysses", why)
    kv_heads = size_hint(call.kv_heads)
    why += f", {kv_heads} kv heads are sent as {math.lcm(kv_heads, axis.size)}"
    return Choice("ulysses", why, (repeat_kv_heads if call.sinks is None else repeat_kv_heads_beside_sinks).id)


def _cost(call: AttentionCall, axis: Axis) -> Cost:
    sent = call.qo_bytes + call.kv_bytes(math.lcm(size_hint(call.kv_heads), axis.size))
    sent *= (axis.size - 1) / axis.size**2
    return Cost(sent, sent, call.flops / axis.size)


ULYSSES = AttentionStrategy("ulysses", _why_not, _choose, _cost, rules=(repeat_kv_heads, repeat_kv_heads_beside_sinks))
