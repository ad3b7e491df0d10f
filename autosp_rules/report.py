"""What AutoSP did to one graph: rules, slices, collectives with their bytes, and what it did not do."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from autosp_rules.memory.budget import MemoryFitted
from fxrewrite import Event, Refusal, Report
from fxrewrite.spmd import Axis, ProductsWhole, ProgramReport, collectives_of, grouped


class LeftAlone(Event, frozen=True):
    """The graph runs whole on every rank."""

    kind: Literal["left alone"] = "left alone"
    why: str

    def __str__(self) -> str:
        return f"{self.why}: the graph went to the inner backend as it was, and runs whole on every rank"


class AutoSPReport(ProgramReport):
    """What was done to one graph; `str(report)` is a table."""

    axis: str
    num_ranks: int
    tokens_per_rank: int = 0
    """tokens of the batch whose hidden states one rank holds, with the padding of uneven chunks"""
    whole_share: float = 0.0
    """share of the FLOPs of matrix products that every rank computes whole, 0 to 1"""
    rewrites: dict[str, int]
    slices: int
    refusals: list[str]
    seconds: float = 0.0
    """time of the transform, without the inner compiler"""

    @staticmethod
    def of_graph_left_alone(axis: Axis, why: str, graph_break: str = "") -> AutoSPReport:
        """The report of a graph that runs whole on every rank."""
        report = AutoSPReport(
            axis=axis.name,
            num_ranks=axis.size,
            whole_share=1.0,
            rewrites={},
            slices=0,
            refusals=[],
            events=[LeftAlone(why=why)],
        )
        return report.at_break(graph_break, 0)

    def __str__(self) -> str:
        tokens = f"{self.tokens_per_rank:,} tokens per rank"
        rows = [f"AutoSP over axis {self.axis} (size {self.num_ranks}), {tokens}, made in {self.seconds:.2f} s"]
        first = MemoryFitted, LeftAlone, ProductsWhole
        rows += [f"  {event}" for event in self.events if isinstance(event, first)]
        rows += self._break_line()
        rows += [f"  refused: {refusal}" for refusal in self.refusals] or ["  nothing was refused"]
        rows += [f"  {line}" for line in grouped(event for event in self.events if not isinstance(event, first))]
        rows += [f"  {collective}" for collective in self.collectives] or ["  nothing is sent"]
        rows.append(f"  {self.slices} slices, and of each rule so many rewrites:")
        rows += [f"    {rule:<40} {count:>6}" for rule, count in self.rewrites.items()]
        return "\n".join(rows)


def summarize(gm: fx.GraphModule, report: Report, axis: Axis, tokens: int) -> AutoSPReport:
    """Returns the report of a transformed graph."""
    rewrites = {entry.rule: entry.rewrites for entry in report.rules if entry.rewrites}
    return AutoSPReport(
        axis=axis.name,
        num_ranks=axis.size,
        tokens_per_rank=tokens,
        whole_share=whole_share(report),
        rewrites=rewrites,
        slices=sum(count for rule, count in rewrites.items() if rule in _SLICES),
        collectives=collectives_of(gm, {axis.name: axis.size}, trains=torch.is_grad_enabled()),
        refusals=_refusals(report),
        events=list(report.events),
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
