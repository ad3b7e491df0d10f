"""Losses of training after pretraining, as trl and others write them: one device's, and no rank gets all logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fxrewrite.spmd import Gathered, ProductsWhole
from tests.autosp.one_device import OneDevice

CLASSES, WIDTH, KEPT = 64, 6, 7
Loss = Callable[["Policy", Tensor, Tensor], Tensor]
"""Of the model, hidden states [B, S, d] and ids [B, S], of which the last KEPT are a completion."""


class Policy(nn.Module):
    """Hidden states that mix tokens, heads of a policy, a frozen reference, values and classes, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.score = nn.Linear(WIDTH, 3, bias=False)
        self.reference = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.loss = loss
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.embed(ids)))
        return self.loss(self, h + h.mean(1, keepdim=True), ids)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def of_completion(head: nn.Module, h: Tensor, ids: Tensor, temperature: float = 0.9) -> Tensor:
    return log_probabilities(head(h)[:, :-1][:, -KEPT:] / temperature, ids[:, -KEPT:])


def of_all(head: nn.Module, h: Tensor, ids: Tensor) -> Tensor:
    return log_probabilities(head(h)[:, :-1], ids[:, 1:])


def entropy(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def counted(ids: Tensor) -> Tensor:
    return (ids[:, -KEPT:] % 5 != 0).double()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum().clamp(min=1)


def grpo(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logps, mask = of_completion(m.head, h, ids), counted(ids)
    with torch.no_grad():
        reference, old = of_completion(m.reference, h, ids), logps - 0.1 * torch.sin(5 * logps)
    advantages = torch.linspace(-1, 1, len(ids), dtype=torch.float64)[:, None]
    ratio, gap = torch.exp(logps - old), reference - logps
    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    by_token = 0.04 * (gap.exp() - gap - 1) - clipped
    return ((by_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def grpo_of_logits_to_keep(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logps = log_probabilities(m.head(h[:, -KEPT - 1 : -1]), ids[:, -KEPT:])
    return -((logps - logps.detach()).exp() * counted(ids)).sum() / (len(ids) * KEPT)


def of_sequences(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logps, mask = of_completion(m.head, h, ids), counted(ids)
    ratio = (((logps - 1.1 * logps.detach()) * mask).sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1).exp()
    return -masked_mean(ratio.expand(-1, KEPT), mask)


def of_uncertain_tokens(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(h)[:, :-1][:, -KEPT:]
    kept = entropy(logits).detach()
    return -masked_mean(log_probabilities(logits, ids[:, -KEPT:]).exp(), kept >= kept.flatten().quantile(0.8))


def entropy_of_best(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    chances = m.head(h)[:, -KEPT - 1 : -1].topk(5, -1).values.softmax(-1)
    return -(chances * chances.log()).sum(-1).mean()


def ppo(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    values, mask = m.value(h).squeeze(-1)[:, -KEPT - 1 : -1], counted(ids)
    before, rewards = values.detach(), torch.sin(ids[:, -KEPT:].double()) * mask
    last, found = torch.zeros(len(ids), dtype=torch.float64), []
    for t in reversed(range(KEPT)):
        following = before[:, t + 1] if t < KEPT - 1 else torch.zeros_like(last)
        last = rewards[:, t] + 0.99 * following - before[:, t] + 0.95 * last
        found.append(last)
    advantages = torch.stack(found[::-1], 1)
    returns, advantages = advantages + before, (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    logps = of_completion(m.head, h, ids)
    ratio = (logps - logps.detach() + 0.05 * logps.detach().sin()).exp()
    of_policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    of_values = torch.max((values - returns) ** 2, (before + (values - before).clamp(-0.2, 0.2) - returns) ** 2)
    return masked_mean(of_policy, mask) + 0.1 * masked_mean(of_values, mask)


def reinforce(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logps = of_all(m.head, h, ids)
    returns = (0.1 * logps.detach() + ids[:, 1:] / 50).flip(1).cumsum(1).flip(1)
    return -masked_mean(logps * returns, (ids[:, 1:] % 4 != 0).double())


def differences_of_values(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    values = m.value(h).squeeze(-1)
    return (values[:, :-1] - torch.sin(ids[:, 1:].double()) - 0.9 * values[:, 1:].detach()).square().mean()


def dpo(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    mask, half = ids[:, 1:] % 3 != 0, len(ids) // 2
    logps = (of_all(m.head, h, ids) * mask).sum(-1)
    with torch.no_grad():
        gaps = (of_all(m.reference, h, ids) * mask).sum(-1)
    gaps = logps - gaps
    return -F.logsigmoid(0.1 * (gaps[:half] - gaps[half : 2 * half])).mean()


def dpo_of_rolled_labels(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logps = log_probabilities(m.head(h), ids.roll(-1, 1)).masked_fill((ids % 3 == 0).roll(-1, 1), 0)
    chosen, rejected = logps.roll(1, 1)[:, 1:].sum(-1)[:2]
    return -F.logsigmoid(0.1 * (chosen - rejected))


def kto(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        reference = of_all(m.reference, h, ids).sum(-1)
    gaps = of_all(m.head, h, ids).sum(-1) - reference
    return (1 - torch.sigmoid(0.1 * (gaps - gaps.mean().detach().clamp(min=0)))).mean()


def rewards(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    chosen, rejected = m.value(h).squeeze(-1)[torch.arange(len(ids)), (ids > 3).sum(1) - 1][:2]
    return -F.logsigmoid(chosen - rejected)


def classes_of_sequences(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    last = (torch.arange(ids.shape[1]) * (ids != 3)).argmax(-1)
    return F.cross_entropy(m.score(h)[torch.arange(len(ids)), last], ids[:, 0] % 3)


def distillation(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    ours, theirs = (F.log_softmax(head(h)[:, 3:-1] / 2.0, -1) for head in (m.head, m.reference))
    mixed = torch.stack([ours + 0.3, theirs - 0.2]).logsumexp(0)
    losses = sum(F.kl_div(mixed, x, reduction="none", log_target=True) for x in (ours, theirs))
    return masked_mean(losses.sum(-1), (ids[:, 4:] % 3 != 0).double())


def distillation_of_best(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    theirs, best = m.reference(h.detach())[:, :-1].topk(4, -1)
    ours = m.head(h)[:, :-1].log_softmax(-1).gather(-1, best)
    return F.kl_div(ours, theirs.softmax(-1), reduction="none").sum(-1).mean()


def smoothed(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    logps, targets = m.head(h)[..., :-1, :].log_softmax(-1), ids[:, 1:].unsqueeze(-1)
    mask = (targets % 3 != 0).double()
    return 0.9 * masked_mean(-logps.gather(-1, targets), mask) + 0.1 * masked_mean(-logps.mean(-1, keepdim=True), mask)


def by_document(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    losses = F.cross_entropy(m.head(h)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    documents, zeros = (ids[:, 1:] % 7 == 0).long().cumsum(1), torch.zeros(len(ids), 12, dtype=torch.float64)
    counts = zeros.scatter_add(1, documents, torch.ones_like(losses))
    return (zeros.scatter_add(1, documents, losses) / counts.clamp(min=1)).mean()


def of_likely_tokens(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    best, at = m.head(h)[:, :-1].max(-1)
    return (best * (at == ids[:, 1:])).sum() + m.score(h[:, -1]).square().mean()


def entropies_in_chunks(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    """As trl computes them: of chunks of rows, whatever row of the batch they are of."""
    logits = m.head(h)[:, -KEPT - 1 : -1]
    found = [entropy(rows) for rows in logits.reshape(-1, CLASSES).split(4)]
    by_row = torch.stack([x.logsumexp(-1) for x in logits])
    return torch.cat(found).reshape(len(ids), -1).mean() + by_row.square().mean()


def head_in_chunks(m: Policy, h: Tensor, ids: Tensor) -> Tensor:
    parts = zip(h[:, :-1].chunk(3, 1), ids[:, 1:].chunk(3, 1), strict=True)
    return -torch.cat([log_probabilities(m.head(x), y) for x, y in parts], 1).mean()


LOSSES = {
    loss.__name__: loss
    for loss in (
        *(grpo, grpo_of_logits_to_keep, of_sequences, of_uncertain_tokens, entropy_of_best, ppo, reinforce),
        *(differences_of_values, dpo, dpo_of_rolled_labels, kto, rewards, classes_of_sequences),
        *(distillation, distillation_of_best, smoothed, by_document, of_likely_tokens),
        *(entropies_in_chunks, head_in_chunks),
    )
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_rank_gets_all_logits(name: str) -> None:
    """What is gathered is one number for each token, and no product of many tokens runs whole."""
    for (batch, length), num_ranks in (((4, 17), 2), ((2, 20), 3)):
        ids = torch.randint(4, CLASSES, (batch, length), generator=torch.Generator().manual_seed(length))
        report = OneDevice(Policy(LOSSES[name]), {"ids": ids}).check(num_ranks).report
        assert all(event.num_bytes <= 8 * batch * length for event in report.events_of(Gathered)), report
        assert all(event.share < 0.05 for event in report.events_of(ProductsWhole)), report
