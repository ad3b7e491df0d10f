"""Rows to the ranks of an axis, as many to each as data say: one all-to-all with uneven parts.

    send_rows([x, y], counts, rows, group)     the rows that came to this rank, `rows` of them, from rank 0 first
    arriving = read_size(match, n)             the number in a tensor, as a size that values may have

`counts` [2, P], int64 on the CPU: how many rows go to each rank, and how many come from each. The rows of x are in the
order of the ranks that they go to. Values of one dtype are sent together. The backward sends gradients back by the
counts in the other order. A rank may send no row, and none may come.
Shapes: x [n, ...] -> [rows, ...]. Numerics: exact.
Source: PyTorch, torch.distributed.all_to_all_single; gloo's takes uneven parts of every dtype, empty ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.sizes import new_data_size
from fxrewrite.match import Match
from fxrewrite.ops import HOST_WAITS, communicates, declare_pure
from fxrewrite.spmd.group import COLLECTIVES

aten = torch.ops.aten


def _send_rows(values: Sequence[torch.Tensor], counts: torch.Tensor, rows: Any, group: str) -> list[torch.Tensor]:
    """The rows that came, of each value; `rows` is their number, which `counts` says too."""
    sent, received = ([part.item() for part in of.unbind(0)] for of in counts.unbind(0))
    started: dict[torch.dtype, tuple[list[int], torch.Tensor]] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        where = [i for i, value in enumerate(values) if value.dtype == dtype]
        flat = [values[i].flatten(1) if values[i].dim() > 1 else values[i].unsqueeze(1) for i in where]
        together = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        started[dtype] = where, COLLECTIVES["all_to_all"](together.contiguous(), received, sent, group)
    made: list[Any] = [None] * len(values)
    for where, sending in started.values():
        widths = [values[i].shape[1:].numel() for i in where]
        parts = COLLECTIVES["wait"](sending).split(widths, 1)
        for i, part in zip(where, parts, strict=True):
            own = part.clone() if len(where) > 1 else part  # results of an operator must not share memory
            made[i] = own.squeeze(1) if values[i].dim() == 1 else own.unflatten(1, values[i].shape[1:])
    return made


send_rows = torch.library.custom_op(
    "fxrewrite::send_rows",
    _send_rows,
    mutates_args=(),
    schema="(Tensor[] values, Tensor counts, SymInt rows, str group_name) -> Tensor[]",
    tags=HOST_WAITS,
)
communicates(send_rows, _send_rows)


@send_rows.register_fake
def _(values: Sequence[torch.Tensor], counts: torch.Tensor, rows: Any, group: str) -> list[torch.Tensor]:
    return [value.new_empty(rows, *value.shape[1:]) for value in values]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, counts, _, group = inputs
    ctx.save_for_backward(counts)
    ctx.rows, ctx.group = values[0].shape[0], group


def _gradients(ctx: Any, given: list[torch.Tensor | None]) -> tuple[Any, ...]:
    (counts,) = ctx.saved_tensors
    sent = [grad for grad in given if grad is not None and grad.is_floating_point()]
    back = iter(send_rows(sent, counts.flip(0), ctx.rows, ctx.group) if sent else ())
    found = [next(back) if grad is not None and grad.is_floating_point() else None for grad in given]
    return found, None, None, None


send_rows.register_autograd(_gradients, setup_context=_save)
SEND_ROWS = torch.ops.fxrewrite.send_rows.default
"""The registered operator; graphs call this."""
declare_pure(SEND_ROWS)


def read_size(match: Match, number: fx.Proxy) -> fx.Proxy:
    """The number in a tensor of one entry, as a size that the program knows when it runs: 0 or more."""
    mode = match.edit.fake_mode
    size = None if mode is None else new_data_size(mode)
    read = aten._local_scalar_dense.default
    return match.proxy(match.edit.call(read, (number.node,), after=number.node, like=match.root, val=size))
