"""What steps and rules know of a graph's values beyond what torch reads: typed facts, one store for each graph.

    PLACEMENT = Fact[Placement]("placement")     declared once, by the module that gives it its meaning
    PLACEMENT.of(node)                           read by whoever has the node; None where nothing is known
    edit.set_fact(node, PLACEMENT, Shard(1))     written through the transaction, which takes it back if it is undone

A fact says nothing of nodes that rules make, unless a step has said how it is derived for each of them (`edit.derive`),
as their fake value is. A transaction starts without facts; those that it found stay readable after it, until the next
one on the same graph.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import fx

__all__ = ["Fact", "facts_of", "forget_facts"]

T = TypeVar("T")
_STORE = "_fxrewrite_facts"
"""Name of the attribute of an `fx.Graph` that holds its facts; copies of the graph do not get it."""


class Fact(Generic[T]):
    """One kind of fact; its values are of type T.

    Args:
        name: a noun, for messages and for canonical text.
        shown: whether canonical text has a column for it.
    """

    __slots__ = ("name", "shown")

    def __init__(self, name: str, *, shown: bool = False) -> None:
        self.name, self.shown = name, shown

    def of(self, node: fx.Node) -> T | None:
        """What is known of the node, None where nothing is."""
        return facts_of(node.graph).get(self, {}).get(node)

    def __repr__(self) -> str:
        return f"Fact({self.name!r})"


def facts_of(graph: fx.Graph) -> dict[Fact[Any], dict[fx.Node, Any]]:
    """The facts of a graph's last transaction, or of the one under way."""
    return graph.__dict__.setdefault(_STORE, {})


def forget_facts(graph: fx.Graph) -> None:
    """Afterwards nothing is known of the graph's nodes."""
    graph.__dict__.pop(_STORE, None)
