"""Softmax, its logarithm, and losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite.verify import Draw
from tests.bench.corpus.cases import Family, floats

_ROWS = [*floats("x"), "rank(x) >= 1", "size(x, -1) > 0"]
LOSSES = Family("losses", numerics="approximate", domain="moderate", where=_ROWS)

LOSSES.true(
    "write_out_softmax", lambda x: torch.softmax(x, -1), lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)
)
LOSSES.false(
    "write_out_softmax",
    lambda x: torch.softmax(x, -1),
    lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
    "exp overflows for large x",
    domain="finite",
)

LOSSES.true(
    "to_log_softmax",
    lambda x: x - torch.logsumexp(x, -1, True),
    lambda x: torch.log_softmax(x, -1),
    numerics="reassociates",
)
LOSSES.false(
    "to_log_softmax",
    lambda x: torch.log(torch.softmax(x, -1)),
    lambda x: torch.log_softmax(x, -1),
    "a softmax that underflows has the logarithm -inf",
    numerics="reassociates",
    domain="finite",
)

LOSSES.pair(
    "to_logsumexp",
    lambda x: torch.log(torch.exp(x).sum(-1)),
    true=lambda x: torch.logsumexp(x, -1),
    false_pattern=lambda x: torch.log(torch.exp(x).mean(-1)),
    why="the logarithm of the length is missing",
)

LOSSES.pair(
    "drop_shift",
    lambda x: torch.softmax(x - x.mean(-1, keepdim=True), -1),
    true=lambda x: torch.softmax(x, -1),
    false_pattern=lambda x: torch.softmax(x - x.mean(0, keepdim=True), -1),
    why="the shift is not the same along a row",
    where=[*_ROWS, "rank(x) == 2"],
)


def _classes(draw: Draw) -> dict[str, Any]:
    """Samples logits of rows, and classes."""
    rows, classes = draw.size(), draw.size()
    return {
        "x": draw.tensor(rows, classes),
        "t": draw.indices(rows, below=classes),
        "w": draw.tensor(classes).abs() + 0.5,
    }


def _only(*names: str, sampler: Any = _classes) -> Any:
    return lambda draw: {name: value for name, value in sampler(draw).items() if name in names}


def _some_ignored(draw: Draw) -> dict[str, Any]:
    """Samples classes, some of which are -100."""
    sampled = _classes(draw)
    ignored = draw.mask(*sampled["t"].shape, probability=0.3)
    return sampled | {"t": torch.where(ignored, -100, sampled["t"])}


_LOGITS = ["dtype(x) in {float32, float64}"]
LOSSES.pair(
    "mean_of_targets",
    lambda x, t: F.cross_entropy(x, t),
    true=lambda x, t: F.cross_entropy(x, t, reduction="sum") / (t != -100).sum(),
    false=lambda x, t: F.cross_entropy(x, t, reduction="sum") / x.shape[0],
    why="ignored targets are no part of the mean",
    numerics="reassociates",
    where=_LOGITS,
    sampler=_only("x", "t", sampler=_some_ignored),
)

LOSSES.pair(
    "write_out_smoothing",
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    true=lambda x, t: (
        0.9 * F.nll_loss(torch.log_softmax(x, 1), t) - 0.1 * torch.log_softmax(x, 1).sum(1).mean() / x.shape[1]
    ),
    false=lambda x, t: (
        0.9 * F.nll_loss(torch.log_softmax(x, 1), t)
        - 0.1 * torch.log_softmax(x, 1).sum(1).mean() / max(x.shape[1] - 1, 1)
    ),
    why="the smoothed mass goes to all classes, not to the others alone",
    where=_LOGITS,
    sampler=_only("x", "t"),
)

LOSSES.pair(
    "weighted_mean",
    lambda x, t, w: F.cross_entropy(x, t, w),
    true=lambda x, t, w: F.cross_entropy(x, t, w, reduction="sum") / w[t].sum(),
    false=lambda x, t, w: F.cross_entropy(x, t, w, reduction="none").mean(),
    why="a weighted mean is divided by the sum of the weights",
    where=_LOGITS,
    sampler=_classes,
)

LOSSES.pair(
    "write_out_bce",
    lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    true=lambda x, y: (F.softplus(x) - x * y).mean(),
    false=lambda x, y: (F.softplus(-x) - x * y).mean(),
    why="a target of 0 costs softplus(x)",
    where=["dtype(x) in {float32, float64}", "same_dtype(x, y)", "shape(x) == shape(y)"],
)

_BOTH = [*floats("x", "y"), "shape(x) == shape(y)", "rank(x) == 2", "size(x, 0) > 0"]
LOSSES.pair(
    "write_out_mse",
    lambda x, y: F.mse_loss(x, y),
    true=lambda x, y: (x - y).pow(2).mean(),
    false=lambda x, y: (x - y).pow(2).sum() / x.shape[0],
    why="the mean is over all entries, not over rows",
    where=[*_BOTH, "dtype(x) in {float32, float64}"],
)

LOSSES.pair(
    "smooth_l1_to_huber",
    lambda x, y: F.smooth_l1_loss(x, y, beta=2.0),
    true=lambda x, y: F.huber_loss(x, y, delta=2.0) / 2.0,
    false=lambda x, y: F.huber_loss(x, y, delta=2.0),
    why="huber is beta times smooth l1",
    where=[*_BOTH, "dtype(x) in {float32, float64}"],
)
