"""Head and loss in one node give the loss and gradients of the two, whole or in chunks; other losses stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import rules.linear_cross_entropy as family
from rules.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy, linear_cross_entropy_rules

pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no such function")
Loss = Callable[..., torch.Tensor]
CLASSES, D = 11, 6


def flat(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, w, b).view(-1, CLASSES)


LOSSES: dict[str, Loss] = {
    "flat": lambda x, w, b, t, c: F.cross_entropy(flat(x, w), t),
    "reshape": lambda x, w, b, t, c: F.cross_entropy(F.linear(x, w).reshape(-1, CLASSES), t),
    "two dimensions": lambda x, w, b, t, c: F.cross_entropy(F.linear(x[0], w), t[:4]),
    "bias": lambda x, w, b, t, c: F.cross_entropy(flat(x, w, b), t),
    "class weights": lambda x, w, b, t, c: F.cross_entropy(flat(x, w, b), t, c),
    "sum, another index": lambda x, w, b, t, c: F.cross_entropy(flat(x, w), t, reduction="sum", ignore_index=3),
    "none": lambda x, w, b, t, c: F.cross_entropy(flat(x, w), t, reduction="none"),
    "a cast that changes nothing": lambda x, w, b, t, c: F.cross_entropy(
        F.linear(x, w).to(x.dtype).view(-1, CLASSES), t
    ),
}
SMOOTH: Loss = lambda x, w, b, t, c: F.cross_entropy(flat(x, w, b), t, c, label_smoothing=0.1)  # noqa: E731


def inputs(dtype: torch.dtype = torch.float64, ignored: int = -100) -> tuple[torch.Tensor, ...]:
    """x [2, 4, d], w [V, d], b [V], target [8] with one that is ignored, class weights [V]."""
    target = torch.randint(0, CLASSES, (8,))
    target[2] = ignored
    x, w, b = torch.randn(2, 4, D), torch.randn(CLASSES, D), torch.randn(CLASSES)
    return x.to(dtype), w.to(dtype), b.to(dtype), target, (torch.rand(CLASSES) + 0.1).to(dtype)


def traced(loss: Loss, args: tuple[torch.Tensor, ...], mode: str = "fake") -> fx.GraphModule:
    return make_fx(lambda *args: loss(*args), tracing_mode=mode, pre_dispatch=True)(*args)


def loss_and_gradients(loss: Loss, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    x, w, b, target, classes = args
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    value = loss(*leaves, target, classes)
    found = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    return [value.detach(), *(gradient for gradient in found if gradient is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", [*LOSSES, "label smoothing"])
def test_whole_is_the_same(case: str, dtype: torch.dtype) -> None:
    loss = LOSSES.get(case, SMOOTH)
    args = inputs(dtype, 3 if "index" in case else -100)
    gm = traced(loss, args)
    assert LINEAR_CROSS_ENTROPY.apply(gm).rewrites == 1
    assert linear_cross_entropy in [node.target for node in gm.graph.nodes]
    expected = loss_and_gradients(loss, args)
    assert all(map(torch.equal, loss_and_gradients(gm, args), expected))
    assert LINEAR_CROSS_ENTROPY.apply(gm).rewrites == 0


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
@pytest.mark.parametrize("case", LOSSES)
def test_chunks_are_the_same_but_for_the_order_of_sums(case: str, rows: int) -> None:
    args = inputs(ignored=3 if "index" in case else -100)
    gm = traced(LOSSES[case], args)
    assert linear_cross_entropy_rules(rows).apply(gm).rewrites == 1
    expected = loss_and_gradients(LOSSES[case], args)
    torch.testing.assert_close(loss_and_gradients(gm, args), expected, rtol=1e-12, atol=1e-14)


REFUSED: dict[str, tuple[Loss, torch.dtype, str]] = {
    "a cast up": (
        lambda x, w, b, t, c: F.cross_entropy(F.linear(x, w).float().view(-1, CLASSES), t),
        torch.bfloat16,
        "the logits are cast to float32, linear_cross_entropy stays in bfloat16",
    ),
    "probabilities": (
        lambda x, w, b, t, c: F.cross_entropy(flat(x, w), c.softmax(0).expand(8, CLASSES)),
        torch.float32,
        "the target is float32: class probabilities",
    ),
    "classes second": (
        lambda x, w, b, t, c: F.cross_entropy(F.linear(x, w), t.view(2, 4)[:, :1].expand(2, CLASSES).clamp(0, 3)),
        torch.float64,
        "the logits have 3 dimensions, classes are the second of them",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    loss, dtype, reason = REFUSED[case]
    gm = traced(loss, inputs(dtype))
    code = gm.code
    (refusal,) = LINEAR_CROSS_ENTROPY.apply(gm).refusals
    assert refusal.reason == reason
    assert gm.code == code


def test_refuses_in_chunks() -> None:
    (refusal,) = linear_cross_entropy_rules(2).apply(traced(SMOOTH, inputs())).refusals
    assert refusal.reason == "label smoothing in chunks"
    symbolic = traced(LOSSES["flat"], inputs(), "symbolic")
    (refusal,) = linear_cross_entropy_rules(2).apply(symbolic).refusals
    assert refusal.reason == "the number of rows is symbolic"
    with pytest.raises(ValueError, match="takes a positive number of rows or None, not 0"):
        linear_cross_entropy_rules(0)


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_IS_THERE", False)
    (refusal,) = LINEAR_CROSS_ENTROPY.apply(traced(LOSSES["flat"], inputs())).refusals
    assert refusal.reason == f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda x, w, b, t, c: (F.cross_entropy(logits := flat(x, w), t), logits), "outside the match"),
        (
            lambda x, w, b, t, c: F.cross_entropy(
                F.linear(x, w).view(4, 2, CLASSES), t.view(8)[:4].view(4, 1).expand(4, CLASSES).clamp(0, 1)
            ),
            "the logits are viewed as [4, 2, 11]",
        ),
    ],
)
def test_leaves_alone(loss: Loss, reason: str) -> None:
    gm = traced(loss, inputs())
    assert LINEAR_CROSS_ENTROPY.apply(gm).rewrites == 0
    assert reason in str(LINEAR_CROSS_ENTROPY.once().explain(gm, "linear_cross_entropy.fuse"))


def test_before_and_after(fx_snapshot: Any) -> None:
    gm = traced(LOSSES["class weights"], inputs())
    assert gm == fx_snapshot(name="before")
    linear_cross_entropy_rules(4).apply(gm)
    assert gm == fx_snapshot(name="after")
