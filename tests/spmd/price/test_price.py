"""The price of a redistribution is what its collective sends, which counting the entries that move tells."""

from __future__ import annotations

import pytest

from fxrewrite.spmd import Partial, Placement, Replicate, Shard, redistribution_bytes

R, P = Replicate(), Partial()
WHOLE = 240
PRICES: dict[str, tuple[Placement, Placement, dict[int, float]]] = {
    "a slice": (R, Shard(0), {2: 0, 4: 0}),
    "nothing": (Shard(0, outer=2), Shard(0, outer=2), {2: 0, 4: 0}),
    "all-to-all": (Shard(0), Shard(1), {2: 60, 4: 45}),  # of a chunk of 120 or 60, all but the part that is kept
    "all-gather": (Shard(0), R, {2: 120, 4: 180}),  # the chunk to each of the others
    "other runs of one dimension": (Shard(0), Shard(0, outer=2), {2: 120, 4: 180}),
    "reduce-scatter": (P, Shard(0), {2: 120, 4: 180}),
    "all-reduce": (P, R, {2: 240, 4: 360}),  # a reduce-scatter and an all-gather
}


@pytest.mark.parametrize("name", PRICES)
def test_bytes_that_a_rank_sends(name: str) -> None:
    src, dst, expected = PRICES[name]
    assert {n: redistribution_bytes(WHOLE, src, dst, n) for n in expected} == expected
    assert redistribution_bytes(WHOLE, src, dst, 1) == 0
