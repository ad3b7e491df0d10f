"""Gradients where a compiled program meets eager code: summed over an axis, or multiplied, by an identity.

    change_gradients(tensors, factor, axis)    the same tensors; backward gives factor * sum over the ranks
    change_gradients(tensors, factor)          the same tensors; backward gives factor * gradient
    hooked_on_any_rank(tensors, axis)          which of them have a hook that reads their gradient

Every rank of a program returns the loss of the whole batch, and each collective's backward is its adjoint, so a rank
differentiates the sum of the losses of all P ranks. What reaches a tensor that every rank holds is therefore a summand:
the mean over the ranks is the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.group import process_group
from fxrewrite.spmd.placement import Axis


def change_gradients(
    tensors: Sequence[torch.Tensor], factor: float = 1.0, axis: Axis | None = None
) -> tuple[torch.Tensor, ...]:
    """The tensors, whose gradients are summed over the ranks of `axis` if there is one, then multiplied by `factor`.

    One all-reduce each, of the gradient's bytes, all of them after the last gradient has come. The gradients cannot be
    differentiated again: FxRewriteError says so where somebody does. What is summed is dense, if sparse before.
    """
    return cast("tuple[torch.Tensor, ...]", _Changed.apply(axis, factor, *tensors)) if tensors else ()


def hooked_here(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor whether this rank has registered a hook on it."""
    return [bool(tensor._backward_hooks) for tensor in tensors]


def hooked_on_any_rank(tensors: Sequence[torch.Tensor], axis: Axis) -> list[bool]:
    """For each tensor whether a rank of the axis has registered a hook on it: the same answer on every rank.

    Such a hook reads the gradient before anything outside of the program sums it over ranks.
    """
    if not tensors:
        return []
    home = max((tensor.device for tensor in tensors), key=lambda device: device.type != "cpu")
    found = torch.tensor(hooked_here(tensors), dtype=torch.int32, device=home)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=process_group(axis))
    return [bool(hooked) for hooked in found.tolist()]


def _scaled(grad: torch.Tensor, factor: float, axis: Axis | None) -> torch.Tensor:
    """The gradient times the factor, as a collective takes it if there is an axis."""
    found = grad if factor == 1 else grad * factor
    if found.layout == torch.strided:
        return found.contiguous()
    return found if axis is None else found.to_dense()


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis | None, factor: float, *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.axis, ctx.factor = axis, factor
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = [None if grad is None else _scaled(grad.detach(), ctx.factor, ctx.axis) for grad in grads]
        if ctx.axis is not None:
            group = process_group(ctx.axis)
            works = [dist.all_reduce(grad, group=group, async_op=True) for grad in found if grad is not None]
            for work in works:
                if work is not None:
                    work.wait()
        if torch.is_grad_enabled():  # create_graph=True
            found = refuse_second_derivatives(found)
        return None, None, *found


def refuse_second_derivatives(
    gradients: Sequence[torch.Tensor | None], of: str = "a compiled program"
) -> tuple[torch.Tensor | None, ...]:
    """The gradients, which cannot be differentiated again: FxRewriteError says so where somebody does."""
    return tuple(None if grad is None else _FirstDerivative.apply(of, grad.requires_grad_()) for grad in gradients)


class _FirstDerivative(torch.autograd.Function):
    """A gradient of a compiled program; differentiating it again is refused."""

    @staticmethod
    def forward(ctx: Any, of: str, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.of = of
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise FxRewriteError(
            f"a gradient of {ctx.of} is differentiated again: a compiled program has first derivatives alone, of which "
            "each rank holds a part; compute what needs second ones, such as a gradient penalty, on the model "
            "without torch.compile"
        )
