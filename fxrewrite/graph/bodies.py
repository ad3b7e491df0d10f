"""Subgraphs of higher-order operators: graph modules that a graph holds as attributes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxrewrite.ops import held

__all__ = ["bodies", "nodes_of"]


def bodies(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yields (path, subgraph module) for every graph module that the graph reads, each once, without nested ones."""
    if not any(isinstance(module, fx.GraphModule) for module in gm.modules() if module is not gm):
        return
    seen: set[fx.GraphModule] = set()
    for node in gm.graph.find_nodes(op="get_attr"):
        found = held(gm, node)
        if isinstance(found, fx.GraphModule) and found not in seen:
            seen.add(found)
            yield str(node.target), found


def nodes_of(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yields the nodes of the graph, then those of every subgraph, nested ones included."""
    yield from gm.graph.nodes
    for _, body in bodies(gm):
        yield from nodes_of(body)
