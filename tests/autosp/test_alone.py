"""One rank of many alone, over torch's fake process group: what it holds and how long it computes can be measured."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from autosp_rules import autosp
from fxrewrite.testing import fake_mesh
from tests.autosp.models import batch, build


@pytest.mark.parametrize(("attention", "rank"), [("ulysses", 0), ("gather_kv", 3), ("ring", 1)])
@pytest.mark.some(1)
def test_a_rank_of_four_trains_without_the_others(attention: Any, rank: int) -> None:
    torch._dynamo.reset()
    model = build("llama_gqa", layers=1)
    with fake_mesh((4,), ("sp",), rank=rank) as mesh:
        backend = autosp(inner="aot_eager", mesh=mesh, attention=attention)
        torch.compile(model, backend=backend, fullgraph=True)(**batch("llama_gqa", "plain", length=32)).loss.backward()
    assert backend.reports[0].tokens_per_rank == 2 * 32 // 4
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_compiled_model_is_saved_and_trains_on_when_it_is_loaded(ranks: int) -> None:
    """As torch saves one that any other backend has compiled: what is loaded compiles again, by the same settings."""
    inputs = batch("llama_gqa", "plain", length=16)
    with fake_mesh((ranks,), ("sp",)) as mesh:
        compiled = torch.compile(build("llama_gqa", layers=1), backend=autosp("eager", mesh=mesh))
        compiled(**inputs).loss.backward()
        file = io.BytesIO()
        torch.save(compiled, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loss = loaded(**inputs).loss
        loss.backward()
        if ranks == 1:  # a fake group of more sends nothing, and gives what is in memory
            assert torch.equal(loss, compiled(**inputs).loss)
    for name, parameter in compiled.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert all(p.grad is not None for p in loaded.parameters())
