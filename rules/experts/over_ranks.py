"""Experts over ranks: a rank computes the token-expert pairs of the experts that it holds.

    slotwise(body, [ids, x, gates, w1, w2])           ->  expert_slots(body, arange(E), [ids, x, ...], E, False)
    sum(reshape(slotwise(...), [n, k, d]), [1])       ->  expert_slots(..., True)     each token's sum of its pairs

Matches experts that `rules.experts.fuse` made one node and whose matrices are held as Shard(0), E experts over P ranks.
The layout rule says that the result is a sum over experts, of all tokens:

    e, (!n !k), !n, e..., !... -> (!n !k), or !n

So where tokens are in chunks over the same axis, they are gathered before the experts, and the sum is scattered; or,
after `rules.experts.exchange`, and where ranks have tokens of their own, pairs are sent to the ranks of their experts.

WRITE_OUT_EXPERTS inlines the operators again for a rank's E / P experts. Where every rank has all tokens, pairs of
other ranks' experts get the number after the last one: the sort puts their rows at the end, where no group of a grouped
product has them, so they cost nothing there. Kernels leave such rows as they find them: they are cleared before and
after each product, which clears their gradients too. Where a rank has its own tokens, it has the pairs that came:

    counts = all_to_all(histogram(ids))                      how many pairs of each expert come from each rank
    rows = send_rows([x[order // k], gates[order]], ...)     in the order of their experts
    send_rows([body(rows)], ...)                             back, and to where the pairs were

No pair is dropped, however uneven the ranks' shares are.
Refuses, and leaves to propagation, which gathers the matrices: experts whose numbers are read by anything else than the
sort, the counts of groups and tables with a row for each expert.
Shapes: ids [n * k], x [n, d], w1 [E, ...], result [n * k, ...] or [n, ...]. As many rows come to a rank as data say.
Numerics: exact but for the order of sums. Source: Lepikhin et al., GShard (arXiv 2006.16668, section 3); transformers,
distributed/expert_parallel.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxrewrite import Match, Pattern, RefusedError, Rule, RuleSet, cap, op, refuse, where
from fxrewrite.graph import reached
from fxrewrite.ops import bind, fake_value, key
from fxrewrite.spmd import (
    COLLECTIVES,
    SEND_ROWS,
    Call,
    IndexMap,
    LayoutRule,
    Partial,
    Placement,
    Replicate,
    Shard,
    Size,
    SpmdContext,
    declare_virtual,
    divide_exactly,
    held_as,
    is_same_placement,
    is_same_size,
    placement_of,
    read_size,
    redistribute,
    size_proxy,
)
from rules.experts.fuse import GROUPED_PRODUCTS
from rules.experts.slots import Read, SlotBody, positions, slot_terms, slotwise, written_out

aten = torch.ops.aten


def _placement_of_chunks(args: Sequence[Any], placements: Sequence[Placement]) -> Placement | None:
    """How ranks hold the result where each has a chunk of the tokens, and experts; None where they do not."""
    body, of_tokens, ids = args[0], args[4], placements[1]
    of_experts = tables(body) if isinstance(ids, Shard) else ()
    wants = [Shard(0), *(chunk_of(read, ids, body) or _held(i in of_experts) for i, read in enumerate(body.reads))]
    if not isinstance(ids, Shard) or not all(map(is_same_placement, wants, placements)):
        return None
    return chunk_of("tokens" if of_tokens else "slots", ids, body)


def chunk_of(read: Read, of_slots: Placement, body: SlotBody) -> Placement | None:
    """How a rank holds what is read so, whose pairs are a chunk of all; None for what is read whole."""
    if read == "whole" or not isinstance(of_slots, Shard):
        return None
    if read == "slots" or not of_slots.uneven:
        return of_slots
    inner = divide_exactly(of_slots.inner, body.per_token)
    return None if inner is None else replace(of_slots, inner=inner)


def _held(is_table: bool) -> Placement:
    return Shard(0) if is_table else Replicate()


@declare_virtual(_placement_of_chunks)
def expert_slots(
    body: SlotBody, numbers: torch.Tensor, operands: list[torch.Tensor], num_experts: int, of_tokens: bool
) -> torch.Tensor:
    """The pairs of the experts with these numbers, consecutive, whose matrices are among the operands; 0 for others.

    There are `num_experts` in all. With `of_tokens` the sum of each token's pairs.
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
    return bool(found) and all(_is_of_shards(operands[position]) for position in found)


def _is_of_shards(node: fx.Node) -> bool:
    """Whether a value is held as Shard(0), or is computed of such values alone: a cast, the sum with an adapter."""

    def computed_of(read: fx.Node) -> Sequence[fx.Node]:
        is_computed = read.op == "call_function" and read.target is not redistribute
        return read.all_input_nodes if is_computed and held_as(read) is None else ()

    return all(computed_of(read) or held_as(read) == Shard(0) for read in reached([node], computed_of))


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
    count = int(table.shape[0])
    numbers = match.call(aten.arange.default, count, device=table.device, pin_memory=False)
    operands = [match.proxy(node) for node in match["operands"]]
    return match.call(expert_slots, match["body"], numbers, operands, count, of_tokens)


@spread_tokens.replacement
def _(match: Match) -> Any:
    """expert_slots(body, arange(E), operands, E, True)"""
    return _spread(match, of_tokens=True)


@spread_pairs.replacement
def _(match: Match) -> Any:
    """expert_slots(body, arange(E), operands, E, False)"""
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


EXPERT_LAYOUTS = (
    LayoutRule("layout.expert_slots", (key(expert_slots),), pairs_by_expert, move_to=("e",), sends_own=True),
)


write_out_experts = Rule(
    "experts.write_out",
    Pattern(
        (
            op(
                expert_slots,
                cap("body", "literal"),
                cap("numbers"),
                cap("operands", "any"),
                cap("num_experts", "literal"),
                cap("of_tokens", "literal"),
            ),
        )
    ),
    shapes="changes",  # symbolic sizes are equal, but other expressions
)


@write_out_experts.replacement
def _(match: Match, numbers: Any, num_experts: int, of_tokens: bool) -> Any:
    """the operators of the subgraph, on the pairs of this rank's experts, or on those that ranks send each other"""
    count, before = fake_value(match["numbers"]).shape[0], match.root.next
    if count < num_experts and not isinstance(placement_of(match.root), Partial):
        pairs = _pairs_sent(match, before, count, num_experts)
    else:
        pairs = _pairs_of_own_experts(match, before, numbers, count)
    if not of_tokens:
        return pairs
    rest = fake_value(pairs.node).shape[1:]
    return aten.sum(aten.reshape(pairs, [-1, match["body"].per_token, *rest]), [1])


def _pairs_of_own_experts(match: Match, before: fx.Node, numbers: Any, count: int) -> Any:
    """Of all tokens, the pairs of this rank's experts; 0 for the others."""
    body: SlotBody = match["body"]
    at = aten.sub(match.proxy(match["operands"][0]), aten.select(numbers, 0, 0))
    is_away = aten.logical_or(aten.lt(at, 0), aten.ge(at, count))
    local = aten.masked_fill(at, is_away, count + 1)  # beyond the greatest number that is counted
    writing = _Writing(match, before, [local.node, *match["operands"][1:]], count)

    of_rows: list[fx.Proxy] = []  # whether a row, where they are sorted, is of an expert of another rank

    def cleared(rows: fx.Node) -> fx.Node:
        if not of_rows:
            sorted_ids = next(made for node, made in writing.made.items() if _is_keys(node))
            of_rows.append(aten.unsqueeze(aten.ge(match.proxy(sorted_ids), count), 1))
        return aten.masked_fill(match.proxy(rows), of_rows[0], 0).node

    for node in body.module.graph.nodes:
        if node.op != "call_function":
            continue
        if key(node) in GROUPED_PRODUCTS:
            rows = bind(node)[GROUPED_PRODUCTS[key(node)][0]]
            writing.made[node] = cleared(writing.written(node, {rows: cleared(writing.made[rows])}))
        else:
            writing.write(node, clamped=True)
    result = writing.result()
    for _ in range(fake_value(result.node).dim() - 1):
        is_away = aten.unsqueeze(is_away, -1)
    return aten.masked_fill(result, is_away, 0)


def _pairs_sent(match: Match, before: fx.Node, count: int, num_experts: int) -> Any:
    """The pairs of this rank's own tokens, computed where their experts are."""
    axis, body = SpmdContext.required(match.context, write_out_experts.id).axis, match["body"]
    ids, pairs = match.proxy(match["operands"][0]), fake_value(match["operands"][0])
    order = match.call(operator.getitem, aten.sort(ids), 1)
    ones = aten.ones_like(ids, dtype=torch.int64)
    how = {"dtype": torch.int64, "device": pairs.device, "pin_memory": False}
    nothing = match.call(aten.zeros.default, [num_experts], **how)
    sent = aten.reshape(aten.scatter_add(nothing, 0, aten._to_copy(ids, dtype=torch.int64), ones), [axis.size, count])
    one_each = [1] * axis.size
    sending = match.call(COLLECTIVES["all_to_all"], sent, one_each, one_each, axis.group)
    match.edit.set_meta(sending.node, "axis", axis.name)
    came = match.call(COLLECTIVES["wait"], sending)
    counts = aten._to_copy(aten.stack([aten.sum(sent, [1]), aten.sum(came, [1])]), device=torch.device("cpu"))
    rows = read_size(match, aten.sum(aten.select(counts, 0, 1)))

    def exchanged(values: list[Any], counts: Any, rows: Any) -> list[Any]:
        sent = match.call(SEND_ROWS, values, counts, rows, axis.group)
        match.edit.set_meta(sent.node, "axis", axis.name)
        return [match.call(operator.getitem, sent, i) for i in range(len(values))]

    of_tokens = aten.floor_divide(order, body.per_token)
    going = [
        aten.index(match.proxy(node), [of_tokens if read == "tokens" else order])
        for read, node in zip(body.reads[1:], match["operands"][1:], strict=True)
        if read != "whole"
    ]
    arrived = iter(exchanged(going, counts, rows))
    # as many entries for each rank and expert as came: the number of the expert among this rank's
    of_rows = match.call(aten.repeat_interleave.Tensor, aten.reshape(came, [-1]), output_size=rows)
    local = aten._to_copy(aten.remainder(of_rows, count), dtype=pairs.dtype)
    operands = [local.node]
    for read, node in zip(body.reads[1:], match["operands"][1:], strict=True):
        operands.append(node if read == "whole" else next(arrived).node)
    writing = _Writing(match, before, operands, count, rows)
    for node in body.module.graph.nodes:
        if node.op == "call_function":
            writing.write(node)
    (back,) = exchanged([writing.result()], aten.flip(counts, [0]), size_proxy(match, pairs.shape[0]))
    return aten.index_put(aten.empty_like(back), [order], back)


class _Writing:
    """Operators of a subgraph, written before a node for a rank's `count` experts; with `rows` on as many pairs."""

    def __init__(
        self, match: Match, before: fx.Node, operands: Sequence[fx.Node], count: int, rows: fx.Proxy | None = None
    ) -> None:
        self._match, self._before, self._count, self._rows = match, before, count, rows
        self._graph = match["body"].module.graph
        placeholders = self._graph.find_nodes(op="placeholder")
        self._of_tokens = [n for n, read in zip(placeholders, match["body"].reads, strict=True) if read == "tokens"]
        self.made: dict[fx.Node, fx.Node] = dict(zip(placeholders, operands, strict=True))

    def write(self, node: fx.Node, *, clamped: bool = False) -> None:
        """Writes what counts experts, or looks up a table of them, for those of this rank; and others as they are."""
        proxy, args = self._match.proxy, bind(node)
        made: Any
        if key(node) == "aten::histc":
            made = aten.histc(proxy(self.made[args["self"]]), self._count, 0, self._count).node
        elif clamped and key(node) == "aten::index" and _is_keys(args["indices"][0]):
            row = aten.clamp_max(proxy(self.made[args["indices"][0]]), self._count - 1)
            made = aten.index(proxy(self.made[args["self"]]), [row]).node
        elif self._rows is not None and node.target is positions:
            device = fake_value(node).device
            made = self._match.call(aten.arange.default, self._rows, device=device, pin_memory=False).node
        elif self._rows is not None and key(node) == "aten::index" and args["self"] in self._of_tokens:
            order = args["indices"][0].all_input_nodes[0]  # of the order divided by k: a pair came with its token
            made = aten.index(proxy(self.made[args["self"]]), [proxy(self.made[order])]).node
        else:
            made = self.written(node)
        self.made[node] = made

    def written(self, node: fx.Node, other: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        """The operator of the node, on what its operands were made, or on `other`."""
        return written_out(self._match, node, {**self.made, **(other or {})}, self._before, write_out_experts.id)

    def result(self) -> fx.Proxy:
        """What the subgraph returns."""
        return self._match.proxy(self.made[self._graph.output_node().all_input_nodes[0]])


WRITE_OUT_EXPERTS = RuleSet("write_out_experts", write_out_experts)
"""Runs on the rank's program."""
