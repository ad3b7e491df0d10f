"""What is proved of a condition is so in every entry, and what is refuted is not."""

from __future__ import annotations

import random

import pytest
import torch

from rules.masks import proofs
from rules.masks.expressions import parse_mask
from rules.masks.positions import LONGEST, Affine
from rules.masks.proofs import CORNERS, is_true_everywhere, is_true_within

COLUMN, ROW = Affine((1,), 0, torch.int64), Affine((1, 0), 0, torch.int64)
DATA = torch.empty(1, dtype=torch.bool, device="meta")
LENGTHS = (2, 3, 17, 40)
NUM_CONDITIONS = 300
WITHIN = {"le": torch.tril, "gt": lambda x: x.triu(1), "eq": torch.diagonal}
"""What an area keeps of a square, by the relation of columns to rows there."""


def positions(length: int) -> list[torch.Tensor]:
    return [torch.arange(length), torch.arange(length)[:, None]]


def drawn(rng: random.Random, depth: int) -> str:
    """A condition on positions, x0 of columns and x1 of rows, and on data x2."""
    if depth == 0:
        a, b = rng.sample(["x0", "x1"], 2)
        shift = rng.choice([0, 0, 1, -1, 5, -20])
        return rng.choice(
            [
                f"{rng.choice(['le', 'lt', 'ge', 'gt', 'eq', 'ne'])}({a}, add({b}, {shift}))",
                f"lt(sub(mul({a}, 2), {b}), {shift})",
                f"ge({a}, {abs(shift)})",
                f"eq(floor_divide({a}, 5), floor_divide({b}, 5))",
                f"lt(where(le({a}, {b}), full(0, torch.float64), -inf), {shift})",
                "x2",
            ]
        )
    a, b = drawn(rng, depth - 1), drawn(rng, depth - 1)
    return rng.choice([f"bitwise_and({a}, {b})", f"bitwise_or({a}, {b})", f"bitwise_or({a}, bitwise_not({b}))", a])


def test_whatever_is_proved_is_so_at_every_length() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    num_proved = 0
    for _ in range(NUM_CONDITIONS):
        text = drawn(rng, 3)
        condition = parse_mask(text)
        for where, within in WITHIN.items():
            is_proved = is_true_within(CORNERS[where](LONGEST), condition.term, [COLUMN, ROW, DATA])
            num_proved += is_proved
            for length in LENGTHS if is_proved else ():
                data = torch.randint(2, (length,), generator=generator).bool()
                found = condition.part([*positions(length), data], (0, length), (0, length)).expand(length, length)
                assert not bool(within(~found).any()), (text, length)
    assert num_proved > NUM_CONDITIONS / 4


def test_whatever_is_said_at_one_length_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few tiles are looked at at once."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    monkeypatch.setattr(proofs, "_AT_ONCE", 512)
    said = {True: 0, False: 0}
    for _ in range(NUM_CONDITIONS):
        text, (rows, columns) = drawn(rng, 2), rng.choices([1, 15, 16, 17, 100, 300], k=2)
        condition = parse_mask(text)
        data = torch.rand(2, 1, 1, columns, generator=generator) < rng.choice([0.9, 0.999, 1.0])
        leaves = [torch.arange(columns), torch.arange(rows)[:, None], data]
        found = is_true_everywhere(condition.term, leaves, rows, columns)
        assert found is bool(condition.part(leaves, (0, rows), (0, columns)).all()), text
        said[found] += 1
    assert min(said.values()) > NUM_CONDITIONS / 20


@pytest.mark.parametrize(("row", "column"), [(0, 1), (70_000, 70_001), (99_998, 99_999)])
def test_one_entry_of_many(row: int, column: int) -> None:
    length = 100_000
    text = "bitwise_or({}, bitwise_and(eq(x0, {}), eq(x1, {})))".format("le(x0, x1)", column, row)
    is_causal = parse_mask(f"eq({text}, le(x0, x1))").term
    assert is_true_everywhere(is_causal, positions(length), length, length) is False
    assert (
        is_true_everywhere(parse_mask("eq(lt(x0, add(x1, 1)), le(x0, x1))").term, positions(length), length, length)
        is True
    )


def test_what_would_take_too_long_is_not_said() -> None:
    odd = parse_mask("eq(remainder(add(x0, x1), 2), remainder(sub(x0, x1), 2))").term
    assert is_true_everywhere(odd, positions(300), 300, 300) is True
    assert is_true_everywhere(odd, positions(20_000), 20_000, 20_000) is None
