"""Blockwise attention: the mask is computed per block of rows, forward and backward, and never held as a whole.

    attention(q, k, v, (c <= r) & padding)
            ->  attention_by_rows(q, k, v, [c, r, padding], "bitwise_and(le(x0, x1), x2)")

Matches sinks, a softcap, and a mask that is an expression of per-row and per-column values (`rules.masks.reading`):
causal, windows, chunks, documents, prefixes, padding, ALiBi, and combinations of them by and, or, not and arithmetic,
bool or added. A dense mask takes at least L * S bytes, and its copy in q's dtype is kept for the backward. Here only
the values of rows and columns are kept, L + S of them. Tiles of columns that every row of a block hides are skipped:
the bounds of the mask (`rules.masks.bounds`) prove it, and neither their scores nor the mask itself is computed. So a
causal mask costs half of the work, a window its width, documents the sum of their squares. The host waits for the
device once, and twice more for an added mask, however many blocks there are; so a CUDA graph cannot record it.
Refuses, in these words:
    "%mask, an input or a parameter, has rows and columns"; "%mask, aten::embedding, has rows and columns"
    "%slope needs a gradient"; "dropout draws in the scores"; "q has rank 3"
    "the mask is torch.float32, q torch.float64"
Shapes: q [B, H, L, E], k [B, KV, S, E], v [B, KV, S, D], mask [B or 1, H or 1, L, S].
Numerics: reassociates; sums over keys restart at each block of rows, and leave out zeros.
Source: FlashAttention (arXiv 2205.14135); PyTorch, torch/nn/attention/flex_attention.py (a mask is a function).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import fx

from fxrewrite import DeadCode, Match, RuleSet, where
from fxrewrite.ops import HOST_WAITS, bind, fake_value, has_data
from fxrewrite.spmd import is_same_size, size_proxy
from rules.attention.kernels import (
    attend_block,
    attend_block_backward,
    has_kernel,
    lse_dtype,
    sinks_backward,
    with_sinks,
)
from rules.attention.operator import attention_rule, is_sdpa
from rules.masks.bounds import mask_bounds
from rules.masks.expressions import MaskExpression, Range, parse_mask
from rules.masks.kinds import CAUSAL, NOTHING_HIDDEN, MaskKind, kind_of, name_mask
from rules.masks.reading import is_dense, read_mask

__all__ = [
    "ATTENTION_BY_ROWS",
    "BY_ROWS",
    "attention_by_rows",
    "attention_by_rows_backward",
    "attention_to_part",
    "kept_tiles",
    "mask_of",
    "tiles_of_parts",
    "why_not_by_rows",
]

aten = torch.ops.aten

_MOST_ROWS = 256
"""Rows per block. Larger blocks read k and v less often, but compute more scores that a causal mask hides."""
_BLOCKS_ON_CUDA = 8
"""So many blocks or more on CUDA, where starting a kernel takes longer than a small block; of a power of two of rows,
which cuts the two halves of a chunk in zigzag order apart."""
_COLUMNS = 128
"""Columns per tile: a block of rows computes or skips them together."""
_MOST_ENTRIES = 1 << 24
"""Limit of memory, in entries: of the mask (and of the scores, where no kernel avoids them) in a block, and of the
bounds of all tiles (of a part of the keys)."""
_MOST_DIMS = 4
"""Dimensions of a mask: sequences, heads, rows, columns."""
_Block: TypeAlias = "tuple[Range, list[Range], bool]"
"""Rows, the runs of columns that any of them may keep, and whether every row keeps all of these."""


@torch.library.custom_op(
    "fxrewrite_rules::attention_by_rows",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] leaves, str mask, float scale, float softcap, Tensor? sinks)"
    " -> (Tensor, Tensor)",
    tags=HOST_WAITS,
)
def attention_by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    mask: str,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention, and the logsumexp of its scores [B, H, L], which has no gradient; shapes as in this module.

    Args:
        q, k, v: queries, keys, values.
        leaves: values per row [..., L, 1], per column [..., 1, S], or scalars.
        mask: an expression of the leaves, as `rules.masks.expressions` reads it; "" hides nothing.
        scale: factor of the scores.
        softcap: what scores are bent to stay below, before the mask; 0 leaves them.
        sinks: an additional score for each row [B, H, L, 1], of a key whose value is 0; the logsumexp includes it.
    """
    out, lse = _attend(q, k, v, leaves, mask, scale, softcap, None)
    if sinks is not None:
        less, lse = with_sinks(out, lse, sinks)
        out.copy_(less)
    return out, lse


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    mask: str,
    scale: float,
    softcap: float,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to a part of the keys, without sinks and without gradients; `kept_tiles` of its mask is known."""
    out, lse = _results(q, v)
    for rows, runs, part in _blocks(q, k, v, leaves, mask, softcap, kept):
        attended, sums = attend_block(_rows(q, rows), _columns(k, runs), _columns(v, runs), part, scale, softcap)
        _rows(out, rows).copy_(attended)
        lse.narrow(2, rows[0], sums.shape[2]).copy_(sums)
    return out, lse


attention_to_part = torch.library.custom_op(
    "fxrewrite_rules::attention_to_part",
    _attend,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] leaves, str mask, float scale, float softcap, Tensor? kept)"
    " -> (Tensor, Tensor)",
    tags=HOST_WAITS,
)


@torch.library.custom_op(
    "fxrewrite_rules::attention_by_rows_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] leaves, str mask, float scale,"
    " float softcap, ScalarType? dtype=None, Tensor? kept=None) -> (Tensor, Tensor, Tensor)",
    tags=HOST_WAITS,
)
def attention_by_rows_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    mask: str,
    scale: float,
    softcap: float,
    dtype: torch.dtype | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v, in `dtype`, or in the operands' own dtypes.

    `out` and `lse` may cover more keys than k and v; then this is the share of these keys, to be summed in `lse_dtype`.
    """
    dq = torch.zeros_like(q, dtype=dtype)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for rows, runs, part in _blocks(q, k, v, leaves, mask, softcap, kept):
        dout_r, q_r, out_r = (_rows(x, rows) for x in (dout, q, out))
        k_c, v_c = _columns(k, runs), _columns(v, runs)
        lse_r = lse.narrow(2, rows[0], rows[1] - rows[0])
        dq_r, dk_c, dv_c = attend_block_backward(dout_r, q_r, k_c, v_c, out_r, lse_r, part, scale, softcap)
        _rows(dq, rows).copy_(dq_r)
        _add_columns(dk, runs, dk_c)
        _add_columns(dv, runs, dv_c)
    return dq, dk.to(dtype or k.dtype), dv.to(dtype or v.dtype)


def _results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates results with the operator's strides: in memory, heads follow rows ([B, L, H, D])."""
    batch, heads, length, _ = q.shape
    out = q.new_zeros(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_full((batch, heads, length), -math.inf, dtype=lse_dtype(q.dtype))


@attention_by_rows.register_fake
@attention_to_part.register_fake
def _(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return _results(q, v)


@attention_by_rows_backward.register_fake
def _(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    leaves: Any,
    mask: str,
    scale: float,
    softcap: float,
    dtype: Any = None,
    kept: Any = None,
) -> Any:
    return tuple(torch.empty_like(x, dtype=dtype) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, leaves, ctx.mask, ctx.scale, ctx.softcap, sinks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, sinks, *leaves)


def _gradients(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, *leaves = ctx.saved_tensors
    given = attention_by_rows_backward(dout, q, k, v, out, lse, leaves, ctx.mask, ctx.scale, ctx.softcap)
    to_sinks = None if sinks is None else sinks_backward(dout, out, lse, sinks)
    return (*given, [None] * len(leaves), None, None, None, to_sinks)


attention_by_rows.register_autograd(_gradients, setup_context=_save)
ATTENTION_BY_ROWS = torch.ops.fxrewrite_rules.attention_by_rows.default
"""The registered operator of `attention_by_rows`; graphs call this."""


def _blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    text: str,
    softcap: float,
    kept: torch.Tensor | None,
) -> Iterator[tuple[Range, list[Range], torch.Tensor | None]]:
    """Yields rows, the runs of columns that any of them may keep, and their mask; skips rows that keep no column."""
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
        if runs := _runs(kept[part, row].tolist(), width, num_keys):
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
        eighth = max(1, length // _BLOCKS_ON_CUDA)
        most_rows = max(_COLUMNS, min(4 * _MOST_ROWS, 1 << (eighth.bit_length() - 1)))
    while length // most_rows * (num_keys // width) > _MOST_ENTRIES:
        width *= 2
    return most_rows, width


def _read(kept: torch.Tensor | None, length: int, num_keys: int, device: torch.device) -> Iterator[_Block]:
    """Yields the blocks of rows that keep a column."""
    if kept is None:
        yield (0, length), [(0, num_keys)], True
        return
    most_rows, width = _tile_size(length, num_keys, device)
    of_rows = kept.tolist() if has_data(kept) else [None] * len(kept)
    for row, of_row in enumerate(of_rows):
        rows = (row * most_rows, min((row + 1) * most_rows, length))
        if of_row is None:  # a body that is run to count what it allocates: the most that it may
            yield rows, [(0, num_keys)], False
        elif runs := _runs(of_row[:-1], width, num_keys):
            yield rows, runs, of_row[-1]


def _runs(kept: Sequence[bool], width: int, num_keys: int) -> list[Range]:
    """Returns the columns of the tiles that are kept, in runs of neighbours."""
    runs, first = [], 0
    for is_kept, tiles in groupby(kept):
        last = first + sum(1 for _ in tiles)
        if is_kept:
            runs.append((first * width, min(last * width, num_keys)))
        first = last
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


def _rows(x: torch.Tensor, part: Range) -> torch.Tensor:
    return x.narrow(2, part[0], part[1] - part[0])


def _columns(x: torch.Tensor, runs: Sequence[Range]) -> torch.Tensor:
    parts = [_rows(x, run) for run in runs]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _add_columns(x: torch.Tensor, runs: Sequence[Range], given: torch.Tensor) -> None:
    parts = given.split([last - start for start, last in runs], 2)
    for run, part in zip(runs, parts, strict=True):
        _rows(x, run).add_(part)


def why_not_by_rows(q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, dropout_p: float = 0.0) -> str:
    """Says why attention with this mask (or without) cannot be computed blockwise; empty if it can."""
    shapes = [fake_value(x).shape for x in (q, k, v)]
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 4:
            return f"{name} has rank {len(shape)}"
        if not is_same_size(shape[0], shapes[0][0]):
            return f"{name} has a batch of {shape[0]}, q of {shapes[0][0]}"
    if dropout_p:
        return "dropout draws in the scores"
    if mask is None:
        return ""
    dtype, mask_dtype = fake_value(q).dtype, fake_value(mask).dtype
    if mask_dtype not in (torch.bool, dtype):
        return f"the mask is {mask_dtype}, q {dtype}"
    read = read_mask(mask)
    return read if isinstance(read, str) else ""


def mask_of(match: Match) -> tuple[list[fx.Proxy], str, MaskKind | None]:
    """Returns the mask of a matched call as leaves, expression ("" hides nothing) and meaning.

    `is_causal` is the comparison of positions. The rule matches only masks that can be read.
    """
    if match["is_causal"]:
        columns, rows = (
            match.call(aten.arange.default, size_proxy(match, x.shape[2]), device=x.device, pin_memory=False)
            for x in (fake_value(match["k"]), fake_value(match["q"]))
        )
        return [columns, aten.unsqueeze(rows, -1)], "le(x0, x1)", CAUSAL
    if match["mask"] is None:
        return [], "", NOTHING_HIDDEN
    read = read_mask(match["mask"])
    assert not isinstance(read, str), "the rule matches masks that can be read"
    return read.leaves(match), read.text, kind_of(match["mask"])


@where.predicate("root", text="is_by_rows")
def _is_by_rows(root: fx.Node) -> bool | str:
    q, k, v, mask, _, dropout_p, *_ = bind(root).values()
    if is_sdpa(root) and (mask is None or not is_dense(mask)):
        return "the mask has no rows and columns" if mask is not None else "there is no mask"
    return why_not_by_rows(q, k, v, mask, dropout_p) or True


# Where products in the backward pass overflow, what the mask hides is NaN here, and 0 in a product with whole scores.
attend_by_rows = attention_rule("masks.attend_by_rows", _is_by_rows, optional=True, domain="moderate")


@attend_by_rows.replacement
def _(match: Match, q: Any, k: Any, v: Any, sinks: Any, scale: float | None, softcap: float) -> fx.Proxy:
    """attention_by_rows"""
    leaves, text, kind = mask_of(match)
    scale = 1 / math.sqrt(fake_value(match["q"]).shape[-1]) if scale is None else float(scale)
    attended = match.call(
        ATTENTION_BY_ROWS, q, k, v, leaves, text or "full(1, torch.bool)", scale, float(softcap), sinks
    )
    name_mask(match.edit, attended.node, kind)
    return attended[0]


BY_ROWS = RuleSet("attention_by_rows", attend_by_rows, DeadCode("drop_dense_masks"))
