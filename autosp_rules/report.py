"""What AutoSP did to one graph: rules, slices, collectives with their bytes, and what it did not do."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel
from torch import fx

from autosp_rules.memory.budget import MemoryFitted
from autosp_rules.memory.checkpoint import is_recomputed
from autosp_rules.memory.costs import SENDERS, bytes_of, sends_of
from fxrewrite import Event, EventLog, Refusal, Report
from fxrewrite.graph import differentiated
from fxrewrite.ops import key
from fxrewrite.spmd import ADJOINTS, COLLECTIVE_KINDS, Axis, ProductsWhole, collective_bytes, size_hint

_DIRECTIONS = ("forward", "again", "backward")


class Collective(BaseModel):
    """All collectives of one kind in one direction of a step."""

    kind: str
    direction: str
    """forward, backward, or again: what the backward pass recomputes"""
    count: int
    bytes_sent: int
    """bytes that one rank sends, assuming a ring in which all ranks take part"""


class LeftAlone(Event, frozen=True):
    """The graph runs whole on every rank."""

    kind: Literal["left alone"] = "left alone"
    why: str

    def __str__(self) -> str:
        return f"{self.why}: the graph went to the inner backend as it was, and runs whole on every rank"


class AutoSPReport(EventLog):
    """What was done to one graph; `str(report)` is a table."""

    axis: str
    num_ranks: int
    tokens_per_rank: int = 0
    """tokens of the batch whose hidden states one rank holds, with the padding of uneven chunks"""
    whole_share: float = 0.0
    """share of the FLOPs of matrix products that every rank computes whole, 0 to 1"""
    rewrites: dict[str, int]
    slices: int
    collectives: list[Collective]
    refusals: list[str]
    seconds: float = 0.0
    """time of the transform, without the inner compiler"""
    graph_break: str = ""
    """why the graph ends before the compiled function does, with the line; empty if it does not"""
    bytes_gathered_at_break: int = 0
    """bytes of values that are gathered, whole on each rank, for the code after the break"""

    @staticmethod
    def of_graph_left_alone(axis: Axis, why: str, graph_break: str = "") -> AutoSPReport:
        """The report of a graph that runs whole on every rank."""
        report = AutoSPReport(
            axis=axis.name,
            num_ranks=axis.size,
            whole_share=1.0,
            rewrites={},
            slices=0,
            collectives=[],
            refusals=[],
            events=[LeftAlone(why=why)],
        )
        return report.at_break(graph_break, 0)

    def at_break(self, graph_break: str, num_bytes: int) -> AutoSPReport:
        """Returns the report with this graph break, if there is one."""
        if not graph_break:
            return self
        return self.model_copy(update={"graph_break": graph_break, "bytes_gathered_at_break": num_bytes})

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends in one step, forward and backward."""
        return sum(collective.bytes_sent for collective in self.collectives)

    def __str__(self) -> str:
        rows = [f"AutoSP over axis {self.axis} (size {self.num_ranks}), {self.tokens_per_rank} tokens per rank"]
        rows += [f"  {event}" for event in self.events_of(MemoryFitted)]
        if self.whole_share:
            rows.append(f"  whole                {self.whole_share:.1%} of the work of matrix products is every rank's")
        if self.graph_break:
            rows.append(f"  graph break: {self.graph_break}; {self.bytes_gathered_at_break:,} bytes are gathered there")
        rows.append(f"  transform            {self.seconds:.2f} s")
        rows += [f"  rule  {rule:<40} {count:>6}" for rule, count in self.rewrites.items()]
        rows.append(f"  slices {self.slices:>46}")
        rows += [
            f"  {c.kind:<16} {c.direction:<9} {c.count:>6} x {c.bytes_sent:>16,} bytes sent per rank and step"
            for c in self.collectives
        ]
        rows.append(f"  refusals             {len(self.refusals)}")
        rows += [f"    {refusal}" for refusal in self.refusals]
        rows += [f"  note: {event}" for event in self.events if not isinstance(event, MemoryFitted)]
        return "\n".join(rows)


def summarize(gm: fx.GraphModule, report: Report, axis: Axis, tokens: int, seconds: float) -> AutoSPReport:
    """Returns the report of a transformed graph."""
    rewrites = {entry.rule: entry.rewrites for entry in report.rules if entry.rewrites}
    return AutoSPReport(
        axis=axis.name,
        num_ranks=axis.size,
        tokens_per_rank=tokens,
        whole_share=whole_share(report),
        rewrites=rewrites,
        slices=sum(count for rule, count in rewrites.items() if rule in _SLICES),
        collectives=_collectives(gm, axis),
        refusals=_refusals(report),
        events=list(report.events),
        seconds=seconds,
    )


def whole_share(report: Report) -> float:
    """Of the operations of matrix products, the share that every rank computes whole, 0 to 1."""
    return max((event.share for event in report.events_of(ProductsWhole)), default=0.0)


def _refusals(report: Report) -> list[str]:
    """Returns each reason once, with its first place and its count."""
    same: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in report.refusals:
        same.setdefault((refusal.rule, refusal.reason), []).append(refusal)
    return [f"{found[0]}" + (f" ({len(found)} times)" if len(found) > 1 else "") for found in same.values()]


_SLICES = {"autosp.shard_label_ids", "autosp.shard_position_ids", "collectives.slice"}


def _collectives(gm: fx.GraphModule, axis: Axis) -> list[Collective]:
    found: dict[tuple[str, str], list[int]] = {}
    is_enabled = torch.is_grad_enabled()
    grads = differentiated(list(gm.graph.nodes), _requires_gradient) if is_enabled else set[fx.Node]()
    for node in gm.graph.nodes:
        kind, inside = COLLECTIVE_KINDS.get(node.target), sends_of(node)
        if kind is not None:
            sent = collective_bytes(kind, bytes_of(node.all_input_nodes[0], size_hint), axis.size)
            forward, backward = (kind, sent), (ADJOINTS[kind], sent)
        elif inside is not None:
            kind = SENDERS[key(node)]
            forward, backward = (kind, inside.forward), (kind, inside.backward)
        else:
            continue
        sends = [("forward", *forward)]
        if node in grads:
            sends.append(("backward", *backward))
        if is_recomputed(node):
            sends.append(("again", *forward))
        for direction, name, num_bytes in sends:
            found.setdefault((name, direction), []).append(round(num_bytes))
    return [
        Collective(kind=kind, direction=direction, count=len(sent), bytes_sent=sum(sent))
        for (kind, direction), sent in sorted(
            found.items(), key=lambda item: (_DIRECTIONS.index(item[0][1]), item[0][0])
        )
    ]


def _requires_gradient(node: fx.Node) -> bool:
    traced = node.meta.get("example_value", node.meta.get("val"))
    return node.op == "placeholder" and getattr(traced, "requires_grad", False)
