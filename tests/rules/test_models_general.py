"""What the general rules find in models of Hugging Face, and that these compute the same afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import fx, nn

from fxrewrite import Report, normalize
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.fusions.activations import ACTIVATIONS
from rules.fusions.linears import LINEARS
from rules.fusions.norms import NORMS
from rules.fusions.rotary import ROTARY
from rules.fusions.swiglu import SWIGLU

VOCAB, LENGTH = 61, 8
PLAN = NORMAL_FORMS.fixpoint() >> ACTIVATIONS >> NORMS >> ROTARY >> LINEARS >> SWIGLU
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "use_cache": False}
_DECODER = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _gptj() -> nn.Module:
    config = transformers.GPTJConfig(
        **_TOKENS, **_NO_DROPOUT, n_positions=32, n_embd=32, n_layer=1, n_head=4, rotary_dim=4
    )
    return transformers.GPTJForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        **{**_TOKENS, "bos_token_id": None},
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**_DECODER)),
    "gptj": _gptj,
    "t5": _t5,
}
FOUND: dict[tuple[str, torch.dtype], dict[str, int]] = {
    ("llama", torch.float32): {
        "norms.to_rms_norm": 3,
        "norms.scale_rms_norm": 3,
        "rotary.fuse_halves": 2,
        "linears.merge": 2,
        "swiglu.fuse": 1,
    },
    ("llama", torch.bfloat16): {
        "norms.to_rms_norm": 3,
        "norms.narrow_rms_norm": 3,
        "rotary.fuse_halves": 2,
        "linears.merge": 2,
        "swiglu.fuse": 1,
    },
    ("cohere", torch.float32): {
        "norms.to_layer_norm": 2,
        "norms.scale_layer_norm": 2,
        "rotary.fuse_pairs": 2,
        "linears.merge": 1,
        "swiglu.fuse": 1,
    },
    ("gptj", torch.float32): {"activations.to_gelu_tanh": 1, "rotary.fuse_pairs": 2, "linears.merge": 1},
    ("t5", torch.float32): {
        "activations.to_gelu_tanh": 2,
        "norms.to_rms_norm": 7,
        "norms.scale_rms_norm": 7,
        "linears.merge": 5,
    },
}


def logits_and_gradients(model: nn.Module, call: Callable[..., Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = call(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach().float(), "logits": out.logits.detach().float(), **gradients}


@pytest.mark.parametrize(("name", "dtype"), FOUND)
@pytest.mark.some(2)
def test_found_and_the_same(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype).train()
    model.loss_type = "ForCausalLM"  # gptj has none, on which transformers logs a warning, which breaks the graph
    ids = torch.randint(2, VOCAB, (2, LENGTH))
    torch._dynamo.mark_dynamic(ids, 1)  # the length is a symbol, and tracing leaves slices that take everything
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        normal = normalize(gm)
        reports.append(PLAN.apply(normal))
        assert PLAN.apply(normal).rewrites == 0
        return normal

    expected = logits_and_gradients(model, model, ids)
    found = logits_and_gradients(model, torch.compile(model, backend=backend, fullgraph=True), ids)
    (report,) = reports
    ours = [entry for entry in report.rules if entry.rewrites and not entry.rule.startswith("normal_forms.")]
    assert {entry.rule: entry.rewrites for entry in ours} == FOUND[name, dtype]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for what, tensor in expected.items():
        error = (found[what] - tensor).abs().max().item()
        assert error <= tolerance * tensor.abs().max().item(), what


def test_the_plan_can_be_cached() -> None:
    assert PLAN.digest()
