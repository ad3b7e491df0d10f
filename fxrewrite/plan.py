"""Rule sets and plans: which rules run in which order, how often, all or none, and what they are expected to do."""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, runtime_checkable

import networkx as nx
import torch
from torch import fx

from fxrewrite.errors import FixpointError, MatchExpectationError, RefusedError, RuleDefinitionError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.source import source_line
from fxrewrite.match.explain import Explanation, explain
from fxrewrite.match.program import Program
from fxrewrite.match.safety import Effects
from fxrewrite.pattern.identity import NoIdentityError, identity
from fxrewrite.report import Report
from fxrewrite.rule import Rule

__all__ = ["Plan", "RuleSet", "Step"]

_log = logging.getLogger(__name__)


@runtime_checkable
class Step(Protocol):
    """A pass over the graph that is no rewrite rule, such as a propagation; it takes part in sets like a rule does."""

    name: str

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Do it through `edit`, and return the number of changes. May raise `RefusedError`."""
        ...

    def text(self) -> str:
        """What it does, for `print(RuleSet)`; together with the name it is the step's part of the digest."""
        ...


Member: TypeAlias = "Rule | RuleSet | Step"


class RuleSet:
    """Members in order, as one value.

    Neighbouring rules run in one sweep over the graph, from the last node to the first; at a node the earlier rule
    wins. `after` and `before` of a rule put it into a later or earlier sweep. Nested sets and steps run where they
    stand.

    Args:
        name: of the set, unique among its siblings.
        members: rules, sets and steps.
        atomic: all of its rewrites, or none: the first refusal undoes the whole plan and is raised; only rules that are
            `optional` may refuse.

    Raises:
        RuleDefinitionError: two members have one id, or the order has a cycle; both are printed.
    """

    def __init__(self, name: str, *members: Member, atomic: bool = False) -> None:
        self.name = name
        self.members = members
        self.atomic = atomic
        seen: dict[str, str] = {}
        for label, provider in _labels(self):
            if label in seen:
                raise RuleDefinitionError(f"set {name}: {label} is defined twice, in {seen[label]} and in {provider}")
            seen[label] = provider
        self._levels = _levels(self)
        self._programs: dict[int, Program[Rule]] = {}

    def rules(self) -> Iterator[Rule]:
        """All rules of the set and of the sets in it."""
        for member in self.members:
            if isinstance(member, Rule):
                yield member
            elif isinstance(member, RuleSet):
                yield from member.rules()

    def once(self) -> Plan:
        """The plan that runs every member once."""
        return Plan((_Stage(self, None),))

    def fixpoint(self, limit: int = 8) -> Plan:
        """The plan that runs the set until nothing changes; more than `limit` rounds with changes are an error."""
        return Plan((_Stage(self, limit),))

    def __rshift__(self, other: RuleSet | Plan) -> Plan:
        return self.once() >> other

    def apply(self, gm: fx.GraphModule, context: Any = None) -> Report:
        """`self.once().apply(gm, context)`."""
        return self.once().apply(gm, context)

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Run every member once inside a transaction; returns the number of changes."""
        return self._run(edit, context, report, self.atomic)

    def _run(self, edit: Edit, context: Any, report: Report, atomic: bool) -> int:
        changes = 0
        for index, level in enumerate(self._levels):
            if isinstance(level, tuple):
                if index not in self._programs:
                    self._programs[index] = Program([(rule, rule.pattern) for rule in level])
                changes += _sweep(self._programs[index], edit, context, report, atomic)
            elif isinstance(level, RuleSet):
                changes += level._run(edit, context, report, atomic or level.atomic)
            else:
                changes += _run_step(level, edit, context, report)
        return changes

    def text(self) -> str:
        """The page that `print` shows: every rule as `id   pattern -> (what the replacement says it does)`."""
        rows: list[str] = [self.name + (" (atomic)" if self.atomic else "")]
        width = max((len(_label(member)) for member in self.members if not isinstance(member, RuleSet)), default=0)
        for member in self.members:
            if isinstance(member, RuleSet):
                rows += [f"  {line}" for line in member.text().splitlines()]
            elif isinstance(member, Rule):
                rows.append(f"  {member.id:{width}}   {member.pattern} -> ({member.doc or 'undocumented'})")
            else:
                rows.append(f"  {member.name:{width}}   {member.text()}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<RuleSet {self.name}: {len(self.members)} members>"


@dataclass(frozen=True, slots=True)
class _Stage:
    rules: RuleSet
    limit: int | None

    def run(self, edit: Edit, context: Any, report: Report, atomic: bool) -> None:
        if self.limit is None:
            self.rules._run(edit, context, report, atomic or self.rules.atomic)  # pyright: ignore[reportPrivateUsage]
            return
        before: dict[str, int] = {}
        for _ in range(self.limit + 1):
            before = {entry.rule: entry.rewrites for entry in report.rules}
            if not self.rules._run(edit, context, report, atomic or self.rules.atomic):  # pyright: ignore[reportPrivateUsage]
                return
        fired = [
            f"{e.rule} ({e.rewrites - before.get(e.rule, 0)})"
            for e in report.rules
            if e.rewrites > before.get(e.rule, 0)
        ]
        raise FixpointError(
            f"set {self.rules.name} still changes the graph after {self.limit} rounds; in the last one fired "
            f"{', '.join(fired)}: two rules undo each other, or limit= is too small"
        )


class Plan:
    """Rule sets in sequence, each once or to a fixpoint; what `torch.compile` backends run.

    Attributes:
        stages: the sets, in order.
        expectations: rule id -> least number of rewrites.
    """

    def __init__(self, stages: tuple[_Stage, ...]) -> None:
        self.stages = stages
        self.expectations: dict[str, int] = {}

    def __rshift__(self, other: RuleSet | Plan) -> Plan:
        then = other.once() if isinstance(other, RuleSet) else other
        plan = Plan(self.stages + then.stages)
        plan.expectations = {**self.expectations, **then.expectations}
        return plan

    def rules(self) -> Iterator[Rule]:
        """All rules, in order; a rule of a set that runs twice comes twice."""
        for stage in self.stages:
            yield from stage.rules.rules()

    def expect(self, rule_id: str, *, at_least: int = 1) -> Plan:
        """From now on `apply` fails, and changes nothing, when the rule or step makes fewer changes. Returns the plan.

        Raises:
            RuleDefinitionError: the plan has no rule or step of that name.
        """
        known = [label for stage in self.stages for label, _ in _labels(stage.rules)]
        if rule_id not in known:
            raise RuleDefinitionError(f"the plan has no rule or step {rule_id!r}; it has {', '.join(known)}")
        self.expectations[rule_id] = at_least
        return self

    def apply(self, gm: fx.GraphModule, context: Any = None) -> Report:
        """Rewrite the graph of `gm` in place, in one transaction, and recompile it once if it changed.

        Args:
            gm: the module; on any exception its graph is exactly as before.
            context: handed to steps, and to replacements as `match.context`.

        Raises:
            RefusedError: a rule of an atomic set, or a step, refused.
            MatchExpectationError: an expectation does not hold; says how near the nearest place came.
            FixpointError: a fixpoint did not end.
        """
        started = time.perf_counter()
        report = Report()
        for rule in self.rules():
            rule.body  # noqa: B018  # a rule without a replacement is an error before anything is touched
            report.rule(rule.id)
        with Edit(gm) as edit:
            for stage in self.stages:
                stage.run(edit, context, report, atomic=False)
            for rule_id, at_least in self.expectations.items():
                if report.rule(rule_id).rewrites < at_least:
                    raise MatchExpectationError(self._unmet(rule_id, at_least, edit, report))
        report.seconds = time.perf_counter() - started
        _log.info("%d rewrites in %.3f s", report.rewrites, report.seconds)
        return report

    def explain(self, gm: fx.GraphModule, rule: Rule | str) -> Explanation:
        """Why a rule of the plan does or does not match in the graph as it is.

        Raises:
            RuleDefinitionError: the plan has no such rule.
        """
        return self._rule(rule).explain(gm)

    def _rule(self, rule: Rule | str) -> Rule:
        found = rule if isinstance(rule, Rule) else next((r for r in self.rules() if r.id == rule), None)
        if found is None:
            raise RuleDefinitionError(f"the plan has no rule {rule!r}; it has {', '.join(r.id for r in self.rules())}")
        return found

    def _unmet(self, rule_id: str, at_least: int, edit: Edit, report: Report) -> str:
        entry = report.rule(rule_id)
        lines = [f"{rule_id}: expected at least {at_least} rewrites, made {entry.rewrites}; the graph is as before"]
        lines += [f"refused  {refusal}" for refusal in entry.refusals]
        if any(rule.id == rule_id for rule in self.rules()):
            lines.append(str(explain(self._rule(rule_id).pattern, edit.nodes())))
        return "\n".join(lines)

    def text(self) -> str:
        """The stages and their rules; input of the digest."""
        rows: list[str] = []
        for stage in self.stages:
            how = "once" if stage.limit is None else f"fixpoint(limit={stage.limit})"
            rows.append(f"{how}: {stage.rules.text()}")
        rows += [f"expect {rule_id} at least {count}" for rule_id, count in self.expectations.items()]
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()

    def digest(self) -> str | None:
        """sha256 over everything that decides what the plan does: a key for compile caches, equal in every process.

        Patterns, options, code and closure values of replacements and predicates, steps, versions of fxrewrite and
        torch. None, with a warning, when a replacement closes over an object that has no identity but its address.
        """
        parts = [self.text(), f"fxrewrite {_version()}", f"torch {torch.__version__}"]
        try:
            for rule in self.rules():
                options = (rule.id, rule.numerics, rule.rng, rule.shapes, rule.optional, rule.after, rule.before)
                parts += [
                    repr(options),
                    identity(rule.body),
                    *(identity(constraint) for constraint in rule.pattern.where),
                ]
        except NoIdentityError as error:
            warnings.warn(f"this plan cannot be cached: {error}", stacklevel=2)
            return None
        return hashlib.sha256("\n\n".join(parts).encode()).hexdigest()


def _sweep(program: Program[Rule], edit: Edit, context: Any, report: Report, atomic: bool) -> int:
    """One pass over the nodes that are there now, users before what they use, so that the largest match comes first."""
    nodes = edit.nodes()
    effects = Effects(nodes, edit.erased)
    anchors: Counter[str] = Counter()
    changes = 0
    for node, key in program.roots(reversed(nodes)):
        if node in edit.erased:
            continue
        anchors[key] += 1
        for rule, match in program.find(node, key):
            entry = report.rule(rule.id)
            entry.matches += 1
            started = time.perf_counter()
            try:
                match.context = context
                rule.rewrite(edit, match, effects)
            except RefusedError as error:
                if atomic and not rule.optional:
                    raise
                entry.refuse(error.refusal)
            else:
                entry.rewrites += 1
                changes += 1
                break
            finally:
                entry.seconds += time.perf_counter() - started
    for rule, keys in program.root_keys:
        report.rule(rule.id).anchors += sum(anchors[key] for key in keys)
    return changes


def _run_step(step: Step, edit: Edit, context: Any, report: Report) -> int:
    entry = report.rule(step.name)
    started = time.perf_counter()
    try:
        changes = step.run(edit, context, report)
    except RefusedError as error:
        node = error.located_at
        source = source_line(node) if isinstance(node, fx.Node) else ""
        raise error.filled(rule=step.name, source=source) from error
    finally:
        entry.seconds += time.perf_counter() - started
    entry.rewrites += changes
    return changes


def _label(member: Member) -> str:
    return member.id if isinstance(member, Rule) else member.name


def _labels(rules: RuleSet) -> Iterator[tuple[str, str]]:
    """(id or name, where it is defined) of all members, also in nested sets."""
    for member in rules.members:
        if isinstance(member, Rule):
            yield member.id, member.provider
        elif isinstance(member, RuleSet):
            yield from _labels(member)
        else:
            yield member.name, f"{type(member).__module__}.{type(member).__qualname__}"


def _levels(rules: RuleSet) -> list[tuple[Rule, ...] | RuleSet | Step]:
    """The members in the order in which they run; rules that may share a sweep are together.

    Raises:
        RuleDefinitionError: after=, before= and the order of the members contradict each other.
    """
    members = rules.members
    place = {_label(member): index for index, member in enumerate(members)}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(members)))
    for index, member in enumerate(members):
        if isinstance(member, Rule):  # an id that is not in the set orders nothing
            order.add_edges_from((place[label], index) for label in member.after if label in place)
            order.add_edges_from((index, place[label]) for label in member.before if label in place)
    fixed = [index for index, member in enumerate(members) if not isinstance(member, Rule)]
    order.add_edges_from(pairwise(fixed))
    for index, member in enumerate(members):
        if isinstance(member, Rule):
            order.add_edges_from((index, later) for later in fixed if later > index)
            order.add_edges_from((earlier, index) for earlier in fixed if earlier < index)
    try:
        generations = [sorted(generation) for generation in nx.topological_generations(order)]
    except nx.NetworkXUnfeasible:
        cycle = " before ".join(_label(members[a]) for a, _ in nx.find_cycle(order))
        first = cycle.partition(" before ")[0]
        raise RuleDefinitionError(f"set {rules.name}: the order has a cycle: {cycle} before {first}") from None
    levels: list[tuple[Rule, ...] | RuleSet | Step] = []
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


def _version() -> str:
    try:
        return version("fxrewrite")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "uninstalled"
