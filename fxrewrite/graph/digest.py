"""One hash for a graph, to compare what ranks compiled."""

from __future__ import annotations

import hashlib

from torch import fx

from fxrewrite.graph.text import graph_text

__all__ = ["graph_digest"]


def graph_digest(gm: fx.GraphModule) -> str:
    """The sha256 of the graph's canonical text: equal in every process for equal graphs.

    Parameters and constants of more than eight elements count by name, type and shape, not by content.
    """
    return hashlib.sha256(graph_text(gm).encode()).hexdigest()
