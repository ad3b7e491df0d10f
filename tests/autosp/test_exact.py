"""The loss and every gradient equal one device's: models and batches in pairs, on simulated ranks, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autosp_rules import AutoSPConfig
from tests.autosp.models import INPUTS, MODELS, batch, build
from tests.autosp.one_device import OneDevice


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
    one_device = OneDevice(model, inputs)
    assert all(grad is not None for grad in one_device.grads.values())
    # logits are cast to float32; the gradient of a key bias is zero but for rounding
    one_device.check(num_ranks, AutoSPConfig(strict=True), loss=1e-6, rtol=0, grads=1e-9, floor=1e-6)
