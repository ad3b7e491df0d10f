"""On one CUDA card: AutoSP is exact over NCCL, and a rank of eight trains in bfloat16 and holds nothing of S x S."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch._inductor import config as inductor_config

from autosp_rules import AutoSPConfig, AutoSPReport, autosp
from fxrewrite.testing import fake_mesh
from tests.autosp.models import batch, build, with_dropout
from tests.autosp.one_rank import differences, one_rank_backend, one_rank_group
from tests.bench.measure import profiled

DEVICES = [pytest.param("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)]


def _on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in inputs.items()}


def _check_exact(name: str, kind: str, dropout: float, inner: str, device: str, group: str) -> None:
    model = build(name, layers=1)
    if dropout:
        with_dropout(model, dropout)
    model, inputs = model.to(device), _on(device, batch(name, kind))
    rng = "global" if dropout else "local"
    config = AutoSPConfig(inner=inner, attention="ulysses", outputs="gather", rng=rng, strict=True)
    reports: list[AutoSPReport] = []
    # inductor's own random numbers are not those of a model that is not compiled
    with one_rank_group(group), inductor_config.patch(fallback_random=True):
        step = torch.compile(model, backend=one_rank_backend(config, reports), fullgraph=True)
        found = differences(step, model, inputs)
    assert bool(reports[0].collectives) == (dropout == 0)
    assert max(found.values()) <= 1e-6, "these models cast their logits to float32"


@pytest.mark.parametrize(("device", "group"), DEVICES)
def test_exact_over_a_real_group(device: str, group: str) -> None:
    _check_exact("llama_gqa", "plain", 0.0, "eager", device, group)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("name", "kind", "dropout"),
    [("llama_gqa", "plain", 0.0), ("gpt2", "plain", 0.1), ("llama_gqa", "right_padding", 0.0)],
)
def test_exact_over_nccl(name: str, kind: str, dropout: float, inner: str) -> None:
    _check_exact(name, kind, dropout, inner, "cuda", "nccl")


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_a_rank_of_eight_in_bfloat16_holds_no_square(padded: bool) -> None:
    """The most that is allocated at once is less than a byte for each row and column."""
    length, dtype = 16384, torch.bfloat16
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(dtype).train()
        ids = torch.randint(256, (1, length))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        inputs["attention_mask"] = (torch.arange(length, device="cuda")[None] < length - 100).long()
    with fake_mesh((8,), ("sp",)):
        step = torch.compile(model, backend=autosp(strict=True, logits="drop"), fullgraph=True)
        step(**inputs).loss.backward()
        found = profiled(lambda: step(**inputs).loss, torch.Tensor.backward, "cuda")
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert 0 < found.largest < length * length
