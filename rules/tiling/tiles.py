"""Tiles of rows: how many rows a tile has, and whether more than one tile is needed.

>>> [(tile.start, tile.stop) for tile in tiles(7, rows_of_tile(row_bytes=8, tile_bytes=30))]
[(0, 3), (3, 6), (6, 7)]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxrewrite.graph import Size

TILE_BYTES = 2**27
"""Bytes that a tile holds by default, of what is never held whole."""


def rows_of_tile(row_bytes: int, tile_bytes: int) -> int:
    """Returns how many rows of `row_bytes` bytes fit into a tile, at least one."""
    return max(1, tile_bytes // row_bytes)


def is_more_than_a_tile(size: Size, of_tile: int) -> bool:
    """Whether this many rows or bytes may exceed a tile.

    A symbolic size may, whatever its hint: if all rows fit into one tile, tiling costs nothing.
    """
    return not isinstance(size, int) or size > of_tile


def tiles(num_rows: int, size: int) -> Iterator[slice]:
    """Yields the rows of each tile, in order; the last one may have fewer."""
    yield from (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def type_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums over tiles are accumulated: at least float32."""
    return torch.promote_types(dtype, torch.float32)
