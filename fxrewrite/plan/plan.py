"""A plan: sets of rules in order, each once or to a fixpoint, and what runs it: a call, or a compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import fx
from torch.export import ExportedProgram

from fxrewrite import backends, ops
from fxrewrite.errors import FxRewriteError, MatchExpectationError, RuleDefinitionError, did_you_mean
from fxrewrite.graph.bodies import nodes_of, require_graph
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.garbage import few_collections
from fxrewrite.graph.outputs import Promise
from fxrewrite.graph.source import source_line
from fxrewrite.graph.text import graph_digest
from fxrewrite.identity import NoIdentityError, identity
from fxrewrite.match.explain import Explanation
from fxrewrite.match.match import Match
from fxrewrite.plan.contracts import Property
from fxrewrite.plan.found import Found, FoundMatch, describe
from fxrewrite.plan.members import MemberSet, label_of
from fxrewrite.plan.stage import Stage, open_needs
from fxrewrite.plan.sweep import Strategy, Sweep
from fxrewrite.report import ComputedOnce, Report
from fxrewrite.rule import Rule
from fxrewrite.sources import toolkit_digest
from fxrewrite.torch_versions import TORCH_VERSION

_log = logging.getLogger(__name__)
_EACH_GRAPH = (
    "in a slot of inductor the forward pass, the backward pass and each body of a higher-order operator are graphs of "
    "their own, and each has to meet the expectation; to plan.backend(...) a graph and its bodies are one"
)
JOINED_PLANS = (
    "a | b puts the rules of two sets into one sweep, and a plan says already how often its sets run; write a >> b, or "
    "join the sets before .once() and .fixpoint()"
)
_MADE_OF_SETS = "a plan is made of rule sets: write RuleSet(name, a_rule, another).once() or .fixpoint(), then a >> b"


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
            `fxrewrite.plan.contracts`. Nothing that is given over one axis is given over another one.
    """

    def __init__(self, stages: tuple[Stage, ...], expectations: Mapping[str, int] | None = None) -> None:
        for stage in stages:
            if not isinstance(stage, Stage):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RuleDefinitionError(f"{_MADE_OF_SETS}, not Plan([{stage!r}])")
        self.stages = stages
        self.needs: Mapping[Property, str] = MappingProxyType(open_needs(stages))
        self.expectations: Mapping[str, int] = MappingProxyType(dict(expectations or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A plan is a value, so that what holds one, such as a configuration, can be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.stages, dict(self.expectations))

    def __rshift__(self, other: MemberSet | Rule | Plan) -> Plan:
        """The plan that does this, and then the other."""
        other = MemberSet(other.id, other) if isinstance(other, Rule) else other
        then = Plan((Stage(other, None, Strategy()),)) if isinstance(other, MemberSet) else other
        if not isinstance(then, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"a >> b: after a plan comes a RuleSet, a Rule or a Plan, not {then!r}")
        asked = {**self.expectations, **then.expectations}
        most = {of: max(self.expectations.get(of, 0), then.expectations.get(of, 0)) for of in asked}
        return Plan(self.stages + then.stages, most)

    def __or__(self, other: object) -> NoReturn:
        raise RuleDefinitionError(JOINED_PLANS)

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
        known = [label_of(member) for stage in self.stages for member in stage.rules.leaves()]
        if rule_id not in known:
            near = did_you_mean(rule_id, known) or f"; it has {', '.join(known)}"
            raise RuleDefinitionError(f"the plan has no rule or step {rule_id!r}{near}")
        if type(at_least) is not int or at_least < 1:
            raise RuleDefinitionError(f"expect({rule_id!r}, at_least={at_least!r}): a number of changes, at least 1")
        return Plan(self.stages, {**self.expectations, rule_id: at_least})

    def apply(self, gm: fx.GraphModule, context: Any = None, *, bodies: bool = True) -> Report:
        """Rewrite the graph of `gm` in place, in one transaction, and recompile it once if it changed.

        An output that had memory of its own still has: where a rule gives back an input instead, it is copied, and
        other outputs that are views of it become views of the copy.

        Args:
            gm: the module; on any exception its graph is as before.
            context: handed to steps, and to replacements as `match.context`.
            bodies: whether graph modules that it calls, and bodies of higher-order operators, are rewritten too.

        Raises:
            RefusedError: a rule of an atomic set, or a step, refused.
            MatchExpectationError: an expectation does not hold; says how near the nearest place came.
            FixpointError: a fixpoint did not end.
        """
        require_graph("apply", gm)
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
        with few_collections(), Edit(gm, bodies=bodies) as edit:
            promises = [(part, Promise(part.gm)) for part in edit.parts()]
            yield edit, report
            for part, promise in promises:
                promise.keep(part)
            for rule_id, at_least in self.expectations.items():
                if report.rule(rule_id).rewrites < at_least:
                    unmet = self._unmet(rule_id, at_least, edit, report)
                    raise MatchExpectationError(unmet if bodies else f"{unmet}\n{_EACH_GRAPH}")
            for part, _ in promises:
                for node, (rule, sources) in part.computed.items():
                    if node.users:
                        path = f"{part.path}.{node.target}" if part.path else str(node.target)
                        report.events.append(ComputedOnce(rule=rule, attribute=path, sources=sources))
        report.seconds = time.perf_counter() - started
        _log.info("%d rewrites in %.3f s", report.rewrites, report.seconds)

    def applied(self, gm: fx.GraphModule, context: Any = None) -> tuple[fx.GraphModule, Report]:
        """A rewritten copy, and the report; `gm` stays as it is, and shares its parameters with the copy."""
        require_graph("applied", gm)
        new = copy_module(gm)
        return new, self.apply(new, context)

    def find(self, gm: fx.GraphModule) -> Found:
        """Every place where a rule of the plan matches in the graph as it is; the graph is only read.

        With the overlap policy "first" all of them, overlapping ones too; else those that the policy prefers. What
        rules would find in each other's results is not there.

        Raises:
            RuleDefinitionError: the plan has steps, such as a propagation, whose results its rules read.
        """
        require_graph("find", gm)
        steps = [member.name for stage in self.stages for member in stage.rules.steps()]
        if steps:
            raise RuleDefinitionError(
                f"find looks at rules alone, and this plan has the steps {', '.join(steps)}; apply it"
            )
        matches: dict[object, FoundMatch] = {}
        with Edit(gm) as edit:
            programs = [(program, stage.strategy) for stage in self.stages for program, _, _ in stage.rules.sweeps()]
            for (program, strategy), part in itertools.product(programs, edit.parts()):
                for rule, match in Sweep(part, None, Report(), atomic=False).find(program, strategy):
                    one = describe(rule, match, part.path, source_line(match.root))
                    matches.setdefault((rule.id, match.nodes), one)
        return Found(graph=_named_digest(gm), matches=list(matches.values()))

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
        require_graph("commit", gm)
        _require_matches(found)
        if isinstance(found, Found) and found.graph != _named_digest(gm):
            raise FxRewriteError("commit: this is not the graph in which the matches were found; find them again")
        with self._transaction(gm) as (edit, report):
            sweeps = {part.path: Sweep(part, context, report, atomic=False) for part in edit.parts()}
            for match in found:
                self._commit_one(match, sweeps.get(match.body))
            for stage in self.stages:
                stage.rules.check_invariant(edit)
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
            for program, atomic, rules in stage.rules.sweeps()
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

        Its `reports` has one report for each graph; see `fxrewrite.backends.RewritingBackend`.
        """
        self._require_whole()
        return backends.RewritingBackend(self.apply, inner, graph=graph, context=context, on_report=on_report)

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
        """What rewrites a graph in one slot: after autograd, by what its decompositions make of the patterns."""
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
        """The plan for graphs after decompositions: patterns are what the table makes of them, replacements stay.

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
                    f"{rule.id} matches nothing after decompositions: {', '.join(removed)} does not occur there, and "
                    "no sample of the pattern gave its form; apply the plan before autograd (pre_grad, plan.backend)",
                    stacklevel=2,
                )
            return rule.decomposed(found)

        stages = (dataclasses.replace(s, rules=s.rules.with_rules(change)) for s in self.stages)
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
            known = [rule.id for rule in self.rules()]
            hint = did_you_mean(rule, known) or f"; it has {', '.join(known)}"
            raise RuleDefinitionError(f"the plan has no rule {rule!r}{hint}")
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

        Patterns, options, code and closure values of replacements and predicates, with what they call in modules of the
        user's; steps and what they hold; the source of fxrewrite, and versions of torch and other packages. None, with
        a warning, where something of it has no identity but its address, as a tensor.
        """
        try:
            decisive = identity([stage.rules for stage in self.stages])
        except NoIdentityError as error:
            warnings.warn(f"this plan cannot be cached: {error}", stacklevel=2)
            return None
        parts = [self.text(), f"fxrewrite {toolkit_digest()}", f"torch {TORCH_VERSION}", decisive]
        return hashlib.sha256("\n\n".join(parts).encode()).hexdigest()


def _named_digest(gm: fx.GraphModule) -> str:
    """A digest of the graph and of the names of its nodes, by which matches are found again."""
    names = " ".join(node.name for node in nodes_of(gm))
    return hashlib.sha256(f"{graph_digest(gm)} {names}".encode()).hexdigest()


def _require_matches(found: object) -> None:
    wrong = [match for match in found if not isinstance(match, FoundMatch)] if isinstance(found, Iterable) else [found]
    if wrong:
        raise FxRewriteError(
            f"commit takes what plan.find(gm) gave, or some of its matches in a list, not {wrong[0]!r}"
        )
