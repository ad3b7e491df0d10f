"""One decision program for all rules of a set: a tree of conditions per root operator, which checks shared ones once.

Where rules differ in an operator or a literal at the same place, the tree looks the value up instead of trying one rule
after the other, so the time per node does not grow with the number of rules. A tree becomes a Python function when the
first node with its root operator is looked at: a set with all spellings of attention pays for those of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, Generic, TypeVar

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.match.compile import Leaf, Tree, TreeFunction, compile_tree
from fxrewrite.match.finish import complete
from fxrewrite.match.lower import Variant, lower
from fxrewrite.match.match import Match
from fxrewrite.match.values import Candidate, Path
from fxrewrite.pattern.pattern import Pattern

Owner = TypeVar("Owner")


class Program(Generic[Owner]):
    """The merged patterns of several owners (rules), one or more of each; earlier ones have priority.

    Attributes:
        root_keys: for each owner, the operators that the first output of its pattern may have.
    """

    def __init__(self, owners: Iterable[tuple[Owner, Pattern]]) -> None:
        self._owners: list[tuple[Owner, Pattern, tuple[Variant, ...]]] = []
        self.root_keys: list[tuple[Owner, frozenset[str]]] = []
        self._trees: dict[str, Tree] = {}
        self._runs: dict[str, TreeFunction] = {}
        keys: dict[Owner, frozenset[str]] = {}
        for owner, pattern in owners:
            variants = lower(pattern)
            rank = len(self._owners)
            self._owners.append((owner, pattern, variants))
            keys[owner] = keys.get(owner, frozenset()) | {v.root_key for v in variants}
            for index, variant in enumerate(variants):
                tree = self._trees.setdefault(variant.root_key, Tree())
                tree.insert(variant.stages[0][1:], (rank, index))  # without the root's operator, which chose the tree
        self.root_keys += keys.items()

    def candidates(self, edit: Edit) -> list[fx.Node]:
        """Returns the nodes that `roots` must look at, in graph order: calls that may be the root of some pattern."""
        roots, found = self._trees.keys(), list[fx.Node]()
        for op, target, nodes in edit.calls():
            if op != "call_function" or not roots.isdisjoint(ops.possible_keys(target)):
                found += nodes
        found.sort()
        return found

    def roots(self, nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
        """Yields the nodes that may be the first output of some pattern, with their operators."""
        roots = self._trees
        for node in nodes:
            key = ops.key(node)
            if key in roots:
                yield node, key

    def find(self, node: fx.Node, key: str) -> Iterator[tuple[Owner, Match]]:
        """Yields the matches whose first output is this node, in the priority of their owners."""
        run = self._runs.get(key)
        if run is None:
            if key not in self._trees:
                return
            run = self._runs[key] = compile_tree(self._trees[key], _ROOT)
        leaves: list[tuple[Leaf, dict[Path, Any]]] = []
        run(node, leaves)
        for (rank, index), values in leaves if len(leaves) < 2 else sorted(leaves, key=itemgetter(0)):
            owner, pattern, variants = self._owners[rank]
            try:
                found = complete(pattern, variants[index], Candidate(values))
                # A list of any length may match in many ways, of which the first is mostly taken.
                for result in found if variants[index].lists else tuple(found):
                    if isinstance(result, Match):
                        yield owner, result
            except FxRewriteError as error:
                raise FxRewriteError(f"{getattr(owner, 'id', owner)}: {error}; the graph is as before") from error


_ROOT = Path.root(0)
