"""A language model's head and its loss are one node, so that the logits need not exist at once.

    cross_entropy(linear(x, w, b).view(-1, V), t, ...)   ->   linear_cross_entropy(x.reshape(-1, d), w, b, t, ...)

The node calls `torch.nn.functional.linear_cross_entropy`: with `rows=None` (LINEAR_CROSS_ENTROPY) that is the same two
operators; `linear_cross_entropy_rules(rows)` takes so many rows of `x` at a time and holds `rows * V` logits.
Matches a view or reshape to [-1, V], or none where `x` has two dimensions; class weights; every reduction; label
smoothing; a cast of the logits that changes nothing.
Does not match where the logits are used elsewhere (a model that returns them), or "the logits are viewed as [2, 3, V]".
Refuses:
  - "the logits are cast to float32, linear_cross_entropy stays in bfloat16": so a half-precision model of Hugging Face,
    whose loss is in float32, keeps its logits;
  - "the target is float32: class probabilities";
  - "label smoothing in chunks", "the number of rows is symbolic", with `rows`;
  - "torch 2.11.0 has no torch.nn.functional.linear_cross_entropy".
Shapes: x [..., d], w [V, d], b [V], target [product of ...] of int64.
Numerics: reassociates. The same two operators on rows, where the logits were a batch of rows: the product may be by
another kernel, which adds the bias before it rounds, or after. With `rows` a second derivative is an error, and where
no target counts at all, and the loss is NaN on both sides, gradients are NaN instead of 0.
Source: PyTorch, torch/nn/functional.py (linear_cross_entropy); Wijmans et al., Cut Your Losses in Large-Vocabulary
Language Models, arXiv 2411.09009.

>>> import torch, torch.nn.functional as F
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def loss(x, w, t):
...     return F.cross_entropy(F.linear(x, w).view(-1, 5), t)
>>> x, w, t = torch.rand(2, 3, 4), torch.rand(5, 4), torch.zeros(6, dtype=torch.int64)
>>> gm = make_fx(loss, tracing_mode="fake", pre_dispatch=True)(x, w, t)
>>> LINEAR_CROSS_ENTROPY.apply(gm).rewrites
1
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, either, maybe, op, refuse, where
from fxrewrite.graph import is_same_size
from fxrewrite.ops import declare_pure, fake_value

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

__all__ = ["LINEAR_CROSS_ENTROPY", "linear_cross_entropy", "linear_cross_entropy_rules"]

aten = torch.ops.aten
_IS_THERE = hasattr(F, "linear_cross_entropy")
_REDUCTIONS = ("none", "mean", "sum")  # by the number that the operator takes


@declare_pure
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    rows: int | None,
) -> torch.Tensor:
    """The cross entropy of `linear(x, weight, bias)` and class indices, `rows` rows at a time.

    Args:
        x: [N, d] or [d].
        weight: [V, d].
        bias: [V].
        target: int64 [N] or [].
        class_weight: [V].
        reduction: "none", "mean" or "sum".
        ignore_index: the target that does not count.
        label_smoothing: between 0 and 1; 0 where `rows` is given.
        rows: None for all at once.
    """
    # Without allow_retain_graph a second backward pass takes gradients that the first one has overwritten.
    options = (
        None if rows is None else torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=rows)
    )
    return F.linear_cross_entropy(
        x,
        weight,
        target,
        linear_bias=bias,
        weight=class_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        options=options,
    )


@where.predicate("shape", "w", text="keeps_classes")
def _keeps_classes(shape: list[Any], w: fx.Node) -> bool | str:
    sizes = [fake_value(size) if isinstance(size, fx.Node) else size for size in shape]
    classes = fake_value(w).shape[0]
    fits = len(sizes) == 2 and is_same_size(sizes[1], classes)
    return fits or f"the logits are viewed as {sizes}, there are {classes} classes"


def _pattern() -> Pattern:
    logits: Any = maybe(op("to", op("linear", cap("x"), cap("w"), cap("b", "optional")), dtype=cap("dtype", Literal)))
    shape = cap("shape", "any")
    flat: Any = either(op("view", logits, shape), op("reshape", logits, shape), logits)
    smoothing, ignored = cap("label_smoothing", Literal), cap("ignore_index", Literal)
    loss = op(
        "cross_entropy_loss",
        flat,
        cap("target"),
        cap("class_weight", "optional"),
        cap("reduction", Literal),
        ignored,
        smoothing,
    )
    return Pattern((loss,), (where.rank("w", 2), _keeps_classes))


def linear_cross_entropy_rules(rows: int | None = None) -> RuleSet:
    """The set whose nodes take `rows` rows at a time, all at once for None.

    Raises:
        ValueError: `rows` is not positive.
    """
    if rows is not None and rows < 1:
        raise ValueError(f"linear_cross_entropy_rules takes a positive number of rows or None, not {rows}")
    fuse = Rule("linear_cross_entropy.fuse", _pattern(), numerics="reassociates", optional=True)

    @fuse.replacement
    def _(match: Match, x: Any, w: Any, b: Any, target: Any, class_weight: Any) -> Any:
        """linear_cross_entropy(x, w, b, target, ...)"""
        smoothing, ignored = match["label_smoothing"], match["ignore_index"]
        _check(match, rows)
        if match["shape"] is not None:
            x = aten.reshape(x, [-1, w.shape[1]])
        how = _REDUCTIONS[match["reduction"]], ignored, smoothing, rows
        return match.call(linear_cross_entropy, x, w, b, target, class_weight, *how)

    fuse.sampler(_sample)
    return RuleSet("linear_cross_entropy", fuse)


def _sample(draw: Draw) -> dict[str, Any]:
    """Hidden states of two dimensions or three, and class indices of which some do not count."""
    tokens, depth, classes = draw.shape(draw.integer(1, 2)), draw.size(), draw.size()
    ignored = draw.choice(-100, 0)
    target = draw.indices(math.prod(tokens), below=classes)
    return {
        "x": draw.tensor(*tokens, depth),
        "w": draw.tensor(classes, depth),
        "b": draw.choice(None, draw.tensor(classes)),
        "target": torch.where(draw.mask(*target.shape, probability=0.3), ignored, target),
        "class_weight": draw.choice(None, draw.tensor(classes).abs()),
        "dtype": draw.dtype,
        "shape": draw.choice([-1, classes], [math.prod(tokens), classes]),
        "reduction": draw.integer(0, 2),
        "ignore_index": ignored,
        "label_smoothing": draw.choice(0.0, 0.0, 0.1),
    }


def _check(match: Match, rows: int | None) -> None:
    x, target = fake_value(match["x"]), fake_value(match["target"])
    if not _IS_THERE:
        refuse(
            f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy",
            hint="it is in torch 2.13; the head and the loss are left as they are",
        )
    if match["dtype"] not in (None, x.dtype):
        refuse(f"the logits are cast to {_name(match['dtype'])}, linear_cross_entropy stays in {_name(x.dtype)}")
    if target.dtype != torch.int64:
        refuse(f"the target is {_name(target.dtype)}: class probabilities")
    if match["shape"] is None and x.ndim > 2:
        refuse(f"the logits have {x.ndim} dimensions, classes are the second of them")
    if rows is not None and match["label_smoothing"] != 0:
        refuse("label smoothing in chunks", hint="use LINEAR_CROSS_ENTROPY")
    if rows is not None and not all(isinstance(size, int) for size in x.shape):
        refuse("the number of rows is symbolic", hint="compile with dynamic=False, or use LINEAR_CROSS_ENTROPY")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LINEAR_CROSS_ENTROPY = linear_cross_entropy_rules()
