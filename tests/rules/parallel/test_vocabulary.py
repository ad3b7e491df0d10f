"""Embeddings, heads and losses in shards of the vocabulary: exact, and without whole logits on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, nn

from fxrewrite import FxRewriteError
from fxrewrite.spmd import Gathered, Parallelism, Replicate, Shard, param
from fxrewrite.testing import Simulated
from rules.parallel.megatron import ENDS
from rules.parallel.vocabulary import VOCABULARY, VOCABULARY_LAYOUTS, lookup_rows, take_class
from tests.rules.parallel.on_ranks import compared, sent_backward

CLASSES, WIDTH = 12, 6
ENDS_ALONE = Parallelism("ends", axis="tp", place=ENDS, rules=[VOCABULARY], layouts=tuple(VOCABULARY_LAYOUTS))
IDS = torch.arange(20).reshape(4, 5) % CLASSES
TARGET = torch.where(IDS % 5 == 2, -100, (IDS * 7) % CLASSES)


class Ends(nn.Module):
    """An embedding, a head, which may be the same weight, and a loss."""

    def __init__(self, *, tied: bool = False, classes: int = CLASSES, padding: int | None = None, **loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(classes, WIDTH, padding)
        self.middle, self.lm_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.loss = loss

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        logits = self.lm_head(torch.tanh(self.middle(self.embed_tokens(ids)))).flatten(0, 1)
        loss = F.cross_entropy(logits, target.flatten(), **self.loss)
        return loss if loss.dim() == 0 else loss.square().sum()


def check(model: Ends, target: Tensor = TARGET) -> Simulated:
    return compared(model.double(), ENDS_ALONE, {"ids": IDS, "target": target}, tolerance=1e-12)


def most_held(found: Simulated) -> int:
    """Of values that the lowered program computes, the most classes that one has."""
    values = [node.meta.get("val") for node in found.program.graph.nodes if node.op == "call_function"]
    return max(value.shape[-1] for value in values if isinstance(value, Tensor) and value.dim() > 1)


@pytest.mark.parametrize("tied", [False, True])
def test_exact_and_no_rank_has_whole_logits(tied: bool) -> None:
    found = check(Ends(tied=tied))
    assert found.sent == {"tp": {"all_reduce": 4}}  # of the embedding; maximum, sum and label's logit
    assert sent_backward(found) == {"all_reduce": 1}  # what the head gives back
    assert most_held(found) == CLASSES // 2
    assert not found.report.events_of(Gathered)


CASES: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed_sum": {"label_smoothing": 0.1, "reduction": "sum"},
    "ignored_class": {"ignore_index": 3},
    "padding": {"padding": 3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(2)
def test_settings_of_the_loss(case: str) -> None:
    ignored = CASES[case].get("ignore_index", -100)
    found = check(Ends(**CASES[case]), torch.where(TARGET == -100, ignored, TARGET))
    is_smoothed = "label_smoothing" in CASES[case]
    assert found.sent == {"tp": {"all_reduce": 5 if is_smoothed else 4}}
    assert most_held(found) == CLASSES // 2


def _log_probability(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _difference(logits: Tensor, target: Tensor) -> Tensor:
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "log probabilities": (_log_probability, 3),
    "log probabilities at a temperature": (lambda x, target: _log_probability(x / 0.7, target), 3),
    "logits less their normalizer": (_difference, 3),
    "two classes a row": (lambda x, i: x.log_softmax(2).gather(2, torch.stack([i, (i + 1) % CLASSES], 2)).exp(), 3),
    "log probabilities in another dtype": (
        lambda x, i: F.log_softmax(x.float(), -1, dtype=x.dtype).gather(2, i[..., None]),
        3,
    ),
    "a normalizer that is kept small": (lambda x, target: x.logsumexp(-1, keepdim=True).square(), 2),
}
"""What losses read of logits, and its all-reduces: the maximum, the sum, and chosen classes."""


@pytest.mark.parametrize("case", READS)
@pytest.mark.some(3)
def test_log_probabilities_need_no_whole_logits(case: str) -> None:
    read, sent = READS[case]
    model = Ends()
    model.forward = lambda ids, target: (  # type: ignore[method-assign]
        read(model.lm_head(torch.tanh(model.embed_tokens(ids))), target % CLASSES).square().sum()
    )
    found = check(model)
    assert found.sent == {"tp": {"all_reduce": 1 + sent}}
    assert most_held(found) == CLASSES // 2
    assert not found.report.events_of(Gathered)


def assert_gathered(found: Simulated) -> None:
    (event,) = found.report.events_of(Gathered)
    assert "aten::cross_entropy_loss: its index d1 must be whole (1,920 bytes" in str(event)


def test_class_weights_are_refused_and_gathered_with_a_line_in_the_report() -> None:
    found = check(Ends(weight=torch.rand(CLASSES, dtype=torch.float64)))
    assert found.sent == {"tp": {"all_reduce": 1, "all_gather": 1}}
    assert_gathered(found)


def test_class_probabilities_are_gathered() -> None:
    model, target = Ends(), torch.rand(20, CLASSES, dtype=torch.float64).softmax(-1)
    model.forward = lambda ids, target: F.cross_entropy(  # type: ignore[method-assign]
        model.lm_head(model.embed_tokens(ids)).flatten(0, 1), target
    )
    found = check(model, target)
    assert found.sent["tp"]["all_gather"] == 1
    assert_gathered(found)


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    with pytest.raises(FxRewriteError, match=r"embed_tokens.weight \[13, 6\]: tp=2 ranks do not divide S\(0\)"):
        check(Ends(classes=13))


def test_a_model_without_these_ends() -> None:

    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum()

    model, given = Squared(4, 4).double(), {"x": torch.randn(3, 4, dtype=torch.float64)}
    plan = Parallelism(
        "ends",
        axis="tp",
        place=ENDS | {param("weight"): Replicate()},
        rules=[VOCABULARY],
        layouts=tuple(VOCABULARY_LAYOUTS),
    )
    assert compared(model, plan, given).sent == {"tp": {}}
    strict = Parallelism("ends", axis="tp", place={param("*lm_head.weight"): Shard(0)})
    with pytest.raises(FxRewriteError, match="matches nothing"):
        compared(model, strict, given)


class Bags(nn.Module):
    """Bags of ids, of which each is a sum or a mean of rows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.head = nn.EmbeddingBag(CLASSES, WIDTH, **settings), nn.Linear(WIDTH, 2)
        self.scales = nn.Parameter(torch.rand(4, 5))
        self.offsets = None if settings.get("include_last_offset") is None else torch.tensor([0, 3, 3, 20])

    def forward(self, ids: Tensor) -> Tensor:
        ids, scales = (ids, self.scales) if self.offsets is None else (ids.flatten(), self.scales.flatten())
        is_scaled = self.embed_tokens.mode == "sum"
        return self.head(self.embed_tokens(ids, self.offsets, scales if is_scaled else None)).square().mean()


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 3}, {"include_last_offset": True}], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(mode: str, settings: dict[str, Any]) -> None:
    """A row of each bag is sent, and not the table."""
    model = Bags(mode=mode, **settings).double()
    found = compared(model, ENDS_ALONE, {"ids": IDS}, tolerance=1e-12)
    assert found.sent == {"tp": {"all_reduce": 1}}
    assert sent_backward(found) == ({"all_reduce": 1} if mode == "sum" else {})  # of the scales' gradient
    assert not found.report.events_of(Gathered)


def test_operators_on_consecutive_rows() -> None:
    weight, ids = torch.randn(6, 3, dtype=torch.float64), torch.tensor([[0, 5], [3, 2]])
    parts = [lookup_rows(weight[rows], rows, ids, -1) for rows in torch.arange(6).chunk(2)]
    torch.testing.assert_close(parts[0] + parts[1], F.embedding(ids, weight))
    logits, target = torch.randn(4, 6, dtype=torch.float64), torch.tensor([[0], [5], [-100], [3]])
    parts = [take_class(logits[:, rows], rows, target) for rows in torch.arange(6).chunk(2)]
    expected = torch.where(target < 0, 0, logits.gather(1, target.clamp(0)))
    torch.testing.assert_close(parts[0] + parts[1], expected)
