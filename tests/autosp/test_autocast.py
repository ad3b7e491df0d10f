"""Under autocast to bfloat16 the ranks are as near to float64 as one device is, loss and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autosp_rules import AutoSPConfig
from tests.autosp.models import batch, build
from tests.autosp.one_device import captured, on_ranks

Outcome = tuple[torch.Tensor, dict[int, torch.Tensor]]


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def on_one_device(model: torch.nn.Module, inputs: dict[str, Any], backend: str) -> Outcome:
    """The loss and the gradients by position of the parameter, compiled under autocast."""
    torch._dynamo.reset()
    with bfloat16():
        loss = torch.compile(model, backend=backend, fullgraph=True)(**inputs).loss
    loss.backward()
    grads = {at: p.grad for at, p in enumerate(model.parameters()) if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def on_two_ranks(model: torch.nn.Module, inputs: dict[str, Any]) -> Outcome:
    with bfloat16():
        gm, values = captured(model, inputs)
        _, report, run = on_ranks(gm, values, 2, AutoSPConfig(strict=True), backward=0)
    assert report.collectives, "nothing was sharded"
    grads = {id(v): grad for v, grad in zip(values, run.gradients(), strict=True) if grad is not None}
    return run.outputs[0][0], {at: grads[id(p)] for at, p in enumerate(model.parameters()) if id(p) in grads}


def error(found: Outcome, exact: Outcome) -> tuple[float, float]:
    """Of the loss, and of all gradients as one vector, relative."""
    (loss, grads), (exact_loss, exact_grads) = found, exact
    assert grads.keys() == exact_grads.keys()
    assert {g.dtype for g in grads.values()} == {torch.float32}
    off = sum(float((grads[at].double() - want).square().sum()) for at, want in exact_grads.items())
    size = sum(float(want.square().sum()) for want in exact_grads.values())
    return abs(float(loss) / float(exact_loss) - 1), (off / size) ** 0.5


@pytest.mark.parametrize(("name", "checkpointing"), [("llama_gqa", True), ("gpt2", False)])
def test_ranks_are_as_exact_as_one_device(name: str, checkpointing: bool) -> None:
    model, inputs = build(name, checkpointing=checkpointing).float(), batch(name, "uneven_labels")
    double = copy.deepcopy(model).double()
    loss = double(**inputs).loss
    loss.backward()
    exact = loss.detach(), {at: p.grad for at, p in enumerate(double.parameters()) if p.grad is not None}
    own = error(on_one_device(model, inputs, "aot_eager"), exact)
    assert own[1] > 1e-3, "nothing was cast"
    found = error(on_two_ranks(model, inputs), exact)
    assert found[0] <= 2 * own[0] + 1e-5
    assert found[1] <= 1.2 * own[1]
