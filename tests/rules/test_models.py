"""What the rules find in models of Hugging Face, and that loss, logits and gradients stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import fx

from fxrewrite import normalize
from rules.attention.composite import ATTENTION
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.fusions.activations import ACTIVATIONS
from rules.fusions.linears import LINEARS
from rules.fusions.norms import NORMS
from rules.fusions.rotary import ROTARY
from rules.fusions.swiglu import SWIGLU
from tests.dynamo import caught
from tests.rewriting import count

VOCAB, LENGTH, LAYERS = 61, 12, 2
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, **_WIDTHS}
_DECODER = {**_TEXT, "pad_token_id": 0, "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "use_cache": False}
_GPT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4}


def _gpt2() -> torch.nn.Module:
    model = transformers.GPT2LMHeadModel(_eager(transformers.GPT2Config(**_GPT, **_GPT_DROPOUT)))
    model.loss_type = "ForCausalLM"  # the default is None, on which transformers logs a warning, which breaks the graph
    return model


def _bloom() -> torch.nn.Module:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=LAYERS, n_head=4, use_cache=False)
    model = transformers.BloomForCausalLM(_eager(config))
    for layer in model.transformer.h:  # its own is a torch.autograd.Function, of whose context torch warns
        layer.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
    return model


def _eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


def _decoder(family: str, **options: Any) -> Callable[[], torch.nn.Module]:
    config, model = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    return lambda: model(_eager(config(**_DECODER, num_key_value_heads=2, **options)))


def _model(name: str, config: str, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(transformers, name)(_eager(getattr(transformers, config)(**options)))


def _t5(activation: str) -> Callable[[], torch.nn.Module]:
    more = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    return _model("T5ForConditionalGeneration", "T5Config", **_T5, **more, feed_forward_proj=activation)


def _gptj() -> torch.nn.Module:
    model = _model("GPTJForCausalLM", "GPTJConfig", **_GPT, **_GPT_DROPOUT, rotary_dim=4)()
    model.loss_type = "ForCausalLM"  # as of GPT-2
    return model


MODELS: dict[str, tuple[int, Callable[[], torch.nn.Module]]] = {
    "llama": (LAYERS, _decoder("Llama")),
    "gpt2": (LAYERS, _gpt2),
    "gpt_neox": (LAYERS, _model("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER)),
    "bloom": (LAYERS, _bloom),
    "codegen": (
        LAYERS,
        _model("CodeGenForCausalLM", "CodeGenConfig", **_GPT, **_GPT_DROPOUT, n_ctx=32, rotary_dim=4),
    ),
    "mpt": (
        LAYERS,
        _model(
            "MptForCausalLM",
            "MptConfig",
            vocab_size=VOCAB,
            d_model=32,
            n_heads=4,
            n_layers=LAYERS,
            max_seq_len=32,
            use_cache=False,
        ),
    ),
    "falcon": (  # scales its scores in place
        LAYERS,
        _model(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            use_cache=False,
        ),
    ),
    "bert": (LAYERS, _model("BertForMaskedLM", "BertConfig", **_TEXT, **_NO_DROPOUT)),
    "vit": (
        LAYERS,
        _model("ViTForImageClassification", "ViTConfig", **_WIDTHS, **_NO_DROPOUT, image_size=16, patch_size=8),
    ),
    "t5": (3 * LAYERS, _t5("relu")),  # the encoder's, the decoder's, and those between them
}
# model, rule, why not
LEFT: dict[str, tuple[Callable[[], torch.nn.Module], torch.dtype, str, str]] = {
    "softcap": (_decoder("Gemma2", head_dim=8), torch.float32, "fuse", "found aten::tanh (%tanh)"),
    "sink": (
        _decoder("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        torch.float32,
        "fuse",
        "found aten::slice (%slice_1)",
    ),
    "softmax in float32": (
        _decoder("Llama"),
        torch.float64,
        "fuse",
        "the softmax is in torch.float32, the operands in torch.float64",
    ),
}


def captured(
    make: Callable[[], torch.nn.Module], dtype: torch.dtype, *, dynamic: bool = False
) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of a training step, and its inputs."""
    torch.manual_seed(0)
    model = make().to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, transformers.ViTForImageClassification):
        pixels = torch.randn((2, 3, 16, 16), generator=generator, dtype=dtype)
        return caught(model, pixel_values=pixels, labels=torch.tensor([0, 1]))
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, LENGTH // 2 :] = 0
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
        torch._dynamo.mark_dynamic(mask, 1)
    return caught(model, input_ids=ids, attention_mask=mask, labels=ids)


def outputs_and_gradients(gm: fx.GraphModule, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """All outputs that depend on parameters (loss, logits), and the gradients of all parameters, of the loss."""
    outputs = [out for out in gm(*inputs) if isinstance(out, torch.Tensor) and out.requires_grad]
    leaves = [a for a in inputs if isinstance(a, torch.Tensor) and a.requires_grad]
    return outputs, list(torch.autograd.grad(outputs[0], leaves, allow_unused=True))


def check(gm: fx.GraphModule, inputs: list[Any], layers: int, tolerance: float) -> None:
    expected, expected_gradients = outputs_and_gradients(gm, inputs)
    assert sum(entry.rewrites for entry in ATTENTION.apply(gm).rules if ".fuse" in entry.rule) == layers
    assert count(gm, "scaled_dot_product_attention") == layers
    assert count(gm, "softmax") == 0
    found, gradients = outputs_and_gradients(gm, inputs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert [g is None for g in gradients] == [g is None for g in expected_gradients]
    compared = [(a, b) for a, b in zip(gradients, expected_gradients, strict=True) if b is not None]
    largest = max(b.abs().max().item() for _, b in compared)
    assert max((a - b).abs().max().item() for a, b in compared) <= tolerance * largest
    assert ATTENTION.apply(gm).rewrites == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(3)
def test_every_layer_becomes_the_operator(name: str) -> None:
    layers, make = MODELS[name]
    gm, inputs = captured(make, torch.float32)
    check(normalize(gm), inputs, layers, 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_in_float64(name: str) -> None:
    layers, make = MODELS[name]
    gm, inputs = captured(make, torch.float64)
    check(normalize(gm), inputs, layers, 1e-6 if name == "gpt2" else 1e-12)  # gpt2 casts its logits to float32


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_in_the_graph_that_dynamo_gives(name: str) -> None:
    layers, make = MODELS[name]
    gm, inputs = captured(make, torch.float32)
    check(gm, inputs, layers, 1e-5)


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.some(1)
def test_stays_as_it_is(name: str) -> None:
    make, dtype, rule, reason = LEFT[name]
    gm = normalize(captured(make, dtype)[0])
    softmaxes = count(gm, "softmax")
    assert not any(entry.rewrites for entry in ATTENTION.apply(gm).rules if ".fuse" in entry.rule)
    assert count(gm, "softmax") == softmaxes
    assert reason in str(ATTENTION.once().explain(gm, f"attention.{rule}"))


PLAN = NORMAL_FORMS.fixpoint() >> ACTIVATIONS >> NORMS >> ROTARY >> LINEARS >> SWIGLU
OTHERS = {
    "llama": _decoder("Llama"),
    "cohere": _decoder("Cohere"),
    "gptj": _gptj,
    "t5": _t5("gated-gelu"),
}
OF_LLAMA = {"norms.to_rms_norm": 5, "rotary.fuse_halves": 4, "linears.merge": 4, "swiglu.fuse": 2}
FOUND: dict[tuple[str, torch.dtype], dict[str, int]] = {
    ("llama", torch.float32): {**OF_LLAMA, "norms.scale_rms_norm": 5},
    ("llama", torch.bfloat16): {**OF_LLAMA, "norms.narrow_rms_norm": 5},
    ("cohere", torch.float32): {
        "norms.to_layer_norm": 3,
        "norms.scale_layer_norm": 3,
        "rotary.fuse_pairs": 4,
        "linears.merge": 2,
        "swiglu.fuse": 2,
    },
    ("gptj", torch.float32): {"activations.to_gelu_tanh": 2, "rotary.fuse_pairs": 4, "linears.merge": 2},
    ("t5", torch.float32): {
        "activations.to_gelu_tanh": 4,
        "norms.to_rms_norm": 12,
        "norms.scale_rms_norm": 12,
        "linears.merge": 9,
    },
}


@pytest.mark.parametrize(("name", "dtype"), FOUND)
@pytest.mark.some(2)
def test_fusions_of_other_layers(name: str, dtype: torch.dtype) -> None:
    """The length is a symbol, so that tracing leaves slices that take everything."""
    gm, inputs = captured(OTHERS[name], dtype, dynamic=True)
    gm = normalize(gm)
    outputs, gradients = outputs_and_gradients(gm, inputs)
    ours = [entry for entry in PLAN.apply(gm).rules if entry.rewrites and "normal_forms." not in entry.rule]
    assert {entry.rule: entry.rewrites for entry in ours} == FOUND[name, dtype]
    assert PLAN.apply(gm).rewrites == 0
    found_outputs, found_gradients = outputs_and_gradients(gm, inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for found, expected in zip(found_outputs + found_gradients, outputs + gradients, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            error = (found.float() - expected.float()).abs().max().item()
            assert error <= tolerance * expected.float().abs().max().item()


def test_the_plan_can_be_cached() -> None:
    assert PLAN.digest()
