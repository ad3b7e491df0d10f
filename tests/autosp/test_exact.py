"""The loss and every gradient equal one device's: models and batches in pairs, on simulated ranks, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autosp_rules import AutoSPConfig
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.models import INPUTS, MODELS, batch, build
from tests.autosp.one_device import captured

LOSS_TOLERANCE = 1e-6  # these models cast their logits to float32
GRAD_TOLERANCE = 1e-9


def _relative(a: torch.Tensor, b: torch.Tensor, floor: float = 1e-300) -> float:
    """Largest difference by the largest entry of `b`, or by `floor` where that is more."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(floor)).item()


def _cells() -> Iterator[Any]:
    """Three batches for every model, so that every batch meets two or three; likewise ways to capture, P and layers.

    A second layer takes a third longer, and can be wrong only in what layers pass on.
    """
    for i, name in enumerate(MODELS):
        for j in {(3 * i + k) % len(INPUTS) for k in range(3)}:
            kind, (dynamic, rest) = INPUTS[j], divmod((i + 3 * j) % 8, 4)
            checkpointing, ranks = rest // 2, (2, 4)[rest % 2]
            layers = 1 + (i + j) % 2
            ways = f"{'dynamic' if dynamic else 'static'}-{'checkpoint' if checkpointing else 'keep'}-{ranks}-{layers}"
            yield pytest.param(
                name, kind, bool(dynamic), bool(checkpointing), ranks, layers, id=f"{name}-{kind}-{ways}"
            )


@pytest.mark.parametrize(("name", "kind", "dynamic", "checkpointing", "num_ranks", "layers"), list(_cells()))
@pytest.mark.some(6)
def test_loss_and_gradients_equal_one_device(
    name: str, kind: str, dynamic: bool, checkpointing: bool, num_ranks: int, layers: int
) -> None:
    model, inputs = build(name, checkpointing=checkpointing, layers=layers), batch(name, kind)
    if dynamic:
        for value in inputs.values():
            if value.dim() > 1:
                torch._dynamo.mark_dynamic(value, 1)
    gm, example_inputs = captured(model, inputs)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    expected = {id(p): p.grad for p in model.parameters()}
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program, report = transform(gm, AutoSPConfig(strict=True), axis_of(mesh, "sp"))
        run = run_on_ranks(program, example_inputs, num_ranks, backward=0)
    assert report.collectives, "nothing was sharded"
    for outputs in run.outputs:
        assert _relative(outputs[0], loss.detach()) <= LOSS_TOLERANCE
    # the gradient of a key bias is zero but for rounding: it is measured against the model's largest
    floor = 1e-6 * max(g.abs().max().item() for g in expected.values() if g is not None)
    compared = 0
    for value, grad in zip(example_inputs, run.gradients(), strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            want = expected[id(value)]
            assert want is not None
            assert grad is not None
            assert _relative(grad, want, floor) <= GRAD_TOLERANCE
            compared += 1
    assert compared == len(list(model.parameters()))
