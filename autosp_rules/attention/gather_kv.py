"""Attention of sharded queries to gathered k and v, for any number of heads.

    attention(q, k, v, is_causal=True)  ->  attention(q, k, v, arange(L)[:, None] >= arange(S))

Every rank attends from its own rows of q to all keys. Propagation does that by itself if the heads do not divide over
the axis; if this strategy is chosen although they do, the rule inserts the gathers. `is_causal` counts a rank's rows
from 0, so it becomes an explicit mask over global positions, of which a rank computes only its rows, [L / P, S] bools.
A mask that the model has is sliced by rows, or computed per row.
Numerics: reassociates; a kernel that takes a mask may sum in another order.
Source: PyTorch, torch/nn/functional.py (scaled_dot_product_attention says what is_causal means).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autosp_rules.attention.strategy import AttentionCall, AttentionStrategy, Choice, needs, serve
from fxrewrite import Match
from fxrewrite.spmd import (
    Axis,
    Price,
    Replicate,
    Shard,
    SpmdContext,
    redistribute,
    redistribution_bytes,
    require_divisible,
    size_proxy,
)
from rules.attention.operator import attend_with, attention_rule
from rules.masks.kinds import CAUSAL, name_mask

aten = torch.ops.aten

# Where scores overflow, kernels make other entries NaN with a mask than without one.
causal_to_mask = attention_rule(
    "autosp.causal_to_mask", needs("autosp.causal_to_mask"), domain="moderate", attn_mask=None, is_causal=True
)
gather_keys = attention_rule("autosp.gather_keys", needs("autosp.gather_keys"))


@causal_to_mask.replacement
def _(match: Match) -> fx.Proxy:
    """attention(q, k, v, arange(L)[:, None] >= arange(S))"""
    return serve(match, attend_with(match, attn_mask=_causal_mask(match), is_causal=False))


@gather_keys.replacement
def _(match: Match, k: Any, v: Any, mask: Any, is_causal: bool) -> fx.Proxy:
    """attention(q, redistribute(k, R), redistribute(v, R), mask)"""
    axis = SpmdContext.required(match.context, gather_keys.id).axis
    k, v = (match.call(redistribute, x, Replicate(), Replicate(), axis) for x in (k, v))
    mask = _causal_mask(match) if is_causal else mask
    return serve(match, attend_with(match, key=k, value=v, attn_mask=mask, is_causal=False))


def _causal_mask(match: Match) -> fx.Proxy:
    rows, columns = (
        match.call(aten.arange.default, size_proxy(match, x.shape[-2]), device=x.device, pin_memory=False)
        for x in (match["q"].meta["val"], match["k"].meta["val"])
    )
    kept = aten.ge(aten.unsqueeze(rows, -1), columns)
    name_mask(match.edit, kept.node, CAUSAL)
    return kept


def _why_not(call: AttentionCall, axis: Axis) -> str:
    return ""


def _choose(call: AttentionCall, axis: Axis, asked: bool) -> Choice:
    """Propagation gathers where the heads do not divide, or moves to a batch where that is cheaper; where the user asks
    for this strategy, k and v are required replicated by the redistributions that `gather_keys` states."""
    if asked or require_divisible(call.heads, axis.size):
        return Choice("gather_kv", "", gather_keys.id)
    return Choice("gather_kv", "", causal_to_mask.id if call.is_causal else "")


def _cost(call: AttentionCall, axis: Axis) -> Price:
    """Returns the cost; the last rank is busiest, because its rows read the most keys."""
    sent = redistribution_bytes(call.kv_bytes(), Shard(-2), Replicate(), axis.size)
    busiest = (2 - 1 / axis.size) if call.hides_later_keys else 1
    return Price(sent, sent, busiest * call.flops / axis.size)


GATHER_KV = AttentionStrategy("gather_kv", _why_not, _choose, _cost, rules=(causal_to_mask, gather_keys))
