"""Rule sets and plans: which rules run in which order, how often, all or none, and what they are expected to do."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, overload, runtime_checkable

import torch
from torch import fx
from torch.export import ExportedProgram

from fxrewrite import backends, ops
from fxrewrite.errors import (
    FixpointError,
    FxRewriteError,
    InvariantError,
    MatchExpectationError,
    RefusedError,
    RuleDefinitionError,
    did_you_mean,
)
from fxrewrite.found import Found, FoundMatch, describe
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.digest import graph_digest
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.outputs import Promise
from fxrewrite.graph.source import source_line
from fxrewrite.identity import NoIdentityError, identity
from fxrewrite.match.explain import Explanation
from fxrewrite.match.match import Match
from fxrewrite.match.program import Program
from fxrewrite.order import generations
from fxrewrite.pattern.terms import Op, subterms
from fxrewrite.report import ComputedOnce, Report
from fxrewrite.rule import Rule, misread_context
from fxrewrite.stages import Contract, Property, checked
from fxrewrite.sweep import Order, Overlap, Strategy, Sweep
from fxrewrite.torch_versions import TORCH_VERSION

__all__ = ["Plan", "RuleSet", "Step", "staged"]

_log = logging.getLogger(__name__)


@runtime_checkable
class Step(Protocol):
    """A pass over the graph that is no rewrite rule, such as a propagation; it takes part in sets like a rule does.

    It may have `needs`, `gives` and `precedes`, tuples of `Property`: see `fxrewrite.stages`.
    """

    name: str

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Do it through `edit`, and return the number of changes. May raise `RefusedError`."""
        ...

    def text(self) -> str:
        """What it does, for `print(RuleSet)`; together with the name it is the step's part of the digest."""
        ...


Member: TypeAlias = "Rule | RuleSet | Step"
Invariant: TypeAlias = Callable[[Sequence[fx.Node]], str]
"""What must be true of the nodes of a graph: an empty text when it is, else what is wrong."""
_JOINED_PLANS = (
    "a | b puts the rules of two sets into one sweep, and a plan says already how often its sets run; write a >> b, or "
    "join the sets before .once() and .fixpoint()"
)


class RuleSet:
    """Members in order, as one value.

    Neighbouring rules run in one sweep over the graph, from the last node to the first; at a node the earlier rule
    wins. `after` and `before` of a rule put it into a later or earlier sweep than other members of the set. Nested sets
    and steps run where they stand.

    Args:
        name: of the set, unique among its siblings.
        members: rules, sets and steps.
        atomic: all of its rewrites, or none: the first refusal undoes the whole plan and is raised; only rules that are
            `optional` may refuse.
        invariant: called with the nodes of the graph after the set ran; a text that says what is wrong undoes the whole
            plan.
        needs: properties of the graph that what runs before the set gives; its members may count on them.
        gives: properties that hold after it, beside those that its members give.
        precedes: properties after which it is too late for it, beside those that its members say.

    Raises:
        RuleDefinitionError: two members have one id (one rule may be in several nested sets), or the order has a
            cycle; both are printed. Or `after` or `before`
            of a rule names what is not a member; a rule that is alone in its set may name anything. Or a step or set
            among them needs what nothing before it gives; see `fxrewrite.stages`.
    """

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
        wrong = [member for member in members if not isinstance(member, (Rule, RuleSet, Step))]  # pyright: ignore[reportUnnecessaryIsInstance]
        if wrong or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = wrong[0] if wrong else name
            raise RuleDefinitionError(
                f"RuleSet(name, member, ...) takes a name, then rules, sets and steps one by one, not {found!r}"
            )
        is_repeated = len({id(member) for member in members}) < len(members)
        seen: dict[str, tuple[Rule | Step, str]] = {}
        for member, provider in _leaves(self):
            label = _label(member)
            first, place = seen.get(label, (None, ""))
            is_shared = first is member and isinstance(member, Rule) and not is_repeated
            if first is not None and not is_shared:
                raise RuleDefinitionError(f"set {name}: {label} is defined twice, in {place} and in {provider}")
            seen[label] = member, provider
        self.needs, self.gives, self.precedes = tuple(needs), tuple(gives), tuple(precedes)
        self.contract = self._checked()
        self._levels = _levels(self)
        self._programs: dict[int, Program[Rule]] = {}

    def _checked(self) -> Contract:
        """What the set and its members need, give and precede together."""
        own = Contract.of(self.name, self.needs, self.gives, self.precedes)
        stages = [_contract(member) for member in self.members if not isinstance(member, Rule)]
        inside = checked(f"set {self.name}", [*stages, Contract(self.name, gives=own.gives)], self.needs)
        return Contract(self.name, {**own.needs, **inside.needs}, inside.gives, {**inside.precedes, **own.precedes})

    def rules(self) -> Iterator[Rule]:
        """All rules of the set and of the sets in it."""
        for member in self.members:
            if isinstance(member, Rule):
                yield member
            elif isinstance(member, RuleSet):
                yield from member.rules()

    def once(self, *, order: Order = "top_down", overlap: Overlap = "first") -> Plan:
        """The plan that runs every member once; `order` and `overlap` are explained at `Strategy`."""
        return Plan((_Stage(self, None, Strategy(order, overlap)),))

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
        return Plan((_Stage(self, limit, Strategy(order, overlap)),))

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
            raise RuleDefinitionError(_JOINED_PLANS)
        if not isinstance(other, (RuleSet, Rule)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"{self.name} | {other!r}: a set is joined with a RuleSet or a Rule")
        if isinstance(other, Rule):
            needs, gives, precedes = self.needs, self.gives, self.precedes
            name, members = f"{self.name} | {other.id}", (*self.members, other)
            return RuleSet(name, *members, needs=needs, gives=gives, precedes=precedes)
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

    def apply(self, gm: fx.GraphModule, context: Any = None) -> Report:
        """`self.once().apply(gm, context)`."""
        return self.once().apply(gm, context)

    def _with_rules(self, change: Callable[[Rule], Rule]) -> RuleSet:
        """The set with other rules in their places, which have the same ids."""
        new = copy.copy(self)
        new.members = tuple(
            change(member)
            if isinstance(member, Rule)
            else member._with_rules(change)
            if isinstance(member, RuleSet)
            else member
            for member in self.members
        )
        new._levels, new._programs = _levels(new), {}
        return new

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Run every member once inside a transaction; returns the number of changes."""
        return self._run(edit, context, report, self.atomic, Strategy())

    def _run(self, edit: Edit, context: Any, report: Report, atomic: bool, strategy: Strategy) -> int:
        changes = 0
        for index, level in enumerate(self._levels):
            if isinstance(level, tuple):
                for part in edit.parts():
                    sweep = Sweep(part, context, report, atomic=atomic)
                    sweep.run(self._program(index, level), strategy)
                    changes += sweep.changes
            elif isinstance(level, RuleSet):
                changes += level._run(edit, context, report, atomic or level.atomic, strategy)
            else:
                changes += _run_step(level, edit, context, report)
        self._check(edit)
        return changes

    def _check(self, edit: Edit) -> None:
        if self.invariant is not None:
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

    def _all_programs(self, atomic: bool) -> Iterator[tuple[Program[Rule], bool, tuple[Rule, ...]]]:
        """The program of each sweep, whether it is part of an atomic set, and its rules."""
        for index, level in enumerate(self._levels):
            if isinstance(level, tuple):
                yield self._program(index, level), atomic or self.atomic, level
            elif isinstance(level, RuleSet):
                yield from level._all_programs(atomic or self.atomic)

    def text(self) -> str:
        """The page that `print` shows: every rule as `id   pattern -> (what the replacement says it does)`."""
        said = Contract.of(self.name, self.needs, self.gives, self.precedes)
        rows: list[str] = [_with(said, self.name + (" (atomic)" if self.atomic else ""))]
        width = max((len(_label(member)) for member in self.members if not isinstance(member, RuleSet)), default=0)
        for member in self.members:
            if isinstance(member, RuleSet):
                rows += [f"  {line}" for line in member.text().splitlines()]
            elif isinstance(member, Rule):
                rows.append(f"  {member.id:{width}}   {member.pattern} -> ({member.doc or 'undocumented'})")
            else:
                rows.append(f"  {member.name:{width}}   {_with(_contract(member), member.text())}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<RuleSet {self.name}: {len(self.members)} members>"


@dataclass(frozen=True, slots=True)
class _Stage:
    rules: RuleSet
    limit: int | None
    strategy: Strategy
    axis: str = ""

    def run(self, edit: Edit, context: Any, report: Report, previous: _Stage | None) -> None:
        if self.axis:
            context = self._on_axis(edit, context, starts=previous is None or previous.axis != self.axis)
        if self.limit is None:
            self._once(edit, context, report)
            return
        before: dict[str, int] = {}
        for _ in range(self.limit + 1):
            before = {entry.rule: entry.rewrites for entry in report.rules}
            if not self._once(edit, context, report):
                return
        fired = [
            f"{e.rule} ({e.rewrites - before.get(e.rule, 0)})"
            for e in report.rules
            if e.rewrites > before.get(e.rule, 0)
        ]
        if len(fired) == 1:
            why = "its result holds its own pattern (run the set .once(), or bound the rule by a constraint)"
        else:
            why = "rules undo each other"
        raise FixpointError(
            f"set {self.rules.name} still changes the graph after {self.limit} rounds; in the last one fired "
            f"{', '.join(fired)}: {why}, or limit= is too small"
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
        return self.rules._run(edit, context, report, self.rules.atomic, self.strategy)  # pyright: ignore[reportPrivateUsage]

    def __str__(self) -> str:
        how = "once" if self.limit is None else f"fixpoint(limit={self.limit})"
        where = f" on {self.axis}" if self.axis else ""
        return f"{how}{where}, {self.strategy}" if str(self.strategy) else f"{how}{where}"


class Plan:
    """Rule sets in order, each once or to a fixpoint; what `torch.compile` backends run.

    A value: what changes it, such as `expect` and `>>`, gives another plan.

    Attributes:
        stages: the sets, in order.
        expectations: rule id -> least number of rewrites.
        needs: properties of the graph that a stage needs and no stage before it gives, with the stage's name: the plan
            is a part of another one, `what_gives_them >> plan`, and cannot be applied alone.

    Raises:
        RuleDefinitionError: a stage comes before what it needs, or after what it precedes; or two give the same. See
            `fxrewrite.stages`. Nothing that is given over one axis is given over another one.
    """

    def __init__(self, stages: tuple[_Stage, ...], expectations: Mapping[str, int] | None = None) -> None:
        self.stages = stages
        self.needs: Mapping[Property, str] = MappingProxyType(_open_needs(stages))
        self.expectations: Mapping[str, int] = MappingProxyType(dict(expectations or {}))

    def __rshift__(self, other: RuleSet | Rule | Plan) -> Plan:
        """The plan that does this, and then the other."""
        other = RuleSet(other.id, other) if isinstance(other, Rule) else other
        then = other.once() if isinstance(other, RuleSet) else other
        if not isinstance(then, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"a >> b: after a plan comes a RuleSet, a Rule or a Plan, not {then!r}")
        return Plan(self.stages + then.stages, {**self.expectations, **then.expectations})

    def __or__(self, other: object) -> NoReturn:
        raise RuleDefinitionError(_JOINED_PLANS)

    def on(self, axis: str) -> Plan:
        """The plan over one axis of a mesh: `apply` is then given a mapping, and its members get `context[axis]`.

        Plans over several axes run one after the other, `a.on("dp") >> b.on("sp")`: a graph that is lowered over one
        axis is a program on one device for the next. See `fxrewrite.spmd.contexts`.

        Raises:
            RuleDefinitionError: a part of it is on an axis already.
        """
        placed = next((stage for stage in self.stages if stage.axis), None)
        if placed is not None:
            raise RuleDefinitionError(f"set {placed.rules.name} is on axis {placed.axis!r} already, not on {axis!r}")
        return Plan(tuple(dataclasses.replace(stage, axis=axis) for stage in self.stages), self.expectations)

    def rules(self) -> Iterator[Rule]:
        """All rules, in order; a rule of a set that runs twice comes twice."""
        for stage in self.stages:
            yield from stage.rules.rules()

    def expect(self, rule_id: str, *, at_least: int = 1) -> Plan:
        """The plan whose `apply` fails, and changes nothing, when the rule or step makes fewer changes.

        Raises:
            RuleDefinitionError: the plan has no rule or step of that name, or `at_least` is not a number above 0.
        """
        known = [_label(member) for stage in self.stages for member, _ in _leaves(stage.rules)]
        if rule_id not in known:
            near = did_you_mean(rule_id, known) or f"; it has {', '.join(known)}"
            raise RuleDefinitionError(f"the plan has no rule or step {rule_id!r}{near}")
        if type(at_least) is not int or at_least < 1:
            raise RuleDefinitionError(f"expect({rule_id!r}, at_least={at_least!r}): a number of changes, at least 1")
        return Plan(self.stages, {**self.expectations, rule_id: at_least})

    def apply(self, gm: fx.GraphModule, context: Any = None, *, bodies: bool = True) -> Report:
        """Rewrite the graph of `gm` in place, in one transaction, and recompile it once if it changed.

        An output that had memory of its own still has: where a rule gives back an input instead, it is copied.

        Args:
            gm: the module; on any exception its graph is exactly as before.
            context: handed to steps, and to replacements as `match.context`.
            bodies: whether bodies of higher-order operators are rewritten too.

        Raises:
            RefusedError: a rule of an atomic set, or a step, refused.
            MatchExpectationError: an expectation does not hold; says how near the nearest place came.
            FixpointError: a fixpoint did not end.
        """
        _require_graph("apply", gm)
        with self._transaction(gm, bodies=bodies) as (edit, report):
            for before, stage in zip((None, *self.stages), self.stages, strict=False):
                stage.run(edit, context, report, before)
        return report

    @contextlib.contextmanager
    def _transaction(self, gm: fx.GraphModule, *, bodies: bool = True) -> Generator[tuple[Edit, Report]]:
        """What the body does to the graph is done if outputs keep what they promise, and expectations hold."""
        self._require_whole()
        started = time.perf_counter()
        report = Report()
        for rule in self.rules():
            rule.body  # noqa: B018  # a rule without a replacement is an error before anything is touched
            report.rule(rule.id)
        with Edit(gm, bodies=bodies) as edit:
            promises = [(part, Promise(part.gm)) for part in edit.parts()]
            yield edit, report
            for part, promise in promises:
                promise.keep(part)
            for rule_id, at_least in self.expectations.items():
                if report.rule(rule_id).rewrites < at_least:
                    raise MatchExpectationError(self._unmet(rule_id, at_least, edit, report))
            for part, _ in promises:
                for node, (rule, sources) in part.computed.items():
                    if node.users:
                        path = f"{part.path}.{node.target}" if part.path else str(node.target)
                        report.events.append(ComputedOnce(rule=rule, attribute=path, sources=sources))
        report.seconds = time.perf_counter() - started
        _log.info("%d rewrites in %.3f s", report.rewrites, report.seconds)

    def applied(self, gm: fx.GraphModule, context: Any = None) -> tuple[fx.GraphModule, Report]:
        """A rewritten copy, and the report; `gm` stays as it is, and shares its parameters with the copy."""
        _require_graph("applied", gm)
        new = copy_module(gm)
        return new, self.apply(new, context)

    def find(self, gm: fx.GraphModule) -> Found:
        """Every place where a rule of the plan matches in the graph as it is; the graph is only read.

        With the overlap policy "first" all of them, overlapping ones too; else those that the policy prefers. What
        rules would find in each other's results is not there.

        Raises:
            RuleDefinitionError: the plan has steps, such as a propagation, whose results its rules read.
        """
        _require_graph("find", gm)
        steps = [member.name for stage in self.stages for member in _steps(stage.rules)]
        if steps:
            raise RuleDefinitionError(
                f"find looks at rules alone, and this plan has the steps {', '.join(steps)}; apply it"
            )
        matches: dict[object, FoundMatch] = {}
        with Edit(gm) as edit:
            for stage in self.stages:
                for program, _, _ in stage.rules._all_programs(atomic=False):  # pyright: ignore[reportPrivateUsage]
                    for part in edit.parts():
                        sweep = Sweep(part, None, Report(), atomic=False)
                        found = sweep.find(program, stage.strategy)
                        for rule, match in found:
                            one = describe(rule, match, part.path, source_line(match.root))
                            matches.setdefault((rule.id, match.nodes), one)
        return Found(graph=graph_digest(gm), matches=list(matches.values()))

    def commit(self, gm: fx.GraphModule, found: Found | Iterable[FoundMatch], context: Any = None) -> Report:
        """Rewrite the given matches and no others, in their order, in one transaction.

        A match that another rewrite took apart is in the report as refused (`Reason.STALE`); in an atomic set that
        undoes everything.

        Raises:
            FxRewriteError: `gm` is not the graph in which they were found, a match names a rule or a node that does not
                exist, or something else was given than matches.
            RefusedError: a rule of an atomic set refused.
            MatchExpectationError: an expectation does not hold.
        """
        _require_graph("commit", gm)
        _require_matches(found)
        if isinstance(found, Found) and found.graph != graph_digest(gm):
            raise FxRewriteError("commit: this is not the graph in which the matches were found; find them again")
        with self._transaction(gm) as (edit, report):
            sweeps = {part.path: Sweep(part, context, report, atomic=False) for part in edit.parts()}
            for match in found:
                self._commit_one(match, sweeps.get(match.body))
            for stage in self.stages:
                stage.rules._check(edit)  # pyright: ignore[reportPrivateUsage]
        return report

    def _commit_one(self, match: FoundMatch, sweep: Sweep | None) -> None:
        rule = self._rule(match.rule)
        names = {} if sweep is None else sweep.names
        unknown = [name for name in match.nodes if name not in names]
        if sweep is None or unknown:
            raise FxRewriteError(
                f"commit: {match} names {', '.join(unknown) or match.body}, which the graph does not have"
            )
        program, atomic = next(
            (program, atomic)
            for stage in self.stages
            for program, atomic, rules in stage.rules._all_programs(atomic=False)  # pyright: ignore[reportPrivateUsage]
            if rule in rules
        )
        outputs, nodes = (tuple(names[name] for name in group) for group in (match.outputs, match.nodes))
        sweep.commit(program, rule, Match(outputs, nodes, frozenset(), {}), atomic=atomic)

    def _require_whole(self) -> None:
        for needed, label in self.needs.items():
            by = f", such as {needed.given_by}," if needed.given_by else ""
            raise RuleDefinitionError(
                f"the plan cannot run alone: {label} needs {needed!s}, and no stage before it gives that; write "
                f"a set{by} that does >> this"
            )

    def backend(
        self,
        inner: str | Callable[..., Any] = "inductor",
        *,
        graph: Literal["torch", "aten"] = "torch",
        context: Any = None,
        on_report: Callable[[Report], None] | None = None,
    ) -> backends.RewritingBackend[Report]:
        """The backend for `torch.compile(model, backend=...)` that runs the plan and then compiles with `inner`.

        Its `reports` has one report for each graph; see `fxrewrite.backends.rewriting_backend`.
        """
        self._require_whole()
        return backends.rewriting_backend(self.apply, inner, graph=graph, context=context, on_report=on_report)

    def in_inductor(
        self, slot: backends.Slot, *, context: Any = None
    ) -> contextlib.AbstractContextManager[backends.GraphPass[Report]]:
        """`with plan.in_inductor("post_grad_pre"):` what inductor compiles inside is rewritten in that slot.

        After what is installed there already. Inductor's caches tell plans apart by `digest`; a plan that has none is
        never cached. See `fxrewrite.backends.installed`.
        """
        return backends.installed(slot, self._in_slot(slot), self.digest(), context=context)

    def graph_pass(self, slot: backends.Slot, *, context: Any = None) -> backends.GraphPass[Report]:
        """The plan as inductor's pass for one slot, for whoever installs it by another way than `in_inductor`.

        Called with a graph it rewrites the module of the graph; `uuid()` is its key in caches, `reports` has one report
        for each graph.
        """
        return backends.GraphPass(slot, self._in_slot(slot), self.digest(), context)

    def _in_slot(self, slot: backends.Slot) -> Callable[[fx.GraphModule, Any], Report]:
        """What rewrites a graph in one slot: behind autograd, by what its decompositions make of the patterns."""
        self._require_whole()
        known: dict[Any, Plan] = {}

        def apply(gm: fx.GraphModule, context: Any) -> Report:
            plan = self
            if slot != "pre_grad":
                tensors = [value for node in gm.graph.nodes for value in ops.tensors_of(node)]
                dtypes = frozenset(value.dtype for value in tensors if value.is_floating_point())
                ranks = frozenset(value.ndim for value in tensors if value.ndim)
                if (dtypes, ranks) not in known:
                    known[dtypes, ranks] = self.decomposed(backends.inductor_table(), dtypes=dtypes, ranks=ranks)
                plan = known[dtypes, ranks]
            return plan.apply(gm, context, bodies=False)  # inductor passes the bodies itself

        return apply

    def decomposed(
        self,
        table: Mapping[Any, Callable[..., Any]],
        *,
        dtypes: Iterable[torch.dtype] = (torch.float32,),
        ranks: Collection[int] = (1, 2, 3, 4),
    ) -> Plan:
        """The plan for graphs behind decompositions: patterns are what the table makes of them, replacements stay.

        A rule of which every operator is left by the table stays as it is. Others match for inputs of the ranks and
        dtypes of samples, which are decomposed here: that takes about a second a rule. What a rule matches is in
        `rule.forms`. One whose operators the table removes, and of which no form is found, matches nothing; a warning
        says so.

        Args:
            table: decompositions by overload, such as `torch.export.default_decompositions()`.
            dtypes: of floating-point inputs.
            ranks: of inputs.
        """
        dtypes = sorted(dtypes, key=str)

        def change(rule: Rule) -> Rule:
            removed = backends.decomposed_in(rule.pattern, table)
            if not removed:
                return rule
            found = backends.forms(rule.pattern, table, dtypes, ranks)
            if not found:
                warnings.warn(
                    f"{rule.id} matches nothing behind decompositions: {', '.join(removed)} never stands there, and no "
                    "sample of the pattern gave a form of it; apply the plan before autograd (pre_grad, plan.backend)",
                    stacklevel=2,
                )
            return rule.decomposed(found)

        stages = (dataclasses.replace(s, rules=s.rules._with_rules(change)) for s in self.stages)  # pyright: ignore[reportPrivateUsage]
        return Plan(tuple(stages), self.expectations)

    def apply_export(self, program: ExportedProgram, context: Any = None) -> ExportedProgram:
        """A rewritten copy of an exported program, with its signature; see `fxrewrite.backends.apply_to_export`."""
        return backends.apply_to_export(self.apply, program, context=context)

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
            nodes = [node for part in edit.parts() for node in part.nodes()]
            lines += ["in the graph as the plan would leave it:"] if entry.rewrites else []
            lines.append(str(self._rule(rule_id).explain_in(nodes)))
        return "\n".join(lines)

    def text(self) -> str:
        """The stages and their rules; input of the digest."""
        rows = [f"{stage}: {stage.rules.text()}" for stage in self.stages]
        rows += [f"expect {rule_id} at least {count}" for rule_id, count in self.expectations.items()]
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()

    def digest(self) -> str | None:
        """sha256 over everything that decides what the plan does: a key for compile caches, equal in every process.

        Patterns, options, code and closure values of replacements and predicates, steps, versions of fxrewrite and
        torch. None, with a warning, when a replacement, or a function in a pattern, closes over an object that has no
        identity but its address.
        """
        parts = [self.text(), f"fxrewrite {_version()}", f"torch {TORCH_VERSION}"]
        try:
            for rule in self.rules():
                promises = (rule.numerics, rule.rng, rule.shapes, rule.domain, rule.terminates, rule.gradients)
                options = (rule.id, *promises, rule.optional, rule.after, rule.before)
                terms = itertools.chain.from_iterable(map(subterms, rule.pattern.outputs))
                unnamed = next((t.key for t in terms if isinstance(t, Op) and ops.is_by_address(t.key)), "")
                if unnamed:
                    raise NoIdentityError(f"{unnamed} in the pattern of {rule.id} has no identity but its address")
                parts += [
                    repr(options),
                    identity(rule.body),
                    *(identity(constraint) for constraint in rule.pattern.where),
                ]
            parts += [identity(rules.invariant) for stage in self.stages for rules in _nested(stage.rules)]
        except NoIdentityError as error:
            warnings.warn(f"this plan cannot be cached: {error}", stacklevel=2)
            return None
        return hashlib.sha256("\n\n".join(parts).encode()).hexdigest()


def _require_graph(method: str, gm: object) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise FxRewriteError(
            f"{method} takes an fx.GraphModule, not {type(gm).__name__}; for an exported program there is "
            "plan.apply_export, for a model torch.compile(model, backend=plan.backend(...))"
        )


def _require_matches(found: object) -> None:
    wrong = [match for match in found if not isinstance(match, FoundMatch)] if isinstance(found, Iterable) else [found]
    if wrong:
        raise FxRewriteError(
            f"commit takes what plan.find(gm) gave, or some of its matches in a list, not {wrong[0]!r}"
        )


def _run_step(step: Step, edit: Edit, context: Any, report: Report) -> int:
    entry = report.rule(step.name)
    started = time.perf_counter()
    try:
        changes = step.run(edit, context, report)
    except RefusedError as error:
        node = error.located_at
        source = source_line(node) if isinstance(node, fx.Node) else ""
        raise error.filled(rule=step.name, source=source) from error
    except AttributeError as error:
        misread = misread_context(error, context)
        if misread:
            raise FxRewriteError(f"{step.name}: {misread}; the graph is as before") from error
        raise
    finally:
        entry.seconds += time.perf_counter() - started
    entry.rewrites += changes
    return changes


def _nested(rules: RuleSet) -> Iterator[RuleSet]:
    """The set, and all sets in it."""
    yield rules
    for member in rules.members:
        if isinstance(member, RuleSet):
            yield from _nested(member)


def _steps(rules: RuleSet) -> Iterator[Step]:
    for nested in _nested(rules):
        yield from (member for member in nested.members if not isinstance(member, (Rule, RuleSet)))


def _contract(stage: RuleSet | Step) -> Contract:
    if isinstance(stage, RuleSet):
        return stage.contract
    said = (tuple(getattr(stage, verb, ())) for verb in ("needs", "gives", "precedes"))
    return Contract.of(stage.name, *said)


def _with(contract: Contract, text: str) -> str:
    """A text, with what the stage needs, gives and precedes at the end of its first line."""
    first, *rest = text.split("\n")
    return "\n".join([f"{first}   [{contract}]" if str(contract) else first, *rest])


def _open_needs(stages: Sequence[_Stage]) -> dict[Property, str]:
    """What the first stages need and none of them gives; stages on one axis know nothing of those on another one."""
    found: dict[Property, str] = {}
    for number, (axis, group) in enumerate(itertools.groupby(stages, key=lambda stage: stage.axis)):
        contracts = [stage.rules.contract for stage in group]
        needs = checked(f"plan on {axis}" if axis else "plan", contracts, () if number else None).needs
        found = found or needs
    return found


class _StagedStep:
    """A step under a contract that the step itself does not have."""

    def __init__(self, step: Step, said: Mapping[str, tuple[Property, ...]]) -> None:
        self.name, self.step = step.name, step
        self.needs, self.gives, self.precedes = said["needs"], said["gives"], said["precedes"]

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        return self.step.run(edit, context, report)

    def text(self) -> str:
        return self.step.text()


@overload
def staged(
    stage: RuleSet,
    *,
    needs: Sequence[Property] = (),
    gives: Sequence[Property] = (),
    precedes: Sequence[Property] = (),
) -> RuleSet: ...
@overload
def staged(
    stage: Step, *, needs: Sequence[Property] = (), gives: Sequence[Property] = (), precedes: Sequence[Property] = ()
) -> Step: ...
def staged(
    stage: RuleSet | Step,
    *,
    needs: Sequence[Property] = (),
    gives: Sequence[Property] = (),
    precedes: Sequence[Property] = (),
) -> RuleSet | Step:
    """The step or set, which needs, gives and precedes this too; where a method says what a general stage cannot know.

    Raises:
        RuleDefinitionError: one of these is not made of properties.
    """
    more: dict[str, Sequence[Property]] = {"needs": needs, "gives": gives, "precedes": precedes}
    said: dict[str, tuple[Property, ...]] = {v: (*getattr(stage, v, ()), *found) for v, found in more.items()}
    Contract.of(stage.name, *said.values())
    if not isinstance(stage, RuleSet):
        return _StagedStep(stage, said)
    new = copy.copy(stage)
    new.needs, new.gives, new.precedes = said["needs"], said["gives"], said["precedes"]
    new.contract = new._checked()  # pyright: ignore[reportPrivateUsage]
    return new


def _label(member: Member) -> str:
    return member.id if isinstance(member, Rule) else member.name


def _leaves(rules: RuleSet) -> Iterator[tuple[Rule | Step, str]]:
    """(rule or step, where it is defined) of all members, also in nested sets."""
    for member in rules.members:
        if isinstance(member, Rule):
            yield member, member.provider
        elif isinstance(member, RuleSet):
            yield from _leaves(member)
        else:
            kind = type(member.step if isinstance(member, _StagedStep) else member)
            yield member, f"{kind.__module__}.{kind.__qualname__}"


def _levels(rules: RuleSet) -> list[tuple[Rule, ...] | RuleSet | Step]:
    """The members in the order in which they run; rules that may share a sweep are together."""
    members = rules.members
    movable = {index: (m.after, m.before) for index, m in enumerate(members) if isinstance(m, Rule)}
    known = [_label(member) for member in members]
    for member in members if len(members) > 1 else ():
        for side in ("after", "before") if isinstance(member, Rule) else ():
            for label in (label for label in getattr(member, side) if label not in known):
                near = did_you_mean(label, known) or f"; it has {', '.join(known)}"
                raise RuleDefinitionError(
                    f"set {rules.name}: rule {_label(member)} is to run {side} {label!r}, which the set lacks{near}"
                )
    levels: list[tuple[Rule, ...] | RuleSet | Step] = []
    for generation in generations(rules.name, known, movable):
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
