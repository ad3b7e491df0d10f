"""A rank's chunk of a dimension with the entries beside it, which its neighbours have.

    halo(x, dim, before, after, rank, num_ranks, group)     cat([last of the rank before, x, first of the rank after])

Beyond the first and the last chunk there are zeros. The backward adds the gradients of entries that came to those of
the rank that they came from. Where a chunk has fewer entries than are read beside it, as that of a short input in a
program for many sizes, all chunks are gathered.
Shapes: x [..., n, ...] -> [..., before + n + after, ...], with as many entries n on every rank.
Numerics: exact; gradients of entries that several ranks read are summed. Sizes do not depend on the rank, and what does
is computed from its number, so that the body runs on simulated ranks as well.
Source: halo exchange, as for stencils; PyTorch, torch/distributed/tensor/_tp_conv.py, sends rows of images so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fxrewrite.ops import communicates, declare_pure
from fxrewrite.spmd.group import COLLECTIVES

_SCHEMA = "(Tensor x, int dim, SymInt before, SymInt after, SymInt rank, int num_ranks, str group_name) -> Tensor"


class _Place(NamedTuple):
    """A rank's position on its axis."""

    rank: Any
    num_ranks: int
    group: str

    def send(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Starts to send `x` to the rank `step` after this one, in a ring; who reads what came waits."""
        to, of = ((self.rank + (by % self.num_ranks)) % self.num_ranks for by in (step, -step))
        sent, received = ([one_if_equal(one, other) for other in range(self.num_ranks)] for one in (to, of))
        return COLLECTIVES["all_to_all"](x.unsqueeze(0).contiguous(), received, sent, self.group)

    def received(self, sending: torch.Tensor, step: int) -> torch.Tensor:
        """What the rank `step` before this one sent; zeros where there is none."""
        came = COLLECTIVES["wait"](sending)
        distance = self.rank if step > 0 else self.rank * -1 + (self.num_ranks - 1)
        is_there: Any = torch.sym_min(distance, 1)
        return torch.cat([torch.zeros_like(came), came]).narrow(0, is_there, 1).squeeze(0)

    def trade(self, to_before: torch.Tensor, to_after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the ranks before and after sent to this one; zeros, as many as it sends that way, if none is there."""
        ways = ((to_after, 1), (to_before, -1))
        started = [self.send(x, step) if x.numel() else None for x, step in ways]
        of_before, of_after = (
            x if sending is None else self.received(sending, step)
            for (x, step), sending in zip(ways, started, strict=True)
        )
        return of_before, of_after


def one_if_equal(a: Any, b: int) -> Any:
    """1 if the numbers are equal, else 0, by arithmetic that also works on a symbolic rank."""
    return torch.sym_min((a - b) * (a - b), 1) * -1 + 1


def _halo(x: torch.Tensor, dim: int, before: Any, after: Any, *where: Any) -> torch.Tensor:
    place, size = _Place(*where), x.shape[dim]
    if size >= max(before, after):
        of_before, of_after = place.trade(x.narrow(dim, 0, after), x.narrow(dim, size - before, before))
        return torch.cat([of_before, x, of_after], dim).contiguous(memory_format=_format_of(x))
    rows = x.movedim(dim, 0).contiguous()
    joined = COLLECTIVES["wait"](COLLECTIVES["all_gather"](rows, place.num_ranks, place.group))
    joined = _between_zeros(joined, before, after)
    held = joined.narrow(0, place.rank * size, before + size + after).movedim(0, dim)
    return held.contiguous(memory_format=_format_of(x))


def _add_halo(x: torch.Tensor, dim: int, before: Any, after: Any, *where: Any) -> torch.Tensor:
    """The adjoint of `_halo`: of what `x` has beside the rank's chunk, sums over all that have it."""
    place, size = _Place(*where), x.shape[dim] - before - after
    if size >= max(before, after):
        own, ends = x.narrow(dim, before, size), (x.narrow(dim, 0, before), x.narrow(dim, before + size, after))
        to_first, to_last = (end.movedim(dim, 0) for end in place.trade(*ends))
        added = _between_zeros(to_first, 0, size - after) + _between_zeros(to_last, size - before, 0)
        return (own + added.movedim(0, dim)).contiguous(memory_format=_format_of(x))
    others = (place.num_ranks - 1) * size
    placed = _between_zeros(x.movedim(dim, 0), others, others)
    placed = placed.narrow(0, place.rank * -size + (others + before), place.num_ranks * size).contiguous()
    summed = COLLECTIVES["reduce_scatter"](placed, "sum", place.num_ranks, place.group)
    return COLLECTIVES["wait"](summed).movedim(0, dim).contiguous(memory_format=_format_of(x))


def _format_of(x: torch.Tensor) -> torch.memory_format:
    """How the result is laid out: images and volumes whose channels come last stay so."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return last if last is not None and x.is_contiguous(memory_format=last) else torch.contiguous_format


def _between_zeros(rows: torch.Tensor, before: Any, after: Any) -> torch.Tensor:
    """Rows of zeros, these, and rows of zeros."""
    return torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows, rows.new_zeros(after, *rows.shape[1:])])


def _as(x: torch.Tensor, dim: int, more: Any) -> torch.Tensor:
    shape = [size + more if at == dim % x.dim() else size for at, size in enumerate(x.shape)]
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format_of(x))


halo = torch.library.custom_op("fxrewrite::halo", _halo, mutates_args=(), schema=_SCHEMA)
add_halo = torch.library.custom_op("fxrewrite::add_halo", _add_halo, mutates_args=(), schema=_SCHEMA)
for _operator, _body in ((halo, _halo), (add_halo, _add_halo)):
    communicates(_operator, _body)


@halo.register_fake
def _(x: torch.Tensor, dim: int, before: Any, after: Any, *where: Any) -> torch.Tensor:
    return _as(x, dim, before + after)


@add_halo.register_fake
def _(x: torch.Tensor, dim: int, before: Any, after: Any, *where: Any) -> torch.Tensor:
    return _as(x, dim, -(before + after))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.how = inputs[1:]


halo.register_autograd(lambda ctx, g: (add_halo(g, *ctx.how), *[None] * len(ctx.how)), setup_context=_save)
add_halo.register_autograd(lambda ctx, g: (halo(g, *ctx.how), *[None] * len(ctx.how)), setup_context=_save)
HALO = torch.ops.fxrewrite.halo.default
"""The registered operator; graphs call this."""
for _overload in (HALO, torch.ops.fxrewrite.add_halo.default):
    declare_pure(_overload)
