"""What a graph looks like in the middle of a plan, for snapshot tests of one stage after the other."""

from __future__ import annotations

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.text import graph_text
from fxrewrite.plan import RuleSet
from fxrewrite.plan.members import Member, label_of
from fxrewrite.report import Report


class Recorder:
    """The step that keeps the canonical text of the graph as it finds it.

    Attributes:
        text_there: the text, empty before the plan ran.
    """

    def __init__(self, name: str) -> None:
        self.name, self.text_there = name, ""

    def run(self, edit: Edit, context: object, report: Report) -> int:
        self.text_there = graph_text(edit.gm, without=edit.erased)
        return 0

    def text(self) -> str:
        return "keeps the text of the graph"


def recorded(rules: RuleSet) -> tuple[RuleSet, dict[str, Recorder]]:
    """The set with a recorder after each of its members; and the recorders, by the member's id or name."""
    recorders: dict[str, Recorder] = {}
    members: list[Member] = []
    for member in rules.members:
        name = label_of(member)
        recorders[name] = Recorder(f"after {name}")
        members += [member, recorders[name]]
    made = RuleSet(
        rules.name,
        *members,
        atomic=rules.atomic,
        invariant=rules.invariant,
        needs=rules.needs,
        gives=rules.gives,
        precedes=rules.precedes,
    )
    return made, recorders
