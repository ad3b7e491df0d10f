"""What became of a graph on ranks: what each holds, what it sends, what all of them compute, and what a plan did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from pydantic import Field
from torch import fx

from fxrewrite.report import EventLog, Report, bytes_text
from fxrewrite.spmd.events import ProductsWhole, grouped
from fxrewrite.spmd.price.program_price import parameter_bytes
from fxrewrite.spmd.price.sent import Collective, collectives_of


class ProgramReport(EventLog):
    """What is known of every rank's program."""

    collectives: list[Collective] = Field(default_factory=list[Collective], description="of a step of one rank")
    graph_break: str = Field(
        default="", description="why the graph ends before the compiled function does, with the line; empty otherwise"
    )
    bytes_gathered_at_break: int = Field(
        default=0, description="of values that are gathered, whole on each rank, for the code after the break"
    )

    def at_break(self, graph_break: str, num_bytes: int) -> Self:
        """Returns the report with this graph break, if there is one."""
        if not graph_break:
            return self
        return self.model_copy(update={"graph_break": graph_break, "bytes_gathered_at_break": num_bytes})

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends in one step, forward and backward."""
        return sum(collective.bytes_sent for collective in self.collectives)

    def _break_line(self) -> list[str]:
        if not self.graph_break:
            return []
        return [f"  graph break: {self.graph_break}; {bytes_text(self.bytes_gathered_at_break)} are gathered there"]


class SpmdReport(ProgramReport, Report):
    """What a plan did to one graph over the axes of a mesh.

    `str(report)` begins with what every rank computes whole and what it sends; rules that changed nothing come last.
    """

    axes: dict[str, int] = Field(description="how many ranks each axis has, by its name, the outermost first")
    parameter_bytes: int = Field(description="of parameters that a rank holds between steps")

    @classmethod
    def of(cls, report: Report, program: fx.GraphModule, axes: Mapping[str, int]) -> SpmdReport:
        """Returns the report of a program that is lowered over all these axes, of that of the plan."""
        return cls(
            axes=dict(axes),
            rules=report.rules,
            events=report.events,
            seconds=report.seconds,
            parameter_bytes=parameter_bytes(program),
            collectives=collectives_of(program, axes, trains=torch.is_grad_enabled()),
        )

    def text(self, *, times: bool = True) -> str:
        """What is whole, held and sent, then events, refusals and rules; the same in every run without times."""
        over = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        rows = [f"program over {over}" + (f", made in {self.seconds:.2f} s" if times else "")]
        whole, others = self.events_of(ProductsWhole), [e for e in self.events if not isinstance(e, ProductsWhole)]
        rows += [f"  {event}" for event in whole]
        rows += self._break_line()
        rows.append(f"  parameters: {bytes_text(self.parameter_bytes)} are held by each rank")
        width = max(map(len, self.axes), default=0)
        rows += [f"  {c.axis:<{width}}  {c}" for c in self.collectives] or ["  nothing is sent"]
        rows += [f"  {line}" for line in grouped(others)]
        rows += [f"  refused  {refusal}" for refusal in self.refusals]
        fired = [entry for entry in self.rules if entry.rewrites]
        rows += [f"  {entry.rule:<58} {entry.rewrites:>8} x" for entry in fired]
        silent = [entry.rule for entry in self.rules if not entry.rewrites]
        if silent:
            rows.append(f"  changed nothing: {', '.join(silent)}")
        return "\n".join(rows)
