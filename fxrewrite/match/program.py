"""One decision program for all rules of a set: a tree of tests per root operator, so that shared tests run once.

Where rules differ in an operator or a literal at one place, the tree looks the value up instead of trying the rules in
turn: the time to look at a node does not grow with the number of rules. Trees are compiled to closures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError
from fxrewrite.match.finish import complete
from fxrewrite.match.lower import Variant, lower
from fxrewrite.match.match import Match
from fxrewrite.match.tests import Arguments, Candidate, Path, Test, holds, literal_outcomes
from fxrewrite.pattern.pattern import Pattern

__all__ = ["Program"]

Owner = TypeVar("Owner")
Leaf: TypeAlias = tuple[int, int]
Run: TypeAlias = Callable[[Candidate, list[Leaf]], None]


class _Tree:
    """Tests that share a beginning: (kind, path) -> value -> what comes after."""

    __slots__ = ("branches", "leaves")

    def __init__(self) -> None:
        self.branches: dict[tuple[str, Path], dict[Any, tuple[Test, _Tree]]] = {}
        self.leaves: list[Leaf] = []

    def insert(self, tests: Sequence[Test], leaf: Leaf) -> None:
        tree = self
        for test in tests:
            targets = tree.branches.setdefault((test.kind, test.path), {})
            tree = targets.setdefault(test.value, (test, _Tree()))[1]
        tree.leaves.append(leaf)

    def compiled(self) -> Run:
        """A function that collects the leaves all of whose tests hold."""
        leaves = self.leaves
        runs = [
            _branch(kind, path, [(test, tree.compiled()) for test, tree in targets.values()])
            for (kind, path), targets in self.branches.items()
        ]
        if not leaves and len(runs) == 1:
            return runs[0]

        def run(candidate: Candidate, found: list[Leaf]) -> None:
            found += leaves
            for then in runs:
                then(candidate, found)

        return run


def _branch(kind: str, path: Path, targets: list[tuple[Test, Run]]) -> Run:
    """All tests of one kind at one path."""
    table = {test.value: then for test, then in targets}
    if kind == "operator":

        def run(candidate: Candidate, found: list[Leaf]) -> None:
            value = candidate.value(path)
            if isinstance(value, fx.Node):
                then = table.get(ops.key(value))
                if then is not None:
                    then(candidate, found)

    elif kind == "literal":

        def run(candidate: Candidate, found: list[Leaf]) -> None:
            for outcome in literal_outcomes(path, candidate):
                then = table.get(outcome)
                if then is not None:
                    then(candidate, found)
                    if len(table) == 1:
                        break

    elif kind == "arguments":
        calls = [(Arguments(test), then) for test, then in targets]

        def run(candidate: Candidate, found: list[Leaf]) -> None:
            for arguments, then in calls:
                if arguments.hold(candidate):
                    then(candidate, found)

    elif kind == "node":
        then = targets[0][1]

        def run(candidate: Candidate, found: list[Leaf]) -> None:
            if isinstance(candidate.value(path), fx.Node):
                then(candidate, found)

    else:

        def run(candidate: Candidate, found: list[Leaf]) -> None:
            for test, then in targets:
                if holds(test, candidate):
                    then(candidate, found)

    return run


class Program(Generic[Owner]):
    """The merged patterns of several owners (rules); earlier owners have priority.

    Attributes:
        root_keys: for each owner, the operators at which its pattern can have its first output.
    """

    def __init__(self, owners: Iterable[tuple[Owner, Pattern]]) -> None:
        self._owners: list[tuple[Owner, Pattern, tuple[Variant, ...]]] = []
        self.root_keys: list[tuple[Owner, frozenset[str]]] = []
        trees: dict[str, _Tree] = {}
        for owner, pattern in owners:
            variants = lower(pattern)
            rank = len(self._owners)
            self._owners.append((owner, pattern, variants))
            self.root_keys.append((owner, frozenset(v.root_key for v in variants)))
            for index, variant in enumerate(variants):
                tree = trees.setdefault(variant.root_key, _Tree())
                tree.insert(variant.stages[0][1:], (rank, index))  # the operator of the root chose the tree
        self._runs = {key: tree.compiled() for key, tree in trees.items()}

    def roots(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
        """The nodes at which some pattern can have its first output, with their operators."""
        runs = self._runs
        hopeless: set[int] = set()  # ids of targets none of whose calls can be a root; overloads hash slowly
        for node in nodes:
            if id(node.target) in hopeless or node.op in ("placeholder", "get_attr", "output"):
                continue
            key = ops.key(node)
            if key in runs:
                yield node, key
            elif node.op == "call_function" and runs.keys().isdisjoint(ops.possible_keys(node.target)):
                hopeless.add(id(node.target))

    def find(self, node: fx.Node, key: str) -> Iterator[tuple[Owner, Match]]:
        """The matches whose first output is this node with this operator, by priority of their owners."""
        run = self._runs.get(key)
        if run is None:
            return
        candidate = Candidate({_ROOT: node})
        leaves: list[Leaf] = []
        run(candidate, leaves)
        for rank, index in sorted(leaves):
            owner, pattern, variants = self._owners[rank]
            try:
                results = list(complete(pattern, variants[index], candidate))
            except FxRewriteError as error:
                raise FxRewriteError(f"{getattr(owner, 'id', owner)}: {error}; the graph is as before") from error
            for result in results:
                if isinstance(result, Match):
                    yield owner, result


_ROOT = Path.root(0)
