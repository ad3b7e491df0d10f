"""A stand-in for the package flash_attn on CPUs, in any dtype: custom functions around kernels with its names.

The kernels compute every score; torch's own `varlen_attn` gets kernels for CPUs that do the same. Documents of a batch
without `cu_seqlens` are its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import varlen

Window = tuple[int, int]


def _documents(starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each row, and how many rows there are from it to the end of its document, itself included."""
    lengths = starts.diff()
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)
    assert len(documents) == length, "the last document ends at the last row"
    return documents, starts[1:][documents] - torch.arange(length)


class How(NamedTuple):
    """What kernels are told beside q, k and v."""

    starts: torch.Tensor
    """Where documents of queries begin, and the last ends."""
    others: torch.Tensor
    """The same of keys."""
    scale: float
    window: Window = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def _weights(q: torch.Tensor, k: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax, logsumexp and slope of the bend of all scores [H, T, U]; k has as many heads as q."""
    starts, others, scale, window, softcap, sinks = how
    scores = torch.einsum("the,uhe->htu", q, k) * scale
    slope = 1 - torch.tanh(scores / softcap).square() if softcap else torch.ones_like(scores)
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    (rows, to_end), (columns, others_to_end) = _documents(starts, len(q)), _documents(others, len(k))
    later = to_end[:, None] - others_to_end
    kept = rows[:, None] == columns
    for number, side in zip(window, (-1, 1), strict=True):
        kept = kept & ((later * side <= number) if number >= 0 else kept)
    scores = scores.masked_fill(~kept, -math.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, len(q), 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1], scores.logsumexp(-1), slope
    none = ~kept.any(-1, keepdim=True)
    return scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0), scores.logsumexp(-1), slope


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [T, H, D] and the logsumexp of its scores [H, T], of q [T, H, E], k [U, KV, E] and v [U, KV, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights, lse, _ = _weights(q, k, how)
    return torch.empty_like(q).copy_(torch.einsum("htu,uhd->thd", weights, v)), lse.float()


def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> list[torch.Tensor]:
    """The gradients of q, k and v."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    weights, _, slope = _weights(q, k, how)
    dv, of_weights = torch.einsum("htu,thd->uhd", weights, grad), torch.einsum("thd,uhd->htu", grad, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * slope * how.scale
    dq, dk = torch.einsum("htu,uhe->the", of_scores, k), torch.einsum("htu,the->uhe", of_scores, q)
    return [dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Where the rows of a batch begin, and the last ends."""
    return torch.arange(0, len(x) * x.shape[1] + 1, x.shape[1])


_NAMESPACE = "stand_in_flash_attn"
_COMMON = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap,"
    " Tensor? alibi_slopes, Tensor? s_aux"
)
_STARTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv"
)
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define(
    f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, {_COMMON}, bool return_softmax) -> (Tensor, Tensor)"
)
_LIBRARY.define(f"_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, {_STARTS}, {_COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(f"_flash_attn_backward({_GRADIENTS}, {_COMMON}) -> ()")
_LIBRARY.define(f"_flash_attn_varlen_backward({_GRADIENTS}, {_STARTS}, {_COMMON}) -> ()")
_LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_seqlen_q,"
    " Tensor? q_descale, float? softmax_scale, bool is_causal=False, int window_size_left=-1, int window_size_right=-1,"
    " int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? s_aux=None) -> Tensor"
)
"""Of a build of flash_attn 3, some arguments; it is read here, and does not run."""


def _how(starts: Any, others: Any, dropout: float, scale: float, causal: bool, *rest: Any) -> How:
    left, right, softcap, _, sinks, *_ = rest
    return How(starts, others, scale, (left, 0 if causal else right), softcap, sinks)


def _forward(q: Any, k: Any, v: Any, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = forward(*(x.flatten(0, 1) for x in (q, k, v)), _how(_rows(q), _rows(k), *options))
    return torch.empty_like(q).copy_(out.view(q.shape)), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _varlen_forward(q: Any, k: Any, v: Any, starts: Any, others: Any, m: int, n: int, *options: Any) -> Any:
    return forward(q, k, v, _how(starts, others, *options))


def _fill(buffers: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    for buffer, x in zip(buffers, found, strict=True):
        buffer.copy_(x.view_as(buffer))


def _backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
    flat = (x.flatten(0, 1) for x in (grad, q, k, v))
    _fill(rest[2:5], backward(*flat, _how(_rows(q), _rows(k), *rest[5:])))


def _varlen_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
    _fill(rest[2:5], backward(grad, q, k, v, _how(*rest[5:7], *rest[9:])))


for _name, _kernel in (
    ("_flash_attn_forward", _forward),
    ("_flash_attn_varlen_forward", _varlen_forward),
    ("_flash_attn_backward", _backward),
    ("_flash_attn_varlen_backward", _varlen_backward),
):
    _LIBRARY.impl(_name, _kernel, "CPU")


@torch.library.register_fake(f"{_NAMESPACE}::_flash_attn_forward", lib=_LIBRARY)
def _(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@torch.library.register_fake(f"{_NAMESPACE}::_flash_attn_varlen_forward", lib=_LIBRARY)
def _(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


_KERNELS = torch.ops.stand_in_flash_attn


class _Flash(torch.autograd.Function):
    """As the package's: heads are padded to a multiple of 8, and the gradients are buffers that a kernel fills."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, starts: Any, others: Any, sinks: Any, longest: int, options: Any, factor: Any
    ) -> Any:
        depth = q.shape[-1]
        ctx.options = (options[0], depth**-0.5 if options[1] is None else options[1], *options[2:])
        ctx.longest, ctx.factor = longest, factor
        q, k, v = (F.pad(x, [0, -depth % 8]) for x in (q, k, v))
        given = () if starts is None else (starts, others, longest, longest)
        kernel = _KERNELS._flash_attn_forward if starts is None else _KERNELS._flash_attn_varlen_forward
        out, lse = kernel(q, k, v, *given, *ctx.options, sinks, *([False] if starts is None else []))
        ctx.save_for_backward(q, k, v, out, lse, starts, others, sinks)
        return out[..., :depth], lse

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        q, k, v, out, lse, starts, others, sinks = ctx.saved_tensors
        found = tuple(map(torch.empty_like, (q, k, v)))
        given = () if starts is None else (starts, others, ctx.longest, ctx.longest)
        kernel = _KERNELS._flash_attn_backward if starts is None else _KERNELS._flash_attn_varlen_backward
        kernel(F.pad(grad, [0, -grad.shape[-1] % 8]), q, k, v, out, lse, *found, *given, *ctx.options, sinks)
        grads = [
            x[..., : grad.shape[-1]] if ctx.factor is None else x[..., : grad.shape[-1]] * ctx.factor for x in found
        ]
        return *grads, None, None, None, None, None, None


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    factor: float | None = None,
    return_lse: bool = False,
) -> Any:
    """The package's function for rows of a batch and for documents; a `factor` of gradients is not the package's."""
    options = dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes
    longest = max(q.shape[0], k.shape[0])
    out, lse = _Flash.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, s_aux, longest, options, factor)  # pyright: ignore[reportGeneralTypeIssues]
    return (out, lse) if return_lse else out


def _torch_how(q: Any, starts: Any, others: Any, scale: float | None, window: Any) -> How:
    return How(starts, others, q.shape[-1] ** -0.5 if scale is None else scale, tuple(window or (-1, -1)))


def _torch_forward(
    q: Any, k: Any, v: Any, starts: Any, others: Any, m: Any, n: Any, causal: Any = False, scale: Any = None, *rest: Any
) -> Any:
    out, lse = forward(q, k, v, _torch_how(q, starts, others, scale, rest[0]))
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _torch_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: Any, others: Any, *rest: Any) -> Any:
    scale, window = (*rest[4:], None, None)[:2]
    return tuple(backward(grad, q, k, v, _torch_how(q, starts, others, scale, window)))


varlen._varlen_attn.register_kernel("cpu")(_torch_forward)  # pyright: ignore[reportPrivateUsage]
varlen._varlen_attn_backward.register_kernel("cpu")(_torch_backward)  # pyright: ignore[reportPrivateUsage]
