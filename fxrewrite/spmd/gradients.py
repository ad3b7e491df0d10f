"""Gradients where a compiled program meets eager code: summed over an axis, or multiplied, by an identity.

    sum_gradients(tensors, axis, factor)    the same tensors; backward gives factor * sum over the ranks
    scale_gradients(tensors, factor)        the same tensors; backward gives factor * gradient

Every rank of a program returns the loss of the whole batch, and each collective's backward is its adjoint, so a rank
differentiates the sum of the losses of all P ranks. What reaches a tensor that every rank holds is therefore a summand:
the mean over the ranks is the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fxrewrite.spmd.group import process_group
from fxrewrite.spmd.layout import Axis

__all__ = ["scale_gradients", "sum_gradients"]


def sum_gradients(tensors: Sequence[torch.Tensor], axis: Axis, factor: float) -> tuple[torch.Tensor, ...]:
    """The tensors, whose gradients are summed over the ranks of `axis`, then multiplied by `factor`.

    One all-reduce each, of the gradient's bytes, all of them after the last gradient has come.
    """
    return _apply(tensors, axis, factor)


def scale_gradients(tensors: Sequence[torch.Tensor], factor: float) -> tuple[torch.Tensor, ...]:
    """The tensors, whose gradients are multiplied by `factor`."""
    return _apply(tensors, None, factor)


def _apply(tensors: Sequence[torch.Tensor], axis: Axis | None, factor: float) -> tuple[torch.Tensor, ...]:
    return cast("tuple[torch.Tensor, ...]", _Reduced.apply(axis, factor, *tensors)) if tensors else ()


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis | None, factor: float, *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.axis, ctx.factor = axis, factor
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = [None if grad is None else (grad * ctx.factor).contiguous() for grad in grads]
        if ctx.axis is not None:
            group = process_group(ctx.axis)
            works = [dist.all_reduce(grad, group=group, async_op=True) for grad in found if grad is not None]
            for work in works:
                if work is not None:
                    work.wait()
        return None, None, *found
