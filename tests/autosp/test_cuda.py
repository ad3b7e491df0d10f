"""On one CUDA card: AutoSP is exact over NCCL, and a rank of eight trains in bfloat16 and holds nothing of S x S."""

from __future__ import annotations

import pytest
import torch
import transformers

from autosp_rules import AutoSPConfig, AutoSPReport, autosp
from fxrewrite.testing import fake_mesh
from tests.autosp.models import batch, build
from tests.autosp.one_rank import differences, one_rank_backend, one_rank_group
from tests.bench.measure import profiled

DEVICES = [pytest.param("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "group"), DEVICES)
def test_exact_over_a_real_group(device: str, group: str) -> None:
    """`tests/gpu/exactness.py` does it for other models, batches and compilers."""
    model = build("llama_gqa", layers=1).to(device)
    inputs = {name: value.to(device) for name, value in batch("llama_gqa", "plain").items()}
    config = AutoSPConfig(inner="eager", attention="ulysses", outputs="gather", strict=True)
    reports: list[AutoSPReport] = []
    with one_rank_group(group):
        step = torch.compile(model, backend=one_rank_backend(config, reports), fullgraph=True)
        found = differences(step, model, inputs)
    assert reports[0].collectives
    assert max(found.values()) <= 1e-6, "these models cast their logits to float32"


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
