"""One decision program for all rules of a set: a tree of tests per root operator, so that shared tests run once.

Where rules differ in an operator or a literal at one place, the tree looks the value up instead of trying the rules in
turn: the time to look at a node does not grow with the number of rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import fx

from fxrewrite import ops
from fxrewrite.match.finish import complete
from fxrewrite.match.lower import Variant, lower
from fxrewrite.match.match import Match
from fxrewrite.match.tests import Candidate, Path, Test, holds, literal_outcomes
from fxrewrite.pattern.pattern import Pattern

__all__ = ["Program"]

Owner = TypeVar("Owner")
_ROOT = Path.root(0)


class _Branch:
    """The tests of one kind at one path, and where to go on for each value."""

    __slots__ = ("kind", "path", "targets")

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.targets: dict[Any, tuple[Test, _Tree]] = {}


class _Tree:
    __slots__ = ("branches", "leaves")

    def __init__(self) -> None:
        self.branches: dict[tuple[str, Path], _Branch] = {}
        self.leaves: list[tuple[int, int]] = []

    def insert(self, tests: Sequence[Test], leaf: tuple[int, int]) -> None:
        tree = self
        for test in tests:
            branch = tree.branches.setdefault((test.kind, test.path), _Branch(test.kind, test.path))
            tree = branch.targets.setdefault(test.value, (test, _Tree()))[1]
        tree.leaves.append(leaf)

    def reached(self, candidate: Candidate, found: list[tuple[int, int]]) -> None:
        """Collect the leaves all of whose tests hold."""
        found += self.leaves
        for branch in self.branches.values():
            targets = branch.targets
            if branch.kind == "operator":
                value = candidate.value(branch.path)
                if isinstance(value, fx.Node):
                    target = targets.get(ops.key(value))
                    if target is not None:
                        target[1].reached(candidate, found)
            elif branch.kind == "literal":
                for outcome in literal_outcomes(branch.path, candidate):
                    target = targets.get(outcome)
                    if target is not None:
                        target[1].reached(candidate, found)
            else:
                for test, tree in targets.values():
                    if holds(test, candidate):
                        tree.reached(candidate, found)


class Program(Generic[Owner]):
    """The merged patterns of several owners (rules); earlier owners have priority.

    Attributes:
        root_keys: for each owner, the operators at which its pattern can have its first output.
    """

    def __init__(self, owners: Iterable[tuple[Owner, Pattern]]) -> None:
        self._owners: list[tuple[Owner, Pattern, tuple[Variant, ...]]] = []
        self._trees: dict[str, _Tree] = {}
        self.root_keys: list[tuple[Owner, frozenset[str]]] = []
        for owner, pattern in owners:
            variants = lower(pattern)
            rank = len(self._owners)
            self._owners.append((owner, pattern, variants))
            self.root_keys.append((owner, frozenset(v.root_key for v in variants)))
            for index, variant in enumerate(variants):
                tree = self._trees.setdefault(variant.root_key, _Tree())
                tree.insert(variant.stages[0][1:], (rank, index))  # the operator of the root chose the tree

    def roots(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
        """The nodes at which some pattern can have its first output, with their operators."""
        trees = self._trees
        plain: dict[Any, bool] = {}  # by target: whether its one key is a root key; missing where arguments decide
        for node in nodes:
            if node.op == "call_function":
                known = plain.get(node.target)
                if known is False:
                    continue
                key = ops.key(node)
                if known is None and ops.has_one_key(node.target):
                    plain[node.target] = key in trees
            else:
                key = ops.key(node)
            if key in trees:
                yield node, key

    def find(self, node: fx.Node, key: str) -> Iterator[tuple[Owner, Match]]:
        """The matches whose first output is this node with this operator, by priority of their owners."""
        tree = self._trees.get(key)
        if tree is None:
            return
        candidate = Candidate({_ROOT: node})
        leaves: list[tuple[int, int]] = []
        tree.reached(candidate, leaves)
        for rank, index in sorted(leaves):
            owner, pattern, variants = self._owners[rank]
            for result in complete(pattern, variants[index], candidate):
                if isinstance(result, Match):
                    yield owner, result
