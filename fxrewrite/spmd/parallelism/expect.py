"""What must hold of a program: how often it communicates, in each of the modules that a glob names, and what fires."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from torch import fx

from fxrewrite.errors import FxRewriteError, MatchExpectationError, did_you_mean
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.modules import matches_glob, module_calls, module_names
from fxrewrite.graph.source import source_line
from fxrewrite.plan import Step
from fxrewrite.report import Event, Report
from fxrewrite.rule import Rule
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import NotInPart
from fxrewrite.spmd.group import COLLECTIVE_KINDS, CollectiveKind
from fxrewrite.spmd.operators.gradient_ops import GATHER_CAST
from fxrewrite.spmd.operators.send_rows import SEND_ROWS
from fxrewrite.spmd.properties import COLLECTIVE_CALLS

KINDS: dict[object, CollectiveKind] = {
    GATHER_CAST: "all_gather",
    SEND_ROWS: "all_to_all",
    **COLLECTIVE_KINDS,
}
_CAUSES = {
    True: "if the model has more in it than the plan speaks of, as adapters, state in the plan what it sends",
    False: "if the plan cuts nothing of a part, as of a mixer that is not attention, place its parameters, or state in "
    "the plan what it sends",
}
"""What may be the cause where there are more collectives than expected, and where there are fewer."""


class Sends:
    """That the forward program has exactly so many collectives over the axis, and no others: a step that counts them.

    Args:
        within: a glob over modules' qualified names; each call of a module that matches, the outermost of those that
            hold each other, has so many. By default the whole program.
        but: a glob over modules in which collectives are not counted, such as adapters.
        all_reduce, all_gather, reduce_scatter, all_to_all: how many.
        hint: what to do where there are others, if the author of the plan knows models that are so.
    """

    def __init__(
        self,
        *,
        within: str = "",
        but: str = "",
        all_reduce: int = 0,
        all_gather: int = 0,
        reduce_scatter: int = 0,
        all_to_all: int = 0,
        hint: str = "",
    ) -> None:
        counts: dict[CollectiveKind, int] = {
            "all_reduce": all_reduce,
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "all_to_all": all_to_all,
        }
        for kind, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise FxRewriteError(f"sends: {kind}={count!r} is not a number of collectives")
        self.within, self.counts, self.but, self.hint = within, counts, but, hint
        self.name = f"expect {self.text()}"
        self.needs = (COLLECTIVE_CALLS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        axis = context.axis
        if axis.size == 1:
            return 0  # one rank sends nothing
        if context.is_part and not self.within:  # a part of the program need not send all
            report.events.append(NotInPart(stated=self.name))
            return 0
        found = dict[tuple[str, str], Counter[str]]()
        where = dict[tuple[str, str, str], list[fx.Node]]()
        for node in edit.nodes():
            call = self._call(node)
            if call is None:
                continue
            counts = found.setdefault(call, Counter())
            kind = KINDS.get(node.target)
            if kind is not None and node.meta.get("axis") == axis.name:
                counts[kind] += 1
                where.setdefault((*call, kind), []).append(node)
        if not found and context.is_part:
            report.events.append(NotInPart(stated=self.name))
        elif not found:
            names = list(dict.fromkeys(name for node in edit.nodes() for name in module_names(node) if name))
            near = did_you_mean(self.within, names) or f"; the graph has {', '.join(names[:3])} ..." * bool(names)
            raise FxRewriteError(f"{self.name}: no module of the graph matches {self.within!r}{near}")
        for (call, module), counts in found.items():
            for kind in dict.fromkeys(KINDS.values()):
                expected = self.counts[kind]
                if counts[kind] != expected:
                    lines = "".join(f"\n  %{n.name}  {source_line(n)}" for n in where.get((call, module, kind), ()))
                    raise FxRewriteError(
                        f"{module or 'the program'} has {counts[kind]} {kind} over {axis.name}, and {expected} are "
                        f"expected ({self.text()}){':' if lines else ''}{lines}\n"
                        f"fxrewrite.testing.explain_placement(model, inputs, plan, mesh, {module or '*'!r}) says why; "
                        f"{_CAUSES[counts[kind] > expected]}: dataclasses.replace(plan, expect=[...]), or () to count "
                        f"nothing{'; ' if self.hint else ''}{self.hint}"
                    )
        return 0

    def _call(self, node: fx.Node) -> tuple[str, str] | None:
        """The call of a module in which the node runs, whose collectives are counted; the program is one, named ''."""
        calls = list(module_calls(node))
        if self.but and any(matches_glob(name, self.but) for _, name in calls):
            return None
        if not self.within:
            return "", ""
        return next(((call, name) for call, name in calls if matches_glob(name, self.within)), None)

    def __repr__(self) -> str:
        return f"<Sends: {self.text()}>"

    def text(self) -> str:
        counts = ", ".join(f"{kind}={count}" for kind, count in self.counts.items() if count) or "nothing"
        but = f" outside of {self.but}" if self.but else ""
        return f"sends {counts}{f' within each {self.within}' if self.within else ''}{but}"


sends = Sends


class _Begun(Event, frozen=True):
    """How often a rule had fired before the list began in which it must fire; it is in no finished report."""

    kind: Literal["begun"] = "begun"
    rule: str
    rewrites: int

    def __str__(self) -> str:
        return f"{self.rule} has fired {self.rewrites} times so far"


class Fires:
    """That a rule of the plan fires, at least so often in a program over the axis; else the nearest miss is said.

    Args:
        rule: its id, or the rule.
        at_least: how often.
    """

    def __init__(self, rule: str | Rule, *, at_least: int = 1) -> None:
        if not isinstance(at_least, int) or isinstance(at_least, bool) or at_least < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FxRewriteError(f"fires: at_least={at_least!r} is not a number of rewrites, 1 or more")
        self.rule = rule.id if isinstance(rule, Rule) else rule
        self.at_least = at_least

    def begin(self) -> Step:
        """The step before the rules among which it is."""
        return _Begin(self)

    def end(self, where: str, rule: Rule) -> Step:
        """The step after them; `where` is what the author calls them: "rules=", "placed=", "lowered=" or "method="."""
        return _End(self, where, rule)

    def text(self) -> str:
        return f"fires {self.rule}, at least {self.at_least}"

    def __repr__(self) -> str:
        return f"<Fires: {self.text()}>"


class _Begin:
    """The step that notes how often the rule has fired, on other axes."""

    def __init__(self, stated: Fires) -> None:
        self.name = f"begin {stated.text()}"
        self._rule = stated.rule

    def run(self, edit: Edit, context: object, report: Report) -> int:
        report.events.append(_Begun(rule=self._rule, rewrites=report.rule(self._rule).rewrites))
        return 0

    def text(self) -> str:
        return "counts"


class _End:
    """The step that raises if the rule has not fired as often as is stated."""

    def __init__(self, stated: Fires, where: str, rule: Rule) -> None:
        self.name = f"expect {stated.text()}"
        self._stated, self._where, self._rule = stated, where, rule

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        begun = next(one for one in reversed(report.events_of(_Begun)) if one.rule == self._rule.id)
        report.events.remove(begun)
        entry = report.rule(self._rule.id)
        found = entry.rewrites - begun.rewrites
        if found >= self._stated.at_least or context.axis.size == 1:
            return 0
        if context.is_part:
            report.events.append(NotInPart(stated=self.name))
            return 0
        refused = "".join(f"\nrefused  {refusal}" for refusal in entry.refusals)
        nodes = [node for part in edit.parts() for node in part.nodes()]
        raise MatchExpectationError(
            f"{self._rule.id} fired {found} times in {self._where} over {context.axis.name}, and "
            f"{self._stated.at_least} or more are expected{refused}\n{self._rule.explain_in(nodes)}\n"
            "rules= sees the global program, placed= that with redistributions, and lowered= what a rank computes, "
            "with its collectives"
        )

    def text(self) -> str:
        return "counts"


fires = Fires
