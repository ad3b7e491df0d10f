"""The search for the longest sequence that fits, over made-up cards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.longest import search

GIB = 2**30


@pytest.mark.parametrize(
    ("constant", "per_token"),
    [(4 * GIB, 50_000), (15 * GIB, 20_000), (0, 1_300_000)],
    ids=["a line", "constant at first", "little fits"],
)
def test_longest_and_too_long_are_close(constant: int, per_token: int) -> None:
    limit, tried = 16 * GIB, []

    def step(length: int) -> dict[str, Any]:
        tried.append(length)
        peak = max(constant, constant // 2 + per_token * length)
        return {"fits": peak <= limit, "peak": peak if peak <= limit else None}

    found = search(step, 4096, limit)
    longest = max(one["length"] for one in found if one["fits"])
    too_long = min(one["length"] for one in found if not one["fits"])
    assert longest < too_long <= max(1.04 * longest, longest + 1024)
    assert len(tried) <= 15


def test_without_a_limit_two_lengths_run() -> None:
    found = search(lambda length: {"fits": True, "peak": None}, 64, None)
    assert [one["length"] for one in found] == [64, 128]
