"""A model of token ids, captured once, run on simulated ranks and compared with itself on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.one_device import captured

__all__ = ["on_ranks"]


def on_ranks(model: nn.Module, ids: torch.Tensor, num_ranks: int, others: Sequence[torch.Tensor] = ()) -> AutoSPReport:
    """The report of `model(ids)` over `num_ranks`, whose loss and gradients equal one device's.

    With `others` the length is symbolic, and the one program must be right for them as well.
    """
    if others:
        ids = ids.clone()
        torch._dynamo.mark_dynamic(ids, 1)
    gm, inputs = captured(model, {"ids": ids})
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program, report = transform(gm, AutoSPConfig(checkpoint="none"), axis_of(mesh, "sp"))
        for these in (ids, *others):
            _compare(model, program, [_instead(value, ids, these) for value in inputs], these, num_ranks)
    return report


def _instead(value: Any, ids: torch.Tensor, these: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return these if value.shape == ids.shape and not value.is_floating_point() else value
    return these.shape[1]


def _compare(model: nn.Module, program: Any, inputs: list[Any], ids: torch.Tensor, num_ranks: int) -> None:
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    run = run_on_ranks(program, inputs, num_ranks, backward=0)
    for outputs in run.outputs:
        torch.testing.assert_close(outputs[0], loss.detach(), rtol=1e-12, atol=1e-12)
    for value, grad in zip(inputs, run.gradients(), strict=True):
        if isinstance(value, nn.Parameter) and value.grad is not None:
            torch.testing.assert_close(grad, value.grad, rtol=1e-10, atol=1e-12)
