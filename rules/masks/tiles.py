"""Which tiles of a mask are hidden, partly kept or fully kept, decided by bounds: the mask itself never exists.

    mask_tiles([c, r], "le(x0, x1)", rows=384, columns=384, ...)   of a causal mask, by rows
            kept in part   [1, 1, 1] of them   [0, ...] [1, ...] [2, ...]
            kept all       [0, 1, 2] of them   [...]    [0, ...] [0, 1, ...]

The result is eight int32 tensors. Per run of 128 rows: the number of partly kept 128 x 128 tiles, [B or 1, 1, L / 128],
and their indices first in a list of all, [B or 1, 1, L / 128, S / 128]; the same for fully kept tiles; then both per
run of columns. A tile that one head keeps and another hides is partly kept, and so is one that the end cuts off.
For an added mask, tiles without an entry greater than `hidden` are hidden, and none is fully kept. If `hidden` is -inf,
an entry that hides by a finite number is an error: a row with only such entries attends to all keys equally. This check
waits for the device; nothing else does.
Numerics: exact; a tile that bounds do not decide counts as partly kept.
Source: PyTorch, torch/nn/attention/flex_attention.py (create_block_mask, BlockMask).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxrewrite import FxRewriteError
from fxrewrite.ops import HOST_WAITS
from rules.masks.bounds import mask_bounds
from rules.masks.expressions import MaskCall, MaskExpression, Term, parse_mask

TILE = 128
"""Rows, and columns, of a tile; torch's flex attention has the same default."""
NUM_TILE_TENSORS = 8


@torch.library.custom_op(
    "fxrewrite_rules::mask_tiles",
    mutates_args=(),
    schema="(Tensor[] leaves, str mask, SymInt rows, SymInt columns, float hidden, Device device)"
    f" -> ({', '.join(['Tensor'] * NUM_TILE_TENSORS)})",
    tags=HOST_WAITS,
)
def _tiles(
    leaves: Sequence[torch.Tensor], mask: str, rows: int, columns: int, hidden: float, device: torch.device
) -> tuple[torch.Tensor, ...]:
    expression = parse_mask(mask)
    low, high = mask_bounds(expression, leaves, rows=TILE, columns=TILE)
    if high.dtype == torch.bool:
        kept, full = high, low
    else:
        kept, full = high > hidden, torch.zeros_like(high, dtype=torch.bool)
        if math.isinf(hidden):
            _check_hidden(expression, leaves, high.dtype)
    batch, *tiles = _shape(leaves, rows, columns)
    kept, full = (x.to(device).expand(*torch.broadcast_shapes(x.shape, (batch, 1, *tiles))) for x in (kept, full))
    kept, full = kept.any(1, keepdim=True), full.all(1, keepdim=True)
    full[..., rows // TILE :, :] = False
    full[..., columns // TILE :] = False
    part = kept & ~full
    return tuple(x for found in (part, full, part.mT, full.mT) for x in _ordered(found))


MASK_TILES = torch.ops.fxrewrite_rules.mask_tiles.default
"""The registered operator; graphs call this."""


@_tiles.register_fake
def _(leaves: Any, mask: str, rows: int, columns: int, hidden: float, device: torch.device) -> Any:
    batch, down, across = _shape(leaves, rows, columns)
    by_rows, by_columns = ((down,), (down, across)), ((across,), (across, down))
    sizes = (*by_rows, *by_rows, *by_columns, *by_columns)
    return tuple(torch.empty((batch, 1, *size), dtype=torch.int32, device=device) for size in sizes)


def _shape(leaves: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[int, ...]:
    """[B or 1, runs of rows, runs of columns]"""
    batch, _ = torch.broadcast_shapes((1, 1), *(leaf.shape[:-2] for leaf in leaves))
    return (batch, *((length + TILE - 1) // TILE for length in (rows, columns)))


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of True tiles per row of tiles, and their indices first in a list of all indices."""
    order = tiles.byte().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32, memory_format=torch.contiguous_format)


def _check_hidden(mask: MaskExpression, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    low, _ = mask_bounds(MaskExpression(_unhidden(mask.term)), leaves, rows=TILE, columns=TILE)
    if not bool((low > torch.finfo(dtype).min / 2).all()):  # waits for the device
        raise FxRewriteError(
            "a mask that is added to the scores may hide keys by a finite number, and a row with nothing else attends "
            "to all keys equally, which flex attention cannot reproduce; hide by -inf, or use mask_kernel='rows'"
        )


_PASS_ON = frozenset({"add", "sub", "rsub", "mul", "neg", "where", "masked_fill"})
"""Operators whose result is not finite if an operand that they read is not finite."""
_CONDITIONS = {"where": 0, "masked_fill": 1}


def _unhidden(term: Term) -> Term:
    """Replaces -inf by 0 in the expression; entries that were finite keep their value."""
    match term:
        case float() if term == -math.inf:
            return 0.0
        case MaskCall("full", (number, dtype)):
            return MaskCall("full", (_unhidden(number), dtype))
        case MaskCall("to", (x, torch.dtype() as dtype)) if dtype.is_floating_point:
            return MaskCall("to", (_unhidden(x), dtype))
        case MaskCall(name, args) if name in _PASS_ON:
            condition = _CONDITIONS.get(name)
            return MaskCall(name, tuple(arg if i == condition else _unhidden(arg) for i, arg in enumerate(args)))
        case _:
            return term
