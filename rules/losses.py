"""A mean over tokens is a sum over tokens by a count.

    cross_entropy(x, t, w, mean, ignore, smoothing)  ->  cross_entropy(x, t, w, sum, ignore, smoothing) / count(t)

The count is of the targets that are not `ignore`, or the sum of their class weights. It is made of the targets alone,
which every rank holds whole: a rank without a single counted token divides 0 by the global count, never by 0.
Matches class indices and class probabilities; of the latter every row counts once.
Numerics: reassociates (one division instead of one per token).
Source: PyTorch, aten/src/ATen/native/LossNLL.cpp (cross_entropy_loss).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Maybe, RuleSet, refuse, rule
from fxrewrite.spmd import product, size_proxy

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
    targets = match["target"].meta["val"]
    if targets.is_floating_point() and targets.dim() < 2:
        refuse("class probabilities of a single row", hint="it is left as it is")
    if targets.is_floating_point():  # class probabilities: every row counts once
        return total / size_proxy(match, product(targets.shape) // targets.shape[1])
    counts = aten.ne(target, ignore_index)
    if weight is not None:
        classes = aten.where(counts, target, aten.zeros_like(target))
        counts = aten.mul(aten.index(weight, [classes]), counts)
    return aten.div(total, aten.sum(counts))


LOSSES = RuleSet("losses", mean_to_sum)
