"""A mean over tokens becomes a sum over tokens divided by their count.

    cross_entropy(x, t, w, mean, ignore, smoothing)  ->  cross_entropy(x, t, w, sum, ignore, smoothing) / count(t)
    nll_loss(x, t, w, mean, ignore)                  ->  nll_loss(x, t, w, sum, ignore) / count(t)
    mse_loss(x, t, mean)                             ->  mean(mse_loss(x, t, none))

Losses of sliced logits first become losses of all logits: `rules.canonical.shifted_losses`.

The count is the number of targets that are not `ignore`, or the sum of their class weights. It is computed from the
targets only, which are replicated: a rank without a single counted token divides 0 by the global count, never by 0.
Matches class indices and class probabilities; with probabilities every row counts once. For losses where every entry
counts once, the mean of the loss becomes the mean of its entries.
Does not match a mean of mse_loss, smooth_l1_loss or huber_loss of operands of two shapes: ATen divides the gradient of
the smaller one by its own number of entries. `torch.nn.functional` expands both before.
Numerics: reassociates (one division instead of one per token). Losses of half precision are summed in float32.
Source: PyTorch, aten/src/ATen/native/LossNLL.cpp (cross_entropy_loss, nll_loss_nd) and Loss.cpp (the others).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, op, refuse, where
from fxrewrite.ops import fake_value
from fxrewrite.spmd import product, size_proxy
from rules.canonical.shifted_losses import SHIFTED_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxrewrite.verify import Draw

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2
_OF_ONE_SHAPE = ("mse_loss", "smooth_l1_loss", "huber_loss")
"""Losses whose mean has another gradient than the mean of its entries where one operand is broadcast."""
_ONE_SHAPE = where.parse("shape(self_) == shape(target_)")


def _mean_to_sum(name: str, loss: str, *more: str) -> Rule:
    """Makes the rule for a mean over tokens, of an operator whose arguments after the reduction are `more`."""
    captures = cap("logits"), cap("target"), cap("weight", "optional"), _MEAN, *(cap(each, Literal) for each in more)
    made = Rule(f"losses.{name}", Pattern((op(loss, *captures),)), numerics="reassociates", optional=True)

    @made.replacement
    def _(match: Match, logits: fx.Proxy, target: fx.Proxy, weight: fx.Proxy | None, ignore_index: int) -> Any:
        """a mean over tokens is a sum by the count of the targets"""
        targets = fake_value(match["target"])
        if targets.is_floating_point() and targets.dim() < 2:
            refuse("class probabilities of a single row", hint="the loss is left unchanged")
        if targets.is_floating_point():  # every row counts once
            count = size_proxy(match, product(targets.shape) // targets.shape[1])
        else:
            count = _count(target, weight, ignore_index)

        def reduced(reduction: int) -> fx.Proxy:
            return getattr(aten, loss)(logits, target, weight, reduction, *(match[each] for each in more))

        return _mean(reduced, count, fake_value(match["logits"]).dtype)

    @made.sampler
    def _(draw: Draw) -> dict[str, Any]:
        """Samples class indices, some of which are ignored, or class probabilities where the operator takes them."""
        takes_probabilities = "label_smoothing" in more
        classes, rest = draw.size(), draw.shape(draw.integer(0, 2))
        shape = (draw.size(), classes, *rest) if rest or draw.flag(0.8) or not takes_probabilities else (classes,)
        ignored = draw.choice(-100, 0)
        indices = draw.indices(*shape[:1], *rest, below=classes) if len(shape) > 1 else draw.indices(below=classes)
        indices = torch.where(draw.mask(*indices.shape, probability=0.3), ignored, indices)
        drawn = {
            "logits": draw.tensor(*shape),
            "target": indices if draw.flag(0.7) or not takes_probabilities else draw.tensor(*shape),
            "weight": draw.choice(None, draw.tensor(classes).abs()),
            "ignore_index": ignored,
        }
        return drawn | ({"label_smoothing": draw.choice(0.0, 0.1)} if takes_probabilities else {})

    return made


def _mean(loss: Callable[[int], fx.Proxy], count: Any, dtype: torch.dtype) -> fx.Proxy:
    """Divides the sum of the losses by the count. Half-precision losses are summed in float32, as torch's kernels do,
    because the sum may exceed the range of float16."""
    if dtype.itemsize > 2:
        return aten.div(loss(_SUM), count)
    return aten.to(aten.div(aten.sum(loss(_NONE), dtype=torch.float32), count), dtype)


def _count(target: fx.Proxy, weight: fx.Proxy | None, ignore_index: int) -> fx.Proxy:
    """Returns the number of targets that count, or the sum of their class weights."""
    counts = aten.ne(target, ignore_index)
    if weight is not None:
        classes = aten.where(counts, target, aten.zeros_like(target))
        counts = aten.mul(aten.index(weight, [classes]), counts)
    return aten.sum(counts)


def _mean_of_entries(name: str, sampler: Callable[[Draw], dict[str, Any]]) -> Rule:
    arguments = getattr(aten, name).default._schema.arguments
    kinds: dict[str, Any] = {"Tensor": "node", "Optional[Tensor]": "optional"}
    terms: dict[str, Any] = {arg.name: cap(f"{arg.name}_", kinds.get(str(arg.type), "literal")) for arg in arguments}
    terms["reduction"] = _MEAN
    positional = [terms[arg.name] for arg in arguments if not arg.kwarg_only]
    loss = op(f"aten::{name}", *positional, **{a.name: terms[a.name] for a in arguments if a.kwarg_only})
    pattern = Pattern((loss,), (_ONE_SHAPE,) if name in _OF_ONE_SHAPE else ())
    made = Rule(f"losses.mean_of_{name}", pattern, numerics="reassociates", optional=True)

    @made.replacement
    def _(match: Match) -> fx.Proxy:
        """mean(loss(none))"""
        captured = {arg: match[f"{arg}_"] for arg in terms if arg != "reduction"}
        given = {arg: match.proxy(value) if isinstance(value, fx.Node) else value for arg, value in captured.items()}
        return aten.mean(getattr(aten, name)(**given, reduction=_NONE))

    @made.sampler
    def _(draw: Draw) -> dict[str, Any]:
        return {f"{arg}_": value for arg, value in sampler(draw).items() if arg in terms}

    return made


def _values(draw: Draw) -> dict[str, Any]:
    """Samples two tensors of one shape."""
    shape = draw.shape(draw.integer(0, 3))
    return {"self": draw.tensor(*shape), "target": draw.tensor(*shape), "beta": 0.5, "delta": 0.5}


def _chances(draw: Draw) -> dict[str, Any]:
    """Samples probabilities, targets from 0 to 1, and weights that broadcast."""
    shape = draw.shape(draw.integer(1, 3))
    weights = {name: draw.choice(None, draw.tensor(*shape[-1:]).abs()) for name in ("weight", "pos_weight")}
    return {"self": draw.tensor(*shape).sigmoid(), "target": draw.tensor(*shape).sigmoid(), **weights}


def _rows(draw: Draw) -> dict[str, Any]:
    """Samples pairs or triples of rows, and one sign."""
    shape = draw.shape(2)
    names = ("input1", "input2", "anchor", "positive", "negative")
    return {"target": draw.choice(1.0, -1.0) * torch.ones(shape[:1]), **{name: draw.tensor(*shape) for name in names}}


LOSSES = RuleSet(
    "losses",
    SHIFTED_LOSSES,
    _mean_to_sum("mean_to_sum", "cross_entropy_loss", "ignore_index", "label_smoothing"),
    _mean_to_sum("nll_mean_to_sum", "nll_loss_nd", "ignore_index"),
    *(_mean_of_entries(name, _values) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")),
    *(_mean_of_entries(f"binary_cross_entropy{name}", _chances) for name in ("", "_with_logits")),
    *(_mean_of_entries(name, _rows) for name in ("cosine_embedding_loss", "triplet_margin_loss")),
)
