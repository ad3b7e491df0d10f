"""Masks as text: any part of what it computes is that part of the mask, and nothing but pointwise operators is run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxrewrite.errors import FxRewriteError
from rules.masks.expressions import Leaf, MaskCall, parse_mask

LENGTH = 7
POSITIONS = torch.arange(LENGTH)
LEAVES = [POSITIONS, POSITIONS[:, None], torch.tensor([[1, 0, 1, 1, 0, 1, 1]] * 2, dtype=torch.bool)[:, None, None]]


@pytest.mark.parametrize(
    "text",
    [
        "bitwise_and(le(x0, x1), x2)",
        "where(le(x0, x1), 0.0, -inf)",
        "masked_fill(mul(to(sub(x0, x1), torch.float64), 0.5), bitwise_not(x2), -1e+30)",
        "bitwise_or(eq(floor_divide(x0, 3), floor_divide(x1, 3)), full(False, torch.bool))",
        "x2",
    ],
)
def test_a_part_is_that_part_of_the_whole(text: str) -> None:
    mask = parse_mask(text)
    whole = mask.part(LEAVES, (0, LENGTH), (0, LENGTH)).expand(2, 1, LENGTH, LENGTH)
    part = mask.part(LEAVES, (2, 5), (1, 7)).expand(2, 1, 3, 6)
    assert torch.equal(part, whole[..., 2:5, 1:7])


def test_what_a_text_means() -> None:
    term = parse_mask("where(le(x0, x1), 0.0, -inf)").term
    assert term == MaskCall("where", (MaskCall("le", (Leaf(0), Leaf(1))), 0.0, -math.inf))


def test_what_is_the_same_is_computed_once() -> None:
    def computed(text: str) -> int:
        with CountingMode() as counted:
            parse_mask(text).part(LEAVES, (0, LENGTH), (0, LENGTH))
        return counted.calls

    assert computed("bitwise_or(le(x0, x1), bitwise_and(le(x0, x1), x2))") == computed("bitwise_or(x2, le(x0, x1))") + 1


class CountingMode(TorchDispatchMode):
    """Counts the operators that compute something."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += torch.Tag.pointwise in func.tags
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "text",
    ["matmul(x0, x1)", "le(x0", "__import__('os')", "x0.T", "le(x0, other=x1)", "torch.load", "y0", "-x0", "'x0'", "x"],
)
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(FxRewriteError, match=r"is not (allowed in a mask|a mask expression)"):
        parse_mask(text)
