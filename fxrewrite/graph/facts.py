"""Typed facts about the values of a graph, beyond what torch reads; each graph has one store.

    PLACEMENT = Fact[Placement]("placement")     declared once, by the module that defines its meaning
    PLACEMENT.of(node)                           read anywhere; None if nothing is known
    edit.set_fact(node, PLACEMENT, Shard(1))     written through the transaction, and undone with it

New nodes have no facts, unless a step has defined how to derive a fact for them (`edit.derive`), as their fake value is
derived. A transaction starts without facts; its facts stay readable after it, until the next transaction on the same
graph.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import fx

T = TypeVar("T")
_STORE = "_fxrewrite_facts"
"""Attribute of an `fx.Graph` that holds its facts; copies of the graph do not get it."""


class Fact(Generic[T]):
    """One kind of fact; its values have type T.

    Args:
        name: a noun, for messages and for canonical text.
        shown: whether canonical text has a column for it.
    """

    __slots__ = ("name", "shown")

    def __init__(self, name: str, *, shown: bool = False) -> None:
        self.name, self.shown = name, shown

    def of(self, node: fx.Node) -> T | None:
        """Returns the fact for the node, or None if nothing is known."""
        return facts_of(node.graph).get(self, {}).get(node)

    def __repr__(self) -> str:
        return f"Fact({self.name!r})"


def facts_of(graph: fx.Graph) -> dict[Fact[Any], dict[fx.Node, Any]]:
    """Returns the facts of a graph's current or last transaction."""
    return graph.__dict__.setdefault(_STORE, {})


def forget_facts(graph: fx.Graph) -> None:
    """Drops all facts of the graph."""
    graph.__dict__.pop(_STORE, None)
