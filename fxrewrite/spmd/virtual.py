"""Operators that stand for something while a plan runs, and that no lowered graph may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import fx

from fxrewrite import ops
from fxrewrite.spmd.placement import Placement

ResultPlacement: TypeAlias = "Placement | tuple[Placement, ...]"
PlacementRule: TypeAlias = "Callable[[Sequence[Any], Sequence[Placement]], ResultPlacement | None]"
Function: TypeAlias = Callable[..., Any]
_PLACEMENTS: dict[Function, PlacementRule] = {}


def declare_virtual(
    placement: PlacementRule | None = None,
    *,
    tested_by: str = "",
) -> Callable[[Function], Function]:
    """State that rules must have replaced the operator before a graph that is localized is committed.

    The function is the operator's meaning on whole values; it has no effects.

    Args:
        placement: how ranks hold the result, of the node's arguments and the placements of its tensor operands; by
            default, and where it gives None, what the operator's layout rule says.
    """

    def declare(function: Function) -> Function:
        declared = ops.declare_virtual(function, tested_by=tested_by)
        if placement is not None:
            _PLACEMENTS[declared] = placement
        return declared

    return declare


def placement_of_virtual(node: fx.Node, placements: Sequence[Placement]) -> ResultPlacement | None:
    """How ranks hold what a virtual operator gives; None where its layout rule says it, and for other operators."""
    placement = _PLACEMENTS.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return None if placement is None else placement(node.args, placements)
