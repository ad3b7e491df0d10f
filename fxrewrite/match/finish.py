"""From a root whose conditions hold to matches: chooses further outputs, checks outside users and constraints."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, Reason, RefusedError
from fxrewrite.graph.source import with_source
from fxrewrite.graph.walk import reached
from fxrewrite.match.conditions import Condition
from fxrewrite.match.lists import Failed, VariadicList, solutions
from fxrewrite.match.lower import Link, Result, Variant
from fxrewrite.match.match import Match
from fxrewrite.match.values import ABSENT, Candidate, Path
from fxrewrite.pattern.pattern import ROOT, Pattern
from fxrewrite.pattern.terms import Siblings
from fxrewrite.pattern.where.base import why_not_each

_NOTHING: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class Failure:
    """The first condition that did not hold.

    Attributes:
        passed: how many conditions held before it.
        reason: the kind of condition.
        expected, found: as text.
        node: where the condition was evaluated.
        instead: the value found there, if it is a node.
    """

    passed: int
    reason: Reason
    expected: str
    found: str
    node: fx.Node
    instead: fx.Node | None = None

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.found}"


def failed(condition: Condition, candidate: Candidate, passed: int, node: fx.Node) -> Failure:
    """The failure of one condition below the candidate."""
    value = candidate.value(condition.path)
    instead = value if isinstance(value, fx.Node) else None
    return Failure(passed, condition.kind.reason, condition.expected(), condition.found(candidate), node, instead)


def complete(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int = 0) -> Iterable[Match | Failure]:
    """Returns the matches of one variant for a candidate that meets those of output 0, and the failures met."""
    if variant.siblings is not None:
        return (_family(pattern, variant, variant.siblings, candidate, passed),)
    if variant.is_plain:
        return (_match(pattern, variant, candidate, passed),)
    return _with_outputs(pattern, variant, candidate, passed)


def _with_outputs(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int) -> Iterator[Match | Failure]:
    further = sum(map(len, variant.stages[1:])) + sum(map(len, variant.lists))
    for chosen in _with_lists(variant, candidate, 1, passed):
        read = next((result for result in variant.unread if _is_read(chosen, result)), None)
        if isinstance(chosen, Failure):
            yield chosen
        elif read is not None:
            root = chosen.value(Path.root(0))
            expected = f"a match at the first result that the graph reads, number {read.number}"
            yield Failure(passed + further, Reason.OUTPUT, expected, f"%{root.name}", root)
        else:
            yield _match(pattern, variant, chosen, passed + further)


def _is_read(candidate: Candidate | Failure, result: Result) -> bool:
    """Whether the graph takes this result of an operator, or may take it, since the operator is not known."""
    node = candidate.value(result.operator) if isinstance(candidate, Candidate) else None
    if not isinstance(node, fx.Node):
        return isinstance(candidate, Candidate)
    values = ops.value(node)
    count = len(values) if isinstance(values, (list, tuple)) else 0
    same = {result.number, result.number - count, result.number + count}
    taken = [user.args[1] for user in node.users if user.target is operator.getitem]
    return any(not isinstance(index, int) or index in same for index in taken)


def _with_lists(variant: Variant, candidate: Candidate, index: int, passed: int) -> Iterator[Candidate | Failure]:
    """Matches the lists of any length of the output before `index`, then the outputs from `index` on."""
    found = _solved(variant.lists[index - 1], candidate, passed) if variant.lists else (candidate,)
    for solved in found:
        if isinstance(solved, Failure):
            yield solved
        else:
            further = len(variant.lists[index - 1]) if variant.lists else 0
            yield from _choose_outputs(variant, solved, index, passed + further)


def _solved(lists: tuple[VariadicList, ...], candidate: Candidate, passed: int) -> Iterator[Candidate | Failure]:
    if not lists:
        yield candidate
        return
    for solved in solutions(lists[0], candidate):
        if isinstance(solved, Failed):
            yield _not_in_list(lists[0], solved, candidate, passed)
        else:
            yield from _solved(lists[1:], solved, passed + 1)


def _not_in_list(listed: VariadicList, found: Failed, candidate: Candidate, passed: int) -> Failure:
    owner = candidate.value(Path.root(0)) if listed.path.parent is None else candidate.value(listed.path.parent)
    node = owner if isinstance(owner, fx.Node) else candidate.value(Path.root(0))
    place = f"item {found.item} of {listed.path}"
    if found.condition is None:
        return Failure(passed, Reason.SAME, f"items of {listed.path} that fit together", f"others up to {place}", node)
    failure = failed(found.condition, found.candidate, passed, node)
    return replace(failure, expected=f"{failure.expected} ({place})")


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
        for count, condition in enumerate(variant.stages[index]):
            if not condition.holds(chosen):
                yield failed(condition, chosen, passed + count, node)
                break
        else:
            yield from _with_lists(variant, chosen, index + 1, passed + len(variant.stages[index]))
    result = variant.may_miss[index] if variant.may_miss else None
    if result is not None and not _is_read(candidate, result):
        tried = True
        yield from _with_lists(variant, candidate.choose(index, ABSENT), index + 1, passed)
    if not tried:
        wanted = variant.stages[index][0].operands[0]
        root = candidate.value(Path.root(0))
        yield Failure(passed, Reason.OUTPUT, f"output {index + 1}, {wanted}, on the same values", "none", root)


def _climb(link: Link, candidate: Candidate) -> list[fx.Node]:
    """Returns the nodes that may be the output: repeated users of a known value, by the operators of the pattern."""
    known = [(candidate.value(path), keys) for path, keys in link]
    known += [(value[0], keys) for value, keys in known if isinstance(value, list) and value]
    starts = [(value, keys) for value, keys in known if isinstance(value, fx.Node)]
    if not starts:
        return []
    start, keys = min(starts, key=lambda choice: len(choice[0].users))
    # Climb from the value with the fewest users, so that a mask that all layers read is not walked through all of them.
    level = {start: None}
    for key in keys:
        level = {user: None for node in level for user in node.users if ops.key(user) in key}
    return sorted(level)


def _match(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int) -> Match | Failure:
    values = candidate.known(variant.paths)
    outputs: tuple[fx.Node, ...] = tuple([values[path] for path in variant.outputs])
    missing: tuple[int, ...] = tuple(range(variant.first))
    below = variant.below
    if variant.may_miss:
        missing += tuple(variant.first + place for place, node in enumerate(outputs) if node is ABSENT)
        outputs = tuple(node for node in outputs if node is not ABSENT)
        below = [one for one in below if values[one[0]] is not ABSENT]
    nodes: dict[fx.Node, None] = dict.fromkeys([*outputs, *[values[path] for path, _ in below]])
    items: list[tuple[fx.Node, bool]] = []
    if variant.lists:
        items = [item for lists in variant.lists for one in lists for item in values[one.nodes]]
        nodes.update((node, None) for node, _ in items)
    # Nodes with users outside of the match, whether they may have some, and where the pattern has them.
    inside = nodes.keys()
    exposed = [(values[path], is_shared, path) for path, is_shared in below if not values[path].users.keys() <= inside]
    exposed += [(node, is_shared, "an item") for node, is_shared in items if not node.users.keys() <= inside]
    kept: set[fx.Node] = set()
    unread: list[fx.Node] = []
    for node, is_shared, place in exposed:
        if node in outputs:
            continue
        outside = [user for user in node.users if user not in nodes]
        reading = [user for user in outside if user.users or user.target is not operator.getitem]
        if not reading:  # tracing takes every result of an operator, also those that nothing reads
            unread += outside
            continue
        if not is_shared:
            user = reading[0]
            expected, found = f"no user of {place} outside the match", f"%{user.name} uses %{node.name}"
            return Failure(passed, Reason.OUTSIDE_USER, expected, found, node, user)
        kept.add(node)
    captures = {name: None if path is None else values[path] for name, path in variant.captures.items()}
    refused = _refused(pattern, variant, captures, outputs[0], passed) if pattern.where else None
    if isinstance(refused, Failure):
        return refused
    stay = _with_inputs(kept, nodes) if kept else _NOTHING
    return Match(outputs, tuple(nodes), stay, captures, refused, missing, tuple(unread))


def _refused(
    pattern: Pattern, variant: Variant, captures: Mapping[str, Any], root: fx.Node, passed: int
) -> RefusedError | Failure | None:
    """Returns why the first constraint does not hold, or the first refusal of one: a match that is refused is found."""
    refused: RefusedError | None = None
    for count, constraint in enumerate(pattern.where):
        # A constraint on a capture that is absent holds; of a Python value that is captured, None is one like others.
        values = pattern.values
        if any(captures[n] is None and (variant.captures[n] is None or n not in values) for n in constraint.names):
            continue
        try:
            why_not = why_not_each(constraint, captures, pattern.lists)
        except RefusedError as refusal:
            refused = refused or refusal
            continue
        except Exception as error:
            raise FxRewriteError(
                f"constraint {constraint} raised {type(error).__name__} at {with_source(root)}: {error}"
            ) from error
        if why_not:
            return Failure(passed + 1 + count, Reason.CONSTRAINT, str(constraint), why_not, root)
    return refused


def _family(pattern: Pattern, variant: Variant, link: Link, last: Candidate, passed: int) -> Match | Failure:
    """Returns all siblings as one match if this root is the last of them, so that a family is found once."""
    root = last.value(Path.root(0))
    own = _match(pattern, variant, last, passed)
    if isinstance(own, Failure):
        return own
    first = pattern.outputs[0]
    assert isinstance(first, Siblings)
    shared = own.captures[first.on]
    found: list[Match] = []
    # Collect siblings from the last to the first. A match that comes before `root` was found means that `root` is not
    # the last sibling; then the last one reports the family.
    for node in reversed(_climb(link, last)):
        if node is root:
            found.append(own)
            continue
        candidate = Candidate({Path.root(0): node})
        if not all(condition.holds(candidate) for condition in variant.stages[0]):
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
    unread = tuple(node for sibling in found for node in sibling.unread)
    return Match(tuple(sibling.root for sibling in found), tuple(nodes), kept, captures, refused, (), unread)


def _with_inputs(kept: set[fx.Node], nodes: dict[fx.Node, None]) -> frozenset[fx.Node]:
    """What a kept node is computed from stays as well."""
    return frozenset(reached(kept, lambda node: [used for used in node.all_input_nodes if used in nodes]))
