"""A model on one device and on simulated ranks: the loss and every gradient are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks

__all__ = ["assert_equal_to_one_device", "captured"]


def captured(model: Callable[..., Any], inputs: dict[str, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of the model, and the tensors that it would be called with."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> fx.GraphModule:
        found.append((gm, list(example_inputs)))
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(**inputs)
    return found[0]


def assert_equal_to_one_device(
    model: nn.Module,
    inputs: dict[str, Any],
    *,
    ranks: Sequence[int] = (2, 4),
    config: AutoSPConfig | None = None,
    seed: int = 0,
    loss_tolerance: float = 1e-12,
    grad_tolerance: float = 1e-12,
) -> AutoSPReport:
    """The report for the last of `ranks`; the model returns its loss, or an output that has it first.

    Gradients may differ by 1e-9 of their own, and by `grad_tolerance` of the largest. Every run starts with the same
    state of torch's random number generator.
    """
    leaves = [v for v in (*model.parameters(), *inputs.values()) if isinstance(v, torch.Tensor) and v.requires_grad]
    torch.manual_seed(seed)
    output = model(**inputs)
    loss = output if isinstance(output, torch.Tensor) else output[0]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    expected = {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True) if grad is not None}
    largest = max(grad.abs().max().item() for grad in expected.values())
    gm, example_inputs = captured(model, inputs)
    report = None
    for num_ranks in ranks:
        with fake_mesh((num_ranks,), ("sp",)) as mesh:
            program, report = transform(gm, config or AutoSPConfig(), axis_of(mesh, "sp"))
            torch.manual_seed(seed)
            run = run_on_ranks(program, example_inputs, num_ranks, backward=0)
        assert report.slices, "nothing was sharded"
        for outputs in run.outputs:
            torch.testing.assert_close(outputs[0], loss.detach(), rtol=loss_tolerance, atol=0)
        compared = 0
        for value, grad in zip(example_inputs, run.gradients(), strict=True):
            if id(value) in expected:
                assert grad is not None
                torch.testing.assert_close(grad, expected[id(value)], rtol=1e-9, atol=grad_tolerance * largest)
                compared += 1
        assert compared == len(expected)
    assert report is not None
    return report
