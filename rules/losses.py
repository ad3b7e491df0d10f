"""A mean over tokens is a sum over tokens by a count.

    cross_entropy(x, t, w, mean, ignore, smoothing)  ->  cross_entropy(x, t, w, sum, ignore, smoothing) / count(t)

The count is of the targets that are not `ignore`, or the sum of their class weights. It is made of the targets alone,
which every rank holds whole: a rank without a single counted token divides 0 by the global count, never by 0.
Matches class indices and class probabilities; of the latter every row counts once.
Numerics: reassociates (one division instead of one per token).
Source: PyTorch, aten/src/ATen/native/LossNLL.cpp (cross_entropy_loss).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Maybe, RuleSet, refuse, rule
from fxrewrite.ops import fake_value
from fxrewrite.spmd import product, size_proxy

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

__all__ = ["LOSSES", "mean_to_sum"]

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


@rule("losses.mean_to_sum", numerics="reassociates", optional=True)
def mean_to_sum(
    logits: torch.Tensor, target: torch.Tensor, weight: Maybe, ignore_index: Literal, label_smoothing: Literal
) -> torch.Tensor:
    """a mean over tokens is a sum by the count of the targets"""
    return aten.cross_entropy_loss(logits, target, weight, _MEAN, ignore_index, label_smoothing)


@mean_to_sum.replacement
def _(
    match: Match, logits: fx.Proxy, target: fx.Proxy, weight: fx.Proxy | None, ignore_index: int, label_smoothing: float
) -> Any:
    total = aten.cross_entropy_loss(logits, target, weight, _SUM, ignore_index, label_smoothing)
    targets = fake_value(match["target"])
    if targets.is_floating_point() and targets.dim() < 2:
        refuse("class probabilities of a single row", hint="it is left as it is")
    if targets.is_floating_point():  # class probabilities: every row counts once
        return total / size_proxy(match, product(targets.shape) // targets.shape[1])
    counts = aten.ne(target, ignore_index)
    if weight is not None:
        classes = aten.where(counts, target, aten.zeros_like(target))
        counts = aten.mul(aten.index(weight, [classes]), counts)
    return aten.div(total, aten.sum(counts))


@mean_to_sum.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Class indices, of which some do not count, or probabilities."""
    classes, rest = draw.size(), draw.shape(draw.integer(0, 2))
    shape = (draw.size(), classes, *rest) if rest or draw.flag(0.8) else (classes,)
    ignored = draw.choice(-100, 0)
    indices = draw.indices(*shape[:1], *rest, below=classes) if len(shape) > 1 else draw.indices(below=classes)
    indices = torch.where(draw.mask(*indices.shape, probability=0.3), ignored, indices)
    return {
        "logits": draw.tensor(*shape),
        "target": indices if draw.flag(0.7) else draw.tensor(*shape),
        "weight": draw.choice(None, draw.tensor(classes).abs()),
        "ignore_index": ignored,
        "label_smoothing": draw.choice(0.0, 0.1),
    }


LOSSES = RuleSet("losses", mean_to_sum)
