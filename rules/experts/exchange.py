"""Tokens to experts by all-to-all: pairs are sent to the ranks of their experts, where tokens are in chunks.

    redistribute(expert_slots(numbers, [redistribute(x, S, R), ...]), P, S)  ->  expert_slots(numbers, [x, ...])

The left side is what propagation finds where tokens and experts are over one axis: tokens are gathered before the
experts, and their sums are reduced and scattered. The right side sends each token-expert pair to the rank that holds
the expert, and its result back. Of n tokens with k experts each, over P ranks, a rank sends

    gather and reduce-scatter    (P - 1) n / P rows each
    all-to-all, and back         (P - 1) n k / P^2 rows each, k / P of that, if the pairs are spread evenly

By "price" the smaller one is taken; at a tie tokens are gathered, which needs no count of rows before they are sent.
The report says for each mixture which one runs and what both would send.
Leaves as they are: experts whose sum is not scattered, since ranks need it whole; tokens that every rank has anyway.
Numerics: exact but for the order of sums. Source: Lepikhin et al., GShard (arXiv 2006.16668, section 3.2); Rajbhandari
et al., DeepSpeed-MoE (arXiv 2201.05596, section 5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast, get_args

from pydantic import Field
from torch import fx

from fxrewrite import Edit, Event, FxRewriteError, Report
from fxrewrite.graph import source_line
from fxrewrite.ops import fake_value
from fxrewrite.report import bytes_text
from fxrewrite.spmd import (
    Gathered,
    Partial,
    Placement,
    Price,
    Replicate,
    Shard,
    SpmdContext,
    bytes_held,
    choose,
    collective_bytes,
    is_same_placement,
    placement_of,
    redistribute,
    redistribution_bytes,
)
from rules.experts.over_ranks import chunk_of, expert_slots

ExpertsOption: TypeAlias = Literal["price", "all_to_all", "gather"]
"""How tokens in chunks come to experts over the same axis."""


class TokensToExperts(Event, frozen=True):
    """How the tokens of a mixture come to the ranks of its experts, where they are in chunks over the same axis."""

    kind: Literal["tokens to experts"] = "tokens to experts"
    node: str
    source: str
    by: Literal["all_to_all", "gather"]
    why: str
    all_to_all_bytes: int = Field(description="that a rank sends forward by all-to-all, if pairs are spread evenly")
    gather_bytes: int = Field(description="that a rank sends forward by a gather and a reduce-scatter")

    def __str__(self) -> str:
        sent = {"all_to_all": self.all_to_all_bytes, "gather": self.gather_bytes}
        other = "gather" if self.by == "all_to_all" else "all_to_all"
        said = f"{self.by}, {bytes_text(sent[self.by])} from each rank ({other}: {bytes_text(sent[other])}): {self.why}"
        return f"tokens to experts: %{self.node} {self.source}: {said}"


class ExchangePairs:
    """A step that has pairs sent by all-to-all where propagation gathers tokens for experts.

    Args:
        by: what decides: the bytes that are sent ("price"), or the caller ("all_to_all", "gather").

    Raises:
        FxRewriteError: `by` is none of these.
    """

    name = "exchange_pairs"

    def __init__(self, by: ExpertsOption = "price") -> None:
        if by not in get_args(ExpertsOption):
            raise FxRewriteError(f"{self.name}: by={by!r} is not one of {get_args(ExpertsOption)}")
        self.by = by

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        """Rewrites the experts that are to be reached so, and returns how many."""
        num_ranks = SpmdContext.required(context, self.name).axis.size
        changes = 0
        for node in edit.nodes():
            chunks = _chunks(node) if num_ranks > 1 else None
            if chunks is None:
                continue
            experts: Any = node.args[0]
            sent, gathered = _bytes_by_all_to_all(experts, num_ranks), _bytes_by_gather(node, num_ranks)
            prices = {"gather": Price(gathered, gathered), "all_to_all": Price(sent, sent)}
            by: Any = choose("tokens to experts", prices).way if self.by == "price" else self.by
            why = (
                "it was asked for"
                if self.by != "price"
                else "both send as much"
                if sent == gathered
                else "it sends less"
            )
            event = TokensToExperts(
                node=experts.name,
                source=source_line(experts),
                by=by,
                why=why,
                all_to_all_bytes=sent,
                gather_bytes=gathered,
            )
            report.events.append(event)
            if by == "all_to_all":
                report.events[:] = [event for event in report.events if not _says_gathered(event, experts)]
                self._exchange(edit, node, experts, chunks)
                changes += 1
        return changes

    def _exchange(self, edit: Edit, scattered: fx.Node, experts: fx.Node, chunks: list[Placement | None]) -> None:
        given: Any = experts.args
        body, numbers, operands, *rest = given
        axis, made = scattered.args[3], list[fx.Node]()
        for operand, chunk in zip(operands, chunks, strict=True):
            origin = _gathered_from(operand)
            if chunk is None:
                made.append(operand)
            elif origin is not None and is_same_placement(placement_of(origin), chunk):
                made.append(origin)
            else:  # every rank has it all, or gathered it for others too: a chunk of it is a slice
                cut = (operand, Replicate(), chunk, axis)
                made.append(
                    edit.call(redistribute, cut, before=experts, like=experts, rule=self.name, val=fake_value(operand))
                )
        args = (body, numbers, made, *rest)
        sent = edit.call(expert_slots, args, before=scattered, like=experts, rule=self.name, val=fake_value(experts))
        edit.replace_uses(scattered, sent)
        for node in (scattered, experts, *operands):
            if not node.users and node.target in (redistribute, expert_slots) and node not in edit.erased:
                edit.erase(node)

    def text(self) -> str:
        by = "whichever sends less" if self.by == "price" else self.by
        return f"tokens in chunks come to experts over the same axis by all_to_all or gather: {by}"


def _chunks(node: fx.Node) -> list[Placement | None] | None:
    """The chunks that a rank has of what experts read of pairs and tokens, None for the rest; None for other nodes."""
    if node.target is not redistribute or not isinstance(node.args[1], Partial) or not isinstance(node.args[2], Shard):
        return None
    experts, dst = node.all_input_nodes[0], cast("Shard", node.args[2])
    if experts.target is not expert_slots or len(experts.users) > 1 or dst.dim:
        return None
    args: Any = experts.args
    body, _, operands, _, of_tokens = args
    of_slots = dst
    if of_tokens and dst.uneven:
        of_slots = replace(dst, inner=dst.inner * body.per_token)
    if not any(map(_gathered_from, operands)):
        return None
    return [chunk_of(read, of_slots, body) for read in body.reads]


def _says_gathered(event: Event, experts: fx.Node) -> bool:
    return isinstance(event, Gathered) and event.node == experts.name


def _gathered_from(operand: Any) -> fx.Node | None:
    """What a value is gathered from; None where it is not."""
    is_gathered = operand.target is redistribute and isinstance(operand.args[1], Shard)
    return operand.all_input_nodes[0] if is_gathered else None


def _bytes_by_gather(scattered: fx.Node, num_ranks: int) -> int:
    experts: Any = scattered.args[0]
    moved = [n for n in experts.args[2] if _gathered_from(n) is not None and len(n.users) == 1] + [scattered]
    return round(sum(redistribution_bytes(bytes_held(n), n.args[1], n.args[2], num_ranks) for n in moved))


def _bytes_by_all_to_all(experts: fx.Node, num_ranks: int) -> int:
    args: Any = experts.args
    body, _, operands, num_experts, of_tokens = args
    read = zip(body.reads[1:], operands[1:], strict=True)
    going = sum(bytes_held(node) * (body.per_token if how == "tokens" else 1) for how, node in read if how != "whole")
    back = bytes_held(experts) * (body.per_token if of_tokens else 1)
    counts = 8 * num_experts
    return round(collective_bytes("all_to_all", (going + back) / num_ranks + counts, num_ranks))
