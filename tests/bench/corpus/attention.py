"""Spellings of attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite import Match
from fxrewrite.verify import Draw
from tests.bench.corpus.cases import Family

_HEADS = ["dtype(q) in {float32, float64}", "same_dtype(q, k, v)", "rank(q) == 4", "rank(k) == 4", "rank(v) == 4"]
ATTENTION = Family("attention", numerics="approximate", domain="moderate", where=_HEADS)


def _heads(draw: Draw) -> dict[str, Any]:
    """Samples queries, keys and values of some heads, and a mask that hides no row completely."""
    batch, heads, queries, keys, size = (draw.size() for _ in range(5))
    hidden = draw.mask(queries, keys)
    hidden[:, 0] = False
    return {
        "q": draw.tensor(batch, heads, queries, size),
        "k": draw.tensor(batch, heads, keys, size),
        "v": draw.tensor(batch, heads, keys, size),
        "bias": draw.tensor(queries, keys),
        "hidden": hidden,
    }


def _only(names: str) -> Any:
    return lambda draw: {name: value for name, value in _heads(draw).items() if name in names.split()}


ATTENTION.pair(
    "to_sdpa",
    lambda q, k, v, scale: torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1), v),
    true=lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale),
    false=lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v),
    why="the scale of the model is not the default",
    literals="scale",
    where=[*_HEADS, "scale > 0", "scale < 4"],
    sampler=_only("q k v"),
)

# A True in a mask of sdpa says that a key is seen, and in masked_fill that it is hidden.
ATTENTION.pair(
    "to_sdpa_with_mask",
    lambda q, k, v, hidden: torch.matmul(
        torch.softmax(torch.matmul(q, k.transpose(-2, -1)).masked_fill(hidden, float("-inf")), -1), v
    ),
    true=lambda q, k, v, hidden: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.logical_not(hidden), scale=1),
    false=lambda q, k, v, hidden: F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, scale=1),
    why="sdpa sees what is True in its mask",
    sampler=_only("q k v hidden"),
)


def _seen(match: Match, q: Any, k: Any, diagonal: int) -> Any:
    sizes = (q.shape[-2], k.shape[-2])
    return match.call(torch.ones, sizes, dtype=torch.bool, device=q.device).tril(diagonal)


ATTENTION.pair(
    "write_out_causal",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    true=lambda match, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=_seen(match, q, k, 0)),
    false=lambda match, q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=_seen(match, q, k, k.shape[-2] - q.shape[-2])
    ),
    why="torch aligns the causal mask at the top left",
    sampler=_only("q k v"),
)


def _groups(draw: Draw) -> dict[str, Any]:
    """Samples queries of several heads to each head of keys and values."""
    batch, heads, group, queries, keys, size = (draw.size() for _ in range(6))
    return {
        "q": draw.tensor(batch, heads * group, queries, size),
        "k": draw.tensor(batch, heads, keys, size),
        "v": draw.tensor(batch, heads, keys, size),
    }


ATTENTION.pair(
    "repeat_heads",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    true=lambda q, k, v: F.scaled_dot_product_attention(
        q,
        k.repeat_interleave(q.shape[1] // k.shape[1], 1),
        v.repeat_interleave(q.shape[1] // k.shape[1], 1),
    ),
    false=lambda q, k, v: F.scaled_dot_product_attention(
        q,
        k.repeat(1, q.shape[1] // k.shape[1], 1, 1),
        v.repeat(1, q.shape[1] // k.shape[1], 1, 1),
    ),
    why="neighbouring queries share a head, not those at a distance",
    sampler=_groups,
)

ATTENTION.pair(
    "fold_query_scale",
    lambda q, k, v, c: F.scaled_dot_product_attention(q * c, k, v, scale=1.0),
    true=lambda q, k, v, c: F.scaled_dot_product_attention(q, k, v, scale=c),
    false_pattern=lambda q, k, v, c: F.scaled_dot_product_attention(q * c, k, v),
    why="the default scale is lost",
    literals="c",
    where=[*_HEADS, "c > 0", "c < 4"],
    sampler=_only("q k v"),
)

ATTENTION.pair(
    "distribute_temperature",
    lambda s, m, c: torch.softmax((s + m) * c, -1),
    true=lambda s, m, c: torch.softmax(s * c + m * c, -1),
    false=lambda s, m, c: torch.softmax(s * c + m, -1),
    why="the mask has the temperature too",
    literals="c",
    where=["dtype(s) in {float32, float64}", "same_dtype(s, m)", "rank(s) >= 1", "rank(m) >= 1", "c > 0", "c < 4"],
)

ATTENTION.true(
    "linear_attention",
    lambda q, k, v: torch.matmul(torch.matmul(q, k.transpose(-2, -1)), v),
    lambda q, k, v: torch.matmul(q, torch.matmul(k.transpose(-2, -1), v)),
    numerics="reassociates",
    sampler=_only("q k v"),
)
ATTENTION.false(
    "linear_attention",
    lambda q, k, v: torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1), v),
    lambda q, k, v: torch.matmul(torch.softmax(q, -1), torch.matmul(torch.softmax(k, -2).transpose(-2, -1), v)),
    "a softmax of a product is no product of softmaxes",
    sampler=_only("q k v"),
)

ATTENTION.pair(
    "merge_heads",
    lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1),
    true=lambda x: x.transpose(1, 2).flatten(2),
    false=lambda x: x.reshape(x.shape[0], x.shape[2], -1),
    why="the heads are not moved next to their entries",
    where=["rank(x) == 4"],
    numerics="exact",
    domain="all",
)

ATTENTION.pair(
    "drop_sink",
    lambda s, z: torch.softmax(torch.cat([s, z], -1), -1)[..., :-1],
    true=lambda s, z: torch.exp(s - torch.logsumexp(torch.cat([s, z], -1), -1, True)),
    false=lambda s, z: torch.softmax(s, -1),
    why="the sink takes a part of each row",
    where=["dtype(s) in {float32, float64}", "same_dtype(s, z)", "rank(s) == 2", "rank(z) == 2", "size(z, 1) == 1"],
)
