"""Which random draws must be equal on all ranks, and which cannot equal one device's; see `rules.random`."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxrewrite import Edit, Report, refuse
from fxrewrite.ops import is_random, key
from rules.random import DrawByRank, draws_on_chunk

__all__ = ["RefuseOwnDraws", "draws_alike"]


class RefuseOwnDraws:
    """The step that checks that nothing draws on a chunk, where draws are to be those of one device.

    Raises:
        RefusedError: something does.
    """

    name = "refuse_own_draws"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        for node in filter(draws_on_chunk, edit.nodes()):
            refuse(
                f"{key(node)} draws random numbers for its chunk, which are not those of one device",
                node=node,
                hint="use rng='local', or for attention with dropout the eager implementation",
            )
        return 0

    def text(self) -> str:
        return "no rank draws random numbers of its own"


def draws_alike(program: fx.GraphModule) -> list[fx.Node]:
    """Returns nodes that must draw the same numbers on every rank: all but draws on chunks, and seeds of those."""
    nodes = (node for node in program.graph.nodes if DrawByRank.seed_id not in node.meta.get("fxrewrite", ()))
    return [node for node in nodes if is_random(node) and not draws_on_chunk(node)]
