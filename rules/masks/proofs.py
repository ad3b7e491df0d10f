"""Decides whether a condition holds for all entries of a mask: proved, refuted, or unknown. Nothing is sampled.

For every length, from the form of the expression: leaves are affine in their indices (`rules.masks.positions`), so
comparisons are true, false or unknown in a polygon of entries, and bounds of the rest follow (`rules.masks.bounds`):

    or(le(column, row), x)     is true on and below the diagonal for any x; above it, it equals x

At one length, tile by tile: a tile that bounds do not decide is split into 16 x 16 tiles; a tile of 16 x 16 entries is
computed. A condition that changes only along lines, such as the diagonal, takes O(S) entries.
Shapes: leaves [..., S, 1] and [..., 1, S], as `rules.masks.expressions` says.
Numerics: exact; entries are computed by the operators of the mask.

>>> from rules.masks.expressions import parse_mask
>>> positions = torch.arange(100_000)
>>> mask = parse_mask("bitwise_or(le(x0, x1), bitwise_and(eq(x0, 777), eq(x1, 776)))")
>>> leaves = [positions, positions[:, None]]
>>> is_true_everywhere(MaskCall("eq", (mask.term, MaskCall("le", (Leaf(0), Leaf(1))))), leaves, 100_000, 100_000)
False
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rules.masks.bounds import Bounds, dtype_range, mask_bounds, term_bounds
from rules.masks.expressions import Leaf, MaskCall, MaskExpression, Term
from rules.masks.positions import Affine, Corners, pointwise

MOST_ENTRIES = 1 << 26
"""Limit of tiles and entries that are evaluated before a proof is given up; takes a second or two on a CPU."""
_SPLIT = 16
"""Branching factor of the tile subdivision per dimension, and side length of the smallest tile (entries)."""
_AT_ONCE = 1 << 22
"""Limit of tiles and entries that are computed at once; their bounds take some hundred bytes each."""


CORNERS: Mapping[str, Callable[[int], Corners]] = {
    "le": lambda length: ((0, 0), (length - 1, 0), (length - 1, length - 1)),
    "eq": lambda length: ((0, 0), (length - 1, length - 1)),
    # Length 1 has no column after its row: what holds for length 2 covers it.
    "gt": lambda length: ((0, 1), (0, max(length, 2) - 1), (max(length, 2) - 2, max(length, 2) - 1)),
}
"""The corners of the rows and columns of a square mask, by the relation of columns to rows."""


def is_true_within(corners: Corners, condition: Term, leaves: Sequence[Affine | torch.Tensor]) -> bool:
    """Whether the form of a condition proves it for all entries within the corners.

    Args:
        corners: rows and columns of the longest sequence, so that a proof also covers shorter ones.
        condition: a bool expression.
        leaves: each as an affine value, or as a meta tensor if only its rank and dtype are known.
    """
    values: dict[MaskCall, Affine | None] = {}
    known: dict[MaskCall, Bounds] = {}

    def value_of(term: Term) -> Any:
        """Returns a literal, the affine value of a term, or None."""
        if isinstance(term, Leaf):
            leaf = leaves[term.index]
            return leaf if isinstance(leaf, Affine) else None
        if not isinstance(term, MaskCall):
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
    """Whether a condition holds for all `rows` x `columns` entries; None if `MOST_ENTRIES` does not suffice.

    If a leaf itself has rows and columns, the entries are in memory anyway, and all are checked.
    """
    mask = MaskExpression(condition)
    if any(leaf.dim() > 1 and leaf.shape[-1] > 1 < leaf.shape[-2] for leaf in leaves):
        return bool(mask.part(leaves, (0, rows), (0, columns)).all())
    batch = math.prod(torch.broadcast_shapes((), *(leaf.shape[:-2] for leaf in leaves)))
    # Start with one tile of at least all rows and columns, of side 16 ** n.
    size = _SPLIT
    while size < max(rows, columns):
        size *= _SPLIT
    tiles, left = torch.zeros(1, 2, dtype=torch.int64), MOST_ENTRIES
    while True:
        # Pay before computing: bounds take 16 x 16 numbers per tile, leaves two sides of a tile.
        left -= len(tiles) * (_SPLIT**2 + 2 * size) * batch
        if left < 0:
            return None
        undecided: list[torch.Tensor] = []
        # Batches of tiles bound the memory.
        for some in tiles.split(max(1, _AT_ONCE // (max(_SPLIT**2, size) * batch))):
            parts = [_of_tiles(leaf, some, size) for leaf in leaves]
            if size == _SPLIT:
                if not bool(mask.part(parts, (0, size), (0, size)).all()):
                    return False
                continue
            # A tile where the condition is certainly false somewhere refutes; one where it is certainly true is done.
            low, high = mask_bounds(mask, parts, rows=size // _SPLIT, columns=size // _SPLIT)
            if not bool(high.all()):
                return False
            undecided += _split(some, low)
        if size == _SPLIT:
            return True
        # The rest is split further; subtiles that start beyond the last row or column do not exist.
        tiles, size = torch.cat(undecided), size // _SPLIT
        tiles = tiles[(tiles * size < torch.tensor([rows, columns])).all(1)]
        if not len(tiles):
            return True


def _of_tiles(leaf: torch.Tensor, tiles: torch.Tensor, size: int) -> torch.Tensor:
    """Selects the rows or columns of a leaf in these tiles, [..., tiles, size or 1, size or 1]; the end is repeated."""
    leaf = leaf[None] if leaf.dim() == 1 else leaf
    dim = next((dim for dim in (-1, -2) if leaf.dim() and leaf.shape[dim] != 1), None)
    if dim is None:
        return leaf.unsqueeze(-3) if leaf.dim() else leaf
    entries = (tiles[:, dim, None] * size + torch.arange(size)).clamp(max=leaf.shape[dim] - 1)
    found = leaf.index_select(dim, entries.flatten()).unflatten(dim, entries.shape)
    return found if dim == -2 else found.movedim(-2, -3)


def _split(tiles: torch.Tensor, low: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the subtiles in which the bounds do not prove the condition."""
    undecided = ~low.expand(*low.shape[:-3], len(tiles), _SPLIT, _SPLIT).reshape(-1, len(tiles), _SPLIT, _SPLIT).all(0)
    at, row, column = undecided.nonzero().unbind(1)
    yield tiles[at] * _SPLIT + torch.stack([row, column], 1)
