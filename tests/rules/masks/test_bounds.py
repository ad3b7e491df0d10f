"""What is said of a tile of a mask holds of each of its entries."""

from __future__ import annotations

import random

import pytest
import torch

from rules.masks.bounds import mask_bounds
from rules.masks.expressions import parse_mask

ROWS, COLUMNS, LENGTH, KEYS = 3, 2, 7, 9
NUM_MASKS = 400
TELLS = {  # masks whose bounds say all there is to say of monotone positions
    "le(x0, x1)",
    "bitwise_and(le(x0, x1), gt(x0, sub(x1, 3)))",
    "bitwise_and(le(x0, x1), eq(floor_divide(x0, 3), floor_divide(x1, 3)))",
    "where(le(x0, x1), full(0, torch.float64), -1.7976931348623157e+308)",
    "masked_fill(full(0, torch.float64), bitwise_not(le(x0, x1)), -inf)",
    "mul(to(bitwise_not(le(x0, x1)), torch.float64), -1e30)",
    "mul(rsub(to(le(x0, x1), torch.float64), 1.0), -1e30)",
    "lt(abs(sub(x0, x1)), 3)",
    "logical_or(le(x0, x1), lt(x0, 2))",
}


def tiles(found: torch.Tensor) -> list[list[torch.Tensor]]:
    return [list(rows.split(COLUMNS, -1)) for rows in found.expand(LENGTH, KEYS).split(ROWS, -2)]


def of_tile(side: torch.Tensor, row: int, column: int) -> torch.Tensor:
    return side.expand(-(-LENGTH // ROWS), -(-KEYS // COLUMNS))[row, column]


def check(text: str, leaves: list[torch.Tensor], *, tells_all: bool = False) -> None:
    mask = parse_mask(text)
    whole = mask.part(leaves, (0, LENGTH), (0, KEYS))
    low, high = mask_bounds(mask, leaves, rows=ROWS, columns=COLUMNS)
    assert low.dtype == high.dtype == whole.dtype
    for i, row in enumerate(tiles(whole)):
        for j, tile in enumerate(row):
            least, greatest = of_tile(low, i, j), of_tile(high, i, j)
            if bool(tile.isnan().any()):
                assert least == -torch.inf, (text, leaves)
                assert greatest == torch.inf, (text, leaves)
            else:
                assert bool((least <= tile).all()), (text, leaves)
                assert bool((tile <= greatest).all()), (text, leaves)
            if tells_all:
                assert greatest == tile.amax()


@pytest.mark.parametrize("text", sorted(TELLS))
def test_positions(text: str) -> None:
    check(text, [torch.arange(KEYS), torch.arange(LENGTH)[:, None]], tells_all="abs" not in text)


COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
CONNECTED = ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or")
NUMBERS = ("0", "1", "-3", "2.5", "inf", "-inf", "9223372036854775807")


def expression(rng: random.Random, kind: str, depth: int) -> str:
    """A mask that is drawn: `kind` is "bool", "whole" or "real"."""

    def more(kind: str) -> str:
        return expression(rng, kind, depth - 1)

    def any_number() -> str:
        return rng.choice([more("whole"), more("real"), rng.choice(NUMBERS[:6])])

    if depth == 0:
        return {"bool": "lt(x0, x1)", "whole": rng.choice(["x0", "x1", "x4"]), "real": rng.choice(["x2", "x3"])}[kind]
    if kind == "bool":
        options = [
            f"{rng.choice(COMPARED)}({more(rng.choice(['whole', 'real']))}, {any_number()})",
            f"{rng.choice(CONNECTED)}({more('bool')}, {more('bool')})",
            f"{rng.choice(['bitwise_not', 'logical_not'])}({more('bool')})",
            f"where({more('bool')}, {more('bool')}, {more('bool')})",
            f"to({more(rng.choice(['whole', 'real']))}, torch.bool)",
        ]
        return rng.choice(options)
    number = rng.choice(["0", "1", "-3", "9223372036854775807"] if kind == "whole" else NUMBERS[:6])
    dtype = rng.choice(["torch.int64", "torch.int8", "torch.uint8"] if kind == "whole" else ["torch.float32"])
    source = rng.choice(["bool", "whole"]) if kind == "whole" else rng.choice(["bool", "whole", "real"])
    operand = rng.choice([more(kind), number])
    options = [
        f"{rng.choice(['add', 'sub', 'mul'])}({more(kind)}, {operand})",
        f"{rng.choice(['minimum', 'maximum'])}({more(kind)}, {more(kind)})",
        f"{rng.choice(['abs', 'neg', 'sign'])}({more(kind)})",
        f"where({more('bool')}, {more(kind)}, {more(kind)})",
        f"masked_fill({more(kind)}, {more('bool')}, {number if kind == 'real' else 1})",
        f"floor_divide({more(kind)}, {rng.choice(['3', '-2'])})",
        f"to({more(source)}, {dtype})",
    ]
    return rng.choice(options)


def test_whatever_is_computed() -> None:
    """Of numbers of which some are large, infinite or NaN."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_MASKS):
        text = expression(rng, rng.choice(["bool", "bool", "real", "whole"]), 3)
        columns, rows = (torch.randint(-4, 5, (n,), generator=generator) for n in (KEYS, LENGTH))
        real, other = (torch.randn(n, generator=generator).mul(2).round() for n in (KEYS, LENGTH))
        rows[rng.randrange(LENGTH)] = rng.choice([0, 2**62, -(2**63), 200])
        real[rng.randrange(KEYS)] = rng.choice([0.0, torch.inf, -torch.inf, torch.nan, 1e38])
        other[rng.randrange(LENGTH)] = rng.choice([0.0, torch.inf, torch.nan, -1e38])
        check(text, [columns, rows[:, None], real, other[:, None], torch.tensor(rng.choice([2, -1]))])
