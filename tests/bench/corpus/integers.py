"""Integers, casts, comparisons, quantization."""

from __future__ import annotations

import torch

from tests.bench.corpus.cases import Family, floats

INTEGERS = Family("integers")
_INTEGER = ["dtype(x) in {int32, int64}"]

INTEGERS.pair(
    "divide_by_shift",
    lambda x: torch.div(x, 4, rounding_mode="floor"),
    true=lambda x: torch.bitwise_right_shift(x, 2),
    false_pattern=lambda x: torch.div(x, 4, rounding_mode="trunc"),
    why="a shift rounds to below, not to zero",
    where=_INTEGER,
)

INTEGERS.pair(
    "remainder_by_mask",
    lambda x: torch.remainder(x, 8),
    true=lambda x: torch.bitwise_and(x, 7),
    false_pattern=lambda x: torch.fmod(x, 8),
    why="fmod has the sign of x",
    where=_INTEGER,
)

INTEGERS.true(
    "write_out_remainder",
    lambda x: torch.remainder(x, 4.0),
    lambda x: x - torch.floor(x * 0.25) * 4.0,
    numerics="reassociates",
    where=["dtype(x) in {float32, float64}"],
)
INTEGERS.false(
    "write_out_fmod",
    lambda x: torch.fmod(x, 4.0),
    lambda x: x - torch.floor(x * 0.25) * 4.0,
    "fmod rounds the quotient to zero",
    numerics="reassociates",
    domain="moderate",
    where=["dtype(x) in {float32, float64}"],
)

INTEGERS.true(
    "drop_wide_cast", lambda x: x.to(torch.float64).to(torch.int32), lambda x: x, where=["dtype(x) in {int32}"]
)
INTEGERS.false(
    "drop_narrow_cast",
    lambda x: x.to(torch.float32).to(torch.int64),
    lambda x: x,
    "float32 has no 2^24 + 1",
    where=["dtype(x) in {int64}"],
)

INTEGERS.true(
    "cast_once",
    lambda x: x.to(torch.float32).to(torch.float64),
    lambda x: x.to(torch.float64),
    where=["dtype(x) in {bfloat16}"],
)
INTEGERS.false(
    "cast_once",
    lambda x: x.to(torch.float32).to(torch.int32),
    lambda x: x.to(torch.int32),
    "float32 has no number between 1 and what is just below",
    domain="moderate",
    where=["dtype(x) in {float64}"],
)

INTEGERS.true(
    "not_below", lambda x, y: torch.logical_not(x < y), lambda x, y: x >= y, domain="finite", where=floats("x", "y")
)
INTEGERS.false(
    "not_below",
    lambda x, y: torch.logical_not(x < y),
    lambda x, y: x >= y,
    "NaN is neither below nor above",
    where=floats("x", "y"),
)

INTEGERS.pair(
    "to_integer",
    lambda x: x.to(torch.int64),
    true=lambda x: torch.trunc(x).to(torch.int64),
    false=lambda x: torch.floor(x).to(torch.int64),
    why="a cast rounds to zero",
    domain="moderate",
    where=floats("x"),
    terminates=False,
)

INTEGERS.pair(
    "round_before_clamp",
    lambda x: x.clamp(-8.0, 7.0).round(),
    true=lambda x: x.round().clamp(-8.0, 7.0),
    false_pattern=lambda x: x.clamp(-7.5, 7.5).round(),
    false=lambda x: x.round().clamp(-7.5, 7.5),
    why="7.5 is not an integer",
    where=floats("x"),
)

INTEGERS.true(
    "quantize",
    lambda x: torch.round(x / 0.25).clamp(-128.0, 127.0).to(torch.int8),
    lambda x: torch.round(x * 4.0).clamp(-128.0, 127.0).to(torch.int8),
    domain="finite",
    where=["dtype(x) in {float32}"],
)
INTEGERS.false(
    "quantize",
    lambda x: torch.floor(x / 0.25 + 0.5).clamp(-128.0, 127.0).to(torch.int8),
    lambda x: torch.round(x / 0.25).clamp(-128.0, 127.0).to(torch.int8),
    "quantization rounds halves to even",
    domain="moderate",
    where=["dtype(x) in {float32}"],
)

INTEGERS.pair(
    "count_in_bytes",
    lambda m: m.sum(-1),
    true=lambda m: m.to(torch.int32).sum(-1),
    false=lambda m: m.to(torch.int8).sum(-1, dtype=torch.int8).to(torch.int64),
    why="more than 127 overflow",
    where=["dtype(m) in {bool}", "rank(m) >= 1"],
    terminates=False,
)
