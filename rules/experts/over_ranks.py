"""Experts over ranks: a rank computes the token-expert pairs of the experts that it holds, and one sum joins them.

    slotwise(body, [ids, x, gates, w1, w2])           ->  expert_slots(body, arange(E), [ids, x, ...], False)
    sum(reshape(slotwise(...), [n, k, d]), [1])       ->  expert_slots(..., True)     each token's sum of its pairs

Matches experts that `rules.experts.fuse` made one node and whose matrices are held as Shard(0), E experts over P ranks.
The layout rule says that the result is a sum over experts, of all tokens:

    e, (!n !k), !n, e..., !... -> (!n !k), or !n

So where tokens are in chunks over the same axis, they are gathered before the experts, and the sum is scattered.

WRITE_OUT_EXPERTS inlines the operators again for a rank's E / P experts. Pairs of other ranks' experts get a number
behind the last one: the sort puts their rows at the end, where no group of a grouped product has them, so they cost
nothing there. Kernels leave such rows as they find them: they are cleared before and after each product, which clears
their gradients too. No pair is dropped, however uneven the ranks' shares are.
Refuses, and leaves to propagation, which gathers the matrices: experts whose numbers are read by anything else than the
sort, the counts of groups and tables with a row for each expert.
Shapes: ids [n * k], x [n, d], w1 [E, ...], result [n * k, ...] or [n, ...].
Numerics: exact but for the order of sums. Source: Lepikhin et al., GShard (arXiv 2006.16668, section 3); transformers,
distributed/expert_parallel.py.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxrewrite import Match, Pattern, RefusedError, Rule, RuleSet, cap, op, refuse, where
from fxrewrite.ops import bind, fake_value, key
from fxrewrite.spmd import (
    Call,
    IndexMap,
    LayoutRule,
    Shard,
    Size,
    declare_virtual,
    divide_exactly,
    held_as,
    is_same_size,
)
from rules.experts.fuse import GROUPED_PRODUCTS
from rules.experts.slots import SlotBody, slot_terms, slotwise, written_out

__all__ = ["EXPERTS_OVER_RANKS", "EXPERT_LAYOUTS", "WRITE_OUT_EXPERTS", "expert_slots"]

aten = torch.ops.aten


@declare_virtual()
def expert_slots(body: SlotBody, numbers: torch.Tensor, operands: list[torch.Tensor], of_tokens: bool) -> torch.Tensor:
    """The pairs of the experts with these numbers, consecutive, whose matrices are among the operands; 0 for others.

    With `of_tokens` the sum of each token's pairs.
    """
    pairs = slotwise(body, operands)
    return pairs.unflatten(0, (-1, body.per_token)).sum(1) if of_tokens else pairs


def tables(body: SlotBody) -> list[int]:
    """The operands that have an entry for each expert, by position.

    Raises:
        RefusedError: an expert's number is read otherwise than to sort pairs, to count them and to find such an entry.
    """
    placeholders = body.module.graph.find_nodes(op="placeholder")
    found = list[int]()
    for position, node in enumerate(placeholders):
        if body.reads[position] == "whole" and any(_is_of_expert(user, node) for user in node.users):
            if not all(_is_of_expert(user, node) for user in node.users):
                refuse("an operand with an entry for each expert is read as a whole, too", node=node)
            found.append(position)
    ids = placeholders[0]
    for node in (ids, *(user for user in _sort(body).users if user.args[1:] == (0,))):
        for user in node.users:
            is_table = key(user) == "aten::index" and bind(user)["self"] in placeholders and node is not ids
            if user is not _sort(body) and not is_table and not _counts(user):
                refuse(f"{key(user)} reads the numbers of experts", node=user)
    return found


def _is_of_expert(user: fx.Node, operand: fx.Node) -> bool:
    """Whether the operand is the matrices of a grouped product, or a table that is read by the sorted numbers."""
    args = bind(user)
    if key(user) in GROUPED_PRODUCTS:
        return args[GROUPED_PRODUCTS[key(user)][1]] is operand
    return key(user) == "aten::index" and args["self"] is operand and _is_keys(args["indices"][0])


def _is_keys(node: fx.Node) -> bool:
    is_first = node.target is operator.getitem and node.args[1:] == (0,)
    return is_first and key(node.all_input_nodes[0]) == "aten::sort"


def _counts(node: fx.Node) -> bool:
    """Whether the node is a histogram, or a cast that only one reads."""
    return key(node) == "aten::histc" or (
        key(node) in ("aten::to", "aten::_to_copy") and all(key(user) == "aten::histc" for user in node.users)
    )


def _sort(body: SlotBody) -> fx.Node:
    return next(node for node in body.module.graph.nodes if key(node) in ("aten::sort", "aten::argsort"))


@where.predicate("body", "operands", text="has_experts_in_shards")
def _has_experts_in_shards(body: SlotBody, operands: list[fx.Node]) -> bool | str:
    if key(_sort(body)) != "aten::sort":
        return "the sort gives no sorted numbers of experts"
    try:
        found = tables(body)
    except RefusedError as error:
        return error.refusal.reason
    return bool(found) and all(held_as(_origin(operands[position])) == Shard(0) for position in found)


def _origin(node: fx.Node) -> fx.Node:
    """What a value is a view of, or a cast."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and held_as(node) is None:
        node = node.all_input_nodes[0]
    return node


@where.predicate("root", "body", text="is_sum_of_tokens")
def _is_sum_of_tokens(root: fx.Node, body: SlotBody) -> bool:
    args, (reshaped, *_) = bind(root), root.all_input_nodes
    of_pairs, split = fake_value(reshaped.all_input_nodes[0]).shape, fake_value(reshaped).shape
    is_plain = not args.get("keepdim") and args.get("dtype") in (None, fake_value(reshaped).dtype)
    is_split = len(split) == len(of_pairs) + 1 and is_same_size(split[1], body.per_token)
    is_kept = is_split and all(map(is_same_size, split[2:], of_pairs[1:]))
    return is_kept and is_plain and list(args["dim"]) == [1]


_SLOTS: Any = op(slotwise, cap("body", "literal"), cap("operands", "any"))
spread_tokens = Rule(
    "experts.spread_tokens",
    Pattern(
        (op("sum", op("reshape", _SLOTS, cap("sizes", "any")), ...),),
        (_has_experts_in_shards, _is_sum_of_tokens),
    ),
)
spread_pairs = Rule("experts.spread_pairs", Pattern((_SLOTS,), (_has_experts_in_shards,)))


def _spread(match: Match, *, of_tokens: bool) -> Any:
    table = fake_value(match["operands"][tables(match["body"])[0]])
    numbers = match.call(aten.arange.default, table.shape[0], device=table.device, pin_memory=False)
    operands = [match.proxy(node) for node in match["operands"]]
    return match.call(expert_slots, match["body"], numbers, operands, of_tokens)


@spread_tokens.replacement
def _(match: Match) -> Any:
    """expert_slots(body, arange(E), operands, True)"""
    return _spread(match, of_tokens=True)


@spread_pairs.replacement
def _(match: Match) -> Any:
    """expert_slots(body, arange(E), operands, False)"""
    return _spread(match, of_tokens=False)


EXPERTS_OVER_RANKS = RuleSet("experts_over_ranks", spread_tokens, spread_pairs)
"""Runs after FuseSlots, where placements of parameters are stated, before propagation."""


def pairs_by_expert(call: Call) -> IndexMap | None:
    """e, (!n !k), !n, e..., !... -> (!n !k) or !n: a sum over experts"""
    body: SlotBody = call.args["body"]
    result = call.result_shapes()[0]
    tokens = result[0] if call.args["of_tokens"] else divide_exactly(result[0], body.per_token)
    if tokens is None:
        return None
    of_experts = tables(body)
    operands = [
        (("e",), *((),) * (len(call.shape(i + 1)) - 1)) if i in of_experts else slot_terms(read, call.shape(i + 1))
        for i, read in enumerate(body.reads)
    ]
    sizes: dict[str, Size] = {"n": tokens, "k": body.per_token, "e": call.shape(0)[0]}
    given = slot_terms("tokens" if call.args["of_tokens"] else "slots", result)
    return IndexMap(((("e",),), *operands), (given,), sizes, frozenset({"n", "k"}))


EXPERT_LAYOUTS = (LayoutRule("layout.expert_slots", (key(expert_slots),), pairs_by_expert, move_to=("e",)),)


write_out_experts = Rule(
    "experts.write_out",
    Pattern(
        (
            op(
                expert_slots,
                cap("body", "literal"),
                cap("numbers"),
                cap("operands", "any"),
                cap("of_tokens", "literal"),
            ),
        )
    ),
    shapes="changes",  # symbolic sizes are equal, but other expressions
)


@write_out_experts.replacement
def _(match: Match, numbers: Any, of_tokens: bool) -> Any:
    """the operators of the subgraph, on the pairs of this rank's experts"""
    graph, count = match["body"].module.graph, fake_value(match["numbers"]).shape[0]
    behind = match.root.next
    placeholders = graph.find_nodes(op="placeholder")
    made: dict[fx.Node, Any] = dict(zip(placeholders, match["operands"], strict=True))
    at = aten.sub(match.proxy(made[placeholders[0]]), aten.select(numbers, 0, 0))
    is_away = aten.logical_or(aten.lt(at, 0), aten.ge(at, count))
    local = aten.masked_fill(at, is_away, count + 1)  # beyond the greatest number that is counted
    made[placeholders[0]] = local.node
    of_rows: list[fx.Proxy] = []  # whether a row, where they are sorted, is of an expert of another rank

    def sorted_away() -> fx.Proxy:
        if not of_rows:
            sorted_ids = next(made[node] for node in graph.nodes if node in made and _is_keys(node))
            of_rows.append(aten.unsqueeze(aten.ge(match.proxy(sorted_ids), count), 1))
        return of_rows[0]

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if key(node) == "aten::histc":
            args = bind(node)
            made[node] = aten.histc(match.proxy(made[args["self"]]), count, 0, count).node
        elif key(node) == "aten::index" and _is_keys(bind(node)["indices"][0]):
            args = bind(node)
            row = aten.clamp_max(match.proxy(made[args["indices"][0]]), count - 1)
            made[node] = aten.index(match.proxy(made[args["self"]]), [row]).node
        elif key(node) in GROUPED_PRODUCTS:
            rows = bind(node)[GROUPED_PRODUCTS[key(node)][0]]
            read = aten.masked_fill(match.proxy(made[rows]), sorted_away(), 0).node
            product = written_out(match, node, {**made, rows: read}, behind, write_out_experts.id)
            made[node] = aten.masked_fill(match.proxy(product), sorted_away(), 0).node
        else:
            made[node] = written_out(match, node, made, behind, write_out_experts.id)
    result = match.proxy(made[graph.output_node().all_input_nodes[0]])
    for _ in range(fake_value(result.node).dim() - 1):
        is_away = aten.unsqueeze(is_away, -1)
    result = aten.masked_fill(result, is_away, 0)
    if not of_tokens:
        return result
    rest = fake_value(result.node).shape[1:]
    return aten.sum(aten.reshape(result, [-1, match["body"].per_token, *rest]), [1])


WRITE_OUT_EXPERTS = RuleSet("write_out_experts", write_out_experts)
"""Runs on the rank's program."""
