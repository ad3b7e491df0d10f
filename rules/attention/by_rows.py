"""Blockwise attention: the mask is computed per block of rows, forward and backward, and never held as a whole.

    attention(q, k, v, (c <= r) & padding)
            ->  attention_by_rows(q, k, v, [c, r, padding], "bitwise_and(le(x0, x1), x2)")

Matches sinks, a softcap, and a mask that is an expression of per-row and per-column values (`rules.masks.reading`):
causal, windows, chunks, documents, prefixes, padding, ALiBi, and combinations of them by and, or, not and arithmetic,
bool or added. A dense mask takes at least L * S bytes, and its copy in q's dtype is kept for the backward. Here only
the values of rows and columns are kept, L + S of them. Tiles of columns that every row of a block hides are skipped
(`rules.attention.blocks`): neither their scores nor the mask itself is computed. So a causal mask costs half of the
work, a window its width, documents the sum of their squares. The host waits for the device once, and once more for an
added mask, however many blocks there are; so a CUDA graph cannot record it.
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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import DeadCode, Match, RuleSet, where
from fxrewrite.ops import HOST_WAITS, bind, fake_value, key
from fxrewrite.spmd import is_same_size, size_proxy
from rules.attention.blocks import blocks
from rules.attention.flops import declare_attention
from rules.attention.kernels import (
    attend_block,
    attend_block_backward,
    lse_dtype,
    sinks_backward,
    with_sinks,
)
from rules.attention.operator import attention_rule, is_sdpa
from rules.masks.expressions import Range
from rules.masks.kinds import CAUSAL, NOTHING_HIDDEN, MaskKind, kind_of, name_mask
from rules.masks.reading import is_dense, read_mask

aten = torch.ops.aten


@torch.library.custom_op(
    "fxrewrite_rules::attention_by_rows",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] leaves, str mask, float scale, float softcap, Tensor? sinks,"
    " Tensor? kept) -> (Tensor, Tensor)",
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
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention, and the logsumexp of its scores [B, H, L], which has no gradient; shapes as in this module.

    Args:
        q, k, v: queries, keys, values.
        leaves: values per row [..., L, 1], per column [..., 1, S], or scalars.
        mask: an expression of the leaves, as `rules.masks.expressions` reads it; "" hides nothing.
        scale: factor of the scores.
        softcap: what scores are bent to stay below, before the mask; 0 leaves them.
        sinks: an additional score for each row [B, H, L, 1], of a key whose value is 0; the logsumexp includes it.
        kept: `rules.attention.blocks.kept_tiles` of the mask, where it is known.
    """
    out, lse = _results(q, v)
    for rows, runs, part in blocks(q, k, v, leaves, mask, softcap, kept):
        attended, sums = attend_block(_rows(q, rows), _columns(k, runs), _columns(v, runs), part, scale, softcap)
        _rows(out, rows).copy_(attended)
        lse.narrow(2, rows[0], sums.shape[2]).copy_(sums)
    if sinks is not None:
        less, lse = with_sinks(out, lse, sinks)
        out.copy_(less)
    return out, lse


@torch.library.custom_op(
    "fxrewrite_rules::attention_by_rows_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] leaves, str mask, float scale,"
    " float softcap, Tensor? kept=None, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)",
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
    kept: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v, in `dtype`, or in the operands' own dtypes.

    `out` and `lse` may cover more keys than k and v; then this is the share of these keys, to be summed in `lse_dtype`.
    """
    dq = torch.zeros_like(q, dtype=dtype)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for rows, runs, part in blocks(q, k, v, leaves, mask, softcap, kept):
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
def _(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return _results(q, v)


@attention_by_rows_backward.register_fake
def _(dout: Any, q: Any, k: Any, v: Any, *_: Any, dtype: Any = None) -> Any:
    return tuple(torch.empty_like(x, dtype=dtype) for x in (q, k, v))


def differentiate(operator: torch.library.CustomOpDef, backward: Callable[..., Any]) -> None:
    """Registers the gradients of attention (q, k, v, leaves, mask, scale, softcap, sinks, *more) -> (out, lse).

    Args:
        operator: the attention; its logsumexp has no gradient.
        backward: (dout, q, k, v, out, lse, leaves, mask, scale, softcap, *more) -> (dq, dk, dv).
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, k, v, leaves, mask, scale, softcap, sinks, *ctx.more = inputs
        ctx.how = (mask, scale, softcap)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, sinks, *leaves)

    def gradients(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks, *leaves = ctx.saved_tensors
        given = backward(dout, q, k, v, out, lse, leaves, *ctx.how, *ctx.more)
        to_sinks = None if sinks is None else sinks_backward(dout, out, lse, sinks)
        return (*given, [None] * len(leaves), None, None, None, to_sinks, *[None] * len(ctx.more))

    operator.register_autograd(gradients, setup_context=save)


differentiate(attention_by_rows, attention_by_rows_backward)
ATTENTION_BY_ROWS = torch.ops.fxrewrite_rules.attention_by_rows.default
"""The registered operator of `attention_by_rows`; graphs call this."""
declare_attention(key(ATTENTION_BY_ROWS))


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
    if not is_same_size(shapes[1][1], shapes[2][1]):  # kernels would read memory that is not theirs
        return f"v has {shapes[2][1]} heads, k {shapes[1][1]}"
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
        ATTENTION_BY_ROWS, q, k, v, leaves, text or "full(1, torch.bool)", scale, float(softcap), sinks, None
    )
    name_mask(match.edit, attended.node, kind)
    return attended[0]


BY_ROWS = RuleSet("attention_by_rows", attend_by_rows, DeadCode("drop_dense_masks"))
