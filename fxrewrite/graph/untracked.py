"""What code that knows no transactions does to a graph, found and put into the transaction's journal.

    changes = UntrackedChanges(graph, journal, erased)
    with changes.near(nodes):        the code runs: new nodes, and what it changes of these nodes and of users of
                                     replaced values, are in the journal
    changes.elsewhere()              before the transaction commits: what was changed of any other node

FX tells of new nodes, erased nodes and replaced uses by hooks of the graph's module, but not of assigned
targets, arguments and metadata, which are found by comparison. Comparing all nodes after each match would make a pass
quadratic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

from torch import fx

from fxrewrite.errors import InvariantError
from fxrewrite.graph.journal import ABSENT, Journal


class UntrackedChanges:
    """Of one transaction on a graph; made before the first change.

    Args:
        graph: under edit.
        journal: of the transaction.
        erased: nodes that will be erased at commit.
    """

    def __init__(self, graph: fx.Graph, journal: Journal, erased: set[fx.Node]) -> None:
        self._graph, self._journal, self._erased = graph, journal, erased
        self._before = {node: _State(node) for node in graph.nodes}

    @contextlib.contextmanager
    def near(self, nodes: Iterable[fx.Node]) -> Generator[None]:
        """Puts what the block does into the journal: new nodes, and changes of `nodes` and of users of replaced values.

        Raises:
            InvariantError: the block erased a node, which no transaction can undo; or it raised when other nodes had
                been changed, which can only be undone with the whole transaction.
        """
        mark = len(self._journal)
        watched = {node: _State(node) for node in nodes if node not in self._erased}
        made, gone = dict[fx.Node, int](), dict[fx.Node, int]()
        owner: Any = self._graph.owning_module

        def created(node: fx.Node) -> None:
            made[node] = len(self._journal)

        def erased(node: fx.Node) -> None:
            gone[node] = len(self._journal)

        def replaced(old: fx.Node, new: str, user: fx.Node) -> None:
            if user not in watched:
                watched[user] = _State(user)

        owner._register_create_node_hook(created)
        owner._register_erase_node_hook(erased)
        owner._register_replace_node_hook(replaced)
        try:
            yield
        except Exception as error:
            self._record(mark, made, gone, watched)
            others = self.elsewhere()
            if others:
                raise InvariantError(
                    f"{type(error).__name__}: {error}; %{others[0].name} was changed, which is not near the match, so "
                    "all matches are undone"
                ) from error
            raise
        else:
            self._record(mark, made, gone, watched)
            lost = next((node for node in gone if node not in made), None)
            if lost is not None:
                raise InvariantError(
                    f"%{lost.name} was erased without the transaction, which cannot undo that; let it be erased by "
                    "edit.erase"
                )
        finally:
            owner._unregister_create_node_hook(created)
            owner._unregister_erase_node_hook(erased)
            owner._unregister_replace_node_hook(replaced)

    def _record(
        self, mark: int, made: dict[fx.Node, int], gone: Iterable[fx.Node], watched: dict[fx.Node, _State]
    ) -> None:
        """Puts new nodes where the journal was when they were made, since later ones read them; then changes."""
        tracked = {record[1] for record in self._journal[mark:] if record[0] in ("create", "attach")}.union(gone)
        for node, place in reversed(made.items()):
            if node not in tracked:
                self._journal.insert(place, ("create", node))
        for node, state in watched.items():
            self._compare(node, state)

    def elsewhere(self) -> list[fx.Node]:
        """Puts changes of nodes that are not in the journal yet into it; returns these nodes."""
        known = {record[1] for record in self._journal}
        return [node for node, state in self._before.items() if node not in known and self._compare(node, state)]

    def _compare(self, node: fx.Node, before: _State) -> bool:
        """Puts changes of a node into the journal; returns whether there are any."""
        mark = len(self._journal)
        if node not in self._erased and (node.args is not before.args or node.kwargs is not before.kwargs):
            self._journal.append(("args", node, before.args, before.kwargs))
        if (node.op, node.target) != before.call:
            self._journal.append(("call", node, *before.call))
        for key in before.meta.keys() | node.meta.keys():
            if node.meta.get(key, ABSENT) is not before.meta.get(key, ABSENT):
                self._journal.append(("entry", node, node.meta, key, before.meta.get(key, ABSENT)))
        return len(self._journal) > mark


class _State:
    """What a node calls, its arguments and metadata."""

    __slots__ = ("args", "call", "kwargs", "meta")

    def __init__(self, node: fx.Node) -> None:
        self.call, self.args, self.kwargs, self.meta = (node.op, node.target), node.args, node.kwargs, dict(node.meta)
