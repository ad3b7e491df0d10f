"""Rotary embeddings, gradients, random draws, broadcasting."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family, floats

OTHER = Family("other", numerics="reassociates", where=floats("x"))


def _rotary(x: Any, cos: Any, sin: Any) -> Any:
    left, right = torch.chunk(x, 2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def _turned(x: Any, cos: Any, sin: Any, sign: Any) -> Any:
    left, right = torch.chunk(x, 2, -1)
    (cos_left, cos_right), (sin_left, sin_right) = torch.chunk(cos, 2, -1), torch.chunk(sin, 2, -1)
    return torch.cat([left * cos_left - sign * right * sin_left, right * cos_right + sign * left * sin_right], -1)


OTHER.pair(
    "rotary_by_halves",
    _rotary,
    true=lambda x, cos, sin: _turned(x, cos, sin, 1),
    false=lambda x, cos, sin: _turned(x, cos, sin, -1),
    why="it turns the other way",
    numerics="approximate",
    domain="moderate",
    where=[
        *("dtype(x) in {float32, float64}", "same_dtype(x, cos, sin)", "rank(x) >= 1", "size(x, -1) % 2 == 0"),
        *("shape(x) == shape(cos)", "shape(x) == shape(sin)", "size(x, -1) > 0"),
    ],
)

OTHER.true("zeros_to_full", lambda x: torch.zeros_like(x), lambda x: torch.full_like(x, 0), numerics="exact")
OTHER.false("zeros_to_product", lambda x: torch.zeros_like(x), lambda x: x * 0.0, "infinity times 0 is NaN")

OTHER.pair(
    "detach_once",
    lambda x, y: x.detach() * y.detach(),
    true=lambda x, y: (x * y).detach(),
    false_pattern=lambda x, y: x.detach() * y,
    why="y has a gradient",
    where=floats("x", "y"),
    numerics="exact",
)

OTHER.pair(
    "scale_before_dropout",
    lambda x: F.dropout(x, 0.5) * 2.0,
    true=lambda x: F.dropout(x * 2.0, 0.5),
    false=lambda x: F.dropout(x * 2.0, 0.25),
    why="it keeps more",
    domain="moderate",
)

OTHER.true(
    "guard_once",
    lambda x: torch.where(x > 1.0, torch.log(torch.where(x > 1.0, x, 1.0)), 0.0),
    lambda x: torch.where(x > 1.0, torch.log(x), 0.0),
    gradients=False,
)
OTHER.false(
    "guard_once",
    lambda x: torch.where(x > 1.0, torch.log(torch.where(x > 1.0, x, 1.0)), 0.0),
    lambda x: torch.where(x > 1.0, torch.log(x), 0.0),
    "the gradient at 0 is 0 times infinity",
    domain="finite",
)
