"""Convolutions along the sequence: ranks send each other the few entries beside their chunks, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fxrewrite.spmd import HALO
from tests.autosp.one_device import OneDevice, Ranks, check_one_program

WIDTH = 6
Mix = Callable[["Model", Tensor], Tensor]
"""Of the model and hidden states [B, d, S], hidden states of the same shape."""


class Model(nn.Module):
    """Embedding, a mixer along the sequence, a head and a loss."""

    def __init__(self, mix: Mix, kernel: int = 4, groups: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = (nn.Embedding(64, WIDTH).double(), nn.Linear(WIDTH, 64).double())
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, groups=groups).double()
        self.mix, self.groups = mix, groups

    def convolve(self, x: Tensor, **options: Any) -> Tensor:
        return F.conv1d(x, self.conv.weight, self.conv.bias, groups=self.groups, **options)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids)).mT
        return F.cross_entropy(self.head((x + self.mix(self, x)).mT).mT, ids)


MIXERS: dict[str, tuple[Mix, int, int]] = {
    "causal": (lambda m, x: F.silu(m.convolve(x, padding=3)[..., : x.shape[-1]]), 4, WIDTH),
    "of all channels": (lambda m, x: m.convolve(x, padding=3)[..., : x.shape[-1]], 4, 1),
    "padded before": (lambda m, x: m.convolve(F.pad(x, (3, 0))), 4, 2),
    "centred": (lambda m, x: m.convolve(x, padding=2), 5, WIDTH),
    "same": (lambda m, x: m.convolve(x, padding="same"), 3, WIDTH),
    "dilated": (lambda m, x: m.convolve(x, padding=6, dilation=3)[..., : x.shape[-1]], 3, WIDTH),
    "ahead": (lambda m, x: m.convolve(F.pad(x, (0, 3))), 4, WIDTH),
    "ahead, by a slice": (lambda m, x: m.convolve(x, padding=3)[..., 3:], 4, WIDTH),
    "between": (lambda m, x: m.convolve(x, padding=3)[..., 2 : x.shape[-1] + 2], 4, WIDTH),
    "twice": (lambda m, x: m.convolve(torch.tanh(m.convolve(x, padding=1)), padding=1), 3, 1),
}


def check(name: str, shape: tuple[int, int], num_ranks: int, *, dynamic: bool = False) -> Ranks:
    ids = torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    return OneDevice(Model(*MIXERS[name]), {"ids": ids}).check(num_ranks)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("batch", "length", "num_ranks"), [(2, 16, 2), (1, 16, 4), (2, 17, 3), (3, 13, 2), (1, 6, 4)])
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.some(14)
def test_ranks_send_what_is_beside_their_chunks(
    name: str, batch: int, length: int, num_ranks: int, dynamic: bool
) -> None:
    """Where chunks are shorter than a halo, as 2 of 6 entries, what is sent of it is all of them."""
    ranks = check(name, (batch, length), num_ranks, dynamic=dynamic)
    assert not [line for line in ranks.report.lines if "gathered:" in line]
    assert {c.kind for c in ranks.report.collectives} == {"all_reduce", "halo"}
    count = sum(node.target is HALO for node in ranks.program.graph.nodes)
    assert count == (2 if name == "twice" else 1)
    if name != "twice":
        rows = {"dilated": 6, "centred": 4, "same": 2}.get(name, 3)
        assert {c.bytes_sent for c in ranks.report.collectives if c.kind == "halo"} == {batch * WIDTH * rows * 8}


def test_one_program_serves_every_length() -> None:
    """Also lengths at which a chunk is shorter than the halo, and some ranks have none of it."""
    generator = torch.Generator().manual_seed(0)
    for name in ("causal", "centred"):
        batches = (torch.randint(1, 64, (2, n), generator=generator) for n in (23, 24, 9, 5, 40))
        check_one_program(Model(*MIXERS[name]), batches, 4)
