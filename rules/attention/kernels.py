"""Attention of some queries to some keys, and its logsumexp, forward and backward: the parts of blockwise attention.

    out, lse = attend_block(q, k, v, mask, scale, softcap)
    out, lse = merge_blocks(out, lse, out of other keys, lse of other keys)
    dq, dk, dv = attend_block_backward(dout, q, k, v, out, lse, mask, scale, softcap)

The backward of a block of keys takes `out` and `lse` over all keys. Its gradients of q must be summed over blocks of
keys, those of k and v over blocks of queries, so they are at least float32. A sink is a key whose value is 0: it
changes `out` and `lse`.
Shapes: q [B, H, L, E], k [B, KV, S, E], v [B, KV, S, D], out [B, H, L, D], lse [B, H, L]; KV divides H, and nothing is
repeated. A mask broadcasts to [B, H, L, S]: bool, where True may be attended to, or added, in q's dtype, or None.
Rows that keep no key get 0, an lse of -inf, and no gradient, as from scaled_dot_product_attention. If one finite number
hides all keys of a row, it attends to all of them equally; lse does not say how many, so they must be in one block.
A score is q @ k^T * scale, or with a softcap c, c * tanh(q @ k^T * scale / c), before a mask is applied.
Without a softcap this calls ATen's fused kernels, which round their results to q's dtype: on the CPU its flash kernel,
where E == D; on CUDA, where E and D are multiples of 8 and q is not float64, flash attention in 16 bits without a mask,
and memory-efficient attention otherwise, for which heads of k and v are repeated. Elsewhere it multiplies matrices in
at least float32, and gradients are not rounded. On CUDA, as from the operator there, a row that the lowest number of
q's dtype hides completely is 0.
Source: FlashAttention (arXiv 2205.14135, section 3.1); PyTorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp,
aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

aten: Any = torch.ops.aten

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention to these keys only, in q's dtype, and the logsumexp of the scores, in `lse_dtype`."""
    if has_kernel(q, v, softcap):
        q, k, v = map(_kernel_strides, (q, k, v))
        added = _added(mask, q.dtype)
        if q.device.type == "cuda":
            out, lse = _attend_on_cuda(q, k, v, added, scale)
        else:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=added, scale=scale)
        if mask is None:
            return out, lse
        keeps_none = _keeps_no_key(mask)
        if q.device.type == "cuda":  # its kernel divides by a sum of no weights
            out = out.masked_fill(keeps_none[..., None], 0)
        return out, lse.masked_fill(keeps_none, -torch.inf)
    scores = _masked(_scores(q, k, scale, softcap), mask)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill(lse.isneginf()[..., None], 0)
    return _merged_heads(_grouped(weights, v) @ v.to(lse.dtype), q).to(q.dtype), lse


def attend_block_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> Gradients:
    """Returns these keys' share of the gradients of q, k and v, in `lse_dtype`; `out` and `lse` cover all keys."""
    if has_kernel(q, v, softcap):
        dout, q, k, v, out = map(_kernel_strides, (dout, q, k, v, out))
        added = _added(mask, q.dtype)
        if q.device.type == "cuda":
            return _attend_on_cuda_backward(dout, q, k, v, out, lse, added, scale)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, _finite(lse), 0.0, False, attn_mask=added, scale=scale
        )
        return dq.to(lse.dtype), dk.to(lse.dtype), dv.to(lse.dtype)
    own = _scores(q, k, scale, softcap)
    scores = _masked(own, mask)
    weights = torch.softmax(scores, -1) * _share(torch.logsumexp(scores, -1), lse)[..., None]
    weights = weights.masked_fill(scores.isneginf(), 0)  # NaN in a row that keeps none of these keys
    dout, wide_q, wide_k, wide_v = (x.to(lse.dtype) for x in (dout, q, k, v))
    dweights = _merged_heads(_grouped(dout, v) @ wide_v.transpose(-2, -1), q)
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta) * scale
    if softcap:
        dscores = dscores * (1 - (own / softcap).square())  # the derivative of tanh
    dscores = _grouped(dscores, k)
    dq = _merged_heads(dscores @ wide_k, q)
    dk = dscores.transpose(-2, -1) @ _grouped(wide_q, k)
    dv = _grouped(weights, v).transpose(-2, -1) @ _grouped(dout, v)
    return dq, dk, dv


def capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns the scores, bent to between -softcap and softcap; with 0 as they are."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def merge_blocks(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention to the keys of both blocks, given attention to each."""
    merged = torch.logaddexp(lse, other_lse)
    share, other_share = (torch.exp(part - _finite(merged))[..., None] for part in (lse, other_lse))
    return (share * out + other_share * other_out).to(out.dtype), merged


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, in each row, a key of score `sinks` [B, H, L, 1] and value 0 to attention over the other keys."""
    merged = torch.logaddexp(lse, sinks.squeeze(-1).to(lse.dtype))
    return (torch.exp(lse - _finite(merged))[..., None] * out).to(out.dtype), merged


def sinks_backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the sinks; `out` and `lse` cover all keys and the sinks."""
    share = torch.exp(sinks.to(lse.dtype) - _finite(lse)[..., None])
    return (-share * (dout.to(lse.dtype) * out).sum(-1, keepdim=True)).to(sinks.dtype)


def _share(lse: torch.Tensor, of_all: torch.Tensor) -> torch.Tensor:
    """Returns which share of a row's weights these keys have, given the logsumexp of their scores and that of all.

    If all keys of a row are hidden by a finite number, both are that number, which has no digits left for how many keys
    there are; so what differs by rounding alone is equal.
    """
    differ = lse - _finite(of_all)
    is_rounding = differ.abs() <= 4 * torch.finfo(lse.dtype).eps * of_all.abs()
    return torch.exp(differ.masked_fill(is_rounding, 0)).masked_fill(lse.isneginf(), 0)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Replaces -inf by 0, because exp(-inf - 0) is 0 and exp(-inf + inf) is NaN."""
    return lse.masked_fill(lse.isneginf(), 0)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the logsumexp of scores in `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def has_kernel(q: torch.Tensor, v: torch.Tensor, softcap: float) -> bool:
    """Whether a fused kernel computes attention of q to v; otherwise a block's scores [B, H, L, S] are in memory."""
    if softcap or q.device.type not in ("cpu", "cuda"):
        return False
    if q.device.type == "cpu":
        return q.shape[-1] == v.shape[-1]
    is_known = q.dtype != torch.float64 and (q.dtype != torch.bfloat16 or _is_ampere(q.device))
    return is_known and q.shape[-1] % _ALIGNED == 0 and v.shape[-1] % _ALIGNED == 0


@functools.cache
def _is_ampere(device: torch.device) -> bool:
    """Whether the card has products of bfloat16 and flash attention; traced without a card, code is for such a one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


_ALIGNED = 8
"""What CUDA's kernels want the head dimensions to be a multiple of."""
_ALIGNED_MASK = 16
"""The same of the distance of a mask's rows, in elements."""
_ALIGNED_LSE = 32
"""Rows of the logsumexp are padded to a multiple of it, in memory-efficient attention."""
_REACH = 2**31
"""Entries between any two of a sequence's, from which offsets in memory-efficient attention, of 32 bits, overflow."""
_WIDEST_FLASH = 256
"""Head dimension (elements) up to which there is flash attention."""


def _has_flash(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return mask is None and is_half and q.shape[-1] == v.shape[-1] <= _WIDEST_FLASH and _is_ampere(q.device)


def _attend_on_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if _has_flash(q, v, mask):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return out, lse
    if parts := _parts_of_heads(mask, q, k, v):
        each = [_attend_on_cuda(q, k, v, mask, scale) for mask, q, k, v in parts]
        out, lse = (torch.cat(of_parts, 1) for of_parts in zip(*each, strict=True))
        return out, lse
    q, k, v = (_within_reach(_repeated(x, q)) for x in (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, _aligned(mask, q, k), True, scale=scale)
    return out, lse.narrow(-1, 0, q.shape[2])


def _attend_on_cuda_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> Gradients:
    not_drawn = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset: there is no dropout
    sums = _finite(lse)  # exp(-inf - 0) is 0
    if _has_flash(q, v, mask):
        lengths, not_drawn = (q.shape[2], k.shape[2]), not_drawn.to(torch.uint64)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, sums.contiguous(), None, None, *lengths, 0.0, False, not_drawn, not_drawn, scale=scale
        )
        return dq.to(lse.dtype), dk.to(lse.dtype), dv.to(lse.dtype)
    if parts := _parts_of_heads(mask, q, k, v, dout, out, lse):
        each = [_attend_on_cuda_backward(do, q, k, v, o, s, mask, scale) for mask, q, k, v, do, o, s in parts]
        dq, dk, dv = (torch.cat(of_parts, 1) for of_parts in zip(*each, strict=True))
        return dq, dk, dv
    dout, q, wide_k, wide_v = (_within_reach(_repeated(x, q)) for x in (dout, q, k, v))
    sums = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % _ALIGNED_LSE), value=torch.inf)
    added, wanted = _aligned(mask, q, k), [True, True, True, False]
    # In 16 bits the kernel sums dout * out, and reads `out` as the forward kernel writes it: a row has all its heads.
    rows_of_heads = out.transpose(1, 2).contiguous().transpose(1, 2)
    dq, wide_dk, wide_dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, wide_k, wide_v, added, rows_of_heads, sums, not_drawn, not_drawn, 0.0, wanted, scale=scale
    )
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=lse.dtype) for x in (wide_dk, wide_dv))
    return dq.to(lse.dtype), dk, dv


def _parts_of_heads(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> list[Any]:
    """Returns the operands cut into groups of heads within reach of the kernel; nothing if all of them are."""
    v, heads = others[0], k.shape[1]
    of_head = max(q.shape[2], k.shape[2]) * max(q.shape[-1], v.shape[-1]) * (q.shape[1] // max(1, heads))
    most = max(1, (_REACH - 1) // max(1, of_head))
    if heads <= most:
        return []
    parts: list[Any] = []
    for start in range(0, heads, most):
        size = min(most, heads - start)

        def cut(x: torch.Tensor, start: int = start, size: int = size) -> torch.Tensor:
            repeats = x.shape[1] // heads
            return x.narrow(1, start * repeats, size * repeats)

        own = mask if mask is None or mask.shape[1] == 1 else cut(mask)
        parts.append((own, *map(cut, (q, k, *others))))
    return parts


def _within_reach(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` in memory where entries of one sequence are near enough to each other for the kernel's offsets."""
    reaches = any((n - 1) * stride >= _REACH for n, stride in list(zip(x.shape, x.stride(), strict=True))[1:])
    return x.contiguous() if reaches else x


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B, KV, S, D] -> [B, H, S, D]"""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _aligned(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask for every sequence and head, whose rows begin where the kernel can read them."""
    if mask is None:
        return None
    size = k.shape[2]
    padded = torch.nn.functional.pad(mask.expand(*mask.shape[:2], q.shape[2], size), (0, -size % _ALIGNED_MASK))
    return padded[..., :size].expand(*q.shape[:2], -1, -1)


def _kernel_strides(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` with a contiguous last dimension; the kernel assumes stride 1 there and would read other entries."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Converts the mask to what the kernel takes: [B or 1, H or 1, L, S], added to the scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)


def _keeps_no_key(mask: torch.Tensor) -> torch.Tensor:
    return ~mask.any(-1) if mask.dtype == torch.bool else mask.isneginf().all(-1)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    wide = lse_dtype(q.dtype)
    scores = _merged_heads(_grouped(q.to(wide), k) @ k.to(wide).transpose(-2, -1), q) * scale
    return capped(scores, softcap)


def _masked(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _grouped(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[B, H, L, ...] -> [B, KV, H / KV * L, ...]: queries that share a head of k become further rows of it."""
    return x.reshape(x.shape[0], kv.shape[1], -1, x.shape[-1])


def _merged_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B, KV, H / KV * L, ...] -> [B, H, L, ...]"""
    return x.reshape(*q.shape[:-1], x.shape[-1])
