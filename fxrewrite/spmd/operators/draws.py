"""Random draws on shards: ranks that are seeded alike would draw the same numbers for different chunks."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxrewrite.errors import refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.ops import is_random, key
from fxrewrite.report import Report
from fxrewrite.spmd.facts import result_placements
from fxrewrite.spmd.placement import Axis, Shard

DRAWS_APART = "draws_apart"
"""In the metadata of a node: the axis along which ranks may draw different numbers by it."""


def draws_alike(program: fx.GraphModule, axis: Axis) -> list[fx.Node]:
    """The nodes that must draw the same numbers on every rank of the axis: all but what draws on chunks, or apart."""
    drawn = (node for node in program.graph.nodes if is_random(node) and not draws_on_chunk(node))
    return [node for node in drawn if node.meta.get(DRAWS_APART) != axis.name]


def draws_on_chunk(node: fx.Node) -> bool:
    """Whether the node draws random numbers for the part of a value that one rank holds."""
    return any(isinstance(placement, Shard) for placement in result_placements(node)) and is_random(node)


_HINT = (
    "draw what depends on the value's shape alone, as torch.rand_like(p) < p in place of torch.bernoulli(p); for "
    "attention with dropout, use its eager implementation"
)


class RefuseShardedDraws:
    """The step that refuses what draws random numbers for a chunk, where draws are to be those of one device.

    Raises:
        RefusedError: something does; names the node.
    """

    def __init__(self, name: str, hint: str = _HINT) -> None:
        self.name, self.hint = name, hint

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        for node in filter(draws_on_chunk, edit.nodes()):
            refuse(
                f"{key(node)} draws random numbers for its chunk, which are not those of one device",
                node=node,
                hint=self.hint,
            )
        return 0

    def text(self) -> str:
        return "no rank draws random numbers of its own"
