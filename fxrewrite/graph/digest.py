"""A hash of a graph, to check that all ranks compiled the same."""

from __future__ import annotations

import hashlib

from torch import fx

from fxrewrite.graph.text import graph_text

__all__ = ["graph_digest"]


def graph_digest(gm: fx.GraphModule) -> str:
    """Returns the sha256 of the graph's canonical text, which is equal in every process for equal graphs.

    Parameters and constants of more than eight elements count by name, type and shape, not by content.
    """
    return hashlib.sha256(graph_text(gm).encode()).hexdigest()
