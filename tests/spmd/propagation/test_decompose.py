"""Operators without a layout rule run as the operators that they are made of: in a model, for any length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosp_rules import AutoSPConfig
from fxrewrite import RuleSet
from fxrewrite.spmd import DecomposeUnknown
from rules.layouts import LAYOUTS
from tests.autosp.one_device import assert_equal_to_one_device, captured

VOCAB, WIDTH = 13, 12
torch.library.define("decompose_test::doubled", "(Tensor x) -> Tensor")


@torch.library.impl("decompose_test::doubled", "CompositeImplicitAutograd")
def doubled(x: Tensor) -> Tensor:
    return torch.dstack([x, x])[..., ::2] + x


MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "dstack": lambda x: torch.dstack([x[..., ::2], x[..., 1::2]]),
    "trapezoid of features": lambda x: x * torch.trapezoid(x, dim=-1).unsqueeze(-1),
    "two trapezoids, and a shift": lambda x: torch.fft.fftshift(x * torch.trapezoid(x, x.cos())[..., None], dim=-1),
    "norm of a matrix of features": lambda x: x / torch.linalg.matrix_norm(x.unflatten(-1, (3, 4)))[..., None],
    "sorted rows, and flipped ones": lambda x: x.msort() + x.flipud(),
    "an operator of one's own": lambda x: torch.ops.decompose_test.doubled(x),
    "pool of features": lambda x: nn.functional.max_pool1d(x, 3, 1, 1) + nn.functional.avg_pool1d(x, 3, 1, 1),
}


class Mixed(nn.Module):
    """Token by token, with an operator that has no layout rule between two products."""

    def __init__(self, mixer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.proj, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixer = mixer

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.mixer(self.proj(self.embed(ids)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.some(6)
def test_parts_are_sharded(mixer: str, is_dynamic: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (2, 10))
    if is_dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    report = assert_equal_to_one_device(
        Mixed(MIXERS[mixer]).double(), {"ids": ids}, ranks=(2, 3), config=AutoSPConfig(strict=True)
    )
    assert {collective.kind for collective in report.collectives} == {"all_reduce"}


def test_what_has_too_many_parts_is_left_alone() -> None:
    network = nn.LSTM(4, 4).double()
    weights = tuple(network.parameters())

    def run(x: Tensor) -> Tensor:
        start = x.new_zeros(1, 2, 4)
        return torch.lstm(x, (start, start), weights, True, 1, 0.0, False, False, False)[0]

    with torch._dynamo.config.patch(allow_rnn=True):
        gm, _ = captured(run, {"x": torch.randn(64, 2, 4, dtype=torch.float64)})
    plan = RuleSet("decompose", DecomposeUnknown("decompose", LAYOUTS)).once()
    assert plan.apply(gm).rewrites == 0
