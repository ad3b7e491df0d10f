"""The process group of a mesh axis: this rank's place in it, and its collectives as functional operators.

The operators are those of `torch.ops._c10d_functional`. They carry their adjoints (all-to-all and all-to-all,
all-gather and reduce-scatter, all-reduce and all-reduce), so autograd runs through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.sizes import inline_value
from fxrewrite.graph.walk import reached
from fxrewrite.ops import declare_per_rank, declare_pure
from fxrewrite.spmd.placement import Axis

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_c10d = torch.ops._c10d_functional

CollectiveKind: TypeAlias = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
ADJOINTS: Mapping[CollectiveKind, CollectiveKind] = {
    "all_to_all": "all_to_all",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
}
"""What the backward pass of each kind of collective sends by."""
COLLECTIVES = {
    "all_to_all": _c10d.all_to_all_single.default,
    "all_gather": _c10d.all_gather_into_tensor.default,
    "reduce_scatter": _c10d.reduce_scatter_tensor.default,
    "all_reduce": _c10d.all_reduce.default,
    "wait": _c10d.wait_tensor.default,
}
COLLECTIVE_KINDS: Mapping[Any, CollectiveKind] = {COLLECTIVES[kind]: kind for kind in get_args(CollectiveKind)}
"""The kind of each operator that sends."""
for _collective in COLLECTIVES.values():
    declare_pure(_collective)  # they give new tensors; FX keeps unused ones only because waiting has a time


def axis_rank(group_name: str) -> int:
    """This rank's position in the process group of that name.

    Lowered graphs hold it as a call, so that one graph serves all ranks; `fix_rank` makes it a number, for compilers.
    """
    return dist.get_rank(_resolve_process_group(_name(group_name)))


declare_per_rank(axis_rank)


def is_of_rank(number: Any) -> bool:
    """Whether a number of a lowered graph follows from this rank's position, so that its fake value, of position 0,
    says nothing of other ranks."""

    def edges(node: fx.Node) -> list[fx.Node]:
        return [] if isinstance(node.meta.get("val"), torch.Tensor) else node.all_input_nodes

    return isinstance(number, fx.Node) and any(node.target is axis_rank for node in reached([number], edges))


def fix_rank(gm: fx.GraphModule, rank_of: Callable[[str], int] = axis_rank) -> None:
    """Replace every `axis_rank` of a lowered graph and of its bodies by the number that `rank_of` gives for the group:
    by default this rank's, for which the process group must be there.

    Compilers read the number while they trace. In the graph it is a part of AOTAutograd's and inductor's cache keys,
    which tells the ranks' programs apart; a call of ours makes AOTAutograd pass its cache by.
    """
    for part in gm.modules():
        calls = part.graph.find_nodes(op="call_function", target=axis_rank) if isinstance(part, fx.GraphModule) else []
        for node in calls:
            inline_value(node, rank_of(*node.args))
            node.graph.erase_node(node)
        if isinstance(part, fx.GraphModule) and (calls or part is gm):
            part.recompile()


def positions_of(group_name: str, world_size: int) -> dict[int, int]:
    """The position of every rank of the world on the axis that the named group is a part of, as in a mesh of rows.

    One process knows only its own group of an axis; the others of that axis have the same distance between neighbours.
    """
    ranks = dist.get_process_group_ranks(_resolve_process_group(_name(group_name)))
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return {rank: rank // step % len(ranks) for rank in range(world_size)}


def _name(group: str) -> GroupName:
    return cast("GroupName", group)  # torch's own name for a str


def process_group(axis: Axis) -> dist.ProcessGroup:
    """The process group of the axis."""
    return _resolve_process_group(_name(axis.group))


def global_ranks(axis: Axis) -> list[int]:
    """The ranks of the default process group that make up the axis, in the order of their positions on it."""
    return dist.get_process_group_ranks(process_group(axis))


def is_fake(axis: Axis) -> bool:
    """Whether this rank runs alone, over torch's fake process group."""
    return dist.get_backend(process_group(axis)) == "fake"


def store_of(axis: Axis) -> dist.Store:
    """A key-value store that the ranks of the axis share, and no other axis."""
    return dist.PrefixStore(f"fxrewrite/{axis.name}/{'-'.join(map(str, global_ranks(axis)))}", _get_default_store())


def axis_of(mesh: DeviceMesh | None, name: str) -> Axis:
    """The axis `name` of `mesh`, or of the default process group where there is no mesh.

    Raises FxRewriteError where no process group is initialized or the mesh has no such axis.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise FxRewriteError(
            f"axis {name}: the process group is not initialized; call torch.distributed.init_process_group() first "
            "(torchrun sets the variables that it reads)"
        )
    if mesh is None:
        group = dist.group.WORLD
        assert group is not None
        return Axis(name, dist.get_world_size(), group.group_name)
    if name not in (mesh.mesh_dim_names or ()):
        raise FxRewriteError(f"the mesh has no axis {name!r}; it has {mesh.mesh_dim_names}")
    group = mesh.get_group(name)
    return Axis(name, group.size(), group.group_name)


def axis_mesh(axis: Axis, device_type: str) -> DeviceMesh:
    """The mesh of the axis alone, made of its process group, for devices of this type."""
    return DeviceMesh.from_group(process_group(axis), device_type, mesh_dim_names=(axis.name,))
