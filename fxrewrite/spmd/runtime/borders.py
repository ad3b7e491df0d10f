"""What passes between compiled programs in chunks: DTensors, which programs and eager code read without gathering them.

    leaving(chunk, placements, mesh)     what eager code gets: a ChunkedTensor of the global shape; no communication
    entering(gm, mesh)                   which inputs of a program are such values, and whether it reads their chunks
    entered(inputs, entries)             what the program then gets of its inputs; examples(...) when it is compiled

A ChunkedTensor is a DTensor. Eager code computes with it by torch's own propagation, in which an ordinary tensor is
one that every rank holds whole, as all eager code between programs does; its gradient is summed over the ranks. While
Dynamo traces a program, a ChunkedTensor is an ordinary tensor of the global shape, so what is captured is the program
of one device; with a DTensor of torch, Dynamo would look for a common placement with every weight. `chunked(dtensor)`
makes one of any DTensor.

Gradients are those of one device, placed as the values are: torch's `from_local` and `to_local` see to that.
The private `_spec` and `_local_tensor` are all that a DTensor is; a subclass has no other way to one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import skip_code
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.sizes import is_same_size, size_hint
from fxrewrite.ops import memory_origins
from fxrewrite.spmd.events import AtBorder
from fxrewrite.spmd.placement import Axis, Placement, Replicate, Shard
from fxrewrite.spmd.propagation.place import CHUNK
from fxrewrite.spmd.runtime.gradients import change_gradients
from fxrewrite.torch_versions import DISPATCHES_DTENSOR_SUBCLASSES, TORCH_VERSION

__all__ = ["ChunkedTensor", "Crossing", "check_dtensors", "chunked", "entering"]

aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default}
"""Operators whose result shares the memory of their operand, and its chunk."""


class ChunkedTensor(DTensor):
    """A DTensor that a program compiled for chunks reads as it is placed. See the module."""

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> ChunkedTensor:
        """What stands for it in a trace: symbolic sizes are multiples of those of the chunk, which programs read."""
        placements, meta = flatten_spec[:2]
        local, mesh = inner_tensors["_local_tensor"], inner_tensors["device_mesh"]
        size = list(outer_size)
        for dim, whole in enumerate(meta.shape):
            ranks = _num_chunks(placements, mesh, dim)
            if ranks > 1 and whole % ranks == 0:
                size[dim] = local.shape[dim] * ranks
        if any(isinstance(placed, _StridedShard) for placed in placements) and isinstance(flatten_spec[2], tuple):
            flatten_spec = (*flatten_spec[:2], None, *flatten_spec[3:])  # an order of shards, which torch then refuses
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, torch.Size(size), outer_stride)
        return _of(made, requires_grad=made.requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            return _eagerly(func, args, kwargs)  # pyright: ignore[reportCallIssue]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given: Any = (args, kwargs or {})
        first = next(x for x in tree_leaves(given) if isinstance(x, ChunkedTensor))
        is_traced = is_fake(first._local_tensor)
        if is_traced and func in _ALIASES:
            return ChunkedTensor(func(first._local_tensor), first._spec, requires_grad=False)
        values, named = pytree.tree_map_only(ChunkedTensor, _whole_fake if is_traced else _plain, given)
        if is_traced:
            return func(*values, **named)
        if func in _LOSSES:
            found = _mean_loss(func, *values, **named)
        elif func in _LOSS_GRADIENTS:
            found = _mean_loss_gradient(func, *values, **named)
        else:
            found = pytree.tree_map_only(DTensor, _without_mask, func(*values, **named))
        return pytree.tree_map_only(DTensor, _of, found)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As that of a DTensor; the result can enter a program, too."""
        return chunked(super().redistribute(*args, **kwargs))


# Where a function runs eagerly between programs, Dynamo would compile what Python calls for each operator, and run the
# program of one operator for the next: it does not guard which one `__torch_function__` is called for.
skip_code(ChunkedTensor.__torch_function__.__func__.__code__)


@torch.compiler.disable
def _eagerly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _with_replicas(args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def check_dtensors() -> None:
    """Raise FxRewriteError where this torch gives subclasses of DTensor no operators of their own."""
    if not DISPATCHES_DTENSOR_SUBCLASSES:
        raise FxRewriteError(
            f"values in chunks between graphs need torch 2.12 or newer, and this is {TORCH_VERSION}, which does not "
            "dispatch to subclasses of DTensor; use breaks='gather'"
        )


def chunked(value: DTensor) -> ChunkedTensor:
    """The DTensor, as a compiled program can read it; its gradient is that of the DTensor.

    Raises:
        FxRewriteError: torch is older than 2.12.
    """
    check_dtensors()
    return cast("ChunkedTensor", value if isinstance(value, ChunkedTensor) else _Chunked.apply(value))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: DTensor) -> ChunkedTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        return _of(value)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> DTensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def _of(value: DTensor, *, requires_grad: bool = False) -> ChunkedTensor:
    made: Any = ChunkedTensor(value._local_tensor.detach(), value._spec, requires_grad=requires_grad)
    return made


def _without_mask(value: DTensor) -> DTensor:
    """The value, whole if it is a sum of rows that ranks found in their parts of a table, as of an embedding.

    Dynamo's guard on such a placement fails at once: the mask that is a part of it does not exist in a trace.
    """
    placements = [TorchReplicate() if hasattr(p, "mask_buffer") else p for p in value.placements]
    return value if placements == list(value.placements) else value.redistribute(placements=placements)


def _plain(value: ChunkedTensor) -> DTensor:
    return DTensor(value._local_tensor.detach(), value._spec, requires_grad=False)


_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def _mean_loss(func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    """A loss and the weight of its labels; a mean is the sum by all ranks' labels.

    DTensor's is the mean of the ranks' means, which is another number where ranks have labels of different weights, or
    of which some are ignored: https://github.com/pytorch/pytorch/issues/185167.
    """
    if reduction != _MEAN or not isinstance(x, DTensor):
        return func(x, target, weight, reduction, ignore_index)
    whole = [TorchReplicate()] * x.device_mesh.ndim
    total, labels = (n.redistribute(placements=whole) for n in func(x, target, weight, _SUM, ignore_index))
    return total / labels, labels


_LOSS_GRADIENTS = {
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
}


def _mean_loss_gradient(func: Any, grad: Any, x: Any, *args: Any, **named: Any) -> Any:
    """The gradient of a mean is that of the sum by the number of all ranks' elements; DTensor's is by a rank's own."""
    given = dict(zip((argument.name for argument in func._schema.arguments[2:]), args, strict=False)) | named
    if given.get("reduction", _MEAN) != _MEAN or not isinstance(x, DTensor):
        return func(grad, x, *args, **named)
    return func(grad, x, **given | {"reduction": _SUM}) / x.numel()


_MEAN, _SUM = 1, 2
"""How aten writes the reduction of a loss."""


def _whole_fake(value: DTensor) -> torch.Tensor:
    return value._local_tensor.new_empty(value.shape)


def _with_replicas(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, in which ordinary tensors are DTensors that every rank holds whole."""
    leaves = tree_leaves((args, kwargs))
    first = next((x for x in leaves if isinstance(x, ChunkedTensor)), None)
    if first is None or is_fake(first._local_tensor) or not any(type(x) in _ORDINARY for x in leaves):
        return args, kwargs
    mesh = first.device_mesh
    whole = [TorchReplicate()] * mesh.ndim

    def replica(value: Any) -> Any:
        return DTensor.from_local(value, mesh, whole, run_check=False) if type(value) in _ORDINARY else value

    return pytree.tree_map(replica, args), pytree.tree_map(replica, kwargs)


_ORDINARY = (torch.Tensor, nn.Parameter)


_NO_FLOATS = "it holds no floating-point numbers"


def _num_chunks(placements: Sequence[TorchPlacement], mesh: DeviceMesh, dim: int) -> int:
    """How many chunks a dimension is cut into."""
    return prod(mesh.size(at) for at, placed in enumerate(placements) if placed.is_shard(dim))


# values that leave a program


class Outputs:
    """How the outputs of a program leave that ranks hold in chunks: as DTensors, or gathered where these cannot say it.

    Attributes:
        placed: of those that leave in chunks, by position, the placement over each axis, by its name.
    """

    def __init__(self) -> None:
        self.placed: dict[int, dict[str, Shard]] = {}
        self._sizes: dict[str, int] = {}
        self._events: dict[tuple[int, str], AtBorder] = {}

    @property
    def events(self) -> list[AtBorder]:
        return list(self._events.values())

    def on(self, axis: Axis) -> Callable[[int, fx.Node, Placement], Placement]:
        """What `SpmdContext.output_placement` is for the axis; axes are decided on in the order of their lowering."""
        self._sizes[axis.name] = axis.size
        return functools.partial(self._decide, axis)

    def _decide(self, axis: Axis, position: int, node: fx.Node, placement: Placement) -> Placement:
        self._events.pop((position, axis.name), None)
        others = {name: p for name, p in self.placed.pop(position, {}).items() if name != axis.name}
        if others:
            self.placed[position] = others
        if not isinstance(placement, Shard):
            return Replicate()
        value = node.meta["val"]
        shape = [size_hint(n) for n in value.shape]
        for name, other in others.items():
            shape[other.dim] *= self._sizes[name]
        is_cut = placement.dim in {other.dim for other in others.values()}
        why = "another axis cuts the same dimension" if is_cut else _why_gathered_out(node, placement)
        placed = f"{axis.name}: {placement}"
        event = AtBorder(value=f"output %{node.name}", shape=tuple(shape), placement=placed, why=why)
        self._events[position, axis.name] = event
        if why:
            return Replicate()
        self.placed[position] = {**others, axis.name: placement}
        return placement


def _why_gathered_out(node: fx.Node, placement: Shard) -> str:
    """Why an output is gathered, or ''."""
    if is_view_of_input(node):
        return "it is a view of an input"
    value = node.meta["val"]
    if not value.is_floating_point():
        return _NO_FLOATS
    if placement.uneven:
        return "the ranks do not divide it"
    if not is_same_size(placement.outer, 1) or not is_same_size(placement.inner, 1):
        return "the ranks hold chunks of parts of a dimension, for which DTensors have no placement"
    return ""


def is_view_of_input(node: fx.Node) -> bool:
    """Whether an output may be a view of what the program gets.

    AOTAutograd makes such a view again, outside of its program and of that input: the gradient of the view is then not
    changed as the program changes those of inputs in chunks.
    """
    return any(origin.op == "placeholder" for origin in memory_origins(node) - {node})


def _leaving(chunk: torch.Tensor, placements: Mapping[str, Shard], mesh: DeviceMesh) -> ChunkedTensor:
    """What ranks hold so, as a DTensor over the mesh; axes that are not named hold it whole.

    The program gets its gradient times the number of ranks, as the sum of all ranks' losses gives it.
    """
    names = mesh.mesh_dim_names or ()
    placed = [TorchShard(placements[name].dim) if name in placements else TorchReplicate() for name in names]
    ranks = prod(mesh.size(names.index(name)) for name in placements)
    (chunk,) = change_gradients([chunk], float(ranks))
    return chunked(DTensor.from_local(chunk, mesh, placed, run_check=False))


# values that enter a program


@dataclass(frozen=True, slots=True)
class Entry:
    """How a program reads an input that is a DTensor."""

    whole: torch.Tensor
    """The fake value of what all ranks hold."""
    is_gathered: bool
    """Whether it is gathered before the program runs; otherwise that starts from what the rank holds."""
    is_chunk: bool
    """Whether the program starts from a chunk, of whose gradient it gives that of one device."""
    events: Sequence[AtBorder]


def entering(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh | None, *, why_whole: str = ""
) -> dict[int, Entry]:
    """Afterwards the graph, as Dynamo captured it, starts from the whole values of inputs that are ChunkedTensors.

    Args:
        gm: changed.
        example_inputs: what Dynamo traced it with; of a view of a ChunkedTensor the graph has an ordinary fake value.
        mesh: whose axes the program is for.
        why_whole: why this program reads nothing in chunks; '' where it may.

    Returns:
        these inputs by position.
    """
    found: dict[int, Entry] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        given, fake = example_inputs[position], node.meta.get("example_value")
        if not isinstance(given, ChunkedTensor) or not isinstance(fake, torch.Tensor):
            continue
        held = fake if isinstance(fake, ChunkedTensor) else given
        why = why_whole or _why_gathered(held, mesh)
        name, shape = input_name(node), tuple(map(size_hint, held.shape))
        axes = list(zip(held.device_mesh.mesh_dim_names or (), held.placements, strict=True))
        placed = ", ".join(f"{axis}: {placement}" for axis, placement in axes)
        like = fake._local_tensor if isinstance(fake, ChunkedTensor) else fake
        whole = like.detach().new_empty(fake.shape).requires_grad_(given.requires_grad)
        cut = {} if why else {axis: Shard(p.dim) for axis, p in axes if isinstance(p, TorchShard)}
        said = [AtBorder(value=f"input {name}", shape=shape, placement=placed, why=why)] if why or cut else []
        found[position] = Entry(whole, is_gathered=bool(why), is_chunk=bool(cut), events=said)
        node.meta["example_value"], node.meta[CHUNK] = whole, cut
    return found


def _why_gathered(held: ChunkedTensor, mesh: DeviceMesh | None) -> str:
    """Why a program gathers an input, or ''."""
    if not held.is_floating_point():
        return _NO_FLOATS
    if held.device_mesh != mesh:
        return f"it is over {held.device_mesh}, and the program is over {mesh}"
    cut = [p.dim for p in held.placements if type(p) is TorchShard]
    if len(set(cut)) != len(cut) or any(type(p) not in (TorchShard, TorchReplicate) for p in held.placements):
        return f"no program starts from {tuple(held.placements)}"
    uneven = [dim for dim in cut if size_hint(held.shape[dim]) % _num_chunks(held.placements, held.device_mesh, dim)]
    return f"the ranks do not divide dimension {uneven[0]}" if uneven else ""


class Crossing:
    """What passes between a program and others as DTensors.

    Attributes:
        entries: inputs that do, by position.
        outputs: those that do; filled while the program is lowered.
        chunks: positions of inputs of which the program starts from this rank's chunk.
    """

    def __init__(self, entries: Mapping[int, Entry] | None = None, mesh: DeviceMesh | None = None) -> None:
        self.entries, self.outputs = entries or {}, Outputs()
        self.chunks = frozenset(position for position, entry in self.entries.items() if entry.is_chunk)
        self._mesh = mesh
        """Of the axes that the program is for; None where nothing leaves as a DTensor."""

    @property
    def events(self) -> list[AtBorder]:
        return [*(event for entry in self.entries.values() for event in entry.events), *self.outputs.events]

    def examples(self, program: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """What the lowered program is compiled for, of what Dynamo traced it with."""
        found, placeholders = list(inputs), program.graph.find_nodes(op="placeholder")
        for position, entry in self.entries.items():
            held = entry.whole
            if entry.is_chunk:
                held = held.new_empty(placeholders[position].meta["val"].shape).requires_grad_(held.requires_grad)
            found[position] = held
        return found

    def entered(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What the program gets of its inputs: the rank's chunk, or what is gathered; gradients flow through both."""
        if not self.entries:
            return inputs
        found = list(inputs)
        for position, entry in self.entries.items():
            value = cast("ChunkedTensor", inputs[position])
            found[position] = (value.full_tensor() if entry.is_gathered else value.to_local()).contiguous()
        return found

    def left(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """What the program returns to its caller."""
        placed, mesh = self.outputs.placed, self._mesh
        if not placed or mesh is None:
            return outputs
        return [_leaving(x, placed[i], mesh) if i in placed else x for i, x in enumerate(outputs)]
