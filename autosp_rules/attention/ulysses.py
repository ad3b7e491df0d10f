"""Attention by all-to-all (Ulysses): whole sequences of some heads each, where the heads divide over the axis.

    redistribute(repeat_kv(k), S(2) -> S(1))  ->  repeat_kv(redistribute(k, S(2) -> S(1)))
    sdpa(q, k, v, enable_gqa=True)            ->  sdpa(q, repeat_kv(k), repeat_kv(v), enable_gqa=True)

Propagation finds that attention needs the sequence whole and its heads do not need each other, and so moves q, k, v
and the result between sequence and heads. With grouped queries k and v would travel as often as they are repeated;
these rules move the all-to-all in front of the repeat: 0.625 of the bytes with 32 / 8 heads. KV heads that do not
divide over the axis are repeated to lcm(KV, P) heads, the fewest that give each rank those that its queries read.
Refuses kv heads of which that is all heads, and an expand and a reshape that are no repeat of heads; k and v then
travel repeated, which is as exact. What the three operands need goes in one collective (`together`), two a layer.
Shapes: k [B, KV, S, D] -> [B, KV, R, S, D] -> [B, KV * R, S, D].
Numerics: exact. Source: DeepSpeed-Ulysses (arXiv 2309.14509, section 3).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autosp_rules.attention.strategy import AttentionCall, AttentionStrategy, Choice, Cost, divides, needs, serve
from fxrewrite import Literal, Match, Pattern, Rule, cap, op, refuse, where
from fxrewrite.spmd import Axis, Layout, Shard, SpmdContext, is_same_size, redistribute, size_hint, size_proxy
from rules.attention_parts import attention_call

__all__ = ["ULYSSES", "all_to_all_before_repeat_kv", "repeat_kv_heads", "repeated"]

aten = torch.ops.aten


@where.predicate("src", "dst", text="is_sequence_to_heads")
def _is_sequence_to_heads(src: Layout, dst: Layout) -> bool:
    return isinstance(src, Shard) and replace(src, uneven=False) == Shard(2) and dst == Shard(1)


all_to_all_before_repeat_kv = Rule(
    "autosp.all_to_all_before_repeat_kv",
    Pattern(
        (
            op(
                redistribute,
                op("aten::reshape", op("aten::expand", op("aten::unsqueeze", cap("k"), 2), ...), ...),
                cap("src", Literal),
                cap("dst", Literal),
                cap("axis", Literal),
            ),
        ),
        (where.rank("k", 4), where.rank("root", 4), _is_sequence_to_heads),
    ),
    optional=True,
)


@all_to_all_before_repeat_kv.replacement
def _(match: Match, k: fx.Proxy, src: Shard, dst: Shard, axis: Axis) -> fx.Proxy:
    """repeat_kv(redistribute(k, S(2) -> S(1))), repeated before as often as the ranks need"""
    kv_heads, heads = match["k"].meta["val"].shape[1], match.root.meta["val"].shape[1]
    if heads % kv_heads:
        refuse(f"{heads} heads are no multiple of {kv_heads} kv heads", hint="k and v travel after they are repeated")
    sent = math.lcm(kv_heads, axis.size)
    if sent == heads and kv_heads != heads:
        refuse(
            f"{kv_heads} kv heads do not divide over axis {axis.name} (size {axis.size})",
            hint="k and v travel after they are repeated",
            kv_heads=kv_heads,
            size=axis.size,
        )
    first = repeated(match, k, sent, src)
    moved = match.call(redistribute, first, src, dst, axis)
    match.edit.set_meta(moved.node, "layout", dst)
    return repeated(match, moved, heads, dst)


def repeated(match: Match, x: fx.Proxy, heads: int, layout: Shard) -> fx.Proxy:
    """x [B, KV, S, D] with each of its heads repeated, [B, heads, S, D], lying as it does."""
    batch, kv_heads, length, head_dim = x.node.meta["val"].shape
    if kv_heads == heads:
        return x
    one = aten.unsqueeze(x, 2)
    many = aten.expand(one, [size_proxy(match, n) for n in (batch, kv_heads, heads // kv_heads, length, head_dim)])
    # with one kv head a rank the reshape would be a view without a stride over heads, which inductor saves for the
    # backward in a layout of its own choice and with the strides of the length at hand
    copied = aten.contiguous(many)
    whole = aten.reshape(copied, [size_proxy(match, n) for n in (batch, heads, length, head_dim)])
    behind_repeats = replace(layout, dim=layout.dim + 1) if layout.dim > 1 else layout
    for made in (one, many, copied):
        match.edit.set_meta(made.node, "layout", behind_repeats)
    match.edit.set_meta(whole.node, "layout", layout)
    return whole


repeat_kv_heads = Rule(
    "autosp.repeat_kv_heads",
    Pattern((attention_call(enable_gqa=True),), (needs("autosp.repeat_kv_heads"),)),
    numerics="reassociates",
    domain="finite",
)


@repeat_kv_heads.replacement
def _(match: Match, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any) -> fx.Proxy:
    """sdpa(q, repeat_kv(k), repeat_kv(v), enable_gqa=True), with as many kv heads as divide over the axis"""
    size = SpmdContext.required(match.context, repeat_kv_heads.id).axis.size
    heads = match["q"].meta["val"].shape[-3]

    def sent_heads(name: str, x: Any) -> Any:
        *batch, kv_heads, length, head_dim = match[name].meta["val"].shape
        sent = math.lcm(kv_heads, size)
        many = (*batch, kv_heads, sent // kv_heads, length, head_dim)
        expanded = aten.expand(aten.unsqueeze(x, -3), [size_proxy(match, size) for size in many])
        return aten.reshape(expanded, [size_proxy(match, size) for size in (*batch, sent, length, head_dim)])

    k, v = sent_heads("k", k), sent_heads("v", v)
    gqa = not all(is_same_size(x.node.meta["val"].shape[-3], heads) for x in (k, v))
    attend = aten.scaled_dot_product_attention
    return serve(match, attend(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa))


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
    return Choice("ulysses", why, repeat_kv_heads.id)


def _cost(call: AttentionCall, axis: Axis) -> Cost:
    sent = call.qo_bytes + call.kv_bytes(math.lcm(size_hint(call.kv_heads), axis.size))
    sent *= (axis.size - 1) / axis.size**2
    return Cost(sent, sent, call.flops / axis.size)


ULYSSES = AttentionStrategy(
    "ulysses", _why_not, _choose, _cost, before=(repeat_kv_heads,), after=(all_to_all_before_repeat_kv,)
)
