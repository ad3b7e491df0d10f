"""The gradient of an output that leaves without one goes by its tail, and is that of the program as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fxrewrite import normalize
from fxrewrite.backends import find_backend, step_memory
from fxrewrite.backends.replayed_views import copy_replayed
from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.runtime.late_gradients import detach_outputs
from tests.autosp.one_device import captured
from tests.rewriting import Halved

WIDTH, CLASSES = 8, 96


class Scored(nn.Module):
    """A loss, and the scores that it is of; `score` is all that a case changes."""

    def __init__(self, score: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("steps", torch.zeros(CLASSES))
        self.score = score

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.score(self, torch.relu(self.up(x)))
        scores, returned = scores if isinstance(scores, tuple) else (scores, scores)
        return F.cross_entropy(scores.flatten(0, -2), at.flatten()), returned


HAS_A_TAIL: dict[str, Callable[..., Any]] = {
    "a head": lambda m, h: m.head(h),
    "a soft cap and a scale": lambda m, h: 3 * torch.tanh(m.head(h) / 3) * 0.5,
    "a weight in another form": lambda m, h: F.linear(h, (m.head.weight * 2).clamp(-1, 1), m.head.bias),
    "a transposed product": lambda m, h: h.flatten(0, 1) @ m.head.weight.t(),
    "a size": lambda m, h: m.head(h.view(h.shape[0] * h.shape[1], WIDTH)).view(h.shape[0], h.shape[1], CLASSES),
    "noise that is smaller": lambda m, h: m.head(h) + torch.zeros(CLASSES, dtype=torch.float64).bernoulli(0.5) * 0,
    "a constant": lambda m, h: m.head(h) + torch.tensor([0.5], dtype=torch.float64),
}
HAS_NONE: dict[str, Callable[..., Any]] = {
    "as large as what it is of": lambda m, h: F.linear(h, m.head.weight[:16]),
    "noise": lambda m, h: (y := m.head(h)) + torch.randn(y.shape, dtype=torch.float64),
    "whole numbers": lambda m, h: (m.head(h), F.one_hot(h.argmax(-1), 8 * CLASSES)),
    "a written buffer": lambda m, h: m.head(h) + m.steps.add_(1.0),
}


def programs(score: Callable[..., Any]) -> tuple[nn.Module, list[Any], Any, Any]:
    model = Scored(score).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gm, inputs = captured(model, {"x": x, "at": torch.arange(10).reshape(2, 5)})
    return model, inputs, normalize(gm), normalize(gm)


def penalty(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return loss + 0.3 * scores.logsumexp(-1).square().mean() + scores[..., :3].sin().sum()


@pytest.mark.parametrize("kind", HAS_A_TAIL)
def test_the_sum_of_both_parts_is_the_gradient(kind: str) -> None:
    model, inputs, expected, program = programs(HAS_A_TAIL[kind])
    (tail,) = detach_outputs(program, [1]).values()
    program.graph.lint()
    run = find_backend("aot_eager")(program, inputs)
    penalty(*expected(*inputs)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    values = run(*inputs)
    assert not values[1].requires_grad
    scores = values[1].detach().requires_grad_()
    operands = tail.operands(values, inputs)
    total = penalty(values[0], scores)
    total.backward(retain_graph=True)
    found = [(x, g) for x, g in zip(operands, tail.gradients(operands, scores.grad), strict=True) if g is not None]
    torch.autograd.backward([x for x, _ in found], [g for _, g in found])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", HAS_NONE)
def test_an_output_without_a_tail_is_as_before(kind: str) -> None:
    _, _, expected, program = programs(HAS_NONE[kind])
    assert detach_outputs(program, [1]) == {}
    assert program.code == expected.code


def test_without_gradients_nothing_changes() -> None:
    *_, expected, program = programs(HAS_A_TAIL["a head"])
    with torch.no_grad():
        assert detach_outputs(program, [1]) == {}
    assert program.code == expected.code


def test_a_gradient_of_the_output_takes_no_memory() -> None:
    *_, expected, program = programs(HAS_A_TAIL["a head"])
    detach_outputs(program, [1])
    scores, hidden = 8 * 10 * CLASSES, 8 * 10 * WIDTH
    saved = step_memory(expected).peak - step_memory(program).peak
    assert scores - hidden <= saved <= scores


def test_a_second_derivative_is_refused() -> None:
    _, inputs, _, program = programs(HAS_A_TAIL["a head"])
    (tail,) = detach_outputs(program, [1]).values()
    values = program(*inputs)
    operands = tail.operands(values, inputs)
    with torch.enable_grad():
        found = tail.gradients(operands, torch.ones_like(values[1]))
    with pytest.raises(FxRewriteError, match="is differentiated again"):
        torch.stack([g.sum() for g in found if g is not None]).sum().backward()


class Shown(Scored):
    """Returns the hidden states as well, of which scores read the identity with a gradient of its own."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden = torch.relu(self.up(x))
        scores = self.score(self, hidden)
        return F.cross_entropy(scores.flatten(0, -2), at.flatten()), scores, hidden


@pytest.mark.parametrize(
    "score",
    [
        lambda m, h: m.head(torch.ops.fxrewrite.scale_gradient(h, 0.5)),
        lambda m, h: m.head(torch.ops.fxrewrite.scale_gradient(h, 0.5).flatten(0, 1)).view(2, 5, CLASSES),
        lambda m, h: m.head(Halved.apply(h)),
    ],
    ids=["of hidden states", "and a view of that", "a function of the user's"],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself does so
def test_a_tail_may_read_an_identity_with_a_gradient_of_its_own(score: Callable[..., Any]) -> None:
    """AOTAutograd would make it again, as a plain view of the hidden states that are returned too."""
    model = Shown(score).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gm, inputs = captured(model, {"x": x, "at": torch.arange(10).reshape(2, 5)})
    expected, program = normalize(gm), normalize(gm)
    (tail,) = detach_outputs(program, [1]).values()
    copy_replayed(program)
    values = find_backend("aot_eager")(program, inputs)(*inputs)
    wanted = expected(*inputs)
    (penalty(*wanted[:2]) + wanted[2].sin().sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    scores = values[1].detach().requires_grad_()
    operands = tail.operands(values, inputs)
    (penalty(values[0], scores) + values[2].sin().sum()).backward(retain_graph=True)
    found = [(x, g) for x, g in zip(operands, tail.gradients(operands, scores.grad), strict=True) if g is not None]
    torch.autograd.backward([x for x, _ in found], [g for _, g in found])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-12, atol=1e-12)
