"""A report as one HTML file: what every rule did and refused, and the graph before and after, without a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from torch import fx

from fxrewrite.errors import Reason, Refusal
from fxrewrite.page.sides import Change, Line, Row, compare, written
from fxrewrite.page.style import STYLE
from fxrewrite.report import Report, RuleReport

__all__ = ["report_page"]

_MARKS = {Change.SAME: " ", Change.ARGUMENTS: "~", Change.GONE: "-", Change.MADE: "+"}
_AROUND = 3  # unchanged lines shown on each side of a change; what is left between two changes can be unfolded
_MAX_LINKS = 20  # to rewrites in the table of rules; each rewrite links to the next


def report_page(
    report: Report,
    before: fx.GraphModule | None = None,
    after: fx.GraphModule | None = None,
    *,
    title: str = "fxrewrite report",
    times: bool = True,
) -> str:
    """The page as text: one HTML file that loads nothing, has no script, and suits light and dark screens.

    Args:
        report: what the plan did.
        before: the graph as it was, a copy if the plan was applied in place; None leaves it out.
        after: the rewritten graph; None leaves it out.
        title: shown at the top.
        times: whether it says how long things took; without, equal inputs give equal pages.
    """
    page = _Page(report, before, after)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        *page.summary(times),
        *page.rules(times),
        *page.refusals(),
        *page.notes(),
        *page.graph(),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


class _Page:
    """The sections of one page, and the names of the places that they link to."""

    def __init__(self, report: Report, before: fx.GraphModule | None, after: fx.GraphModule | None) -> None:
        self._report = report
        self._rows: list[Row] = []
        self._title = "Graph"
        self._is_pair = before is not None and after is not None
        if before is not None and after is not None:
            self._rows = compare(before, after)
        elif (only := after if before is None else before) is not None:
            self._rows = [(None, line) for line in written(only)]
            self._title = "Graph after" if before is None else "Graph before"
        self._changes = [(changed, list(rows)) for changed, rows in groupby(self._rows, key=_is_changed)]
        self._silent = self._candidates()
        self._places = Counter(rule for changed, rows in self._changes if changed for rule in self._behind(rows))
        listed = dict.fromkeys(entry.rule for entry in report.rules)
        self._listed = set(listed)
        self._numbers = {rule: number for number, rule in enumerate(listed | dict.fromkeys(self._places))}
        self._num_seen: dict[str, int] = {}
        refused = {refusal.node for refusal in report.refusals}
        lines = {line.node: line for row in self._rows for line in row if line is not None and line.node in refused}
        self._anchors = {id(line): f"node-{number}" for number, line in enumerate(lines.values())}
        self._nodes = {name: self._anchors[id(line)] for name, line in lines.items()}

    def _candidates(self) -> list[str]:
        """The rules that come into question where nothing was made: an older value is read instead, by no new node."""
        seen = {rule for changed, rows in self._changes if changed for rule in _rules_of(rows)}
        fired = [entry.rule for entry in self._report.rules if entry.rewrites]
        return [rule for rule in fired if rule not in seen] or fired

    def _behind(self, rows: Sequence[Row]) -> list[str]:
        """The rules that are known to have a part in a change."""
        rules = _rules_of(rows)
        if _is_unexplained(rows) and len(self._silent) == 1:
            rules += [rule for rule in self._silent if rule not in rules]
        return rules

    def summary(self, times: bool) -> Iterator[str]:
        fired = sum(entry.rewrites > 0 for entry in self._report.rules)
        yield (
            f"<p>{_count(self._report.rewrites, 'rewrite')} by {fired} of {_count(len(self._report.rules), 'rule')}, "
            f"{_count(len(self._report.refusals), 'refusal')}"
            + (f", in {self._report.seconds:.3f} s" if times else "")
            + "</p>"
        )

    def rules(self, times: bool) -> Iterator[str]:
        yield '<h2 id="rules">Rules</h2>'
        counts = ["anchors", "matches", "rewrites", "refused", *(["ms"] if times else [])]
        heads = "".join(f'<th class="n">{name}</th>' for name in counts)
        yield '<div class="scroll"><table>'
        yield f"<thead><tr><th>rule</th>{heads}<th>refused because of</th><th>in the graph</th></tr></thead>"
        yield "<tbody>"
        for number, entry in enumerate(self._report.rules):
            numbers = [str(entry.anchors), str(entry.matches), str(entry.rewrites), str(len(entry.refusals))]
            numbers += [f"{entry.seconds * 1e3:.2f}"] if times else []
            cells = "".join(f'<td class="n">{value}</td>' for value in numbers)
            yield (
                f'<tr id="rule-{number}"><td><code>{escape(entry.rule)}</code></td>{cells}'
                f"<td>{_kinds(entry)}</td><td>{self._links(entry.rule)}</td></tr>"
            )
        yield "</tbody></table></div>"

    def refusals(self) -> Iterator[str]:
        if not self._report.refusals:
            return
        yield '<h2 id="refusals">Refusals</h2>'
        for kind in Reason:
            refusals = [refusal for refusal in self._report.refusals if refusal.kind == kind]
            if refusals:
                yield f'<h3 id="kind-{kind}">{kind} ({len(refusals)})</h3>'
                yield '<div class="scroll"><table>'
                yield "<thead><tr><th>rule</th><th>reason</th><th>node</th><th>source</th><th>hint</th></tr></thead>"
                yield "<tbody>"
                yield from (self._refusal(refusal) for refusal in refusals)
                yield "</tbody></table></div>"

    def _refusal(self, refusal: Refusal) -> str:
        node = f"<code>%{escape(refusal.node)}</code>" if refusal.node else ""
        if refusal.node in self._nodes:
            node = f'<a href="#{self._nodes[refusal.node]}">{node}</a>'
        cells = [self._rule_link(refusal.rule), escape(refusal.reason), node]
        cells += [escape(refusal.source), escape(refusal.hint)]
        return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"

    def notes(self) -> Iterator[str]:
        if self._report.events:
            yield '<h2 id="notes">Notes</h2>'
            yield "<ul>"
            yield from (f"<li>{escape(str(event))}</li>" for event in self._report.events)
            yield "</ul>"

    def graph(self) -> Iterator[str]:
        if not self._rows:
            return
        yield f'<h2 id="graph">{self._title}</h2>'
        if self._is_pair:
            yield (
                '<p class="faint">Each side has its own numbers. <span class="gone">- gone</span> '
                '<span class="made">+ made</span> <span class="arguments">~ has other arguments</span></p>'
            )
        yield '<div class="graph">'
        if self._is_pair:
            yield '<div class="row faint"><div>before</div><div>after</div></div>'
        for index, (changed, rows) in enumerate(self._changes):
            if changed:
                yield from self._change(rows)
            else:
                yield from self._unchanged(rows, first=index == 0, last=index == len(self._changes) - 1)
        yield "</div>"

    def _unchanged(self, rows: Sequence[Row], *, first: bool, last: bool) -> Iterator[str]:
        start = 0 if first else _AROUND
        stop = len(rows) if last else len(rows) - _AROUND
        if len(self._changes) == 1 or stop - start < _AROUND:  # nothing changed, or too little to fold
            yield from map(self._row, rows)
            return
        yield from map(self._row, rows[:start])
        yield f"<details><summary>{stop - start} lines that stayed</summary>"
        yield from map(self._row, rows[start:stop])
        yield "</details>"
        yield from map(self._row, rows[stop:])

    def _change(self, rows: Sequence[Row]) -> Iterator[str]:
        rules, labels = self._behind(rows), self._labels(rows)
        yield '<div class="change">'
        for index, row in enumerate(rows):
            yield self._row(row, labels if index == 0 else "", with_rules=len(rules) > 1)
        yield "</div>"

    def _row(self, row: Row, labels: str = "", with_rules: bool = False) -> str:
        before, after = row
        right = self._cell(after, labels, with_rules)
        if not self._is_pair:
            return f'<div class="row one">{right}</div>'
        return f'<div class="row">{self._cell(before, "", with_rules)}{right}</div>'

    def _cell(self, line: Line | None, labels: str, with_rules: bool) -> str:
        if line is None:
            return f"<div>{labels}</div>"
        anchor = f' id="{self._anchors[id(line)]}"' if id(line) in self._anchors else ""
        text = f"{line.text}  # {', '.join(line.rules)}" if with_rules and line.rules else line.text
        return f'<div class="{line.change}"{anchor}>{labels}{_MARKS[line.change]} {escape(text)}</div>'

    def _labels(self, rows: Sequence[Row]) -> str:
        """The rules behind a change, each with a link to its next one."""
        labels: list[str] = []
        for rule in self._behind(rows):
            number = self._num_seen[rule] = self._num_seen.get(rule, -1) + 1
            following = (
                f' <a href="#{self._place(rule, number + 1)}">next</a>' if number + 1 < self._places[rule] else ""
            )
            labels.append(f'<span id="{self._place(rule, number)}">{self._rule_link(rule)}{following}</span>')
        if _is_unexplained(rows) and len(self._silent) > 1:
            labels.append(" or ".join(map(self._rule_link, self._silent)))
        return f'<span class="by">{", ".join(labels)}</span>' if labels else ""

    def _place(self, rule: str, number: int) -> str:
        return f"rule-{self._numbers[rule]}-{number}"

    def _links(self, rule: str) -> str:
        count = self._places[rule]
        links = [f'<a href="#{self._place(rule, i)}">{i + 1}</a>' for i in range(min(count, _MAX_LINKS))]
        return " ".join(links) + (f" and {count - _MAX_LINKS} more" if count > _MAX_LINKS else "")

    def _rule_link(self, rule: str) -> str:
        name = f"<code>{escape(rule)}</code>"
        return f'<a href="#rule-{self._numbers[rule]}">{name}</a>' if rule in self._listed else name


def _is_changed(row: Row) -> bool:
    return any(line is not None and line.change in (Change.GONE, Change.MADE) for line in row)


def _is_unexplained(rows: Iterable[Row]) -> bool:
    """Whether a line went and no rule is known to have made what is read instead."""
    return any(before is not None and before.change == Change.GONE and not before.rules for before, _ in rows)


def _rules_of(rows: Iterable[Row]) -> list[str]:
    """The rules behind the lines that changed, each once."""
    return list(
        dict.fromkeys(
            rule
            for row in rows
            for line in reversed(row)
            if line is not None and line.change in (Change.GONE, Change.MADE)
            for rule in line.rules
        )
    )


def _kinds(entry: RuleReport) -> str:
    counts = {kind: sum(refusal.kind == kind for refusal in entry.refusals) for kind in Reason}
    return ", ".join(f'<a href="#kind-{kind}">{kind}</a> {count}' for kind, count in counts.items() if count)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
