"""What stages of a plan need and give, so that an order which cannot work is an error where the plan is made.

    PLACEMENTS = Property("placements", given_by="a PropagatePlacements step")

A stage, which is a step or a set of rules, may say of properties of the graph that it

    needs      them: a stage before it gives them
    gives      them: they hold after it; only one stage of a plan gives each
    precedes   them: it does nothing right any more after a stage that gives them

Stages run in the order in which they are written; that order is checked, never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from fxrewrite.errors import RuleDefinitionError


@dataclass(frozen=True, slots=True)
class Property:
    """Something that stages make true of a graph.

    Attributes:
        name: a noun, for messages and for `print(plan)`; properties of one name are equal.
        given_by: a stage that gives it, for messages.
    """

    name: str
    given_by: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Contract:
    """What a stage needs, gives and precedes; for each property, the stage inside of it that does."""

    name: str
    needs: dict[Property, str] = field(default_factory=dict[Property, str])
    gives: dict[Property, str] = field(default_factory=dict[Property, str])
    precedes: dict[Property, str] = field(default_factory=dict[Property, str])

    @staticmethod
    def of(
        name: str, needs: Iterable[Property] = (), gives: Iterable[Property] = (), precedes: Iterable[Property] = ()
    ) -> Contract:
        """The contract of a stage that says so itself.

        Raises:
            RuleDefinitionError: one of these is not made of properties.
        """
        said: dict[str, Any] = {"needs": needs, "gives": gives, "precedes": precedes}
        for verb, found in said.items():
            if isinstance(found, str) or not all(isinstance(item, Property) for item in found):
                raise RuleDefinitionError(f"{name}: {verb}={found!r}: a tuple of Property objects")
        return Contract(name, *(dict.fromkeys(found, name) for found in said.values()))

    def __str__(self) -> str:
        said = {"needs": self.needs, "gives": self.gives, "precedes": self.precedes}
        return "; ".join(f"{verb} {', '.join(map(str, found))}" for verb, found in said.items() if found)


_BEFORE = "a set before this one"


def checked(where: str, stages: Sequence[Contract], outside: Iterable[Property] | None = ()) -> Contract:
    """The contract of stages that run one after the other.

    Args:
        where: the set or plan that they are in, for messages.
        stages: the contracts of its members, in order.
        outside: what is given before the first of them. None: whatever they need and none of them gives.

    Raises:
        RuleDefinitionError: a stage needs what none gives before it; two give one property; a stage comes after what it
            precedes; or stages need each other, in a cycle. Names the stages, and what to do.
    """
    known = dict.fromkeys(outside or (), _BEFORE)
    joined = Contract(where)
    giver = {given: stage for stage in reversed(stages) for given in stage.gives}
    for stage in stages:
        for needed, label in stage.needs.items():
            if needed in known:
                if known[needed] == _BEFORE:
                    joined.needs.setdefault(needed, label)
                continue
            if needed in giver:
                later = giver[needed]
                what = f"{label} needs {needed!s}, which {later.gives[needed]} gives after it"
                raise _misplaced(where, stages, f"{what}; write {later.name} before {stage.name}")
            if outside is not None:
                by = f": {needed.given_by} gives it" if needed.given_by else ""
                raise RuleDefinitionError(
                    f"{where}: {label} needs {needed!s}, and no stage before it gives that; add one before it{by}; or, "
                    f"where this is a part of a plan, say RuleSet(..., needs=...) of it"
                )
            known[needed] = _BEFORE
            joined.needs[needed] = label
        for late, label in stage.precedes.items():
            if late in known:
                what = f"{label} precedes {late!s}, which {known[late]} gives before it"
                raise _misplaced(where, stages, f"{what}; write {stage.name} earlier")
            joined.precedes.setdefault(late, label)
        for given, label in stage.gives.items():
            if given in known:
                raise RuleDefinitionError(
                    f"{where}: {label} gives {given!s}, which {known[given]} gives already; leave one of them out, "
                    "or run each over an axis of its own, .on(axis)"
                )
            known[given] = label
            joined.gives[given] = label
    return joined


def _misplaced(where: str, stages: Sequence[Contract], what: str) -> RuleDefinitionError:
    """The order is wrong, as `what` says; or no order is right, and the cycle says why."""
    order: nx.DiGraph[str] = nx.DiGraph()
    giver = {given: stage.name for stage in stages for given in stage.gives}
    for stage in stages:
        order.add_edges_from((giver[p], stage.name, {"why": f"gives {p!s} to"}) for p in stage.needs if p in giver)
        order.add_edges_from(
            (stage.name, giver[p], {"why": f"precedes {p!s} of"}) for p in stage.precedes if p in giver
        )
    try:
        cycle = nx.find_cycle(order)
    except nx.NetworkXNoCycle:
        return RuleDefinitionError(f"{where}: {what}")
    said = ", ".join(f"{a} {order.edges[a, b]['why']} {b}" for a, b in cycle)
    return RuleDefinitionError(f"{where}: no order is right: {said}; split one of these stages in two")
