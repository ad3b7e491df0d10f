"""From a root whose own tests hold to matches: further outputs, users outside, constraints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, Reason, RefusedError
from fxrewrite.graph.source import source_line
from fxrewrite.graph.walk import reached
from fxrewrite.match.lower import Link, Variant
from fxrewrite.match.match import Match
from fxrewrite.match.tests import REASONS, Candidate, Path, Test, found_text, holds, test_text
from fxrewrite.pattern.pattern import ROOT, Pattern
from fxrewrite.pattern.terms import Siblings

__all__ = ["Failure", "complete", "failed"]

_NOTHING: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class Failure:
    """The first condition that did not hold.

    Attributes:
        passed: how many conditions hold before it.
        reason: what kind of condition it is.
        expected, found: in words.
        node: where it was looked for.
        instead: the value that stands there, if it is one of the graph.
    """

    passed: int
    reason: Reason
    expected: str
    found: str
    node: fx.Node
    instead: fx.Node | None = None

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.found}"


def failed(test: Test, candidate: Candidate, passed: int, node: fx.Node) -> Failure:
    """The failure of one test below the candidate."""
    value = candidate.value(test.path)
    instead = value if isinstance(value, fx.Node) else None
    return Failure(passed, REASONS[test.kind], test_text(test), found_text(test, candidate), node, instead)


def complete(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int = 0) -> Iterable[Match | Failure]:
    """The matches of one variant below a candidate that passed the tests of output 0, and what failed on the way."""
    if variant.siblings is not None:
        return (_family(pattern, variant, variant.siblings, candidate, passed),)
    if len(variant.stages) == 1:
        return (_match(pattern, variant, candidate, passed),)
    return _with_outputs(pattern, variant, candidate, passed)


def _with_outputs(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int) -> Iterator[Match | Failure]:
    for chosen in _choose_outputs(variant, candidate, 1, passed):
        if isinstance(chosen, Failure):
            yield chosen
        else:
            yield _match(pattern, variant, chosen, passed + sum(map(len, variant.stages[1:])))


def _choose_outputs(variant: Variant, candidate: Candidate, index: int, passed: int) -> Iterator[Candidate | Failure]:
    if index == len(variant.stages):
        yield candidate
        return
    taken = {candidate.value(Path.root(output)) for output in range(index)}
    tried = False
    for node in _climb(variant.links[index - 1], candidate):
        if node in taken:
            continue
        tried = True
        chosen = candidate.choose(index, node)
        for count, test in enumerate(variant.stages[index]):
            if not holds(test, chosen):
                yield failed(test, chosen, passed + count, node)
                break
        else:
            yield from _choose_outputs(variant, chosen, index + 1, passed + len(variant.stages[index]))
    if not tried:
        wanted = variant.stages[index][0].value
        root = candidate.value(Path.root(0))
        yield Failure(passed, Reason.OUTPUT, f"output {index + 1}, {wanted}, on the same values", "none", root)


def _climb(link: Link, candidate: Candidate) -> list[fx.Node]:
    """Nodes that can be the output: users of users ... of a known value, with the operators of the pattern."""
    known = [(candidate.value(path), keys) for path, keys in link.choices]
    starts = [(value, keys) for value, keys in known if isinstance(value, fx.Node)]
    if not starts:
        return []
    start, keys = min(starts, key=lambda choice: len(choice[0].users))
    level = {start: None}
    for key in keys:
        level = {user: None for node in level for user in node.users if ops.key(user) in key}
    return sorted(level)


def _match(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int) -> Match | Failure:
    values = candidate.known(variant.paths)
    outputs: tuple[fx.Node, ...] = tuple([values[path] for path in variant.outputs])
    inner: list[fx.Node] = [values[path] for path in variant.inner]
    nodes: dict[fx.Node, None] = dict.fromkeys((*outputs, *inner))
    kept: set[fx.Node] = set()
    for path, node in zip(variant.inner, inner, strict=True):
        if node.users.keys() <= nodes.keys() or node in outputs:
            continue
        for user in node.users:
            if user not in nodes:
                if path not in variant.shared:
                    expected = f"no user of {path} outside the match"
                    found = f"%{user.name} uses %{node.name}"
                    return Failure(passed, Reason.OUTSIDE_USER, expected, found, node, user)
                kept.add(node)
    captures = {name: None if path is None else values[path] for name, path in variant.captures.items()}
    refused: RefusedError | None = None
    for count, constraint in enumerate(pattern.where):
        if any(captures[name] is None and name not in variant.literals for name in constraint.names):
            continue  # a constraint speaks of what was captured
        try:
            why_not = constraint.why_not(captures)
        except RefusedError as refusal:
            refused = refused or refusal
            continue
        except Exception as error:
            place = f"%{outputs[0].name} ({source_line(outputs[0])})".replace(" ()", "")
            raise FxRewriteError(
                f"constraint {constraint} raised {type(error).__name__} at {place}: {error}"
            ) from error
        if why_not:
            return Failure(passed + 1 + count, Reason.CONSTRAINT, str(constraint), why_not, outputs[0])
    return Match(outputs, tuple(nodes), _with_inputs(kept, nodes) if kept else _NOTHING, captures, refused)


def _family(pattern: Pattern, variant: Variant, link: Link, last: Candidate, passed: int) -> Match | Failure:
    """All siblings as one match, if this one is the last of them."""
    root = last.value(Path.root(0))
    own = _match(pattern, variant, last, passed)
    if isinstance(own, Failure):
        return own
    first = pattern.outputs[0]
    assert isinstance(first, Siblings)
    shared = own.captures[first.on]
    found: list[Match] = []
    for node in reversed(_climb(link, last)):
        if node is root:
            found.append(own)
            continue
        candidate = Candidate({Path.root(0): node})
        if not all(holds(test, candidate) for test in variant.stages[0]):
            continue
        sibling = _match(pattern, variant, candidate, passed)
        if isinstance(sibling, Match) and sibling.captures[first.on] is shared:
            if not found:
                expected = f"the last of its siblings, where the match is: %{node.name}"
                return Failure(passed, Reason.OUTPUT, expected, f"%{root.name}", root)
            found.append(sibling)
    if len(found) < first.least:
        expected = f"{first.least} siblings or more on %{shared.name}"
        return Failure(passed, Reason.OUTPUT, expected, f"{len(found)}", root)
    found.reverse()
    captures: dict[str, Any] = {name: [sibling.captures[name] for sibling in found] for name in own.captures}
    captures[first.on] = shared
    captures[ROOT] = found[0].root
    nodes = dict.fromkeys(sibling.root for sibling in found) | dict.fromkeys(n for s in found for n in s.nodes)
    kept = frozenset[fx.Node]().union(*(sibling.kept for sibling in found))
    refused = next((sibling.refused for sibling in found if sibling.refused is not None), None)
    return Match(tuple(sibling.root for sibling in found), tuple(nodes), kept, captures, refused)


def _with_inputs(kept: set[fx.Node], nodes: dict[fx.Node, None]) -> frozenset[fx.Node]:
    """What a kept node is computed from stays as well."""
    return frozenset(reached(kept, lambda node: [used for used in node.all_input_nodes if used in nodes]))
