"""Norms that are spelled out, and the operators that they become."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family

_WIDE = ["dtype(x) in {float32, float64}", "rank(x) >= 1", "size(x, -1) > 0"]
NORMS = Family("norms", numerics="approximate", domain="moderate", where=_WIDE)

NORMS.true(
    "to_rms_norm",
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    lambda x: F.rms_norm(x, [x.shape[-1]], None, 1e-6),
    domain="all",
)
NORMS.false(
    "to_rms_norm",
    lambda x: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6),
    lambda x: F.rms_norm(x, [x.shape[-1]], None, 1e-6),
    "eps is added to the root, not under it",
    domain="finite",
    gradients=False,
)

NORMS.true(
    "to_layer_norm",
    lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
    lambda x: F.layer_norm(x, [x.shape[-1]], None, None, 1e-5),
)
NORMS.false(
    "to_layer_norm",
    lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
    lambda x: F.layer_norm(x, [x.shape[-1]], None, None, 1e-5),
    "var is unbiased by default",
    where=[*_WIDE, "size(x, -1) > 1"],
)

_SCALED = [*_WIDE, "same_dtype(x, w, b)", "rank(w) == 1", "rank(b) == 1", "size(w, 0) == size(x, -1)"]
_SCALED = [*_SCALED, "size(b, 0) == size(x, -1)"]
NORMS.pair(
    "scale_layer_norm",
    lambda x, w, b: F.layer_norm(x, [x.shape[-1]]) * w + b,
    true=lambda x, w, b: F.layer_norm(x, [x.shape[-1]], w, b),
    false_pattern=lambda x, w, b: (F.layer_norm(x, [x.shape[-1]]) + b) * w,
    why="the bias is scaled too",
    where=_SCALED,
)

NORMS.pair(
    "instance_to_group_norm",
    lambda x: F.instance_norm(x),
    true=lambda x: F.group_norm(x, x.shape[1]),
    false=lambda x: F.group_norm(x, 1),
    why="all channels are in one group",
    where=[*_WIDE, "rank(x) == 4", "size(x, 0) > 0", "size(x, 1) > 0", "size(x, 2) > 0", "size(x, 3) > 1"],
)

_STATISTICS = [*_WIDE, "same_dtype(x, m, v)", "rank(x) == 2", "rank(m) == 1", "rank(v) == 1"]
_STATISTICS = [*_STATISTICS, "size(m, 0) == size(x, 1)", "size(v, 0) == size(x, 1)"]
NORMS.pair(
    "write_out_batch_norm",
    lambda x, m, v: F.batch_norm(x, m, v, training=False),
    true=lambda x, m, v: (x - m) * torch.rsqrt(v + 1e-5),
    false=lambda x, m, v: (x - m) * torch.rsqrt(v),
    why="eps is missing",
    where=_STATISTICS,
    gradients=False,
)

# Llama rounds the norm before it multiplies by the weight; Gemma rounds the product.
NORMS.true(
    "drop_round_trip",
    lambda x: x.to(torch.float32).to(torch.bfloat16),
    lambda x: x,
    where=["dtype(x) in {bfloat16}"],
    numerics="exact",
    domain="all",
)
NORMS.false(
    "round_after_weight",
    lambda x, w: w * F.rms_norm(x.to(torch.float32), [x.shape[-1]], None, 1e-6).to(torch.bfloat16),
    lambda x, w: (w.float() * F.rms_norm(x.to(torch.float32), [x.shape[-1]], None, 1e-6)).to(torch.bfloat16),
    "the norm is not rounded before the product",
    where=["dtype(x) in {bfloat16}", "same_dtype(x, w)", "rank(x) >= 1", "rank(w) == 1", "size(w, 0) == size(x, -1)"],
    numerics="exact",
    domain="all",
)

NORMS.pair(
    "to_normalize",
    lambda x: x / torch.linalg.vector_norm(x, 2, -1, True).clamp_min(1e-6),
    true=lambda x: F.normalize(x, dim=-1, eps=1e-6),
    false_pattern=lambda x: x / (torch.linalg.vector_norm(x, 2, -1, True) + 1e-6),
    why="eps is added to every norm, not to small ones alone",
    numerics="reassociates",
    domain="all",
)

NORMS.pair(
    "drop_scale_before_norm",
    lambda x: F.rms_norm(x * 4.0, [x.shape[-1]], None, 1e-5),
    true=lambda x: F.rms_norm(x, [x.shape[-1]], None, 1e-5 / 16.0),
    false=lambda x: F.rms_norm(x, [x.shape[-1]], None, 1e-5),
    why="eps is not scaled",
    domain="finite",
)

NORMS.pair(
    "write_out_batch_statistics",
    lambda x: F.batch_norm(x, None, None, training=True),
    true=lambda x: (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-5),
    false=lambda x: (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5),
    why="the variance of a batch norm is biased",
    where=[*_WIDE, "rank(x) == 2", "size(x, 0) > 1"],
)
