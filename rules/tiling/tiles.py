"""Rows that are computed a tile at a time: how many a tile has, and when there are more.

>>> [(tile.start, tile.stop) for tile in tiles(7, rows_of_tile(row_bytes=8, tile_bytes=30))]
[(0, 3), (3, 6), (6, 7)]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxrewrite.graph import Size

__all__ = ["TILE_BYTES", "is_more_than_a_tile", "rows_of_tile", "tiles", "type_of_sums"]

TILE_BYTES = 2**27
"""Bytes that a tile holds by default, of what is never held whole."""


def rows_of_tile(row_bytes: int, tile_bytes: int) -> int:
    """How many rows of `row_bytes` bytes a tile has: at least one."""
    return max(1, tile_bytes // row_bytes)


def is_more_than_a_tile(size: Size, of_tile: int) -> bool:
    """Whether what has this many rows or bytes may have more than a tile has.

    A symbolic size may, however small it is at hand: where all rows fit into one tile, tiles cost nothing.
    """
    return not isinstance(size, int) or size > of_tile


def tiles(num_rows: int, size: int) -> Iterator[slice]:
    """The rows of each tile, in order; the last one may have fewer."""
    yield from (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def type_of_sums(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over tiles are added up."""
    return torch.promote_types(dtype, torch.float32)
