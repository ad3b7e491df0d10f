"""What the forward pass keeps waits on the host, and gradients are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from autosp_rules import autosp
from autosp_rules.memory.offload import offloaded
from fxrewrite.backends import find_backend
from fxrewrite.testing import fake_mesh
from tests.autosp.models import batch, build
from tests.autosp.one_device import captured


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is copied to the host."""
    values: list[torch.Tensor] = []
    copy = torch.Tensor.copy_

    def noted(host: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        values.append(value)
        return copy(host, value, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    return values


def gradients(run: Any, inputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = next(out for out in run(*inputs) if out.dim() == 0)
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_gradients_are_those_of_values_that_stayed(inner: str, copied: list[torch.Tensor]) -> None:
    model = build("llama_gqa", layers=1)
    gm, inputs = captured(model, batch("llama_gqa", "plain", length=16))
    parameters = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    run = find_backend(inner)(gm, inputs)
    expected = gradients(run, inputs, parameters)
    for got, want in zip(gradients(offloaded(run, min_bytes=2**10), inputs, parameters), expected, strict=True):
        assert torch.equal(got, want)
    assert copied
    parameters_at = {p.untyped_storage().data_ptr() for p in parameters}
    assert not parameters_at.intersection(value.untyped_storage().data_ptr() for value in copied)


def test_inputs_small_values_and_those_a_copy_would_lay_out_otherwise_stay() -> None:
    x = torch.rand(64, 64, requires_grad=True)
    small = torch.rand(4, requires_grad=True)

    def run(x: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        return (x * x).sum() + (small.exp() * 2).exp().sum() + (x.exp()[:, ::2] ** 2).sum()

    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        loss = offloaded(run, min_bytes=2**10)(x, small)
    assert not kept, "the inner hooks are the ones that count"
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x + _doubled(x))
    torch.testing.assert_close(small.grad, (small.exp() * 2).exp() * 2 * small.exp())


def _doubled(x: torch.Tensor) -> torch.Tensor:
    grad = torch.zeros_like(x)
    grad[:, ::2] = 2 * (x.exp() ** 2)[:, ::2]
    return grad


def test_a_rank_offloads_what_its_layers_keep(copied: list[torch.Tensor]) -> None:
    model = build("llama_gqa", layers=1)
    with fake_mesh((2,), ("sp",)):
        backend = autosp(inner="aot_eager", checkpoint="attention", offload=True)
        torch.compile(model, backend=backend, fullgraph=True)(**batch("llama_gqa", "plain", length=256)).loss.backward()
    (line,) = [line for line in backend.reports[0].lines if line.startswith("offload: ")]
    assert line == "offload: kept values of 65,536 bytes and more wait in host memory for backward"
    assert (2, 128, 32) in {tuple(value.shape) for value in copied}, "the input of the layer"
