"""What a plan over one mesh axis is told; given to `plan.apply(gm, context=...)`. It may be used for any graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.spmd.group import axis_of
from fxrewrite.spmd.placement import AnyPlacement, Axis, Placement, Replicate

Reduction: TypeAlias = Literal["done", "mean", "sum"]
"""What the caller of a program does over the axis with gradients of inputs that are held whole; see `cotangents`."""


def _whole(position: int, node: fx.Node, placement: Placement) -> Placement:
    return Replicate()


def _as_it_is(program: fx.GraphModule) -> None:
    return None


@dataclass(frozen=True, slots=True)
class SpmdContext:
    """The axis of a plan, and what its user allows."""

    axis: Axis
    strict: bool = False
    """Refuse an operator without a layout rule instead of gathering its operands."""
    output_placement: Callable[[int, fx.Node, Placement], AnyPlacement] = _whole
    """How an output is returned: given its position, the node, and the placement that it has."""
    gradients: Reduction = "done"
    """What the caller does over the axis with gradients of inputs that every rank holds whole: nothing, as they leave
    the program complete ("done", which a mean does not change either); a mean, as replicas do; or a sum.
    Gradients of inputs in shards are those of one device in any case."""
    is_part: bool = False
    """Whether the graph is a part of a model, where what is stated of another part matches nothing."""
    is_ahead: bool = True
    """Whether shards of parameters are gathered a layer ahead, while the layer before is computed."""
    finish: Callable[[fx.GraphModule], object] = _as_it_is
    """What the caller does to the lowered program before it compiles it; for a step that estimates what that holds."""
    watch: Callable[[Edit, Axis], None] | None = None
    """Called with the graph once every value has a placement; it may look, and change nothing."""

    @staticmethod
    def required(context: Any, by: str) -> SpmdContext:
        """The context, if there is one.

        Raises:
            FxRewriteError: the plan was applied without one, or with something else; says who needs it.
        """
        if not isinstance(context, SpmdContext):
            found = "" if context is None else f", not {context!r}"
            raise FxRewriteError(
                f"{by} needs to know the mesh axis; pass plan.apply(gm, context=SpmdContext(Axis(name, size))){found}"
            )
        return context


def contexts(
    mesh: DeviceMesh,
    *,
    strict: bool = False,
    gradients: Reduction = "done",
    is_part: bool = False,
    is_ahead: bool = True,
) -> dict[str, SpmdContext]:
    """What a plan over several axes is given: the context of each axis of the mesh, by its name.

        plan = first.on("x") >> second.on("y")
        plan.apply(gm, context=contexts(mesh))

    Raises:
        FxRewriteError: the mesh's axes have no names.
    """
    if not mesh.mesh_dim_names:
        raise FxRewriteError("the axes of the mesh have no names; pass init_device_mesh(..., mesh_dim_names=(...))")
    return {
        name: SpmdContext(axis_of(mesh, name), strict=strict, gradients=gradients, is_part=is_part, is_ahead=is_ahead)
        for name in mesh.mesh_dim_names
    }
