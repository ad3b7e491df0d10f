"""Parts of the sharded dimension: a slice stays where its entries are, or is sharded anew; ranks look up their entries.

As losses of policies, preferences and rewards take logits, log probabilities and hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autosp_rules import AutoSPConfig
from fxrewrite.spmd import COLLECTIVE_KINDS
from tests.autosp.one_device import OneDevice, Ranks, captured, check_one_program, on_ranks

CLASSES = 64
Loss = Callable[["Model", Tensor, Tensor], Any]
"""Of the model, hidden states [B, S, d] and ids [B, S]."""


class Model(nn.Module):
    """Embedding, hidden states, a head of many classes, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 6, dtype=torch.float64)
        self.up, self.head = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, CLASSES, dtype=torch.float64)
        self.loss = loss

    def forward(self, ids: Tensor) -> Any:
        return self.loss(self, torch.tanh(self.up(self.embed(ids))), ids)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return ((x * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def attended(h: Tensor) -> Tensor:
    heads = h.unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def losses(kept: int) -> dict[str, Loss]:
    """Losses that keep so many tokens."""
    k = kept
    return {
        "logits before": lambda m, h, ids: -log_probabilities(m.head(h)[:, -k - 1 : -1], ids[:, -k:]).mean(),
        "logits twice": lambda m, h, ids: masked_mean(
            log_probabilities(m.head(h)[:, :-1][:, -k:] / 0.7, ids[:, -k:]).exp(), ids[:, -k:] > 9
        ),
        "hidden states": lambda m, h, ids: -log_probabilities(m.head(h[:, -k - 1 : -1]), ids[:, -k:]).square().mean(),
        "the first": lambda m, h, ids: m.head(h[:, :k]).square().mean(),
        "narrow": lambda m, h, ids: m.head(h).narrow(1, 1, k).square().mean(),
        "cross entropy": lambda m, h, ids: F.cross_entropy(m.head(h)[:, -k:].flatten(0, 1), ids[:, -k:].flatten()),
        "log probabilities": lambda m, h, ids: (
            log_probabilities(m.head(h)[:, :-1], ids[:, 1:])[:, -k:].exp() * (ids[:, -k:] % 3)
        ).sum(),
        "beside all": lambda m, h, ids: (
            entropy((x := m.head(h))[:, -k - 1 : -1]).mean() + log_probabilities(x[:, :k], ids[:, :k]).sum() + x.mean()
        ),
        "entropies": lambda m, h, ids: entropy(m.head(h)[:, -k - 1 : -1]).mean(),
        "sequence first": lambda m, h, ids: m.head(h).transpose(0, 1)[-k - 1 : -1].log_softmax(-1).square().mean(),
        "softmax over tokens": lambda m, h, ids: (m.head(h)[:, 1 : k + 1].softmax(1) * m.head(h)[:, 1 : k + 1]).sum(),
        "a product of tokens": lambda m, h, ids: (h[:, 1 : k + 1].mT @ h[:, -k:]).square().mean(),
    }


def last(ids: Tensor) -> Tensor:
    """The number of one token of each row."""
    return (ids > 9).sum(1) - 1


def row(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0])


LOOKED_UP: dict[str, Loss] = {
    "the last token's states": lambda m, h, ids: m.head(h[row(ids), last(ids)]).square().mean(),
    "the last token's logits": lambda m, h, ids: m.head(h)[row(ids), last(ids)].log_softmax(-1).square().mean(),
    "two tokens": lambda m, h, ids: h[row(ids)[:, None], torch.stack([last(ids), ids.argmax(1)], 1)].exp().mean(),
    "from the end": lambda m, h, ids: h[row(ids), -(ids > 20).sum(1).clamp(min=1)].square().sum(),
    "index_select": lambda m, h, ids: m.head(h).index_select(1, torch.tensor([0, 3, 1])).square().mean(),
    "gather": lambda m, h, ids: m.head(h).logsumexp(-1).gather(1, last(ids)[:, None]).exp().sum(),
    "take_along_dim": lambda m, h, ids: torch.take_along_dim(h, last(ids)[:, None, None], 1).square().sum(),
    "select": lambda m, h, ids: (m.head(h[:, -1]) * m.head(h[:, 0])).sum() + h[:, -3].exp().sum(),
    "of a section": lambda m, h, ids: m.head(h)[:, 2:][:, -1].square().mean() + h[:, :-1][row(ids), 3].exp().sum(),
    "sequence first": lambda m, h, ids: h.transpose(0, 1)[last(ids), row(ids)].square().sum(),
    "numbers": lambda m, h, ids: (h.argmax(-1)[row(ids), last(ids)] * h.sum((1, 2))).sum(),
    "beside all": lambda m, h, ids: (h * h[row(ids), last(ids)].unsqueeze(1)).sum(),
}
TOO: dict[str, Loss] = {
    "differences": lambda m, h, ids: (h[:, 1:] - h[:, :-1]).square().sum(),
    "attention": lambda m, h, ids: m.head(attended(h[:, 1:])).square().mean(),
    "a section of a section": lambda m, h, ids: (h[:, :-4].exp()[:, 1:].sin() * h[:, 2:-3]).sum(),
    "runs": lambda m, h, ids: m.head(h).flatten(0, 1)[1:].square().mean(),
    "every second": lambda m, h, ids: m.head(h)[:, ::2].square().mean(),
    "truths": lambda m, h, ids: ((h > 0)[row(ids), last(ids)] * h.sum(1)).sum(),
    "classes, of which those of other rows are none": lambda m, h, ids: (
        (x := m.head(h))[:, 3:]
        .gather(2, torch.where(torch.arange(ids.shape[1]) < 3, -100, x.argmax(-1))[:, 3:, None])
        .square()
        .sum()
    ),
    "one by one": lambda m, h, ids: sum((i + 1) * h[:, i : i + 1].exp().sum() for i in range(ids.shape[1] - 1)),
    "each of them": lambda m, h, ids: sum((i + 1) * h[:, i].exp().sum() for i in range(ids.shape[1] - 1)),
}
"""Losses beside these whose values and gradients are compared alone."""


def check(loss: Loss, shape: tuple[int, int], num_ranks: int, *, dynamic: bool = False) -> Ranks:
    ids = torch.randint(1, CLASSES, shape, generator=torch.Generator().manual_seed(sum(shape)))
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    return OneDevice(Model(loss), {"ids": ids}).check(num_ranks)


def sent(ranks: Ranks) -> int:
    """How many numbers the largest collective has on a rank."""
    nodes = [node for node in ranks.program.graph.nodes if node.target in COLLECTIVE_KINDS]
    return max(node.all_input_nodes[0].meta["val"].numel() for node in nodes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "num_ranks", "kept"),
    [(3, 16, 2, 9), (3, 16, 2, 5), (1, 15, 2, 9), (2, 13, 3, 4), (3, 17, 3, 10), (1, 19, 4, 3), (2, 9, 3, 1)],
)
@pytest.mark.parametrize("name", losses(1))
@pytest.mark.some(3)
def test_what_is_kept_is_sharded(name: str, batch: int, length: int, num_ranks: int, kept: int, dynamic: bool) -> None:
    """No rank gets all rows, nor computes a product whole.

    What is sent of logits is a number for each, a maximum of each class, or few rows of logits that are read elsewhere.
    """
    ranks = check(losses(kept)[name], (batch, length), num_ranks, dynamic=dynamic)
    assert not [line for line in ranks.report.lines if "products run whole" in line and kept >= num_ranks]
    is_wide = name in ("beside all", "narrow") and kept * num_ranks < length
    of_rows = (kept + num_ranks - 1) * (CLASSES if is_wide else 6)
    assert sent(ranks) <= batch * max(of_rows, 2 * CLASSES if "softmax" in name else 0, length + num_ranks)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LOOKED_UP)
@pytest.mark.some(12)
def test_what_is_looked_up_is_all_that_is_sent(name: str, dynamic: bool) -> None:
    for shape, num_ranks in (((3, 16), 2), ((2, 13), 3), ((1, 18), 4)):
        if not (dynamic and name == "take_along_dim"):  # which makes torch itself fix the length
            ranks = check(LOOKED_UP[name], shape, num_ranks, dynamic=dynamic)
            assert not [line for line in ranks.report.lines if "gathered" in line]
            assert sent(ranks) <= 3 * shape[0] * CLASSES


def test_a_loop_over_chunks_of_tokens_runs_no_product_whole() -> None:
    """What is sent of all chunks is as much as a gather sends."""

    def loss(m: Model, h: Tensor, ids: Tensor) -> Tensor:
        parts = [slice(at, at + 4) for at in range(0, 16, 4)]
        return torch.stack([F.cross_entropy(m.head(h[:, p]).mT, ids[:, p], reduction="sum") for p in parts]).sum()

    ranks = check(loss, (2, 19), 3)
    assert not [line for line in ranks.report.lines if "gathered" in line or "products run whole" in line]


@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [("ulysses", 2), ("gather_kv", 3), ("ring", 3), ("ring_ulysses", 4)]
)
def test_attention_on_a_section(strategy: Any, num_ranks: int) -> None:
    """All but the first token go on, as of an image whose class token was read."""
    model = Model(lambda m, h, ids: m.head(attended(h[:, 1:])).square().mean())
    ids = torch.randint(1, CLASSES, (2, 17), generator=torch.Generator().manual_seed(0))
    OneDevice(model, {"ids": ids}).check(num_ranks, AutoSPConfig(attention=strategy))


@pytest.mark.parametrize("name", TOO)
def test_other_slices_are_exact(name: str) -> None:
    for shape, num_ranks in (((3, 16), 2), ((2, 11), 3)):
        check(TOO[name], shape, num_ranks)


@pytest.mark.parametrize("kept", [3, 6])
def test_one_program_serves_all_lengths(kept: int) -> None:
    """Nothing in it is of the length that it was traced with, nor of its chunks."""
    draws = ((length, torch.Generator().manual_seed(length)) for length in (11, 13, 29, 8))
    batches = (torch.randint(CLASSES, (2, length), generator=draw) for length, draw in draws)
    check_one_program(Model(losses(kept)["logits twice"]), batches, 3)


def test_what_was_cut_off_gets_no_gradient() -> None:
    """Of the first token the norm is 0, and its gradient NaN; it is cut off before, and so it is 0 / 0 for padding."""

    def loss(m: Model, h: Tensor, ids: Tensor) -> Tensor:
        states = h * (torch.arange(ids.shape[1]) > 0).unsqueeze(-1)
        kept = states[:, 1:]
        return (kept / kept.square().sum(-1, keepdim=True).sqrt()).exp().sum()

    check(loss, (2, 9), 3)


def test_a_section_leaves_whole() -> None:
    """Its chunks are those of a longer dimension, which no reader outside could tell."""

    def loss(m: Model, h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return h.square().mean(), m.head(h)[:, 2:-1] * 2

    ids = torch.randint(1, CLASSES, (2, 11), generator=torch.Generator().manual_seed(0))
    model = Model(loss)
    found = on_ranks(*captured(model, {"ids": ids}), 3).run.outputs
    for _, logits in found:
        torch.testing.assert_close(logits, model(ids)[1].detach(), rtol=1e-12, atol=1e-14)
