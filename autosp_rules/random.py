"""Which random draws must be equal on all ranks; see `rules.random`."""

from __future__ import annotations

from torch import fx

from fxrewrite.ops import is_random
from fxrewrite.spmd import draws_on_chunk
from rules.random import DrawByRank


def draws_alike(program: fx.GraphModule) -> list[fx.Node]:
    """Returns nodes that must draw the same numbers on every rank: all but draws on chunks, and seeds of those."""
    nodes = (node for node in program.graph.nodes if DrawByRank.seed_id not in node.meta.get("fxrewrite", ()))
    return [node for node in nodes if is_random(node) and not draws_on_chunk(node)]
