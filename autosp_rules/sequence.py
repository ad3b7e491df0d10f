"""Where sharding starts: the lookup that turns token ids into hidden states.

    embedding(weight, ids)  ->  embedding(weight, redistribute(ids, R -> S(last)))

Matches an embedding whose index is an integer input of the model's call, [B, S]: token ids, segment ids, positions.
Refuses a sequence that does not divide over the axis.
All else is sharded because something sharded asks for it. Rotary tables, learned positions and shifted labels are
computed from whole inputs and sliced, so a label is shifted before it is sliced.
Numerics: exact. Source: AutoSP (arXiv 2604.27089, section 3), which slices ids, labels and positions at the inputs.
"""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite import Literal, Match, RuleSet, refuse, rule, where
from fxrewrite.backends import is_model_state
from fxrewrite.ops import key
from fxrewrite.spmd import Replicated, Shard, SpmdContext, is_same_size, redistribute, require_divisible, size_hint

__all__ = ["SEQUENCE_RULES", "shard_input_ids"]

_VIEWS = {"aten::view", "aten::reshape", "aten::expand", "aten::unsqueeze"}
_SAME_IDS = {*_VIEWS, "aten::to", "aten::contiguous", "aten::clone"}
"""Operators through which an input is still the same ids."""


@where.predicate("ids", text="is_call_input")
def _is_call_input(ids: fx.Node) -> bool:
    shape = ids.meta["val"].shape
    if len(shape) < 2 or is_same_size(shape[-1], 1):
        return False  # one id for a whole sequence: a language, a task
    return (source := _source(ids)).op == "placeholder" and not is_model_state(source)


def _source(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and key(node) in _SAME_IDS:
        node = node.all_input_nodes[0]
    return node


@rule("autosp.shard_input_ids", where=[_is_call_input])
def shard_input_ids(weight: torch.Tensor, ids: torch.Tensor, padding_idx: Literal) -> torch.Tensor:
    """hidden states start sharded on the sequence, the last dimension of the ids"""
    return torch.ops.aten.embedding(weight, ids, padding_idx)


@shard_input_ids.replacement
def _(match: Match, weight: fx.Proxy, ids: fx.Proxy, padding_idx: int) -> fx.Proxy:
    """embedding(weight, redistribute(ids, R -> S(last)))"""
    axis, ids_node = SpmdContext.required(match.context, "this rule").axis, match["ids"]
    last = ids_node.meta["val"].dim() - 1
    length = ids_node.meta["val"].shape[last]
    if not require_divisible(length, axis.size):
        refuse(
            f"sequence length {size_hint(length)} does not divide over axis {axis.name} (size {axis.size})",
            node=_source(ids_node),
            hint=f"pad the batch to a multiple of {axis.size} (labels with -100)",
            length=size_hint(length),
            size=axis.size,
        )
    shard = match.call(redistribute, ids, Replicated(), Shard(last), axis)
    return torch.ops.aten.embedding(weight, shard, padding_idx)


SEQUENCE_RULES = RuleSet("shard_input_ids", shard_input_ids)
