"""A mean over tokens and the sum by the count are one number, with all that the loss takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from rules.canonical.losses import LOSSES
from tests.rewriting import traced

LOGITS = torch.randn(12, 5, dtype=torch.float64)
TARGET = torch.randint(0, 5, (12,))
SOME = torch.where(torch.arange(12) % 3 == 0, -100, TARGET)
WEIGHT = torch.rand(5, dtype=torch.float64) + 0.1
CASES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "plain": (TARGET, {}),
    "ignored": (SOME, {}),
    "other index": (TARGET, {"ignore_index": 2}),
    "weights": (SOME, {"weight": WEIGHT}),
    "smoothing": (SOME, {"label_smoothing": 0.1}),
    "weights and smoothing": (SOME, {"weight": WEIGHT, "label_smoothing": 0.3}),
    "probabilities": (torch.rand(12, 5, dtype=torch.float64).softmax(-1), {}),
    "nothing counts": (torch.full((12,), -100), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_mean_is_sum_by_count(case: str) -> None:
    target, options = CASES[case][0], dict(CASES[case][1])

    inputs = (target, options.pop("weight", None))

    def loss(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return F.cross_entropy(logits, target, weight, **options)

    gm = traced(loss, LOGITS, *inputs)
    report = LOSSES.apply(gm)
    assert report["losses.mean_to_sum"].rewrites == 1
    a, b = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    expected, found = loss(a, *inputs), gm(b, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)
    expected.backward()
    found.backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-15, equal_nan=True)
    assert LOSSES.apply(gm).rewrites == 0


LOSS_FUNCTIONS = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll_loss": lambda x, t: F.nll_loss(x.log_softmax(-1), t),
}


@pytest.mark.parametrize("loss", LOSS_FUNCTIONS.values(), ids=LOSS_FUNCTIONS)
def test_halves_are_summed_in_float32(loss: Any) -> None:
    """The sum of these losses is beyond float16, their mean is not."""
    logits = torch.zeros(9_000, 5, dtype=torch.float16)
    logits[:, 0] = 20
    target = torch.ones(9_000, dtype=torch.int64)
    gm = traced(loss, logits, target)
    assert LOSSES.apply(gm).rewrites == 1
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected, found = loss(a, target), gm(b, target)  # expected is infinite where torch's kernel has few threads
    assert found.item() == loss(a.float(), target).item() == 20
    expected.backward()
    found.backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-7)


def test_a_sum_is_left_alone() -> None:
    gm = traced(lambda x, t: F.cross_entropy(x, t, reduction="sum"), LOGITS, TARGET)
    assert LOSSES.apply(gm).rewrites == 0
