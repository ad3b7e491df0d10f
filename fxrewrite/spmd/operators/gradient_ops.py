"""Operators of a lowered graph that are the identity forward, and that change gradients.

    scale_gradient(x, factor)             factor * gradient
    mean_gradient(x, group_name, ranks)        the mean over the ranks of a mesh axis: one all-reduce
    mean_gradients(xs, group_name, ranks)      the same of several, by one all-reduce
    pass_gradient(value, x, factor)       `value` forward; `x` gets factor * gradient in its dtype, and `value` none

They give views of their first operand. And one that is no identity, an all-gather of a cast value:

    gather_cast(x, ranks, group_name, dtype)   all_gather(to(x, dtype)), to be waited for; gradients are cast back to
                                               the dtype of x, and then reduced and scattered

Autograd runs through them; a second derivative is refused by autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fxrewrite.ops import declare_pure
from fxrewrite.spmd.group import COLLECTIVES


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.ranks = group, ranks
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = [grad.reshape(-1) for grad in grads]
        row = torch.cat(rows) if len(rows) > 1 else rows[0].contiguous()
        mean = COLLECTIVES["wait"](COLLECTIVES["all_reduce"](row, "sum", ctx.group)) / ctx.ranks
        parts = mean.split([grad.numel() for grad in grads])
        return None, None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor, ctx.dtype = factor, x.dtype
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, grad.to(ctx.dtype) * ctx.factor, None


class _GatherCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, group: str, dtype: torch.dtype) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dtype, ctx.ranks, ctx.group = x.dtype, ranks, group
        return COLLECTIVES["all_gather"](x.to(dtype), ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = COLLECTIVES["reduce_scatter"](grad.to(ctx.dtype).contiguous(), "sum", ctx.ranks, ctx.group)
        return COLLECTIVES["wait"](sent), None, None, None


# Composite, so that autograd and AOTAutograd look inside, and no compiled graph has an operator that it does not know.
_LIBRARY = torch.library.Library("fxrewrite", "FRAGMENT")
for _schema, _function in (
    ("scale_gradient(Tensor(a) x, float factor) -> Tensor(a)", lambda x, factor: _Passed.apply(x, x, factor)),
    (
        "mean_gradient(Tensor(a) x, str group_name, int ranks) -> Tensor(a)",
        lambda x, group, ranks: _Means.apply(group, ranks, x)[0],
    ),
    (
        "mean_gradients(Tensor(a)[] xs, str group_name, int ranks) -> Tensor(a)[]",
        lambda xs, group, ranks: list(_Means.apply(group, ranks, *xs)),
    ),
    ("pass_gradient(Tensor(a) value, Tensor x, float factor) -> Tensor(a)", _Passed.apply),
    ("gather_cast(Tensor x, int ranks, str group_name, ScalarType dtype) -> Tensor", _GatherCast.apply),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")

SCALE_GRADIENT = torch.ops.fxrewrite.scale_gradient.default
MEAN_GRADIENT = torch.ops.fxrewrite.mean_gradient.default
MEAN_GRADIENTS = torch.ops.fxrewrite.mean_gradients.default
PASS_GRADIENT = torch.ops.fxrewrite.pass_gradient.default
GATHER_CAST = torch.ops.fxrewrite.gather_cast.default
declare_pure(GATHER_CAST)
