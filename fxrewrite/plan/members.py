"""Rules, sets and steps in order: which of them share a sweep, and how they run in a transaction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Self, TypeAlias

import networkx as nx
from torch import fx

from fxrewrite.errors import InvariantError, RuleDefinitionError, did_you_mean
from fxrewrite.graph.edit import Edit
from fxrewrite.match.program import Program
from fxrewrite.plan.contracts import Contract, Property, checked
from fxrewrite.plan.step import Step, contract_of, provider_of, run_step
from fxrewrite.plan.sweep import Strategy, Sweep
from fxrewrite.report import Report
from fxrewrite.rule import Rule

Member: TypeAlias = "Rule | MemberSet | Step"
Invariant: TypeAlias = Callable[[Sequence[fx.Node]], str]
"""What must be true of the nodes of a graph: an empty text when it is, else what is wrong."""
_Level: TypeAlias = "tuple[Rule, ...] | MemberSet | Step"
"""What runs at once: the rules of one sweep, or a nested set, or a step."""
_DEFAULT_STRATEGY = Strategy()


class MemberSet:
    """Members in order, as they run; what users write is `RuleSet`, which says what the arguments are."""

    def __init__(
        self,
        name: str,
        *members: Member,
        atomic: bool = False,
        invariant: Invariant | None = None,
        needs: Sequence[Property] = (),
        gives: Sequence[Property] = (),
        precedes: Sequence[Property] = (),
    ) -> None:
        self.name = name
        self.members = members
        self.atomic = atomic
        self.invariant = invariant
        wrong = [member for member in members if not isinstance(member, (Rule, MemberSet, Step))]  # pyright: ignore[reportUnnecessaryIsInstance]
        if wrong or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = wrong[0] if wrong else name
            raise RuleDefinitionError(
                f"RuleSet(name, member, ...) takes a name, then rules, sets and steps one by one, not {found!r}"
            )
        self._require_distinct()
        self.needs, self.gives, self.precedes = tuple(needs), tuple(gives), tuple(precedes)
        self.contract = self._checked_contract()
        self._levels = _levels(self)
        self._programs: dict[int, Program[Rule]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A set is a value, as each of its members is."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}  # they hold compiled code, which cannot be pickled

    def _require_distinct(self) -> None:
        is_repeated = len({id(member) for member in self.members}) < len(self.members)
        seen: dict[str, tuple[Rule | Step, str]] = {}
        for member in self.leaves():
            label, provider = label_of(member), member.provider if isinstance(member, Rule) else provider_of(member)
            first, place = seen.get(label, (None, ""))
            if first is not None and (first is not member or is_repeated):
                if first is member:
                    raise RuleDefinitionError(f"set {self.name}: {label} is listed twice; leave one of them out")
                raise RuleDefinitionError(f"set {self.name}: {label} is defined twice, in {place} and in {provider}")
            seen[label] = member, provider

    def _checked_contract(self) -> Contract:
        """What the set and its members need, give and precede together."""
        own = Contract.of(self.name, self.needs, self.gives, self.precedes)
        stages = [contract_of(member) for member in self.members if not isinstance(member, Rule)]
        inside = checked(f"set {self.name}", [*stages, Contract(self.name, gives=own.gives)], self.needs)
        return Contract(self.name, {**own.needs, **inside.needs}, inside.gives, {**inside.precedes, **own.precedes})

    # What is in it

    def rules(self) -> Iterator[Rule]:
        """All rules of the set and of the sets in it."""
        return (member for member in self.leaves() if isinstance(member, Rule))

    def steps(self) -> Iterator[Step]:
        """All steps of the set and of the sets in it."""
        return (member for member in self.leaves() if not isinstance(member, Rule))

    def leaves(self) -> Iterator[Rule | Step]:
        """All rules and steps, also in nested sets."""
        for member in self.members:
            if isinstance(member, MemberSet):
                yield from member.leaves()
            else:
                yield member

    def sweeps(self, *, atomic: bool = False) -> Iterator[tuple[Program[Rule], bool, tuple[Rule, ...]]]:
        """The program of each sweep, whether it is part of an atomic set, and its rules."""
        for index, level in enumerate(self._levels):
            if isinstance(level, tuple):
                yield self._program(index, level), atomic or self.atomic, level
            elif isinstance(level, MemberSet):
                yield from level.sweeps(atomic=atomic or self.atomic)

    def decisive(self) -> tuple[Any, ...]:
        """What decides what the set does; see `fxrewrite.identity`."""
        return self.name, self.atomic, self.invariant, self.members

    # Other sets made of it

    def with_rules(self, change: Callable[[Rule], Rule]) -> Self:
        """The set with other rules in their places, which have the same ids."""
        new = copy.copy(self)
        new.members = tuple(
            change(member)
            if isinstance(member, Rule)
            else member.with_rules(change)
            if isinstance(member, MemberSet)
            else member
            for member in self.members
        )
        new._levels, new._programs = _levels(new), {}
        return new

    # Running

    def run(
        self, edit: Edit, context: Any, report: Report, *, atomic: bool = False, strategy: Strategy = _DEFAULT_STRATEGY
    ) -> int:
        """Runs every member once in a transaction, and returns the number of changes."""
        atomic = atomic or self.atomic
        changes = 0
        for index, level in enumerate(self._levels):
            if isinstance(level, tuple):
                for part in edit.parts():
                    sweep = Sweep(part, context, report, atomic=atomic)
                    sweep.run(self._program(index, level), strategy)
                    changes += sweep.changes
            elif isinstance(level, MemberSet):
                changes += level.run(edit, context, report, atomic=atomic, strategy=strategy)
            else:
                changes += run_step(level, edit, context, report)
        self.check_invariant(edit)
        return changes

    def check_invariant(self, edit: Edit) -> None:
        """Raises `InvariantError` if the invariant does not hold of the graph."""
        if self.invariant is None:
            return
        try:
            wrong = self.invariant(edit.nodes())
        except Exception as error:
            raise InvariantError(
                f"set {self.name}: the invariant raised {type(error).__name__}: {error}; the graph is as before"
            ) from error
        if wrong is not None and not isinstance(wrong, str):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise InvariantError(
                f"set {self.name}: the invariant gave {wrong!r}; it gives a text that says what is wrong, or ''"
            )
        if wrong:
            raise InvariantError(f"set {self.name}: after it, {wrong}; the graph is as before")

    def _program(self, index: int, rules: Sequence[Rule]) -> Program[Rule]:
        if index not in self._programs:
            self._programs[index] = Program([(rule, form) for rule in rules for form in rule.forms])
        return self._programs[index]

    # Printing

    def text(self) -> str:
        """The page that `print` shows: every rule as `id   pattern -> (what the replacement says it does)`."""
        said = Contract.of(self.name, self.needs, self.gives, self.precedes)
        rows: list[str] = [_with_contract(said, self.name + (" (atomic)" if self.atomic else ""))]
        width = max((len(label_of(member)) for member in self.members if not isinstance(member, MemberSet)), default=0)
        for member in self.members:
            if isinstance(member, MemberSet):
                rows += [f"  {line}" for line in member.text().splitlines()]
            elif isinstance(member, Rule):
                rows.append(f"  {member.id:{width}}   {member.pattern} -> ({member.doc or 'undocumented'})")
            else:
                rows.append(f"  {member.name:{width}}   {_with_contract(contract_of(member), member.text())}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<RuleSet {self.name}: {len(self.members)} members>"


def label_of(member: Member) -> str:
    """What a member is called: the id of a rule, the name of a set or a step."""
    return member.id if isinstance(member, Rule) else member.name


def _with_contract(contract: Contract, text: str) -> str:
    """A text, with what the stage needs, gives and precedes at the end of its first line."""
    first, *rest = text.split("\n")
    return "\n".join([f"{first}   [{contract}]" if str(contract) else first, *rest])


def _levels(rules: MemberSet) -> list[_Level]:
    """The members in the order in which they run; rules that may share a sweep are together.

    Raises:
        RuleDefinitionError: what runs before what has a cycle, which is printed.
    """
    members = rules.members
    labels = [label_of(member) for member in members]
    place = {label: index for index, label in enumerate(labels)}
    if len(members) > 1:
        _require_known(rules, labels)
    fixed = [index for index, member in enumerate(members) if not isinstance(member, Rule)]
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(members)))
    order.add_edges_from(pairwise(fixed))
    for index, member in enumerate(members):
        if isinstance(member, Rule):  # which moves as far as it says, and across nothing that stays where it is
            order.add_edges_from((place[label], index) for label in member.after if label in place)
            order.add_edges_from((index, place[label]) for label in member.before if label in place)
            order.add_edges_from((index, later) for later in fixed if later > index)
            order.add_edges_from((earlier, index) for earlier in fixed if earlier < index)
    try:
        generations = [sorted(generation) for generation in nx.topological_generations(order)]
    except nx.NetworkXUnfeasible:
        cycle = " before ".join(str(labels[a]) for a, _ in nx.find_cycle(order))
        first = cycle.partition(" before ")[0]
        raise RuleDefinitionError(f"set {rules.name}: the order has a cycle: {cycle} before {first}") from None
    levels: list[_Level] = []
    for generation in generations:
        together: list[Rule] = []
        for index in generation:
            member = members[index]
            if isinstance(member, Rule):
                together.append(member)
            else:
                levels.append(member)
        if together:
            levels.append(tuple(together))
    return levels


def _require_known(rules: MemberSet, known: Sequence[str]) -> None:
    """Raises if a rule is to run before or after what the set does not have."""
    for member in rules.members:
        for side in ("after", "before") if isinstance(member, Rule) else ():
            for label in (label for label in getattr(member, side) if label not in known):
                near = did_you_mean(label, known) or f"; it has {', '.join(known)}"
                raise RuleDefinitionError(
                    f"set {rules.name}: rule {label_of(member)} is to run {side} {label!r}, which the set lacks{near}"
                )
