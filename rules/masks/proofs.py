"""Whether a condition on a mask's entries is true of them all: proved, refuted, or not known. Nothing is sampled.

At every length, from the form of the expression. Leaves are affine in their indices (`rules.masks.positions`), so in a
polygon of entries what compares them is true, false or unknown, and bounds of the rest follow (`rules.masks.bounds`):

    or(le(column, row), x)     is true on and below the diagonal, whatever x; above it, it is what x is

At one length, tile by tile. Where bounds do not tell a tile, it is split into 16 x 16; tiles of 16 x 16 entries are
computed. Of a condition that changes along lines, such as the diagonal, O(S) entries are.
Shapes: leaves [..., S, 1] and [..., 1, S], as `rules.masks.expressions` says.
Numerics: exact; entries are computed by the operators of the mask.

>>> from rules.masks.expressions import parse_mask
>>> positions = torch.arange(100_000)
>>> mask = parse_mask("bitwise_or(le(x0, x1), bitwise_and(eq(x0, 777), eq(x1, 776)))")
>>> leaves = [positions, positions[:, None]]
>>> is_true_everywhere(Call("eq", (mask.term, Call("le", (Leaf(0), Leaf(1))))), leaves, 100_000, 100_000)
False
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rules.masks.bounds import Bounds, dtype_range, mask_bounds, term_bounds
from rules.masks.expressions import Call, Leaf, MaskExpression, Term
from rules.masks.positions import Affine, Corners, pointwise

__all__ = ["MOST_ENTRIES", "above_diagonal", "is_true_everywhere", "is_true_within", "up_to_diagonal"]

MOST_ENTRIES = 1 << 26
"""Tiles and entries that are looked at before a proof is given up: a second or two."""
_SPLIT = 16
"""Tiles of a tile, in each dimension, and entries of the least."""
_AT_ONCE = 1 << 22
"""Tiles and entries that are computed at once, whose bounds take some hundred bytes each."""


def up_to_diagonal(length: int) -> Corners:
    """Rows and columns with column <= row."""
    return (0, 0), (length - 1, 0), (length - 1, length - 1)


def above_diagonal(length: int) -> Corners:
    """Rows and columns with column > row, of which a length of 1 has none."""
    length = max(length, 2)
    return (0, 1), (0, length - 1), (length - 2, length - 1)


def is_true_within(corners: Corners, condition: Term, leaves: Sequence[Affine | torch.Tensor]) -> bool:
    """Whether the form of a condition proves it for all entries within corners.

    Args:
        corners: rows and columns, of the longest sequence; in a shorter one there are fewer.
        condition: an expression that is bool.
        leaves: what each is in all its entries; of a fake one nothing is known but its rank and dtype.
    """
    values: dict[Call, Affine | None] = {}
    known: dict[Call, Bounds] = {}

    def value_of(term: Term) -> Any:
        """A literal, what an affine term is, or None."""
        if isinstance(term, Leaf):
            leaf = leaves[term.index]
            return leaf if isinstance(leaf, Affine) else None
        if not isinstance(term, Call):
            return term
        if term not in values:
            found = values[term] = pointwise(term.name, [value_of(arg) for arg in term.args], corners)
            if found is not None:
                known[term] = _bounds_of(found, corners)
        return values[term]

    value_of(condition)
    low, _ = term_bounds(condition, [_bounds_of(leaf, corners) for leaf in leaves], known)
    return bool(low.all())


def _bounds_of(leaf: Affine | torch.Tensor, corners: Corners) -> Bounds:
    if isinstance(leaf, Affine):
        shape = (1,) * len(leaf.slopes)
        low, high = (torch.full(shape, side, dtype=leaf.dtype) for side in leaf.bounds(corners))
        return low, high
    least, greatest = dtype_range(leaf.dtype)
    shape = (1,) * leaf.dim()
    return torch.full(shape, least, dtype=leaf.dtype), torch.full(shape, greatest, dtype=leaf.dtype)


def is_true_everywhere(condition: Term, leaves: Sequence[torch.Tensor], rows: int, columns: int) -> bool | None:
    """Whether a condition holds of all of so many rows and columns; None beyond `MOST_ENTRIES`.

    Where a leaf has rows and columns, all entries exist, and are looked at.
    """
    mask = MaskExpression(condition)
    if any(leaf.dim() > 1 and leaf.shape[-1] > 1 < leaf.shape[-2] for leaf in leaves):
        return bool(mask.part(leaves, (0, rows), (0, columns)).all())
    batch = math.prod(torch.broadcast_shapes((), *(leaf.shape[:-2] for leaf in leaves)))
    size = _SPLIT
    while size < max(rows, columns):
        size *= _SPLIT
    tiles, left = torch.zeros(1, 2, dtype=torch.int64), MOST_ENTRIES
    while True:
        left -= len(tiles) * (_SPLIT**2 + 2 * size) * batch
        if left < 0:
            return None
        undecided: list[torch.Tensor] = []
        for some in tiles.split(max(1, _AT_ONCE // (max(_SPLIT**2, size) * batch))):
            parts = [_of_tiles(leaf, some, size) for leaf in leaves]
            if size == _SPLIT:
                if not bool(mask.part(parts, (0, size), (0, size)).all()):
                    return False
                continue
            low, high = mask_bounds(mask, parts, rows=size // _SPLIT, columns=size // _SPLIT)
            if not bool(high.all()):
                return False
            undecided += _split(some, low)
        if size == _SPLIT:
            return True
        tiles, size = torch.cat(undecided), size // _SPLIT
        tiles = tiles[(tiles * size < torch.tensor([rows, columns])).all(1)]
        if not len(tiles):
            return True


def _of_tiles(leaf: torch.Tensor, tiles: torch.Tensor, size: int) -> torch.Tensor:
    """The rows or columns of a leaf in these tiles, [..., tiles, size or 1, size or 1]; beyond the end, the last."""
    leaf = leaf[None] if leaf.dim() == 1 else leaf
    dim = next((dim for dim in (-1, -2) if leaf.dim() and leaf.shape[dim] != 1), None)
    if dim is None:
        return leaf.unsqueeze(-3) if leaf.dim() else leaf
    entries = (tiles[:, dim, None] * size + torch.arange(size)).clamp(max=leaf.shape[dim] - 1)
    found = leaf.index_select(dim, entries.flatten()).unflatten(dim, entries.shape)
    return found if dim == -2 else found.movedim(-2, -3)


def _split(tiles: torch.Tensor, low: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tiles of those tiles in which the bounds do not say that all is true."""
    undecided = ~low.expand(*low.shape[:-3], len(tiles), _SPLIT, _SPLIT).reshape(-1, len(tiles), _SPLIT, _SPLIT).all(0)
    at, row, column = undecided.nonzero().unbind(1)
    yield tiles[at] * _SPLIT + torch.stack([row, column], 1)
