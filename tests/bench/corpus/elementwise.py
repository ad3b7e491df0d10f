"""Identities of elementwise operators."""

from __future__ import annotations

import torch

from tests.bench.corpus.cases import Family, floats

ELEMENTWISE = Family("elementwise", where=floats("x"))

# -0.0 - 0.0 is -0.0, and -0.0 + 0.0 is 0.0.
ELEMENTWISE.true("drop_sub_zero", lambda x: x - 0.0, lambda x: x)
ELEMENTWISE.false("drop_add_zero", lambda x: x + 0.0, lambda x: x, "-0.0 becomes 0.0")

ELEMENTWISE.true("to_expm1", lambda x: torch.exp(x) - 1.0, lambda x: torch.expm1(x), numerics="reassociates")
ELEMENTWISE.false(
    "from_expm1",
    lambda x: torch.expm1(x),
    lambda x: torch.exp(x) - 1.0,
    "the difference cancels for small x",
    numerics="reassociates",
)

ELEMENTWISE.true(
    "sigmoid_of_minus", lambda x: 1.0 - torch.sigmoid(x), lambda x: torch.sigmoid(-x), numerics="reassociates"
)
ELEMENTWISE.false(
    "one_minus_sigmoid",
    lambda x: torch.sigmoid(-x),
    lambda x: 1.0 - torch.sigmoid(x),
    "the difference cancels for large x",
    numerics="reassociates",
)

ELEMENTWISE.pair(
    "clamp_to_relu",
    lambda x: torch.clamp(x, min=0.0),
    true=lambda x: torch.relu(x),
    false=lambda x: torch.where(x > 0, x, 0.0),
    why="NaN > 0 is false, so NaN becomes 0",
    gradients=False,
)

ELEMENTWISE.true(
    "where_to_maximum",
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.maximum(x, y),
    numerics="reassociates",
    domain="finite",
    where=floats("x", "y"),
    gradients=False,
)
ELEMENTWISE.false(
    "where_to_maximum",
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.maximum(x, y),
    "a NaN in x gives y",
    numerics="reassociates",
    where=floats("x", "y"),
    gradients=False,
)

# A quarter is a number of the machine, a third is not.
ELEMENTWISE.true("quarter", lambda x: x / 4.0, lambda x: x * 0.25)
ELEMENTWISE.false("third", lambda x: x / 3.0, lambda x: x * (1.0 / 3.0), "a third is rounded")

ELEMENTWISE.pair(
    "to_lerp",
    lambda x, y, w: x + w * (y - x),
    true=lambda x, y, w: torch.lerp(x, y, w),
    false=lambda x, y, w: torch.lerp(y, x, w),
    why="the ends are exchanged",
    literals="w",
    numerics="reassociates",
    domain="moderate",
    where=[*floats("x", "y"), "w >= 0", "w <= 1"],
)

ELEMENTWISE.true("ceil", lambda x: -torch.floor(-x), lambda x: torch.ceil(x))
ELEMENTWISE.false(
    "round",
    lambda x: torch.floor(x + 0.5).to(torch.int32),
    lambda x: torch.round(x).to(torch.int32),
    "halves are rounded to even",
    domain="moderate",
)

ELEMENTWISE.true(
    "exp_of_sum",
    lambda x, y: torch.exp(x) * torch.exp(y),
    lambda x, y: torch.exp(x + y),
    numerics="approximate",
    domain="moderate",
    where=floats("x", "y"),
)
ELEMENTWISE.false(
    "log_of_product",
    lambda x, y: torch.log(x * y),
    lambda x, y: torch.log(x) + torch.log(y),
    "the product of two negative numbers has a logarithm",
    numerics="approximate",
    domain="moderate",
    where=floats("x", "y"),
)
