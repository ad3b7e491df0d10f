"""A stage of a plan: a set that runs once or to a fixpoint, over an axis or none."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxrewrite.errors import FixpointError, FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.plan.contracts import Property, checked
from fxrewrite.plan.members import MemberSet
from fxrewrite.plan.sweep import Strategy
from fxrewrite.report import Report

_CYCLE = 4
"""Rounds whose rules an error names: rules that undo each other fire in turn."""
_MOST, _GROWTH = 2000, 16
"""Nodes beyond which a fixpoint that has run for `_CYCLE` rounds has no end: so many, and so many for each that the
graph had."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A set in a plan.

    Attributes:
        rules: the set.
        limit: most rounds with changes of a fixpoint; None: the set runs once.
        strategy: how its rules are applied.
        axis: name of the mesh axis over which it runs; empty if there is none.
    """

    rules: MemberSet
    limit: int | None
    strategy: Strategy
    axis: str = ""

    def run(self, edit: Edit, context: Any, report: Report, previous: Stage | None) -> None:
        """Runs the set after another stage of the plan.

        Raises:
            FixpointError: the fixpoint did not end.
            FxRewriteError: the context has nothing for the axis.
        """
        if self.axis:
            context = self._on_axis(edit, context, starts=previous is None or previous.axis != self.axis)
        if self.limit is None:
            self._once(edit, context, report)
            return
        before, grown, number = len(edit.nodes()), "", 0
        rounds = deque[dict[str, int]](maxlen=_CYCLE)
        for number in range(self.limit + 1):  # noqa: B007  # the error reads it
            counts = {entry.rule: entry.rewrites for entry in report.rules}
            if not self._once(edit, context, report):
                return
            new = {entry.rule: entry.rewrites - counts.get(entry.rule, 0) for entry in report.rules}
            rounds.append({rule: count for rule, count in new.items() if count})
            size = len(edit.nodes())
            if len(rounds) == _CYCLE and size > _MOST + _GROWTH * before:
                grown = f", and made {size:,} nodes of {before:,}"
                break
        last = {rule: count for of_round in rounds for rule, count in of_round.items()}
        fired = [f"{rule} ({count})" for rule, count in last.items()]
        if len(fired) == 1:
            why = "its result holds its own pattern (run the set .once(), or bound the rule by a constraint)"
        else:
            why = "rules undo each other"
        raise FixpointError(
            f"set {self.rules.name} still changes the graph after {number} rounds{grown}; in the last ones "
            f"fired {', '.join(fired)}: {why}, or limit= is too small"
        )

    def _on_axis(self, edit: Edit, context: Any, *, starts: bool) -> Any:
        """The axis's context; where stages on it start, what was known over another axis says nothing of this one."""
        if not isinstance(context, Mapping) or self.axis not in context:
            has = f"axes {', '.join(map(str, context))}" if isinstance(context, Mapping) else repr(context)
            raise FxRewriteError(
                f"set {self.rules.name} runs on axis {self.axis!r}; pass a mapping from axes to contexts, such as "
                f"context=fxrewrite.spmd.contexts(mesh), not {has}"
            )
        for part in edit.parts() if starts else ():
            part.forget()
        return context[self.axis]

    def _once(self, edit: Edit, context: Any, report: Report) -> int:
        return self.rules.run(edit, context, report, strategy=self.strategy)

    def __str__(self) -> str:
        how = "once" if self.limit is None else f"fixpoint(limit={self.limit})"
        where = f" on {self.axis}" if self.axis else ""
        return f"{how}{where}, {self.strategy}" if str(self.strategy) else f"{how}{where}"


def open_needs(stages: Sequence[Stage]) -> dict[Property, str]:
    """What the first stages need and none of them gives; stages on one axis know nothing of those on another one."""
    found: dict[Property, str] = {}
    for number, (axis, group) in enumerate(itertools.groupby(stages, key=lambda stage: stage.axis)):
        contracts = [stage.rules.contract for stage in group]
        needs = checked(f"plan on {axis}" if axis else "plan", contracts, () if number else None).needs
        found = found or needs
    return found
