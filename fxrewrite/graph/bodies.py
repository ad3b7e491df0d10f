"""Graphs within a graph: graph modules that a graph calls, or holds as subgraphs of higher-order operators."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxrewrite.errors import FxRewriteError
from fxrewrite.ops import held


def body_of(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Returns the graph module that a node of the graph reads or calls, or None."""
    found = held(gm, node) if node.op in ("get_attr", "call_module") else None
    return found if isinstance(found, fx.GraphModule) else None


def bodies(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yields (path, graph module) for every one that the graph reads or calls, each once, without nested ones."""
    if not any(isinstance(module, fx.GraphModule) for module in gm.modules() if module is not gm):
        return
    seen: set[fx.GraphModule] = set()
    for op in ("get_attr", "call_module"):
        for node in gm.graph.find_nodes(op=op):
            found = body_of(gm, node)
            if found is not None and found not in seen:
                seen.add(found)
                yield str(node.target), found


def require_graph(method: str, gm: object) -> None:
    """Raise FxRewriteError, with what to write instead, where a method was called with something else than a graph."""
    if not isinstance(gm, fx.GraphModule):
        raise FxRewriteError(
            f"{method} takes an fx.GraphModule, not {type(gm).__name__}; for an exported program there is "
            "plan.apply_export, for a model torch.compile(model, backend=plan.backend(...))"
        )


def nodes_of(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yields the nodes of the graph, then those of every graph within it, nested ones included."""
    yield from gm.graph.nodes
    for _, body in bodies(gm):
        yield from nodes_of(body)
