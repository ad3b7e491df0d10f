"""Views, permutations, splitting and concatenating."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family, floats

VIEWS = Family("views")

VIEWS.pair(
    "compose_permutations",
    lambda x: x.permute(1, 2, 0).permute(1, 2, 0).flatten(),
    true=lambda x: x.permute(2, 0, 1).flatten(),
    false=lambda x: x.permute(1, 2, 0).flatten(),
    why="a cycle of three is not its own square",
    where=["rank(x) == 3"],
)

VIEWS.pair(
    "roll_to_cat",
    lambda x: torch.roll(x, 1, -1),
    true=lambda x: torch.cat([x[..., -1:], x[..., :-1]], -1),
    false=lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    why="it is rolled the other way",
    where=["rank(x) >= 1"],
)

VIEWS.pair(
    "drop_cut",
    lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
    true=lambda x: x,
    false_pattern=lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    why="the parts change their order",
    where=["rank(x) == 2", "size(x, 0) > 0"],
)


def _beside(x: Any) -> Any:
    upper, lower = torch.chunk(x, 2, 0)
    return torch.cat([upper, lower], 1)


VIEWS.pair(
    "chunks_beside",
    _beside,
    true=lambda x: x.reshape(2, x.shape[0] // 2, x.shape[1]).transpose(0, 1).reshape(x.shape[0] // 2, x.shape[1] * 2),
    false=lambda x: x.reshape(x.shape[0] // 2, x.shape[1] * 2),
    why="neighbouring rows are joined, not rows of both halves",
    where=["rank(x) == 2", "size(x, 0) > 0", "size(x, 0) % 2 == 0", "size(x, 1) > 0"],
)

VIEWS.pair(
    "interleave",
    lambda x, y: torch.stack([x, y], -1).flatten(-2),
    true=lambda x, y: torch.cat([x.unsqueeze(-1), y.unsqueeze(-1)], -1).flatten(-2),
    false=lambda x, y: torch.cat([x, y], -1),
    why="the entries alternate",
    where=["rank(x) >= 1", "shape(x) == shape(y)", "same_dtype(x, y)"],
)

VIEWS.pair(
    "repeat_rows",
    lambda x: x.repeat_interleave(2, 0),
    true=lambda x: x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1),
    false=lambda x: x.repeat(2, 1),
    why="each row is repeated, not the whole",
    where=["rank(x) == 2"],
)

VIEWS.pair(
    "sum_of_windows",
    lambda x: x.unfold(0, 2, 2).sum(-1),
    true=lambda x: x.reshape(-1, 2).sum(1),
    false=lambda x: x.reshape(2, -1).sum(0),
    why="a window has neighbours, not entries half the length apart",
    numerics="reassociates",
    where=[*floats("x"), "rank(x) == 1", "size(x, 0) > 0", "size(x, 0) % 2 == 0"],
)


def _shuffled(x: Any, *dims: Any) -> Any:
    rows, channels, height, width = x.shape
    parts = x.reshape(rows, channels // 4, 2, 2, height, width).permute(*dims)
    return parts.reshape(rows, channels // 4, height * 2, width * 2)


VIEWS.pair(
    "write_out_pixel_shuffle",
    lambda x: F.pixel_shuffle(x, 2),
    true=lambda x: _shuffled(x, 0, 1, 4, 2, 5, 3),
    false=lambda x: _shuffled(x, 0, 1, 4, 3, 5, 2),
    why="the two offsets are exchanged",
    where=["rank(x) == 4", "size(x, 1) % 4 == 0", *(f"size(x, {dim}) > 0" for dim in range(4))],
)
