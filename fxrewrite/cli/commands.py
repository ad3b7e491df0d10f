"""What the subcommands do: each says its lines as it goes, and returns an exit status and the same as JSON."""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fxrewrite.backends import apply_to_export
from fxrewrite.cli.graphs import Subject, load_graph
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph import graph_diff, graph_text, source_line
from fxrewrite.match.explain import Explanation
from fxrewrite.page import report_page
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.registry import RegistryError, load, registered
from fxrewrite.report import Report
from fxrewrite.rule import Rule

Say: TypeAlias = Callable[[str], None]


class UsageError(FxRewriteError):
    """The arguments of the command contradict each other."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has found.

    Attributes:
        data: for `--json`.
        status: exit status.
    """

    data: Any
    status: int = 0


def rules(arguments: Namespace, say: Say) -> Answer:
    """The registered sets, or the rules of one."""
    sets = registered()
    if arguments.name:
        found = load(arguments.name)
        lines = str(found).splitlines()
        shown = [_cut(line) for line in lines] if isinstance(found, RuleSet) else lines
        say("\n".join(shown))
        if shown != lines:
            say("\n`...` stands for the rest of a long pattern; `fxrewrite show ID` prints one rule whole")
        return Answer({"name": arguments.name, "rules": [_facts(rule) for rule in _distinct(found)]})
    rows: list[dict[str, Any]] = []
    for name in sets:
        row: dict[str, Any] = {"name": name, "distribution": sets.distribution(name)}
        try:
            row["rules"] = len(list(sets[name].rules()))
        except RegistryError as error:
            row["error"] = str(error)
        rows.append(row)
    if not rows:
        say("no installed package registers rule sets; see docs/cli.md")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        what = row.get("error") or f"{row['rules']:3} rule{'s' if row['rules'] != 1 else ' '}  {row['distribution']}"
        say(f"{row['name']:{width}}  {what}")
    return Answer(rows)


_PATTERN = 160
"""Characters of a line of a listing up to the end of the pattern: that of most rules is shown whole."""


def _cut(line: str) -> str:
    """A line `id   pattern -> (replacement)` with what a listing shows of the pattern."""
    pattern, arrow, replacement = line.rpartition(" -> (")
    return f"{pattern[:_PATTERN]} ...{arrow}{replacement}" if len(pattern) > _PATTERN else line


def show(arguments: Namespace, say: Say) -> Answer:
    """The text of a set, a rule or a plan, and what each of its rules promises."""
    found = load(arguments.rules)
    digest, why_not = _digest(_plan(found))
    facts = [_facts(rule) for rule in _distinct(found)]
    say(f"{found}\n")
    for fact in facts:
        order = [f"{side} {', '.join(fact[side])}" for side in ("after", "before") if fact[side]]
        promises = [f"numerics {fact['numerics']}", f"rng {fact['rng']}", f"shapes {fact['shapes']}"]
        promises += [f"domain {fact['domain']}"] if fact["domain"] != "all" else []
        promises += [f"{name} no" for name in ("terminates", "gradients") if not fact[name]]
        say(fact["id"])
        say("    " + ", ".join([*promises, *(["optional"] if fact["optional"] else []), *order]))
        say(f"    {fact['provider']}")
    say(f"\ndigest  {digest or f'none: {why_not}'}")
    return Answer({"text": str(found), "digest": digest, "rules": facts})


def explain(arguments: Namespace, say: Say) -> Answer:
    """Why rules do or do not match in a graph."""
    found = load(arguments.rules)
    gm = load_graph(arguments.graph, arguments.level).gm
    data: list[dict[str, Any]] = []
    for rule in _distinct(found):
        explanation = rule.explain(gm)
        say("\n".join([rule.id, *(f"    {line}" for line in str(explanation).splitlines())]))
        data.append({"rule": rule.id, **_explanation(explanation)})
    return Answer(data)


def verify(arguments: Namespace, say: Say) -> Answer:
    """Run pattern and replacement of every rule on drawn inputs and compare; status 1 if a rule fails."""
    found = list(_distinct(load(arguments.rules)))
    if not found:
        raise UsageError(f"{arguments.rules} has no rule to verify")
    width = max(len(rule.id) for rule in found)
    data: list[dict[str, Any]] = []
    options: dict[str, Any] = {"proof": True} if arguments.prove else {}
    for rule in found:
        try:
            verdict = rule.verify(samples=arguments.samples, seed=arguments.seed, **options)
            ok, text = bool(verdict.ok), str(verdict)
        except FxRewriteError as error:  # a rule that cannot be run does not hide the others
            ok, text = False, str(error)
        first, _, more = text.removeprefix(f"{rule.id}: ").partition("\n")
        say(f"{'ok' if ok else 'FAILED':6}  {rule.id:{width}}  {first}")
        if not ok and more:  # not indented: the counterexample is a program to be copied
            say(f"\n{more}\n")
        data.append({"rule": rule.id, "ok": ok, "verdict": text})
    failed = sum(not row["ok"] for row in data)
    say(f"{len(data) - failed} of {len(data)} rules passed")
    return Answer(data, 1 if failed else 0)


def apply(arguments: Namespace, say: Say) -> Answer:
    """Rewrite a graph; print the report and write what is asked for."""
    plan = _plan(load(arguments.rules), fixpoint=arguments.fixpoint, expected=dict(arguments.expect))
    subject = load_graph(arguments.graph, arguments.level)
    if _is_program(arguments.output) and subject.program is None:
        raise UsageError(
            f"{arguments.output} would be an exported program, but {arguments.graph} is not one; use .fx.txt"
        )
    outputs = [path for path in (arguments.output, arguments.page) if path]
    for path in outputs:
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} to write {path} to")
    after, report = _rewritten(plan, subject)
    say(str(report))
    data: dict[str, Any] = {"report": report.model_dump(mode="json")}
    if arguments.diff:
        data["diff"] = graph_diff(subject.gm, after.gm)
        say(f"\n{data['diff'] or 'the graph is as before'}")
    if arguments.output:
        _write(arguments.output, after)
    if arguments.page:
        page = report_page(report, subject.gm, after.gm, title=f"{arguments.rules} on {arguments.graph}")
        arguments.page.write_text(page, encoding="utf-8")
    data["written"] = list(map(str, outputs))
    if outputs:
        say(f"\nwrote {', '.join(data['written'])}")
    return Answer(data)


def _rewritten(plan: Plan, subject: Subject) -> tuple[Subject, Report]:
    """A rewritten copy, and the report."""
    if subject.program is None:
        gm, report = plan.applied(subject.gm)
        return Subject(gm), report
    reports: list[Report] = []
    program = apply_to_export(plan.apply, subject.program, on_report=reports.append)
    return Subject(program.graph_module, program), reports[0]


def _is_program(path: Path | None) -> bool:
    return path is not None and path.suffix == ".pt2"


def _write(path: Path, subject: Subject) -> None:
    if _is_program(path):
        assert subject.program is not None
        torch.export.save(subject.program, path)
    else:
        path.write_text(graph_text(subject.gm, rules=True) + "\n", encoding="utf-8")


def _plan(found: RuleSet | Rule | Plan, *, fixpoint: bool = False, expected: Mapping[str, int] | None = None) -> Plan:
    if isinstance(found, Rule):
        found = RuleSet(found.id, found)
    if isinstance(found, RuleSet):
        plan = found.fixpoint() if fixpoint else found.once()
    elif fixpoint:
        raise UsageError("--fixpoint is for a rule set; a plan says itself how often its sets run")
    else:
        plan = found
    for rule, at_least in (expected or {}).items():
        plan = plan.expect(rule, at_least=at_least)
    return plan


def _distinct(found: RuleSet | Rule | Plan) -> Iterator[Rule]:
    """Its rules, each once."""
    return iter({id(rule): rule for rule in ([found] if isinstance(found, Rule) else found.rules())}.values())


def _digest(plan: Plan) -> tuple[str | None, str]:
    """The digest, or None and why there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        digest = plan.digest()
    return digest, "; ".join(str(warning.message) for warning in caught)


_PROMISES = ("doc", "numerics", "rng", "shapes", "domain", "terminates", "gradients", "optional")


def _facts(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "pattern": str(rule.pattern),
        **{name: getattr(rule, name) for name in _PROMISES},
        "after": list(rule.after),
        "before": list(rule.before),
        "provider": _short(rule.provider),
    }


def _short(provider: str) -> str:
    """With paths from the current folder on, where the file is in it."""
    return re.sub(r"\((.*):(\d+)\)$", lambda found: f"({_relative(Path(found[1]))}:{found[2]})", provider)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _explanation(explanation: Explanation) -> dict[str, Any]:
    return {
        "pattern": str(explanation.pattern),
        "matches": explanation.num_matches,
        "anchors": explanation.num_anchors,
        "operators": list(explanation.root_keys),
        "misses": [
            {
                "node": miss.root.name,
                "source": source_line(miss.root),
                "passed": miss.failure.passed,
                "conditions": miss.num_conditions,
                "reason": miss.reason,
                "expected": miss.failure.expected,
                "found": miss.failure.found,
                "hint": miss.hint,
            }
            for miss in explanation.misses
        ],
    }
