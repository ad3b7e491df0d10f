"""Propagation: who is sharded, who is gathered, what is said about it; the programs run and equal one device."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from autosp_rules import AutoSPConfig, dry_run
from fxrewrite import Edit, FxRewriteError, Report
from fxrewrite.spmd import LocalizeShapes, PropagatePlacements
from rules.layouts import LAYOUTS
from tests.autosp.one_device import assert_equal_to_one_device

IDS = torch.arange(32).reshape(2, 16) % 8
WITHOUT_TAGS = AutoSPConfig(checkpoint="none")


class Body(nn.Module):
    """Embedding, a function of hidden states [B, S, 8], and their mean square."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 8, dtype=torch.float64)
        self.other = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
        self.body = body

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.embed(ids), ids).square().mean()


def check(body: Any, *, num_ranks: int = 2, ids: torch.Tensor = IDS) -> list[str]:
    """Loss and gradients equal one device's; returns what the report says."""
    report = assert_equal_to_one_device(Body(body), {"ids": ids}, ranks=(num_ranks,), config=WITHOUT_TAGS, rtol=1e-10)
    return list(report.lines)


def gathers(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("gathered")]


CLEAN: dict[str, Any] = {
    "pointwise": lambda m, x, ids: F.gelu(x) * 2.0 + x,
    "learned positions": lambda m, x, ids: x + m.other[: ids.shape[1]],
    "global length in the arithmetic": lambda m, x, ids: x / ids.shape[1],
    "matmul with a parameter": lambda m, x, ids: x @ m.other.T @ m.other,
    "contraction over the sequence": lambda m, x, ids: x.transpose(1, 2) @ x,
    "sum over the sequence": lambda m, x, ids: x.sum(1) * 3.0,
    "mean over the sequence": lambda m, x, ids: x - x.mean(1, keepdim=True),
    "flatten and back": lambda m, x, ids: x.reshape(-1, 8).tanh().view(2, 16, 8),
    "split heads and join": lambda m, x, ids: (
        x.view(2, 16, 2, 4).transpose(1, 2).exp().transpose(1, 2).reshape(2, 16, 8)
    ),
    "stack and unbind": lambda m, x, ids: torch.stack([x, 2 * x], 1).unbind(1)[1],
    "chunk": lambda m, x, ids: x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
    "mask from ids": lambda m, x, ids: x * (ids != 3).unsqueeze(-1),
    "attention": lambda m, x, ids: F.scaled_dot_product_attention(
        *(3 * [x.view(2, 16, 2, 4).transpose(1, 2)]), is_causal=True
    ),
}
CLEAN |= {
    "fused q, k, v by unflatten": lambda m, x, ids: F.scaled_dot_product_attention(
        *torch.cat([x, x, x], -1).unflatten(-1, (3, -1, 2)).permute(2, 0, 3, 1, 4), is_causal=True
    ),
    "squeeze where a chunk has length one": lambda m, x, ids: x * x[:, :, :1].squeeze(-1).unsqueeze(-1),
    "maximum of two": lambda m, x, ids: torch.max(x, m.other[: ids.shape[1]]),
    "type_as": lambda m, x, ids: x * torch.arange(8).type_as(x),
    "softmax over the sequence": lambda m, x, ids: x.softmax(1) * x,
    "variance over the sequence": lambda m, x, ids: x * x.var(1, keepdim=True),
    "last token": lambda m, x, ids: x[:, -1],
    "all but some tokens": lambda m, x, ids: (x[:, 2:-1] * ids[:, 3:].unsqueeze(-1)).sum(),
}
MOVED: dict[str, Any] = {
    "shift by pads of 1 and -1": lambda m, x, ids: x + F.pad(x, (0, 0, 1, -1)),
    "a split that keeps all": lambda m, x, ids: x.split(16, 1)[0] + x,
    "cumulative sum": lambda m, x, ids: x.cumsum(1) + x,
    "shift": lambda m, x, ids: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "eager attention": lambda m, x, ids: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "maximum over the sequence": lambda m, x, ids: x.amax(1),
}
"""The sequence must be whole; over two ranks the rows of the batch are spread instead, over four the features."""
GATHERED: dict[str, Any] = {
    "no rule": lambda m, x, ids: torch.fft.fft(x, dim=1).real + x,
    "cumulative sum": MOVED["cumulative sum"],
    "eager attention": MOVED["eager attention"],
}
"""Over three ranks nothing but the sequence divides."""


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.slow
def test_stays_sharded(name: str, num_ranks: int) -> None:
    if name == "attention" and num_ranks == 4:
        pytest.skip("two heads")
    assert not gathers(check(CLEAN[name], num_ranks=num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MOVED)
def test_moves_where_the_sequence_must_be_whole(name: str, num_ranks: int) -> None:
    gathered = gathers(check(MOVED[name], num_ranks=num_ranks))
    assert all("aten::square reads it whole (128 bytes whole" in line for line in gathered) == (
        name != "eager attention" or num_ranks == 2  # over four ranks it contracts the features
    )


@pytest.mark.parametrize("name", GATHERED)
def test_is_gathered_and_says_so(name: str) -> None:
    assert gathers(check(GATHERED[name], num_ranks=3, ids=torch.arange(30).reshape(2, 15) % 8))


def test_ranks_that_hold_one_token() -> None:
    ids = torch.arange(4).reshape(2, 2)
    check(lambda m, x, ids: (x * x.squeeze()).squeeze(1) + x, ids=ids)
    check(lambda m, x, ids: x[..., :1].squeeze() - x[..., :1].mean(1), ids=ids)


def test_shifted_ids_are_shifted_before_they_are_sliced() -> None:
    check(lambda m, x, ids: x + m.embed(F.pad(ids, (1, -1))))


def test_matrix_products_that_stay_whole_are_counted() -> None:
    lines = check(lambda m, x, ids: x + (m.embed.weight.T @ m.embed.weight).cumsum(1)[0])
    assert [line for line in lines if line.startswith("whole: 1 of 1 matrix products")]


def test_half_precision_means_do_not_overflow() -> None:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x.half() * 8).square().mean(1).double()

    check(lambda m, x, ids: mean(x * 0 + 12.5).sqrt())  # 16 tokens of 10,000 each: beyond float16


def test_dropout_that_draws_says_so() -> None:
    class Drops(Body):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.embed(ids), 0.5).mean()

    _, report = dry_run(Drops(None), {"ids": IDS}, num_ranks=2)
    assert any(line.startswith("random: ") for line in report.lines)


def test_three_and_eight_ranks() -> None:
    check(CLEAN["flatten and back"], num_ranks=8)
    check(CLEAN["contraction over the sequence"], num_ranks=3, ids=torch.arange(30).reshape(2, 15) % 8)


def test_a_plan_without_its_context_says_what_it_needs() -> None:
    gm = fx.symbolic_trace(lambda x: x + 1)
    for step in (PropagatePlacements("shard", LAYOUTS), LocalizeShapes("localize", LAYOUTS)):
        with pytest.raises(FxRewriteError, match=r"needs to know the mesh axis; pass plan\.apply"), Edit(gm) as edit:
            step.run(edit, cast(Any, None), Report())
