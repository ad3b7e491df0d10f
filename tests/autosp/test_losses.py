"""Every loss of torch over sharded tokens: its value and gradients are one device's, and nothing is gathered for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.autosp.one_device import assert_equal_to_one_device

CLASSES, IDS = 8, torch.arange(32).reshape(2, 16) % 7
LABELS = torch.where(IDS % 3 == 0, -100, (IDS * 3 + 1) % CLASSES)
LABELS[0, :9] = -100  # a rank of four without a single label
WEIGHT = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)
CHANCES = torch.rand(2, 16, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
SIGNS = torch.where(IDS % 2 == 0, 1.0, -1.0)
Loss = Callable[[torch.Tensor], torch.Tensor]
"""Of logits [B, S, classes]."""


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def by_token(loss: Callable[..., torch.Tensor], **options: Any) -> Loss:
    return lambda x: loss(tokens(x), tokens(LABELS), **options)


def to_chances(loss: Callable[..., torch.Tensor], **options: Any) -> Loss:
    return lambda x: loss(x, CHANCES, **options)


LOSSES: dict[str, Loss] = {
    "mean": by_token(F.cross_entropy),
    "sum": by_token(F.cross_entropy, reduction="sum"),
    "none, then a mean": lambda x: F.cross_entropy(tokens(x), tokens(LABELS), reduction="none").mean(),
    "class weights": by_token(F.cross_entropy, weight=WEIGHT),
    "label smoothing": by_token(F.cross_entropy, label_smoothing=0.2),
    "class weights and label smoothing": by_token(F.cross_entropy, weight=WEIGHT, label_smoothing=0.2),
    "another index is ignored": lambda x: F.cross_entropy(tokens(x), tokens(IDS), WEIGHT, ignore_index=3),
    "classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "soft targets": lambda x: F.cross_entropy(tokens(x), tokens(CHANCES)),
    "soft targets, class weights and smoothing": lambda x: F.cross_entropy(
        tokens(x), tokens(CHANCES), WEIGHT, label_smoothing=0.1
    ),
    "negative log likelihood": lambda x: F.nll_loss(tokens(x).log_softmax(-1), tokens(LABELS), WEIGHT),
    "squares": to_chances(F.mse_loss),
    "squares, sum": to_chances(F.mse_loss, reduction="sum"),
    "distances": to_chances(F.l1_loss),
    "smooth": to_chances(F.smooth_l1_loss, beta=0.3),
    "huber": to_chances(F.huber_loss, delta=0.3),
    "logits of chances": to_chances(F.binary_cross_entropy_with_logits, weight=WEIGHT, pos_weight=WEIGHT),
    "chances": lambda x: F.binary_cross_entropy(x.sigmoid(), CHANCES),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), CHANCES),
    "divergence by batch": lambda x: F.kl_div(x.log_softmax(-1), CHANCES, reduction="batchmean"),
    "angles": lambda x: F.cosine_embedding_loss(tokens(x), tokens(CHANCES), tokens(SIGNS)),
    "triplets": lambda x: F.triplet_margin_loss(tokens(x), tokens(CHANCES), tokens(x * x)),
}


def shifted(loss: Callable[..., torch.Tensor], **options: Any) -> Loss:
    return lambda x: loss(
        x[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[:, 1 : x.shape[1]].reshape(-1), **options
    )


SHIFTED: dict[str, Loss] = {
    "mean": shifted(F.cross_entropy),
    "sum, weights and smoothing": shifted(F.cross_entropy, weight=WEIGHT, label_smoothing=0.2, reduction="sum"),
    "soft caps": lambda x: shifted(F.cross_entropy)(torch.tanh(x / 3) * 3),
    "rows": lambda x: F.cross_entropy(x[:, :-1].transpose(1, 2), LABELS[:, 1 : x.shape[1]]),
    "log_softmax": lambda x: shifted(F.nll_loss)(x.log_softmax(-1)),
    "none": lambda x: shifted(F.cross_entropy, reduction="none")(x).square().mean(),
}


class Head(nn.Module):
    """Embedding, a projection to logits [B, S, classes], and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 6, dtype=torch.float64)
        self.head = nn.Linear(6, CLASSES, dtype=torch.float64)
        self.loss = loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.embed(ids)))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # what torch's kl_div says of its own default
def test_loss_of_shards_is_the_loss_of_one_device(loss: str) -> None:
    report = assert_equal_to_one_device(Head(LOSSES[loss]), {"ids": IDS}, ranks=(4,))
    assert not [line for line in report.lines if "gathered" in line]


@pytest.mark.parametrize("length", [16, 13])
@pytest.mark.parametrize("loss", SHIFTED)
def test_loss_of_shifted_tokens_gathers_no_logits(loss: str, length: int) -> None:
    report = assert_equal_to_one_device(Head(SHIFTED[loss]), {"ids": IDS[:, :length]}, ranks=(2, 3))
    assert not [line for line in report.lines if "gathered" in line]


def test_loss_of_shifted_tokens_of_any_length() -> None:
    ids = IDS[:, :13].clone()
    torch._dynamo.mark_dynamic(ids, 1)
    report = assert_equal_to_one_device(Head(SHIFTED["rows"]), {"ids": ids}, ranks=(3,))
    assert not [line for line in report.lines if "gathered" in line]
