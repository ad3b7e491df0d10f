"""A loss of logits that were cut is that of all logits, with labels that are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Literal, Pattern, cap, normalize, op
from fxrewrite.spmd import Axis, SpmdContext
from fxrewrite.verify import Draw, verify_rewrite
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.canonical.shifted_losses import SHIFTED_LOSSES
from tests.dynamo import caught

BATCH, LENGTH, CLASSES = 2, 8, 5
LOGITS = torch.randn(BATCH, LENGTH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % CLASSES
SOME = torch.where(LABELS == 2, -100, LABELS)
WEIGHT = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)
Loss = Callable[[torch.Tensor, torch.Tensor], Any]
"""Of logits [B, S, V] and labels [B, S]."""


def by_token(loss: Callable[..., torch.Tensor], **options: Any) -> Loss:
    return lambda x, t: loss(x[..., :-1, :].contiguous().view(-1, CLASSES), t[..., 1:].reshape(-1), **options)


LOSSES: dict[str, Loss] = {
    "mean": by_token(F.cross_entropy),
    "sum": by_token(F.cross_entropy, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="none"),
    "none, of rows": lambda x, t: F.cross_entropy(x[:, 1:-2].mT, t[:, 3:], reduction="none") * (t[:, 3:] > 1),
    "weights and smoothing": by_token(F.cross_entropy, weight=WEIGHT, label_smoothing=0.2),
    "a class is ignored": lambda x, t: by_token(F.cross_entropy, ignore_index=3)(x, t.clamp_min(0)),
    "soft caps in float32": lambda x, t: F.cross_entropy(
        (torch.tanh(x[:, :-1] / 3) * 3).float().flatten(0, 1), t[:, 1:].flatten()
    ),
    "log_softmax": lambda x, t: F.nll_loss(x[:, :-1].log_softmax(-1).flatten(0, 1), t[:, 1:].flatten(), WEIGHT),
    "a head": lambda x, t: F.cross_entropy(F.linear(x[:, :-1], WEIGHT.diag()).permute(0, 2, 1), t[:, 1:]),
    "a prefix": lambda x, t: F.cross_entropy(x[:, 3:].flatten(0, 1), t[:, 3:].flatten()),
    "sequence first": lambda x, t: F.cross_entropy(x.transpose(0, 1)[:-1].flatten(0, 1), t.T[1:].flatten()),
    "one sequence": lambda x, t: F.cross_entropy(x[0, :-1], t[0, 1:]),
}


def graph_of(loss: Loss, labels: torch.Tensor, *, dynamic: bool = False) -> tuple[fx.GraphModule, list[Any]]:
    """The normal graph of a loss of LOGITS and labels, and its inputs."""
    logits, labels = LOGITS.clone().requires_grad_(), labels.clone()
    if dynamic:
        torch._dynamo.mark_dynamic(logits, 1)
        torch._dynamo.mark_dynamic(labels, 1)
    return caught(loss, logits, labels, inside=normalize)


def rewritten(gm: fx.GraphModule) -> int:
    (NORMAL_FORMS >> SHIFTED_LOSSES).apply(gm, context=SpmdContext(Axis("sp", 2)))
    names = [str(node.target) for node in gm.graph.nodes if node.target is not torch.ops.aten.slice.Tensor]
    assert not SHIFTED_LOSSES.apply(gm, context=SpmdContext(Axis("sp", 2))).rewrites
    return sum("constant_pad_nd" in name for name in names)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_not_cut(name: str, dynamic: bool) -> None:
    gm, inputs = graph_of(LOSSES[name], SOME, dynamic=dynamic)
    assert rewritten(gm) == 1
    logits = LOGITS.clone().requires_grad_()
    (found,), expected = gm(*inputs), LOSSES[name](logits, SOME)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    given = next(value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad)
    grads = [torch.autograd.grad(out.exp().sum(), x)[0] for out, x in ((found, given), (expected, logits))]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)
    cuts = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert not [node for node in cuts if node.meta["val"].is_floating_point() and "none" not in name]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_label_counts(reduction: str) -> None:
    loss, nothing = by_token(F.cross_entropy, reduction=reduction), torch.full_like(LABELS, -100)
    gm, inputs = graph_of(loss, nothing)
    assert rewritten(gm) == 1
    (found,) = gm(*inputs)
    assert torch.equal(found.isnan(), loss(LOGITS, nothing).isnan())
    given = next(value for value in inputs if value.requires_grad)
    assert not torch.autograd.grad(found, given)[0].any()


def behind_autograd(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        cut = x[:, :-1].flatten(0, 1)
    return F.cross_entropy(cut, labels[:, 1:].flatten()) + x.sum()


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(1100):
        x = torch.sin(x)
    return x


NOTHING = "the logits are not sliced"
LEFT_ALONE: dict[str, tuple[Loss, str]] = {
    "whole": (lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()), NOTHING),
    "classes": (lambda x, t: F.cross_entropy(x[..., :4].flatten(0, 1), t.flatten() % 4), NOTHING),
    "a scan": (lambda x, t: F.cross_entropy(x[:, :-1].cumsum(1).mT, t[:, 1:]), NOTHING),
    "every second": (lambda x, t: F.cross_entropy(x[:, ::2].mT, t[:, ::2]), NOTHING),
    "read elsewhere": (lambda x, t: (F.cross_entropy((cut := x[:, :-1]).mT, t[:, 1:]), cut), NOTHING),
    "two cuts": (lambda x, t: F.cross_entropy((x[:, :-1] + x[:, 1:]).mT, t[:, 1:]), NOTHING),
    "chances": (lambda x, t: F.cross_entropy(x[:, :-1].mT, x[:, 1:].mT), "the targets are not int64"),
    "little": (lambda x, t: F.cross_entropy(x[:, :3].mT, t[:, :3]), "the slice keeps 3 of 8"),
    "a long way": (lambda x, t: F.cross_entropy(deep(x).mT, t), NOTHING),
    "no gradient": (behind_autograd, "writes, or sets a mode, between the slice and the loss"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_does_not_match_says_why(name: str) -> None:
    loss, why = LEFT_ALONE[name]
    gm, _ = graph_of(loss, LABELS)
    assert rewritten(gm) == 0
    (rule,) = (r for r in SHIFTED_LOSSES.rules() if "cross_entropy" in r.id)
    assert why in str(rule.explain(gm))


def _shifted(draw: Draw) -> dict[str, Any]:
    batch, length, classes = draw.size(), draw.size() + 1, draw.size()
    ignored = draw.choice(-100, 0)
    indices = draw.indices(batch * (length - 1), below=classes)
    return {
        "x": draw.tensor(batch, length, classes),
        "target": torch.where(draw.mask(*indices.shape, probability=0.3), ignored, indices),
        "weight": draw.choice(None, draw.tensor(classes).abs()),
        "reduction": draw.choice(0, 1, 2),
        "ignore_index": ignored,
        "label_smoothing": draw.choice(0.0, 0.1),
        "shape": [-1, classes],
    }


def test_the_rules_are_true_of_shifted_tokens() -> None:
    cut = op("reshape", op("slice", cap("x"), 1, 0, -1), cap("shape", "any"))
    more = [cap("weight", "optional"), *(cap(name, Literal) for name in ("reduction", "ignore_index"))]
    for name, extra in (("cross_entropy_loss", [cap("label_smoothing", Literal)]), ("nll_loss_nd", [])):
        pattern = Pattern((op(name, cut, cap("target"), *more, *extra),))
        captured = {capture.name for capture in pattern.captures}

        def sample(draw: Draw, names: set[str] = captured) -> dict[str, Any]:
            return {key: value for key, value in _shifted(draw).items() if key in names}

        def rewrite(gm: fx.GraphModule) -> int:
            return SHIFTED_LOSSES.apply(gm, context=SpmdContext(Axis("sp", 2))).rewrites

        promise: dict[str, Any] = {"numerics": "reassociates", "domain": "finite"}
        verdict = verify_rewrite(name, pattern, rewrite, samples=16, sampler=sample, **promise)
        verdict.raise_if_false()
        assert verdict.samples >= 16, str(verdict)
        assert verdict.gradients, str(verdict)
