"""The placement of queries, keys and values in a ring, and the operator that moves them there and back.

    exchange([q, k, v], ...)          ->  this rank's part of each in the ring
    exchange([out], ..., back=True)   ->  the rank's own rows again

P ranks are R groups of U. Within a group, ranks trade rows for heads (Ulysses), so that each has the rows of its group
and one U-th of the heads. Over the R groups, halves of these rows are traded so that causal work is equal (zigzag): of
2R halves, group g gets half g, which reads few keys, and half 2R - 1 - g, which reads many.
Shapes: [B, H, S / P, D] -> [B, H / U, S / R, D], for each value; all values for one rank are sent together.
Numerics: exact; the backward is the exchange in the other direction. Every size that differs between ranks is computed
from the rank's number, so that the body runs on simulated ranks as well.
Source: USP (arXiv 2405.07719); zigzag: Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxrewrite.ops import communicates
from fxrewrite.spmd import COLLECTIVES, one_if_equal

PLACE = "SymInt rank, int num_ranks, int per_group, bool zigzag, str group_name"
"""The fields of `Ring` in the schema of an operator."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's position: P = `num_ranks` ranks in rings over groups of `per_group`; `zigzag` trades halves if R > 1."""

    rank: Any
    num_ranks: int
    per_group: int
    zigzag: bool
    process_group: str

    @property
    def num_groups(self) -> int:
        """R, the number of groups, which is the length of a ring."""
        return self.num_ranks // self.per_group

    @property
    def group(self) -> Any:
        """The number of the rank's group, which is its position in the ring."""
        return self.rank // self.per_group

    @property
    def member(self) -> Any:
        """The rank's number in its group, which is the number of its ring."""
        return self.rank % self.per_group

    def to(self, groups: Sequence[Any]) -> list[Any]:
        """Returns how many pieces each rank gets if each of these groups, in the same ring, gets one."""
        return [
            sum(one_if_equal(group, other // self.per_group) for group in groups)
            * one_if_equal(self.member, other % self.per_group)
            for other in range(self.num_ranks)
        ]


def send(pieces: torch.Tensor, ring: Ring, sent: Sequence[Any], received: Sequence[Any]) -> torch.Tensor:
    """Starts to send the pieces [n, ...]: `sent[i]` to rank i, `received[i]` from it; the caller must wait."""
    return COLLECTIVES["all_to_all"](pieces.contiguous(), list(received), list(sent), ring.process_group)


def _traded(values: Sequence[torch.Tensor], ring: Ring, sent: Sequence[Any], received: Sequence[Any]) -> Any:
    """Trades the values [n, ...] piece by piece, in one collective."""
    rows = [x.reshape(x.shape[0], -1) for x in values]
    came = COLLECTIVES["wait"](send(torch.cat(rows, 1), ring, sent, received))
    parts = came.split([row.shape[1] for row in rows], 1)
    return [part.reshape(x.shape) for part, x in zip(parts, values, strict=True)]


def _in_group(values: Sequence[torch.Tensor], ring: Ring, cut: int, join: int) -> list[torch.Tensor]:
    """In each group, cuts dimension `cut` into a part for each rank, and joins what comes along dimension `join`."""
    pieces = [one_if_equal(ring.group, other // ring.per_group) for other in range(ring.num_ranks)]
    parts = [x.unflatten(cut, (ring.per_group, -1)).movedim(cut, 0) for x in values]
    return [x.movedim(0, join).flatten(join, join + 1) for x in _traded(parts, ring, pieces, pieces)]


def _zigzag(values: Sequence[torch.Tensor], ring: Ring, *, back: bool) -> list[torch.Tensor]:
    """Trades halves 2g and 2g + 1 of the rows for halves g and 2R - 1 - g, or back."""
    group, last = ring.group, 2 * ring.num_groups - 1
    own, other = group * 2, group * 2 + 1
    sent = ring.to([torch.sym_min(half, half * -1 + last) for half in (own, other)])
    received = ring.to([group // 2, (group * -1 + last) // 2])
    turned = own // ring.num_groups  # in the upper half of the groups, the second half goes to the lower group
    cut = [x.unflatten(2, (2, -1)).movedim(2, 0) for x in values]
    if back:
        traded = [torch.roll(x, turned, 0) for x in _traded(cut, ring, received, sent)]
    else:
        traded = _traded([torch.roll(x, turned, 0) for x in cut], ring, sent, received)
    return [x.movedim(0, 2).flatten(2, 3) for x in traded]


def _exchange(values: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    """Moves the values to their placement in the ring, or `back` to each rank's own rows; see the shapes above.

    Args:
        values: with the same batch size and number of rows.
        how: the position in the ring, see `Ring`, and `back`.
    """
    *place, back = how
    ring, found = Ring(*place), list(values)
    if not back and ring.per_group > 1:
        found = _in_group(found, ring, 1, 2)  # [B, H, S, D] -> [B, H / U, U S, D]
    if ring.zigzag:
        found = _zigzag(found, ring, back=back)
    if back and ring.per_group > 1:
        found = _in_group(found, ring, 2, 1)
    return [x.clone(memory_format=torch.contiguous_format) for x in found]  # received parts share memory


exchange = torch.library.custom_op(
    "autosp::exchange",
    _exchange,
    mutates_args=(),
    schema=f"(Tensor[] values, {PLACE}, bool back) -> Tensor[]",
)
communicates(exchange, _exchange)


@exchange.register_fake
def _(values: Any, rank: Any, num_ranks: int, per_group: int, zigzag: bool, group: str, back: bool) -> Any:
    heads, rows = (1, per_group) if back else (per_group, 1)
    return [x.new_empty(x.shape[0], x.shape[1] // heads * rows, x.shape[2] * heads // rows, x.shape[3]) for x in values]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.how = inputs[1:]


def _gradients(ctx: Any, given: list[torch.Tensor]) -> tuple[Any, ...]:
    *place, back = ctx.how
    return exchange(given, *place, not back), *[None] * len(ctx.how)


exchange.register_autograd(_gradients, setup_context=_save)
EXCHANGE = torch.ops.autosp.exchange.default
"""The registered operator of `exchange`; graphs call this."""
