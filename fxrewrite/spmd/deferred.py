"""A sharded result of a compiled program, as a tensor of global shape that is gathered when it is first used.

    deferred_gather(chunk, shape, layout, axis)     a DeferredGather; no communication, no memory but the chunk's

A chunk that returns to eager code looks like a tensor of a smaller batch or of a shorter sequence: `logits[:, -1]` or
a mean over it is silently wrong on every rank. A DeferredGather has the global shape. Any operator that reads it runs
on the gathered value, which is kept from then on; what only renames it or casts it (detach, clone, to) stays deferred.
Autograd sees an ordinary tensor: the gradient of the gathered value is reduced and scattered to the chunks.

The gather is a collective, so every rank must use the value where one does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.layout import Axis, Shard, num_entries

__all__ = ["DeferredGather", "deferred_gather"]

log = logging.getLogger(__name__)
aten = torch.ops.aten
Before: TypeAlias = "Callable[[], None]"

_STAYS_DEFERRED = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
"""Operators that act on each element alone and keep the shape, so that they can run on the chunk."""


class DeferredGather(torch.Tensor):
    """A tensor of global shape, of which this rank holds a chunk until any operator reads it. See the module."""

    _chunk: torch.Tensor
    _shape: Sequence[int]
    _layout: Shard
    _axis: Axis
    _before: Before
    _gathered: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: PYI034  # torch makes the object
        cls: type[DeferredGather], chunk: torch.Tensor, shape: Sequence[int], layout: Shard, axis: Axis, before: Before
    ) -> DeferredGather:
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        new = make(cls, tuple(shape), dtype=chunk.dtype, device=chunk.device)
        new._chunk, new._shape, new._layout, new._axis, new._before = chunk, shape, layout, axis, before
        new._gathered = None
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        state = "gathered" if self._gathered is not None else f"gathered over {self._axis} at the first use"
        return f"DeferredGather(shape={tuple(self._shape)}, dtype={self.dtype}, {state})"

    def gathered(self) -> torch.Tensor:
        """The whole value, as an ordinary tensor without autograd; the first call communicates."""
        if self._gathered is None:
            self._before()
            log.info("gathering %s of %s over %s: it is used", tuple(self._shape), self.dtype, self._axis)
            self._gathered = _gather(self._chunk, self._shape, self._layout, self._axis)
        return self._gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OUTSIDE_THE_DISPATCHER:  # they read memory, which the wrapper has not
            args = pytree.tree_map_only(DeferredGather, _whole, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = args[0] if args else None
        if func in _STAYS_DEFERRED and isinstance(value, DeferredGather):
            chunk = func(value._chunk, *args[1:], **kwargs)
            new = DeferredGather(chunk, value._shape, value._layout, value._axis, value._before)
            if value._gathered is not None:
                new._gathered = func(value._gathered, *args[1:], **kwargs)
            return new
        whole_args, whole_kwargs = pytree.tree_map_only(DeferredGather, DeferredGather.gathered, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        same = next((x for x in pytree.tree_leaves((args, kwargs)) if _holds(x, result)), None)
        return result if same is None else same  # written in place: what was passed is what returns


def _holds(value: Any, result: Any) -> bool:
    return isinstance(value, DeferredGather) and isinstance(result, torch.Tensor) and value._gathered is result


def _whole(value: DeferredGather) -> torch.Tensor:
    """The gathered value for what does not go through the dispatcher, with autograd's history if it has one."""
    if value.requires_grad:
        return cast("torch.Tensor", _Plain.apply(value))
    return value.gathered()


class _Plain(torch.autograd.Function):
    """The ordinary tensor of a deferred one; gradients pass."""

    @staticmethod
    def forward(ctx: Any, value: DeferredGather) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.gathered().view_as(value.gathered())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


_OUTSIDE_THE_DISPATCHER = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__format__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
}


def deferred_gather(
    chunk: torch.Tensor,
    shape: Sequence[int],
    layout: Shard,
    axis: Axis,
    *,
    grad_scale: float = 1.0,
    before: Before = lambda: None,
) -> torch.Tensor:
    """A tensor of global `shape` of which every rank of `axis` holds `chunk` as `layout` says; see the module.

    Args:
        chunk: what this rank holds, with its padding where the layout is uneven.
        grad_scale: what the gradient of the chunk is multiplied with.
        before: called when the value is used, before the collective: the place to see whether every rank comes.
    """
    return cast("torch.Tensor", _Deferred.apply(chunk, tuple(shape), layout, axis, grad_scale, before))


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        chunk: torch.Tensor,
        shape: tuple[int, ...],
        layout: Shard,
        axis: Axis,
        grad_scale: float,
        before: Before,
    ) -> DeferredGather:
        ctx.of = (chunk.shape, shape, layout, axis, grad_scale)
        ctx.set_materialize_grads(False)
        return DeferredGather(chunk.detach(), shape, layout, axis, before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 6
        chunk_shape, shape, layout, axis, grad_scale = ctx.of
        if isinstance(grad, DeferredGather):
            grad = grad.gathered()
        found = _reduce_scatter(grad, shape, layout, axis).reshape(chunk_shape)
        return found if grad_scale == 1.0 else found * grad_scale, None, None, None, None, None


def _runs(shape: Sequence[int], layout: Shard, entries: int) -> list[int]:
    """The shape with the sharded dimension split into [outer, entries, inner]."""
    return [*shape[: layout.dim], int(layout.outer), entries, int(layout.inner), *shape[layout.dim + 1 :]]


def _gather(chunk: torch.Tensor, shape: Sequence[int], layout: Shard, axis: Axis) -> torch.Tensor:
    entries = int(num_entries(shape, layout))
    held, at = -(-entries // axis.size), layout.dim + 1
    runs = chunk.detach().reshape(_runs(shape, layout, held)).movedim(at, 0).contiguous()
    sent = runs.view(torch.uint8) if runs.dtype == torch.bool else runs  # gloo sends no booleans
    received = COLLECTIVES["wait"](COLLECTIVES["all_gather"](sent, axis.size, axis.group))
    whole = received.view(runs.dtype).narrow(0, 0, entries)
    return whole.movedim(0, at).reshape(tuple(shape)).contiguous()


def _reduce_scatter(grad: torch.Tensor, shape: Sequence[int], layout: Shard, axis: Axis) -> torch.Tensor:
    entries = int(num_entries(shape, layout))
    held, at = -(-entries // axis.size), layout.dim + 1
    runs = grad.reshape(_runs(shape, layout, entries)).movedim(at, 0)
    padding = held * axis.size - entries
    if padding:
        runs = torch.cat([runs, runs.new_zeros(padding, *runs.shape[1:])])
    scatter = COLLECTIVES["reduce_scatter"](runs.contiguous(), "sum", axis.size, axis.group)
    return COLLECTIVES["wait"](scatter).movedim(0, at)
