"""What is known of values while a plan works over one axis: placements, and the shape of the whole value."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.sizes import Size
from fxrewrite.spmd.placement import Placement, Replicate

PLACEMENT = Fact["Placement | tuple[Placement, ...]"]("placement", shown=True)
"""How ranks hold what a node computes; of a node with several results, a tuple."""
REQUIRED = Fact["Placement"]("required placement")
"""The placement that a node must produce its first result with if any of its operands is sharded: how a strategy for
an operator is stated. Propagation keeps to it, or refuses."""
GLOBAL_SHAPE = Fact["tuple[Size, ...]"]("global shape")
"""The shape of a sharded value on all ranks together, once its `val` is the local one."""


def placement_of(node: fx.Node) -> Placement:
    """How ranks hold the value that `node` computes, after propagation; replicated before."""
    placement = PLACEMENT.of(node)
    return placement if placement is not None and not isinstance(placement, tuple) else Replicate()


def result_placements(node: fx.Node) -> tuple[Placement, ...]:
    """How ranks hold each result of `node`; none where nothing is known."""
    placement = PLACEMENT.of(node)
    return placement if isinstance(placement, tuple) else () if placement is None else (placement,)


def set_placements(edit: Edit, node: fx.Node, placements: tuple[Placement, ...]) -> None:
    """Note how ranks hold each result of `node`; a node without results has nothing to note."""
    if placements:
        several = isinstance(node.meta.get("val"), (list, tuple))
        edit.set_fact(node, PLACEMENT, placements if several else placements[0])


def global_shape(node: fx.Node) -> Sequence[Size]:
    """The shape of the whole value of which `node` holds a part."""
    return GLOBAL_SHAPE.of(node) or node.meta["val"].shape
