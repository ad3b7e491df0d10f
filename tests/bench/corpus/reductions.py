"""Sums, means, variances, maxima, running sums."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family, floats

REDUCTIONS = Family("reductions", numerics="approximate", domain="moderate")
_ROWS = [*floats("x"), "rank(x) >= 1", "size(x, -1) > 0"]
_WIDE = ["dtype(x) in {float32, float64}", "rank(x) >= 1", "size(x, -1) > 0"]

REDUCTIONS.pair(
    "mean_of_cat",
    lambda x, y: torch.cat([x, y], 0).mean(0),
    true=lambda x, y: (x.sum(0) + y.sum(0)) / (x.shape[0] + y.shape[0]),
    false=lambda x, y: (x.mean(0) + y.mean(0)) / 2.0,
    why="the longer part counts more",
    where=[*_WIDE, "rank(x) == 2", "rank(y) == 2", "same_dtype(x, y)", "size(x, 0) > 0", "size(y, 0) > 0"],
)

REDUCTIONS.true(
    "variance_by_squares",
    lambda x: x.var(-1, unbiased=False),
    lambda x: (x * x).mean(-1) - x.mean(-1) * x.mean(-1),
    where=_WIDE,
)
REDUCTIONS.false(
    "variance_by_squares",
    lambda x: x.var(-1, unbiased=False),
    lambda x: (x * x).mean(-1) - x.mean(-1) * x.mean(-1),
    "the difference cancels where the mean is large",
    domain="finite",
    where=_WIDE,
)

REDUCTIONS.pair(
    "deviation",
    lambda x: x.std(-1),
    true=lambda x: x.var(-1).sqrt(),
    false=lambda x: x.var(-1, unbiased=False).sqrt(),
    why="std is unbiased by default",
    where=[*_WIDE, "size(x, -1) > 1"],
    gradients=False,
)

REDUCTIONS.pair(
    "place_of_maximum",
    lambda x: x.argmax(-1),
    true=lambda x: torch.max(x, -1)[1],
    false=lambda x: x.shape[-1] - 1 - x.flip(-1).argmax(-1),
    why="of equal entries the last is taken",
    where=_ROWS,
    terminates=False,
    numerics="exact",
    domain="all",
)

REDUCTIONS.pair(
    "exclusive_sum",
    lambda x: x.cumsum(-1) - x,
    true=lambda x: F.pad(x.cumsum(-1)[..., :-1], (1, 0)),
    false=lambda x: F.pad(x.cumsum(-1)[..., :-1], (0, 1)),
    why="the zero belongs at the front",
    numerics="reassociates",
    where=_ROWS,
)

REDUCTIONS.true(
    "product_of_exp", lambda x: x.exp().prod(-1), lambda x: x.sum(-1).exp(), where=[*_WIDE, "size(x, -1) < 8"]
)
REDUCTIONS.false(
    "sum_of_logs",
    lambda x: x.prod(-1).log(),
    lambda x: x.log().sum(-1),
    "the product of two negative entries has a logarithm",
    where=[*_WIDE, "size(x, -1) < 8"],
)

REDUCTIONS.pair(
    "largest_size",
    lambda x: x.abs().amax(-1),
    true=lambda x: torch.maximum(x.amax(-1), -x.amin(-1)),
    false=lambda x: x.amax(-1).abs(),
    why="the largest entry in size may be negative",
    numerics="reassociates",
    where=_ROWS,
    gradients=False,
    domain="all",
)

REDUCTIONS.pair(
    "write_out_mean",
    lambda x: x.mean(),
    true=lambda x: x.sum() / math.prod(x.shape),
    false=lambda x: x.sum() / max(math.prod(x.shape), 1),
    why="the mean of nothing is NaN",
    domain="finite",
    where=["dtype(x) in {float32, float64}", "rank(x) >= 1"],
)
