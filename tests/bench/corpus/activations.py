"""Activations that are spelled out, and the operators that they become."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family, floats

ACTIVATIONS = Family("activations", numerics="reassociates", domain="moderate", where=floats("x"))

ACTIVATIONS.pair(
    "gelu_tanh",
    lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0)))),
    true=lambda x: F.gelu(x, approximate="tanh"),
    false=lambda x: F.gelu(x),
    why="it is the approximation by tanh, not the one by erf",
    numerics="approximate",
    where=["dtype(x) in {float32, float64}"],
)


def _halves(x: Any) -> Any:
    gate, value = torch.chunk(x, 2, -1)
    return gate * torch.sigmoid(value)


def _other_halves(x: Any) -> Any:
    gate, value = torch.chunk(x, 2, -1)
    return torch.sigmoid(gate) * value


_EVEN = [*floats("x"), "rank(x) >= 1", "size(x, -1) % 2 == 0", "size(x, -1) > 0"]
ACTIVATIONS.pair(
    "to_glu",
    _halves,
    true=lambda x: F.glu(x, -1),
    false_pattern=_other_halves,
    why="glu takes the sigmoid of the second half",
    where=_EVEN,
    domain="all",
)

ACTIVATIONS.pair(
    "softplus",
    lambda x: torch.log1p(torch.exp(x)),
    true=lambda x: F.softplus(x),
    false=lambda x: F.softplus(x, 1.0, 5.0),
    why="above the threshold of 5 it is x, which is off by 0.0067",
    numerics="approximate",
)

ACTIVATIONS.true(
    "hardswish", lambda x: x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0, lambda x: F.hardswish(x), numerics="approximate"
)
ACTIVATIONS.false(
    "hardsigmoid",
    lambda x: torch.clamp(0.2 * x + 0.5, 0.0, 1.0),
    lambda x: F.hardsigmoid(x),
    "the slope of torch's operator is 1/6",
    numerics="approximate",
)

ACTIVATIONS.true(
    "leaky_relu",
    lambda x, a: torch.maximum(x, a * x),
    lambda x, a: F.leaky_relu(x, a),
    literals="a",
    domain="finite",
    where=[*floats("x"), "a > 0", "a < 1"],
    gradients=False,
)
ACTIVATIONS.false(
    "leaky_relu",
    lambda x, a: torch.maximum(x, a * x),
    lambda x, a: F.leaky_relu(x, a),
    "with a slope above 1 the maximum is the other one",
    literals="a",
    domain="finite",
    where=[*floats("x"), "a > 0"],
    gradients=False,
)

ACTIVATIONS.pair(
    "elu",
    lambda x: torch.where(x > 0, x, 2.0 * (torch.exp(x) - 1.0)),
    true=lambda x: F.elu(x, 2.0),
    false=lambda x: F.celu(x, 2.0),
    why="celu divides x by alpha before exp",
    gradients=False,
)

ACTIVATIONS.pair(
    "logsigmoid",
    lambda x: -F.softplus(-x),
    true=lambda x: F.logsigmoid(x),
    false_pattern=lambda x: -F.softplus(x),
    why="it is the softplus of -x",
    numerics="approximate",
)

ACTIVATIONS.true(
    "relu6", lambda x: torch.clamp(x, 0.0, 6.0), lambda x: F.relu6(x), gradients=False, numerics="exact", domain="all"
)
ACTIVATIONS.false("relu_by_mask", lambda x: torch.relu(x), lambda x: x * (x > 0), "-inf times 0 is NaN", domain="all")
