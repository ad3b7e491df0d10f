"""Blocks of rows and columns that attention computes together; what the mask hides from a whole block is left out.

    causal, 3 blocks of 256 rows, tiles of 128 columns  ->  rows 0:256 x columns 0:256, 256:512 x 0:512, 512:768 x 0:768

The bounds of the mask (`rules.masks.bounds`) decide per tile, and the host reads them: it waits for the device once,
and once more for an added mask that may hide a whole row.
Numerics: exact; a tile that bounds do not decide is computed.
Source: FlashAttention (arXiv 2205.14135); PyTorch, torch/nn/attention/flex_attention.py (BlockMask).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from fxrewrite.ops import HOST_WAITS, has_data
from rules.attention.kernels import has_kernel
from rules.masks.bounds import mask_bounds
from rules.masks.expressions import MaskExpression, Range, parse_mask

_MOST_ROWS = 256
"""Rows per block. Larger blocks read k and v less often, but compute more scores that a causal mask hides."""
_BLOCKS_ON_CUDA, _FEWEST_ON_CUDA = 8, 512
"""So many blocks or more on CUDA, of so many rows or more, but at least two: starting the kernels of a block takes
longer there than a small block. They have a power of two of rows, which cuts the halves of a chunk in zigzag order
apart."""
_COLUMNS = 128
"""Columns per tile: a block of rows computes or skips them together."""
_MOST_ENTRIES = 1 << 24
"""Limit of memory, in entries: of the mask (and of the scores, where no kernel avoids them) in a block, and of the
bounds of all tiles (of a part of the keys)."""
_MOST_DIMS = 4
"""Dimensions of a mask: sequences, heads, rows, columns."""
_Block: TypeAlias = "tuple[Range, list[Range], bool]"
"""Rows, the runs of columns that any of them may keep, and whether every row keeps all of these."""


def blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    text: str,
    softcap: float,
    kept: torch.Tensor | None,
) -> Iterator[tuple[Range, list[Range], torch.Tensor | None]]:
    """Yields rows, the runs of columns that any of them may keep, and their mask; skips rows that keep no column.

    Args:
        q, k, v, leaves, softcap: of `rules.attention.by_rows.attention_by_rows`.
        text: its mask; "" hides nothing.
        kept: `kept_tiles` of the mask, if it is known.
    """
    mask = parse_mask(text) if text else None
    length, num_keys = q.shape[2], k.shape[2]
    if not length or not num_keys:
        return
    if mask is not None and kept is None:
        kept = kept_tiles(leaves, text, 1, length, num_keys, q.device)[0]
    of_scores = 0 if has_kernel(q, v, softcap) else q.shape[0] * q.shape[1]
    of_mask = 0 if mask is None else max((math.prod(leaf.shape[:-2]) for leaf in leaves), default=1)
    outer = max(of_scores, of_mask)
    for (first, end), runs, is_whole in _joined(_read(kept, length, num_keys, q.device)):
        num_columns = sum(last - start for start, last in runs)
        step = max(1, _MOST_ENTRIES // max(1, (of_scores if is_whole else outer) * num_columns))
        for start in range(first, end, step):
            rows = (start, min(start + step, end))
            yield rows, runs, None if mask is None or is_whole else _part(mask, leaves, rows, runs).to(q.device)


def _part(mask: MaskExpression, leaves: Sequence[torch.Tensor], rows: Range, runs: Sequence[Range]) -> torch.Tensor:
    """Computes the mask for these rows and for the columns in `runs`."""
    parts = [mask.part(leaves, rows, run) for run in runs]
    wide = [
        part.expand(*part.shape[:-2], rows[1] - rows[0], last - start)
        for part, (start, last) in zip(parts, runs, strict=True)
    ]
    return torch.cat(wide, -1) if len(wide) > 1 else wide[0]


@torch.library.custom_op(
    "fxrewrite_rules::kept_tiles",
    mutates_args=(),
    schema="(Tensor[] leaves, str mask, int num_parts, SymInt length, SymInt num_keys, Device device) -> Tensor",
    tags=HOST_WAITS,
)
def kept_tiles(
    leaves: Sequence[torch.Tensor], mask: str, num_parts: int, length: int, num_keys: int, device: torch.device
) -> torch.Tensor:
    """Returns on the host which tiles some row may keep: bool [parts, blocks of rows, tiles of columns + 1].

    The last column says whether every row of the block keeps all columns of the tiles that are kept. The others are
    True unless the bounds of the mask prove the tile hidden. An added mask needs care: the lowest number of a dtype
    hides a column only if the row keeps another column. A row that has nothing else attends to all columns equally, so
    none of its columns may be skipped.

    Args:
        leaves: of the mask, those of parts as `tiles_of_parts` stacks them.
        mask: an expression of the leaves.
        num_parts: how many parts of the keys.
        length, num_keys: rows, and columns of a part.
        device: where attention runs; on CUDA blocks are larger.
    """
    expression = parse_mask(mask)
    most_rows, width = _tile_size(length, num_keys, device)
    low, high = mask_bounds(expression, leaves, rows=most_rows, columns=width)
    tiles = num_parts, -(-length // most_rows), -(-num_keys // width)
    if not has_data(high):
        return high.new_empty(*tiles[:2], tiles[2] + 1, dtype=torch.bool)
    is_bool = high.dtype == torch.bool
    least = 0 if is_bool else torch.finfo(high.dtype).min / 2
    kept = _of_tiles(high > least, tiles).any(1)
    if is_bool:
        is_whole = (_of_tiles(low, tiles).all(1) | ~kept).all(-1, keepdim=True)
        return torch.cat([kept, is_whole], -1).cpu()  # waits for the device
    # Rows that finite numbers hide completely attend to all columns, so their blocks must keep everything.
    is_safe = (low > least / 2).any(-1, keepdim=True)
    doubtful = _of_tiles((high <= least) & ~high.isneginf() & ~is_safe, tiles).any(1).any(-1, keepdim=True)
    kept, doubtful = torch.cat([kept, doubtful], -1).cpu().split([tiles[2], 1], -1)
    tops: dict[tuple[int, int], torch.Tensor] = {}
    for part, row in doubtful[..., 0].nonzero().tolist():
        own = [leaf[part] if leaf.dim() > _MOST_DIMS else leaf for leaf in leaves]
        rows = (row * most_rows, min((row + 1) * most_rows, length))
        (runs,) = _runs(kept[part, row, None], width, num_keys)
        if runs:
            tops[part, row] = _part(expression, own, rows, runs).amax(-1).amin()
        else:
            kept[part, row] = True
    for (part, row), top in zip(tops, torch.stack(list(tops.values())).tolist() if tops else [], strict=True):
        if not top > least / 2:
            kept[part, row] = True
    return torch.cat([kept, torch.zeros_like(doubtful)], -1)


@kept_tiles.register_fake
def _(leaves: Any, mask: str, num_parts: int, length: Any, num_keys: Any, device: torch.device) -> Any:
    most_rows, width = _tile_size(length, num_keys, device)
    return torch.empty(num_parts, -(-length // most_rows), -(-num_keys // width) + 1, dtype=torch.bool)


def tiles_of_parts(
    parts: Sequence[Sequence[torch.Tensor]], mask: str, q: torch.Tensor, k: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Returns `kept_tiles` for each part of the keys, or None without a mask; the host waits once for all parts.

    Each part is as long as k, and has leaves of its own.
    """
    if not mask:
        return [None] * len(parts)
    leaves = [_stacked(leaf) for leaf in zip(*parts, strict=True)]
    return kept_tiles(leaves, mask, len(parts), q.shape[2], k.shape[2], q.device).unbind(0)


def _stacked(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks what the parts have of one leaf, in front of all dimensions of a mask; what they share stays as it is."""
    if all(leaf is leaves[0] for leaf in leaves):
        return leaves[0]
    return torch.stack([leaf.reshape((1,) * (_MOST_DIMS - leaf.dim()) + leaf.shape) for leaf in leaves])


def _tile_size(length: int, num_keys: int, device: torch.device) -> tuple[int, int]:
    """Returns how many rows a block has at most, and how many columns a tile."""
    width, most_rows = _COLUMNS, _MOST_ROWS
    if device.type == "cuda":
        half = max(1, length // 2)
        rows = min(4 * _MOST_ROWS, max(length // _BLOCKS_ON_CUDA, min(_FEWEST_ON_CUDA, half)))
        most_rows = max(_COLUMNS, 1 << (rows.bit_length() - 1))
    while length // most_rows * (num_keys // width) > _MOST_ENTRIES:
        width *= 2
    return most_rows, width


def _read(kept: torch.Tensor | None, length: int, num_keys: int, device: torch.device) -> Iterator[_Block]:
    """Yields the blocks of rows that keep a column."""
    if kept is None:
        yield (0, length), [(0, num_keys)], True
        return
    most_rows, width = _tile_size(length, num_keys, device)
    rows = [(row, min(row + most_rows, length)) for row in range(0, length, most_rows)]
    if not has_data(kept):  # a body that is run to count what it allocates: the most that it may
        yield from ((each, [(0, num_keys)], False) for each in rows)
        return
    of_rows = zip(rows, _runs(kept[:, :-1], width, num_keys), kept[:, -1].tolist(), strict=True)
    yield from ((each, runs, is_whole) for each, runs, is_whole in of_rows if runs)


def _runs(kept: torch.Tensor, width: int, num_keys: int) -> list[list[Range]]:
    """Returns for each block of rows the columns of the tiles that are kept, in runs of neighbours."""
    edges = torch.nn.functional.pad(kept, (1, 1)).byte().diff(dim=-1).nonzero().tolist()  # where neighbours differ
    runs: list[list[Range]] = [[] for _ in range(len(kept))]
    for (row, first), (_, last) in zip(edges[::2], edges[1::2], strict=True):
        runs[row].append((first * width, min(last * width, num_keys)))
    return runs


def _joined(blocks: Iterable[_Block]) -> Iterator[_Block]:
    """Yields the blocks, and one in place of neighbours whose rows all keep the same columns."""
    last: _Block | None = None
    for rows, runs, is_whole in blocks:
        if last is not None and is_whole and last[2] and last[0][1] == rows[0] and last[1] == runs:
            last = ((last[0][0], rows[1]), runs, True)
            continue
        if last is not None:
            yield last
        last = rows, runs, is_whole
    if last is not None:
        yield last


def _of_tiles(found: torch.Tensor, tiles: tuple[int, int, int]) -> torch.Tensor:
    """[parts, sequences and heads, tile rows, tile columns]"""
    num_parts, *of_part = tiles
    wide = found.expand(*found.shape[:-2], *of_part)
    is_stacked = found.dim() > _MOST_DIMS
    return wide.reshape(num_parts if is_stacked else 1, -1, *of_part).expand(num_parts, -1, *of_part)
