"""A rule set: members in order, as the value that users write, and the plans that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import fx

from fxrewrite.backends import RewritingBackend
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match.overlap import Overlap
from fxrewrite.plan.contracts import Property
from fxrewrite.plan.members import MemberSet
from fxrewrite.plan.plan import JOINED_PLANS, Plan
from fxrewrite.plan.stage import Stage
from fxrewrite.plan.step import StagedStep, Step
from fxrewrite.plan.sweep import Order, Strategy
from fxrewrite.report import Report
from fxrewrite.rule import Rule

S = TypeVar("S", "RuleSet", Step)


class RuleSet(MemberSet):
    """Members in order, as one value.

    Neighbouring rules run in one sweep over the graph, from the last node to the first; at a node the earlier rule
    wins. `after` and `before` of a rule put it into a later or earlier sweep than other members of the set. Nested sets
    and steps run where they are written.

    Args:
        name: of the set, unique among its siblings.
        members: rules, sets and steps.
        atomic: all of its rewrites, or none: the first refusal undoes the whole plan and is raised; only rules that are
            `optional` may refuse.
        invariant: called with the nodes of the graph after the set ran; a text that says what is wrong undoes the whole
            plan.
        needs: properties of the graph that what runs before the set gives; its members may count on them.
        gives: properties that hold after it, with those that its members give.
        precedes: properties after which it is too late for it, with those that its members say.

    Raises:
        RuleDefinitionError: two members have one id (one rule may be in several nested sets), or the order has a
            cycle; both are printed. Or `after` or `before` of a rule names what is not a member; a rule that is alone
            in its set may name anything. Or a step or set among them needs what nothing before it gives; see
            `fxrewrite.plan.contracts`.
    """

    def once(self, *, order: Order = "top_down", overlap: Overlap = "first") -> Plan:
        """The plan that runs every member once; `order` and `overlap` are explained at `Strategy`."""
        return Plan((Stage(self, None, Strategy(order, overlap)),))

    def fixpoint(self, limit: int = 8, *, order: Order = "top_down", overlap: Overlap = "first") -> Plan:
        """The plan that runs the set until nothing changes; more than `limit` rounds with changes are an error.

        Raises:
            RuleDefinitionError: a rule says that it does not terminate, or `limit` is not a number above 0.
        """
        if not isinstance(limit, int) or limit < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"fixpoint(limit={limit!r}): a number of rounds, at least one")
        endless = [rule.id for rule in self.rules() if not rule.terminates]
        if endless:
            raise RuleDefinitionError(
                f"set {self.name} has no fixpoint: {', '.join(endless)} fires on its own results (terminates=False); "
                "run it in a set of its own, .once()"
            )
        return Plan((Stage(self, limit, Strategy(order, overlap)),))

    def on(self, axis: str) -> Plan:
        """`self.once().on(axis)`."""
        return self.once().on(axis)

    def __rshift__(self, other: RuleSet | Rule | Plan) -> Plan:
        """The plan that runs this set once, and then the other."""
        return self.once() >> other

    def __or__(self, other: RuleSet | Rule) -> RuleSet:
        """The set with the members of both: their rules share a sweep, and at a node the left one wins.

        Raises:
            RuleDefinitionError: one of two sets is atomic or has an invariant, which means something for it alone; nest
                it, `RuleSet(name, a, b)`. Or the other is neither a set nor a rule.
        """
        if isinstance(other, Plan):
            raise RuleDefinitionError(JOINED_PLANS)
        if not isinstance(other, (RuleSet, Rule)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"{self.name} | {other!r}: a set is joined with a RuleSet or a Rule")
        if isinstance(other, Rule):
            other = RuleSet(other.id, other)
        if any(rules.atomic or rules.invariant for rules in (self, other)):
            raise RuleDefinitionError(
                f"{self.name} | {other.name}: an atomic set, or one with an invariant, stays a set of its own; "
                "nest them: RuleSet(name, a, b)"
            )
        between = [
            p for a, b in ((self, other), (other, self)) for p in a.contract.gives if {p} & {*b.needs, *b.precedes}
        ]
        if between:
            raise RuleDefinitionError(
                f"{self.name} | {other.name}: {between[0]} orders one after the other, and joined they run in one "
                f"sweep; write {self.name} >> {other.name}, or the other way round"
            )
        return RuleSet(
            f"{self.name} | {other.name}",
            *(*self.members, *other.members),
            needs=tuple(dict.fromkeys((*self.needs, *other.needs))),
            gives=tuple(dict.fromkeys((*self.gives, *other.gives))),
            precedes=tuple(dict.fromkeys((*self.precedes, *other.precedes))),
        )

    def expect(self, rule_id: str, *, at_least: int = 1) -> Plan:
        """`self.once().expect(rule_id, at_least=at_least)`."""
        return self.once().expect(rule_id, at_least=at_least)

    def apply(self, gm: fx.GraphModule, context: Any = None) -> Report:
        """`self.once().apply(gm, context)`."""
        return self.once().apply(gm, context)

    def backend(self, inner: str | Callable[..., Any] = "inductor", **how: Any) -> RewritingBackend[Report]:
        """`self.once().backend(inner, **how)`."""
        return self.once().backend(inner, **how)


def staged(
    stage: S, *, needs: Sequence[Property] = (), gives: Sequence[Property] = (), precedes: Sequence[Property] = ()
) -> S:
    """The step or set, which needs, gives and precedes this too; where a method says what a general stage cannot know.

    Raises:
        RuleDefinitionError: one of these is not made of properties.
    """
    more: dict[str, Sequence[Property]] = {"needs": needs, "gives": gives, "precedes": precedes}
    said: dict[str, tuple[Property, ...]] = {v: (*getattr(stage, v, ()), *found) for v, found in more.items()}
    if isinstance(stage, RuleSet):
        return RuleSet(stage.name, *stage.members, atomic=stage.atomic, invariant=stage.invariant, **said)
    return StagedStep(stage, said)
