"""Attention by all-to-all (Ulysses): K and V travel before they are repeated.

    redistribute(repeat_kv(k), S(2) -> S(1))  ->  repeat_kv(redistribute(k, S(2) -> S(1)))

Propagation finds that attention needs the sequence whole and its heads do not need each other, and so moves q, k, v
and the result between sequence and heads: four all-to-alls a layer. With grouped queries k and v would travel as often
as they are repeated; this rule moves the all-to-all in front of the repeat: 0.625 of the bytes with 32 / 8 heads.
Refuses kv heads that do not divide over the axis, and an expand and a reshape that are no repeat of heads; k and v then
travel repeated, which is as exact.
Shapes: k [B, KV, S, D] -> [B, KV, R, S, D] -> [B, KV * R, S, D].
Numerics: exact. Source: DeepSpeed-Ulysses (arXiv 2309.14509, section 3).
"""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, op, refuse, where
from fxrewrite.spmd import Axis, Layout, Shard, redistribute, size_proxy

__all__ = ["ATTENTION_RULES", "all_to_all_before_repeat_kv"]

aten = torch.ops.aten


@where.predicate("src", "dst", text="is_sequence_to_heads")
def _is_sequence_to_heads(src: Layout, dst: Layout) -> bool:
    return src == Shard(2) and dst == Shard(1)


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
def _(match: Match, k: fx.Proxy, src: Layout, dst: Layout, axis: Axis) -> fx.Proxy:
    """repeat_kv(redistribute(k, S(2) -> S(1)))"""
    batch, kv_heads, length, head_dim = match["k"].meta["val"].shape
    heads = match.root.meta["val"].shape[1]
    if kv_heads % axis.size:
        refuse(
            f"{kv_heads} kv heads do not divide over axis {axis.name} (size {axis.size})",
            hint="k and v travel after they are repeated",
            kv_heads=kv_heads,
            size=axis.size,
        )
    if heads % kv_heads:
        refuse(f"{heads} heads are no multiple of {kv_heads} kv heads", hint="k and v travel after they are repeated")
    repeats = heads // kv_heads
    moved = match.call(redistribute, k, src, dst, axis)
    one = aten.unsqueeze(moved, 2)
    many = aten.expand(one, [size_proxy(match, n) for n in (batch, kv_heads, repeats, length, head_dim)])
    # with one kv head a rank the reshape would be a view without a stride over heads, which inductor saves for the
    # backward in a layout of its own choice and with the strides of the length at hand
    copied = aten.contiguous(many)
    whole = aten.reshape(copied, [size_proxy(match, n) for n in (batch, heads, length, head_dim)])
    for made in (moved, one, many, copied, whole):
        match.edit.set_meta(made.node, "layout", Shard(1))
    return whole


ATTENTION_RULES = RuleSet("insert_attention_all_to_all", all_to_all_before_repeat_kv)
