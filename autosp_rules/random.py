"""Which random draws must be equal on all ranks, and which cannot equal one device's; see `rules.random`."""

from __future__ import annotations

from torch import fx

from fxrewrite import refuse
from fxrewrite.ops import is_random, key
from rules.random import DrawByRank, draws_on_chunk

__all__ = ["draws_alike", "refuse_own_draws"]


def refuse_own_draws(program: fx.GraphModule) -> None:
    """Raises RefusedError for a draw on a chunk, which cannot give the numbers that one device draws."""
    for node in filter(draws_on_chunk, program.graph.nodes):
        refuse(
            f"{key(node)} draws random numbers for its chunk, which are not those of one device",
            node=node,
            hint="use rng='local', or for attention with dropout the eager implementation",
        )


def draws_alike(program: fx.GraphModule) -> list[fx.Node]:
    """Returns nodes that must draw the same numbers on every rank: all but draws on chunks, and seeds of those."""
    nodes = (node for node in program.graph.nodes if DrawByRank.seed_id not in node.meta.get("fxrewrite", ()))
    return [node for node in nodes if is_random(node) and not draws_on_chunk(node)]
