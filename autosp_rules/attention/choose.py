"""Which strategy serves which attention, and what that sends: an event in the report for every kind of call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from torch import fx

from autosp_rules.attention.strategy import (
    CHOICE,
    AttentionCall,
    AttentionStrategy,
    Choice,
    write_choice,
)
from autosp_rules.config import AttentionOption
from autosp_rules.memory.costs import bytes_of, planned_for
from fxrewrite import Edit, Event, Report, refuse
from fxrewrite.graph import source_line
from fxrewrite.report import bytes_text
from fxrewrite.spmd import Axis, Shard, SpmdContext, choose, placement_of, redistribute, redistribution_bytes, size_hint
from rules.attention.operator import attentions


class ChooseAttention:
    """A step that chooses a strategy for every attention of the graph.

    That is the strategy that the user requested, or else the one with the least price (`fxrewrite.spmd.Price`). Of
    equals the first, ulysses, wins.
    """

    name = "choose_strategy"

    def __init__(self, strategies: Sequence[AttentionStrategy], asked: AttentionOption = "auto") -> None:
        self._strategies = {strategy.name: strategy for strategy in strategies}
        self._asked = asked

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        """Stores a choice for every attention, or refuses the requested strategy. Changes no node."""
        axis = SpmdContext.required(context, self.name).axis
        for node in attentions(edit.nodes()):
            write_choice(edit, node, self._choice(node, AttentionCall.of(node), axis))
        return 0

    def _choice(self, node: fx.Node, call: AttentionCall, axis: Axis) -> Choice:
        ways = {
            name: strategy.why_not(call, axis) or strategy.cost(call, axis)
            for name, strategy in self._strategies.items()
        }
        found = choose("attention", ways)
        name = found.way if self._asked == "auto" else self._asked
        reason = found.impossible.get(name)
        if reason is not None:
            refuse(
                f"attention={name!r}: {reason}",
                node=node,
                hint=f"use attention={found.way!r}, which serves it, or 'auto'",
            )
        choice = self._strategies[name].choose(call, axis, self._asked != "auto")
        others = found.model_copy(update={"way": name}).others
        return replace(choice, why=self._why(node, choice, found.impossible), others=others)

    def _why(self, node: fx.Node, choice: Choice, reasons: dict[str, str]) -> str:
        if self._asked != "auto":
            return ": ".join(filter(None, ("asked for", choice.why)))
        if choice.strategy == "ulysses":
            return choice.why
        cheaper = f"costs less than ulysses{planned_for([node])}"
        return ", ".join(filter(None, (reasons.get("ulysses", cheaper), choice.why)))

    def text(self) -> str:
        names = ", ".join(self._strategies)
        return f"the cheapest strategy that serves each attention, or the requested one ({self._asked}): {names}"


class AttentionRuns(Event, frozen=True):
    """Calls of attention run by one strategy, for one reason."""

    kind: Literal["attention"] = "attention"
    num_calls: int
    strategy: str
    why: str
    bytes_sent: int = Field(description="by a rank in each call, forward")
    first: str = Field(description="the first call's node")
    source: str
    others: str = Field(description="what the other strategies would cost, or why they cannot serve")

    def __str__(self) -> str:
        first = f"the first is %{self.first} {self.source}".rstrip()
        return (
            f"attention: {self.num_calls} x {self.strategy}: {self.why}; each sends {bytes_text(self.bytes_sent)} "
            f"per rank forward; {first} ({self.others})"
        )


class DescribeAttention:
    """A step that reports how every attention runs, once placements are known."""

    name = "describe_attention"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        """Adds a line to the report for every kind of call. Changes no node."""
        axis = SpmdContext.required(context, self.name).axis
        alike: dict[tuple[str, str, int, str], list[fx.Node]] = {}
        for node in edit.nodes():
            placement, choice = placement_of(node), CHOICE.of(node)
            if isinstance(placement, Shard) and choice is not None:
                how = _how(node, placement) if choice.sent is None else choice.strategy
                why = choice.why if how == choice.strategy else "it sends fewer bytes"
                sent = _bytes_sent(node, axis) if choice.sent is None else choice.sent
                alike.setdefault((how, why, sent, choice.others), []).append(node)
        for (strategy, why, sent, others), (first, *more) in alike.items():
            event = AttentionRuns(
                num_calls=1 + len(more),
                strategy=strategy,
                why=why,
                bytes_sent=sent,
                first=first.name,
                source=source_line(first),
                others=others,
            )
            report.events.append(event)
        return 0

    def text(self) -> str:
        return "an event for every kind of call: strategy, reason, bytes, and what the others would cost"


def _how(node: fx.Node, placement: Shard) -> str:
    """Returns the strategy of a call, which follows from the sharded dimension of its result [..., H, S, D]."""
    from_behind = placement.dim - node.meta["val"].dim()
    return {-2: "gather_kv", -3: "ulysses"}.get(from_behind, "by the batch")


def _bytes_sent(node: fx.Node, axis: Axis) -> int:
    """Returns how many bytes a rank sends to move q, k and v to a call, and its result back."""
    operands: Any = node.args[:3]
    moved = [operand for operand in operands if operand.target is redistribute]
    moves = [(x, *x.args[1:3]) for x in dict.fromkeys(moved)]
    if node.args[0] in moved:
        _, src, dst, _ = moved[0].args
        if isinstance(src, Shard):  # the result is moved back as q was moved, unless that was a slice
            moves.append((node, dst, src))
    return round(sum(redistribution_bytes(bytes_of(x, size_hint), src, dst, axis.size) for x, src, dst in moves))
