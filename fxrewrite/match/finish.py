"""From a root whose own tests hold to matches: further outputs, users outside, constraints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxrewrite import ops
from fxrewrite.match.lower import Link, Variant
from fxrewrite.match.match import Match
from fxrewrite.match.tests import Candidate, Path, found_text, holds, test_text
from fxrewrite.pattern.pattern import Pattern

__all__ = ["Failure", "complete"]


_NOTHING: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class Failure:
    """The first condition that did not hold: how many did before it, what it expected, what stands there."""

    passed: int
    expected: str
    found: str
    node: fx.Node

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.found}"


def complete(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int = 0) -> Iterator[Match | Failure]:
    """The matches of one variant below a candidate that passed the tests of output 0, and what failed on the way."""
    if len(variant.stages) == 1:
        yield _match(pattern, variant, candidate, passed)
        return
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
                yield Failure(passed + count, test_text(test), found_text(test, chosen), node)
                break
        else:
            yield from _choose_outputs(variant, chosen, index + 1, passed + len(variant.stages[index]))
    if not tried:
        wanted = variant.stages[index][0].value
        root = candidate.value(Path.root(0))
        yield Failure(passed, f"output {index + 1}, {wanted}, on the same values", "none", root)


def _climb(link: Link, candidate: Candidate) -> list[fx.Node]:
    """Nodes that can be the output: users of users ... of a known value, with the operators of the pattern."""
    known = [(candidate.value(path), keys) for path, keys in link.choices]
    starts = [(value, keys) for value, keys in known if isinstance(value, fx.Node)]
    if not starts:
        return []
    start, keys = min(starts, key=lambda choice: len(choice[0].users))
    level = {start: None}
    for key in keys:
        level = {user: None for node in level for user in node.users if ops.key(user) == key}
    return sorted(level)


def _match(pattern: Pattern, variant: Variant, candidate: Candidate, passed: int) -> Match | Failure:
    value = candidate.value
    outputs: tuple[fx.Node, ...] = tuple(value(Path.root(index)) for index in range(len(variant.stages)))
    nodes: dict[fx.Node, None] = dict.fromkeys(outputs)
    for path in variant.inner:
        nodes[value(path)] = None
    kept: set[fx.Node] = set()
    for path in variant.inner:
        node: fx.Node = value(path)
        if node in outputs:
            continue
        for user in node.users:
            if user not in nodes:
                if path not in variant.shared:
                    expected = f"no user of {path} outside the match"
                    return Failure(passed, expected, f"%{user.name} uses %{node.name}; allow it with shared()", node)
                kept.add(node)
    captures = {name: None if path is None else value(path) for name, path in variant.captures.items()}
    for count, constraint in enumerate(pattern.where):
        if any(captures[name] is None for name in constraint.names):
            continue  # a constraint speaks of what was captured
        why_not = constraint.why_not(captures)
        if why_not:
            return Failure(passed + 1 + count, str(constraint), why_not, outputs[0])
    return Match(outputs, tuple(nodes), _with_inputs(kept, nodes) if kept else _NOTHING, captures)


def _with_inputs(kept: set[fx.Node], nodes: dict[fx.Node, None]) -> frozenset[fx.Node]:
    """What a kept node is computed from stays as well."""
    stack = list(kept)
    while stack:
        for used in stack.pop().all_input_nodes:
            if used in nodes and used not in kept:
                kept.add(used)
                stack.append(used)
    return frozenset(kept)
