"""What passes between compiled programs in chunks: DTensors, which programs and eager code read without gathering them.

A ChunkedTensor is a DTensor. Eager code computes with it by torch's own propagation, in which an ordinary tensor is
one that every rank holds whole, as all eager code between programs does; its gradient is summed over the ranks. While
Dynamo traces a program, a ChunkedTensor is an ordinary tensor of the global shape, so what is captured is the program
of one device; with a DTensor of torch, Dynamo would look for a common placement with every weight. `chunked(dtensor)`
makes one of any DTensor. Which values a program reads and returns as these is decided in `borders`.

Gradients are those of one device, placed as the values are: torch's `from_local` and `to_local` see to that.
The private `_spec` and `_local_tensor` are all that a DTensor is; a subclass has no other way to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Placement as TorchPlacement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from fxrewrite.errors import FxRewriteError
from fxrewrite.torch_versions import DISPATCHES_DTENSOR_SUBCLASSES, TORCH_VERSION

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
            ranks = num_chunks(placements, mesh, dim)
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
        values, named = pytree.tree_map_only(ChunkedTensor, whole_fake if is_traced else _plain, given)
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


def whole_fake(value: torch.Tensor) -> torch.Tensor:
    """What stands for a traced value that ranks hold in chunks, whole and without a gradient."""
    held = value._local_tensor if isinstance(value, ChunkedTensor) else value
    return held.detach().new_empty(value.shape)


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


def num_chunks(placements: Sequence[TorchPlacement], mesh: DeviceMesh, dim: int) -> int:
    """How many chunks a dimension is cut into."""
    return prod(mesh.size(at) for at, placed in enumerate(placements) if placed.is_shard(dim))
