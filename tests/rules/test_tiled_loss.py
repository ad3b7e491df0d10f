"""A loss in tiles has the value and the gradients of the loss of all logits, and never holds these."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import normalize
from fxrewrite.graph import size_hint
from rules.tiled_loss import tiled_cross_entropy, tiled_loss_rules

ROWS, DEPTH, CLASSES = 37, 8, 61
TILE = CLASSES * 8 * 5  # five rows in float64: the last tile has two


def operands(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, DEPTH), (CLASSES, DEPTH), (CLASSES,))
    x, w, b = (torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::3] = -100
    return x, w, b, target


def whole(x: Any, w: Any, b: Any, target: Any, class_weight: Any, steps: str, **how: Any) -> torch.Tensor:
    logits = F.linear(x, w, b)
    if "tanh" in steps:
        logits = torch.tanh(logits / 3) * 3
    return F.cross_entropy(logits.float() if "float32" in steps else logits, target, class_weight, **how)


@pytest.mark.parametrize("steps", ["", "to(v0, 'float32')", "div(v0, 3.0); tanh(v1); mul(v2, 3.0)"])
def test_values_and_gradients_are_those_of_all_logits(steps: str) -> None:
    x, w, b, target = operands()
    rounding = 1e-6 if "float32" in steps else 1e-12
    weights = torch.rand(CLASSES, dtype=torch.float32 if "float32" in steps else torch.float64)
    for reduction, smoothing, class_weight in itertools.product(("none", "mean", "sum"), (0.0, 0.1), (None, weights)):
        expected = whole(x, w, b, target, class_weight, steps, reduction=reduction, label_smoothing=smoothing)
        loss = tiled_cross_entropy(x, w, b, target, class_weight, steps, reduction, -100, smoothing, TILE)
        torch.testing.assert_close(loss, expected, rtol=rounding, atol=rounding)
        seed = torch.rand_like(expected)
        grads = torch.autograd.grad(loss, (x, w, b), seed)
        for grad, want in zip(grads, torch.autograd.grad(expected, (x, w, b), seed), strict=True):
            torch.testing.assert_close(grad, want, rtol=rounding, atol=rounding)


def test_no_counted_target_has_no_gradient() -> None:
    x, w, b, target = operands()
    loss = tiled_cross_entropy(x, w, b, torch.full_like(target, -100), None, "", "mean", -100, 0.0, TILE)
    assert loss.isnan()
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (x, w, b)))


def test_half_precision_is_as_near_to_the_truth_as_all_logits() -> None:
    exact = operands()
    half = tuple(t.detach().bfloat16().requires_grad_() for t in exact[:3])
    exact = *(t.detach().double().requires_grad_() for t in half), exact[3]
    truth = torch.autograd.grad(whole(*exact, None, ""), exact[:3])
    before = torch.autograd.grad(whole(*half, exact[3], None, "to(v0, 'float32')"), half)
    tiled = torch.autograd.grad(
        tiled_cross_entropy(*half, exact[3], None, "to(v0, 'float32')", "mean", -100, 0.0, TILE), half
    )
    for grad, untiled, true in zip(tiled, before, truth, strict=True):
        assert (grad.double() - true).norm() <= 1.2 * (untiled.double() - true).norm()


def spelled(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As models of Hugging Face do it: shifted labels, soft-capped logits in float32, a sum by a count."""
    logits = torch.tanh(F.linear(x, w) * 0.5 / 30.0) * 30.0
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    total = F.cross_entropy(logits.float().view(-1, CLASSES), shifted, reduction="sum", ignore_index=-100)
    return total / (shifted != -100).sum()


def sliced(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w)[:, :-1, :].contiguous()
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def padded(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A head with more rows than there are classes, and a bounded activation behind it."""
    logits = F.linear(x, w)[..., : CLASSES - 3].sigmoid().reshape(-1, CLASSES - 3)
    return F.cross_entropy(logits * 4, labels.flatten() % (CLASSES - 3))


@pytest.mark.parametrize(
    ("loss", "dynamic"),
    [(spelled, False), (spelled, True), (sliced, False), (sliced, True), (padded, False)],  # a cut of s classes is none
)
def test_no_value_of_rows_by_classes_is_left(loss: Callable[..., torch.Tensor], dynamic: bool) -> None:
    x, w = torch.randn(2, 19, DEPTH).requires_grad_(), torch.randn(CLASSES, DEPTH).requires_grad_()
    labels = torch.randint(CLASSES, (2, 19))
    rules, graphs = tiled_loss_rules(CLASSES * 4 * 5), list[fx.GraphModule]()

    def keep(traced: fx.GraphModule, _: Any) -> Any:
        graphs.append(traced)
        return make_boxed_func(traced)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        gm = normalize(gm)
        assert rules.apply(gm).rule("tiled_loss.tile").rewrites == 1
        assert not rules.apply(gm).rewrites
        return aot_autograd(fw_compiler=keep)(gm, inputs)

    compiled = torch.compile(loss, backend=backend, dynamic=dynamic)(x, w, labels)
    grads = torch.autograd.grad(compiled, (x, w))
    values = [node.meta.get("val") for graph in graphs for node in graph.graph.nodes]
    sizes = [size_hint(value.numel()) for value in values if isinstance(value, torch.Tensor)]
    assert len(graphs) == 2
    assert max(sizes) < 36 * CLASSES
    for grad, want in zip(grads, torch.autograd.grad(loss(x, w, labels), (x, w)), strict=True):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x, w, t: (F.cross_entropy(z := F.linear(x, w), t), z), "%linear is read elsewhere"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w).erf(), t), "%erf, aten::erf, is between the head and the"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w) * w[:, 0], t), "%mul, aten::mul, is between the head and the"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w)[None].mT, t[None]), "the logits have rank 3"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w), F.one_hot(t, CLASSES).double()), "class probabilities"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w)[:3], t[:3]), "1,464 bytes, fit into a tile"),
    ],
)
def test_what_does_not_match_and_why(loss: Callable[..., Any], why: str) -> None:
    x, w, _, target = operands()
    gm = make_fx(loss, tracing_mode="fake", pre_dispatch=True)(x.detach(), w.detach(), target.clamp(min=0))
    rules = tiled_loss_rules(TILE)
    assert not rules.apply(gm).rule("tiled_loss.tile").rewrites
    assert why in str(rules.once().explain(gm, "tiled_loss.tile"))
