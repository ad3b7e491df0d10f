"""One pass of rules over a graph: in which order it looks at nodes, and which of overlapping matches it rewrites."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason, Refusal, RefusedError, RuleDefinitionError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.source import source_line
from fxrewrite.match.match import Match
from fxrewrite.match.overlap import Overlap, check_overlap, choose
from fxrewrite.match.program import Program
from fxrewrite.match.safety import Effects
from fxrewrite.report import Report
from fxrewrite.rule import Rule

Order: TypeAlias = Literal["top_down", "bottom_up"]
Ruled: TypeAlias = tuple[Rule, Match]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a sweep goes about it.

    Attributes:
        order: "top_down" looks at users before what they use, so the pattern that reaches furthest down comes first;
            "bottom_up" the other way round.
        overlap: which matches are rewritten when several consume one node: the "first" one met, the "largest", or the
            "best_cover", which consumes most nodes in all. The last two look at the whole graph before the first
            rewrite; what they leave is in the report.
    """

    order: Order = "top_down"
    overlap: Overlap = "first"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise RuleDefinitionError(f"order={self.order!r} is not one of {', '.join(map(repr, get_args(Order)))}")
        check_overlap(self.overlap)

    def __str__(self) -> str:
        words = [] if self.order == "top_down" else [self.order]
        return ", ".join(words if self.overlap == "first" else [*words, f"overlap={self.overlap}"])


class Sweep:
    """Rewriting of one graph, or body of a higher-order operator, by the rules of one program.

    Args:
        edit: the transaction on that graph.
        context: handed to replacements as `match.context`.
        report: where matches, rewrites and refusals are counted.
        atomic: whether a refusal ends the plan, unless the rule is optional.
    """

    def __init__(self, edit: Edit, context: Any, report: Report, *, atomic: bool) -> None:
        self.edit = edit
        self.changes = 0
        self._context = context
        self._report = report
        self._atomic = atomic
        self._matches: Counter[Rule] = Counter()
        self._rewrites: Counter[Rule] = Counter()
        self._seconds: defaultdict[Rule, float] = defaultdict(float)

    def run(self, program: Program[Rule], strategy: Strategy) -> None:
        """Rewrite what the program finds in the nodes that are there now; new nodes are for the next sweep."""
        nodes = self._candidates(program, strategy)
        anchors: Counter[str] = Counter()
        try:
            if strategy.overlap == "first":
                self._in_turn(program, nodes, anchors)
            else:
                found = list(self._all(program, nodes, anchors))
                self._chosen(program, found, choose([match for _, match in found], strategy.overlap))
        finally:
            self._count(program, anchors)

    def find(self, program: Program[Rule], strategy: Strategy) -> list[Ruled]:
        """What `run` would rewrite, as far as that can be said before anything is: the graph is only read."""
        found = list(self._all(program, self._candidates(program, strategy), Counter()))
        if strategy.overlap == "first":
            return found
        return [found[index] for index in choose([match for _, match in found], strategy.overlap)]

    def _candidates(self, program: Program[Rule], strategy: Strategy) -> list[fx.Node]:
        nodes = program.candidates(self.edit)
        return nodes[::-1] if strategy.order == "top_down" else nodes

    @functools.cached_property
    def _effects(self) -> Effects:
        """Asked for by the first rewrite, before it changes anything."""
        return Effects(self.edit)

    @functools.cached_property
    def names(self) -> dict[str, fx.Node]:
        """The nodes by name."""
        return {node.name: node for node in self.edit.nodes()}

    def commit(self, program: Program[Rule], rule: Rule, match: Match, *, atomic: bool) -> None:
        """Rewrite a match that was found before, if it is still there."""
        self._atomic = atomic
        self._matches[rule] += 1
        try:
            self._again(program, rule, match)
        finally:
            self._count(program, Counter())

    def _in_turn(self, program: Program[Rule], nodes: Any, anchors: Counter[str]) -> None:
        erased = self.edit.erased
        for node, key in program.roots(nodes):
            if node in erased:
                continue
            anchors[key] += 1
            for rule, match in program.find(node, key):
                self._matches[rule] += 1
                if self._rewrite(rule, match):
                    break

    def _all(self, program: Program[Rule], nodes: Any, anchors: Counter[str]) -> Iterator[Ruled]:
        """Each rule's first reading at each node."""
        for node, key in program.roots(nodes):
            anchors[key] += 1
            seen: set[Rule] = set()
            for rule, match in program.find(node, key):
                if rule not in seen:
                    seen.add(rule)
                    self._matches[rule] += 1
                    yield rule, match

    def _chosen(self, program: Program[Rule], found: Sequence[Ruled], chosen: Sequence[int]) -> None:
        preferred = set(chosen)
        for index, (rule, match) in enumerate(found):
            if index not in preferred:
                reason = "another match that consumes the same nodes was preferred"
                self._refuse(rule, match.root, Reason.OVERLAP, reason)
        for index in chosen:
            self._again(program, *found[index])

    def _again(self, program: Program[Rule], rule: Rule, match: Match) -> None:
        """Rewrite a match that was found before others were rewritten: its captures may be other nodes now."""
        root, nodes = match.root, set(match.nodes)
        alive = root not in self.edit.erased
        readings = program.find(root, ops.key(root)) if alive else iter(())
        now = next((m for other, m in readings if other is rule and set(m.nodes) == nodes), None)
        if now is None:
            self._refuse(rule, root, Reason.STALE, "the match is not there any more: another rewrite took it apart")
        else:
            self._rewrite(rule, now)

    def _rewrite(self, rule: Rule, match: Match) -> bool:
        started = time.perf_counter()
        match.context = self._context
        try:
            rule.rewrite(self.edit, match, self._effects)
        except RefusedError as error:
            if self._atomic and not rule.optional:
                raise
            self._report.rule(rule.id).refuse(error.refusal)
            return False
        finally:
            self._seconds[rule] += time.perf_counter() - started
        self._rewrites[rule] += 1
        self.changes += 1
        return True

    def _refuse(self, rule: Rule, node: fx.Node, kind: Reason, reason: str) -> None:
        refusal = Refusal(rule=rule.id, reason=reason, node=node.name, source=source_line(node), kind=kind)
        if self._atomic and not rule.optional and kind is not Reason.OVERLAP:
            raise RefusedError(refusal, node)
        self._report.rule(rule.id).refuse(refusal)

    def _count(self, program: Program[Rule], anchors: Counter[str]) -> None:
        """Into the report at the end: a pydantic field costs a microsecond to set, a counter nothing."""
        for rule, keys in program.root_keys:
            entry = self._report.rule(rule.id)
            entry.anchors += sum(anchors[key] for key in keys)
            entry.matches += self._matches[rule]
            entry.rewrites += self._rewrites[rule]
            entry.seconds += self._seconds[rule]
        self._matches.clear()
        self._rewrites.clear()
        self._seconds.clear()
