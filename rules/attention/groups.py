"""Grouped-query attention: heads of keys and values that a model repeats are shared instead, and back.

    attention(q, repeat_kv(k), repeat_kv(v))  ->  attention(q, k, v, enable_gqa=True)        SHARE_HEADS
    attention(q, k, v, enable_gqa=True)       ->  attention(q, repeat_kv(k), repeat_kv(v))   REPEAT_HEADS

Rules reason about the first form: k and v have the size in which they are sent and kept, and the shapes say how often a
head is read. It matches unsqueeze, expand and reshape (also of [B, S, KV, D] with a transpose afterwards),
repeat_interleave, and one expanded head.
Leaves alone, in these words, "k and v are not repeats of the same number of heads"; "there are no heads" (rank 2).
CPU kernels take groups without repeating. On other devices FlashAttention does: without a mask, for head sizes up to
256, in half precision. Elsewhere torch would fall back to a kernel that holds all scores, so REPEAT_HEADS repeats k and
v before the operator.
Shapes: q [B, H, L, E], k [B, KV, S, E], v [B, KV, S, D] -> out [B, H, L, D]; H and KV are not symbolic.
Numerics: reassociates. The kernel for CPUs gives the same results and gradients of q, bit by bit, and adds up the
gradients of k and v over the heads of a group in their dtype; in half precision they lose a bit by that.
Source: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_mem_efficient_attention), sdp_utils_cpp.h
(check_batch_size_and_num_heads_dense); Hugging Face transformers, integrations/sdpa_attention.py (repeat_kv).

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> from rules.attention.operator import ATTEND
>>> def attention(q, k, v):
...     return ATTEND(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
>>> gm = make_fx(attention, tracing_mode="fake", pre_dispatch=True)(torch.rand(1, 4, 6, 8), *torch.rand(2, 1, 2, 6, 8))
>>> SHARE_HEADS.apply(gm)["attention.share_heads"].rewrites
1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Literal, Match, RuleSet, cap, either, op, refuse, shared, where
from fxrewrite.ops import bind, key, value
from fxrewrite.spmd import PLACEMENT, Size, is_same_size, placement_of
from rules.attention.operator import attend_with, attention_rule

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

aten = torch.ops.aten


def _repeated(name: str) -> Any:
    x, groups, sizes = cap(name), cap(f"{name}_groups", "any"), cap(f"{name}_sizes", "any")
    return either(
        shared(op("reshape", op("expand", op("unsqueeze", x, 2), groups), sizes)),
        shared(op("transpose", op("reshape", op("expand", op("unsqueeze", x, 3), groups), sizes), 1, 2)),
        shared(op("repeat_interleave", x, cap(f"{name}_times", Literal), 1)),
        shared(op("expand", x, sizes)),
    )


@where.predicate("root", "q", "k", "v", text="share_heads")
def _share_heads(root: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node) -> bool | str:
    heads, operands = value(q).shape[1] if value(q).dim() == 4 else 0, bind(root)
    of_k, of_v = (_shared_heads(operands[name], x, heads) for name, x in (("key", k), ("value", v)))
    return 0 < of_k == of_v < heads or "k and v are not repeats of the same number of heads"


def _shared_heads(repeated: fx.Node, x: fx.Node, heads: Size) -> int:
    """Returns the number of heads of x if `repeated` repeats only these, to `heads`; else 0."""
    dim, sizes = _head_dim(repeated), list(value(x).shape)
    repeated = repeated.all_input_nodes[0] if dim == 2 else repeated
    found = value(repeated).shape
    if len(sizes) != 4 or len(found) != 4:
        return 0
    kv_heads = sizes[dim]
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return 0
    sizes[dim] = heads
    fits = all(map(is_same_size, found, sizes))
    if key(repeated) == "aten::reshape":
        fits = fits and is_same_size(value(repeated.all_input_nodes[0]).shape[dim + 1] * kv_heads, heads)
    return kv_heads if fits else 0


def _head_dim(repeated: fx.Node) -> int:
    """Returns the dimension of the heads before repeating: 1 in [B, KV, S, D], 2 in [B, S, KV, D], transposed later."""
    return 2 if key(repeated) == "aten::transpose" else 1


def _by_head(match: Match) -> list[Any]:
    """Returns k and v before repeating, as [B, KV, S, D]."""
    operands, given = bind(match.root), [match.proxy(match[name]) for name in "kv"]
    dims = [_head_dim(operands[name]) for name in ("key", "value")]
    return [torch.transpose(x, 1, 2) if dim == 2 else x for x, dim in zip(given, dims, strict=True)]


share_heads = attention_rule(
    "attention.share_heads", _share_heads, optional=True, key=_repeated("k"), value=_repeated("v"), enable_gqa=False
)


@share_heads.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples groups of heads, or one head for all, with sizes as repeats write them."""
    batch, kv_heads, length, num_keys, depth = draw.shape(5)
    kv_heads, times = draw.choice(1, kv_heads), draw.integer(2, 3)
    heads = kv_heads * times
    found: dict[str, Any] = {}
    for name in "kv":
        outer, inner = draw.choice(([batch], [num_keys, depth]), ([batch, num_keys], [depth]))
        found[name] = draw.tensor(*outer, kv_heads, *inner)
        found[f"{name}_times"] = times
        found[f"{name}_groups"] = [draw.choice(-1, batch), *outer[1:], kv_heads, times, *inner]
        found[f"{name}_sizes"] = [*outer, draw.choice(-1, heads), *inner]
    return {
        **found,
        "q": draw.tensor(batch, heads, length, depth),
        "mask": draw.choice(None, draw.tensor(length, num_keys)),
        "sinks": draw.choice(None, draw.tensor(batch, heads, length, 1)),
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": 0.5,
    }


@share_heads.replacement
def _(match: Match) -> Any:
    """attention(q, k, v, mask, sinks, enable_gqa=True)"""
    k, v = _by_head(match)
    return attend_with(match, key=k, value=v, enable_gqa=True)


@where.predicate("root", "q", "v", text="no_kernel_takes_groups")
def _no_kernel_takes_groups(root: fx.Node, q: fx.Node, v: fx.Node) -> bool:
    of_q, width = value(q), value(v).shape[-1]
    is_half = of_q.dtype in (torch.float16, torch.bfloat16)
    is_flash = is_half and is_same_size(of_q.shape[-1], width) and width <= 256 and bind(root)["attn_mask"] is None
    return of_q.device.type != "cpu" and not is_flash


repeat_heads = attention_rule(
    "attention.repeat_heads", _no_kernel_takes_groups, optional=True, sinks=None, softcap=0.0, enable_gqa=True
)


@repeat_heads.replacement
def _(match: Match, q: Any, k: Any, v: Any) -> Any:
    """attention(q, repeat_kv(k), repeat_kv(v), mask)"""
    if min(value(x.node).dim() for x in (q, k, v)) < 3:
        refuse("there are no heads")
    k, v = (aten.repeat_interleave(x, value(q.node).shape[-3] // value(x.node).shape[-3], -3) for x in (k, v))
    attended = attend_with(match, key=k, value=v, enable_gqa=False)
    match.edit.set_fact(attended.node, PLACEMENT, placement_of(match.root))  # says whose numbers dropout draws
    return attended


SHARE_HEADS = RuleSet("attention_share_heads", share_heads)
REPEAT_HEADS = RuleSet("attention_repeat_heads", repeat_heads)
