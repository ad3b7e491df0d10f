"""Convolutions, pooling, padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family, floats

CONVOLUTIONS = Family("convolutions", numerics="approximate", domain="moderate")
_CONV = ["dtype(x) in {float32, float64}", "same_dtype(x, w)", "rank(x) == 3", "rank(w) == 3"]
_SOME = [f"size(x, {dim}) > 0" for dim in range(3)]
_IMAGE = ["dtype(x) in {float32, float64}", "rank(x) == 4", *_SOME, "size(x, 3) > 0"]

CONVOLUTIONS.pair(
    "pointwise_to_matmul",
    lambda x, w: F.conv1d(x, w),
    true=lambda x, w: torch.matmul(w[:, :, 0], x),
    false=lambda x, w: torch.matmul(w[:, :, 0].t(), x),
    why="rows of the weight are outputs",
    where=[*_CONV, *_SOME, "size(w, 2) == 1", "size(w, 0) == size(w, 1)", "size(w, 0) > 0"],
)

CONVOLUTIONS.pair(
    "write_out_transposed",
    lambda x, w: F.conv_transpose1d(x, w),
    true=lambda x, w: F.conv1d(x, w.transpose(0, 1).flip(-1), padding=w.shape[2] - 1),
    false=lambda x, w: F.conv1d(x, w.transpose(0, 1), padding=w.shape[2] - 1),
    why="the kernel is not reversed",
    where=[*_CONV, *_SOME, *(f"size(w, {dim}) > 0" for dim in range(3))],
)

CONVOLUTIONS.pair(
    "pad_before_average",
    lambda x: F.avg_pool2d(x, 3, 1, 1),
    true=lambda x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1),
    false=lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    why="the padding counts as entries",
    where=_IMAGE,
    terminates=False,
)

CONVOLUTIONS.pair(
    "pad_before_maximum",
    lambda x: F.max_pool1d(x, 3, 1, 1),
    true=lambda x: F.max_pool1d(F.pad(x, (1, 1), value=float("-inf")), 3, 1),
    false=lambda x: F.max_pool1d(F.pad(x, (1, 1)), 3, 1),
    why="0 is more than a negative entry at the border",
    domain="finite",
    where=[*floats("x"), "rank(x) == 3", *_SOME],
    terminates=False,
    numerics="exact",
)

CONVOLUTIONS.pair(
    "relu_before_pool",
    lambda x: torch.relu(F.max_pool2d(x, 2)),
    true=lambda x: F.max_pool2d(torch.relu(x), 2),
    false_pattern=lambda x: torch.relu(F.avg_pool2d(x, 2)),
    false=lambda x: F.avg_pool2d(torch.relu(x), 2),
    why="a mean does not commute with relu",
    numerics="reassociates",
    where=_IMAGE,
    domain="all",
)


def _in_groups(x: Any, w: Any, first: int, second: int) -> Any:
    parts, weights = x.chunk(2, 1), w.chunk(2, 0)
    return torch.cat([F.conv1d(parts[0], weights[first]), F.conv1d(parts[1], weights[second])], 1)


CONVOLUTIONS.pair(
    "split_groups",
    lambda x, w: F.conv1d(x, w, groups=2),
    true=lambda x, w: _in_groups(x, w, 0, 1),
    false=lambda x, w: _in_groups(x, w, 1, 0),
    why="the weights of the groups are exchanged",
    where=[*_CONV, *_SOME, "size(x, 1) == size(w, 1) * 2", "size(w, 0) % 2 == 0", "size(w, 0) > 0", "size(w, 2) > 0"],
)

CONVOLUTIONS.pair(
    "scale_weight",
    lambda x, w, b, c: F.conv1d(x, w, b) * c,
    true=lambda x, w, b, c: F.conv1d(x, w * c, b * c),
    false=lambda x, w, b, c: F.conv1d(x, w * c, b),
    why="the bias is not scaled",
    literals="c",
    where=[*_CONV, *_SOME, "same_dtype(x, b)", "rank(b) == 1", "c > 0", "c < 4"],
)

CONVOLUTIONS.pair(
    "pad_to_cat",
    lambda x: F.pad(x, (0, 1)),
    true=lambda x: torch.cat([x, torch.zeros_like(x[..., :1])], -1),
    false=lambda x: torch.cat([torch.zeros_like(x[..., :1]), x], -1),
    why="the second number is the padding at the end",
    where=[*floats("x"), "rank(x) >= 1", "size(x, -1) > 0"],
    numerics="exact",
    domain="all",
)
