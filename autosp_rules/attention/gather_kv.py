"""Attention with queries where they are, and k and v gathered: for any number of heads.

    sdpa(q, k, v, is_causal=True)  ->  sdpa(q, k, v, arange(L)[:, None] >= arange(S))

Every rank attends from its own rows of q to all keys, which propagation does by itself where the heads do not divide
over the axis; where it is chosen although they do, the gathers are written out. `is_causal` counts a rank's
rows from 0, so the mask that it means is written out: over global positions, of which a rank computes its rows alone,
[L / P, S] bools. A mask that is given is sliced by rows, or computed by rows.
Numerics: reassociates; a kernel that takes a mask may sum in another order.
Source: PyTorch, torch/nn/functional.py (scaled_dot_product_attention says what is_causal means).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autosp_rules.attention.strategy import AttentionCall, AttentionStrategy, Choice, Cost, divides, needs, serve
from fxrewrite import Match, Pattern, Rule
from fxrewrite.spmd import Axis, Replicated, SpmdContext, redistribute, size_proxy
from rules.attention_parts import attend_with_sinks, attention_call, sinks_call
from rules.mask_kinds import name_mask

__all__ = ["GATHER_KV", "causal_to_mask", "gather_keys", "gather_keys_beside_sinks"]

aten = torch.ops.aten

causal_to_mask = Rule(
    "autosp.causal_to_mask",
    Pattern((attention_call(attn_mask=None, is_causal=True),), (needs("autosp.causal_to_mask"),)),
    numerics="reassociates",
    domain="finite",
)
gather_keys = Rule(
    "autosp.gather_keys",
    Pattern((attention_call(),), (needs("autosp.gather_keys"),)),
    numerics="reassociates",
    domain="finite",
)
gather_keys_beside_sinks = Rule(
    "autosp.gather_keys_beside_sinks",
    Pattern((sinks_call(),), (needs("autosp.gather_keys_beside_sinks"),)),
    numerics="reassociates",
    domain="finite",
)


@causal_to_mask.replacement
def _(match: Match, q: fx.Proxy, k: fx.Proxy, v: fx.Proxy, dropout_p: float, scale: Any, enable_gqa: bool) -> fx.Proxy:
    """sdpa(q, k, v, arange(L)[:, None] >= arange(S))"""
    attend = aten.scaled_dot_product_attention
    kept = _causal_mask(match)
    return serve(match, attend(q, k, v, kept, dropout_p, False, scale=scale, enable_gqa=enable_gqa))


@gather_keys.replacement
def _(
    match: Match, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any, enable_gqa: bool
) -> fx.Proxy:
    """sdpa(q, redistribute(k, R), redistribute(v, R), mask)"""
    k, v = _gathered(match, k, v)
    attend = aten.scaled_dot_product_attention
    mask = _causal_mask(match) if is_causal else mask
    return serve(match, attend(q, k, v, mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa))


@gather_keys_beside_sinks.replacement
def _(match: Match, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float) -> fx.Proxy:
    """attend_with_sinks(q, redistribute(k, R), redistribute(v, R), mask, sinks, scale)"""
    k, v = _gathered(match, k, v)
    return serve(match, match.call(attend_with_sinks, q, k, v, mask, sinks, scale))


def _gathered(match: Match, *values: fx.Proxy) -> list[fx.Proxy]:
    axis = SpmdContext.required(match.context, gather_keys.id).axis
    return [match.call(redistribute, x, Replicated(), Replicated(), axis) for x in values]


def _causal_mask(match: Match) -> fx.Proxy:
    rows, columns = (
        match.call(aten.arange.default, size_proxy(match, x.shape[-2]), device=x.device, pin_memory=False)
        for x in (match["q"].meta["val"], match["k"].meta["val"])
    )
    kept = aten.ge(aten.unsqueeze(rows, -1), columns)
    name_mask(match.edit, kept.node, "causal")
    return kept


def _why_not(call: AttentionCall, axis: Axis) -> str:
    return ""


def _choose(call: AttentionCall, axis: Axis, asked: bool) -> Choice:
    """Propagation gathers where the heads do not divide, or moves to a batch where that is cheaper."""
    if asked or divides(call.heads, axis):
        return Choice("gather_kv", "", (gather_keys if call.sinks is None else gather_keys_beside_sinks).id)
    return Choice("gather_kv", "", causal_to_mask.id if call.is_causal else "")


def _cost(call: AttentionCall, axis: Axis) -> Cost:
    """The last rank has the rows that read the most keys."""
    sent = call.kv_bytes() * (axis.size - 1) / axis.size
    busiest = (2 - 1 / axis.size) if call.hides_later_keys else 1
    return Cost(sent, sent, busiest * call.flops / axis.size)


GATHER_KV = AttentionStrategy(
    "gather_kv", _why_not, _choose, _cost, rules=(causal_to_mask, gather_keys, gather_keys_beside_sinks)
)
