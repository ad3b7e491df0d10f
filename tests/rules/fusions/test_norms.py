"""Norms as Hugging Face writes them, and the operator, give the same bits where they round the same; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from rules.fusions.norms import NORMS
from tests.rewriting import check_left_alone, check_rewritten, check_stages, traced, value_and_gradients

Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
aten = torch.ops.aten
D, EPS = 32, 1e-5


def module(kind: type[torch.nn.Module]) -> Norm:
    """The forward of a Hugging Face module as a function of its input and weight."""

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": w}, (x,))

    norm = kind(D)
    return forward


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


RMS: dict[str, Norm] = {
    "bare": lambda x, w, b: x * torch.rsqrt(mean_square(x) + EPS),
    "weight in front": lambda x, w, b: w * (x * torch.rsqrt(mean_square(x) + EPS)),
    "x * x": lambda x, w, b: x * torch.rsqrt(EPS + (x * x).mean(-1, keepdim=True)) * w,
    "square": lambda x, w, b: x * torch.rsqrt(torch.square(x).mean((-1,), keepdim=True) + EPS) * w,
    "x ** 2.0": lambda x, w, b: x * torch.rsqrt((x**2.0).mean(2, keepdim=True) + EPS) * w,
    "sqrt": lambda x, w, b: x / torch.sqrt(mean_square(x) + EPS) * w,
    "power of -0.5": lambda x, w, b: x * torch.pow(mean_square(x) + EPS, -0.5) * w,
}
LAYER: dict[str, Norm] = {
    "bare": lambda x, w, b: centered(x) * torch.rsqrt(mean_square(centered(x)) + EPS),
    "weight": lambda x, w, b: w * (centered(x) * torch.rsqrt(mean_square(centered(x)) + EPS)),
    "weight and bias": lambda x, w, b: centered(x) / torch.sqrt(mean_square(centered(x)) + EPS) * w + b,
    "bias": lambda x, w, b: b + centered(x) / torch.sqrt(mean_square(centered(x)) + EPS),
    "var(unbiased=False)": lambda x, w, b: (
        centered(x) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) * w + b
    ),
    "var(correction=0)": lambda x, w, b: centered(x) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + EPS) * w,
}
MODULES = {kind.__name__: kind for kind in (LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, Olmo2RMSNorm, CohereLayerNorm)}
CALLS = {
    ("LlamaRMSNorm", "float32"): ["rms_norm"],
    ("T5LayerNorm", "float32"): ["to", "rms_norm"],  # a cast that changes nothing is for rules.canonical.normal_forms
    ("GemmaRMSNorm", "float32"): ["to", "add", "rms_norm"],
    ("Olmo2RMSNorm", "float32"): ["rms_norm"],
    ("CohereLayerNorm", "float32"): ["layer_norm"],
    ("LlamaRMSNorm", "bfloat16"): ["rms_norm", "mul"],
    ("T5LayerNorm", "bfloat16"): ["rms_norm", "mul"],
    ("GemmaRMSNorm", "bfloat16"): ["to", "to", "add", "rms_norm", "type_as"],
    ("Olmo2RMSNorm", "bfloat16"): ["rms_norm"],
    ("CohereLayerNorm", "bfloat16"): ["layer_norm"],
    ("LlamaRMSNorm", "float64"): ["to", "rms_norm", "to", "mul"],
    ("CohereLayerNorm", "float64"): ["to", "to", "layer_norm", "to"],
}

NARROW_GRADIENTS = {("T5LayerNorm", "bfloat16"), ("Olmo2RMSNorm", "bfloat16")}
"""Their spelling rounds parts of a gradient to bfloat16 before it adds them up."""


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 5, D, dtype=torch.float64) * 2 + 1
    return x.to(dtype), torch.randn(D).to(dtype), torch.randn(D).to(dtype)


def calls(gm: fx.GraphModule) -> list[str]:
    return [node.target._schema.name[6:] for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("norm", "spelling"), [*(("rms_norm", name) for name in RMS), *(("layer_norm", name) for name in LAYER)]
)
def test_spellings(norm: str, spelling: str) -> None:
    function = (RMS if norm == "rms_norm" else LAYER)[spelling]
    gm = check_rewritten(NORMS, f"norms.to_{norm}", function, inputs(torch.float64), 1e-11)
    assert calls(gm) == [norm]


@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_hugging_face(name: str, dtype: str) -> None:
    norm, args = module(MODULES[name]), inputs(getattr(torch, dtype))
    gm = traced(norm, *args)
    NORMS.apply(gm)
    assert calls(gm) == CALLS[name, dtype]
    before, after = value_and_gradients(norm, args), value_and_gradients(gm, args)
    if name == "CohereLayerNorm":  # layer_norm sums in another order
        tolerance = {"bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-6}[dtype]
        scale = max(t.abs().max().item() for t in before)
        torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance * scale)
    elif (name, dtype) in NARROW_GRADIENTS:
        assert torch.equal(after[0], before[0])
        torch.testing.assert_close(after, before, rtol=1.6e-2, atol=8e-2)
    else:
        assert all(map(torch.equal, after, before))
    assert NORMS.apply(gm).rewrites == 0


def refused(norm: Norm, dtype: torch.dtype = torch.float64, w: torch.Tensor | None = None) -> list[str]:
    x, weight, bias = inputs(dtype)
    weight = weight if w is None else w
    gm = traced(lambda x, w, b: norm(x, w, b), x, weight, bias)
    report = NORMS.apply(gm)
    assert torch.equal(gm(x, weight, bias), norm(x, weight, bias))
    return [refusal.reason for refusal in report.refusals]


def test_refuses_what_rounds_otherwise() -> None:
    each, scale = (
        "the spelling rounds to {} after each step, {} once",
        "the spelling rounds the norm to {} before it is",
    )
    half = torch.bfloat16
    assert refused(RMS["bare"], half) == [each.format("bfloat16", "rms_norm")]
    assert refused(LAYER["bare"], torch.float16)[0] == each.format("float16", "layer_norm")
    assert refused(module(LlamaRMSNorm), half) == [scale.format("bfloat16") + " scaled, rms_norm after that"]
    layer = lambda x, w, b: F.layer_norm(x, [D]) * w + b  # noqa: E731
    assert refused(layer, half)[0] == scale.format("bfloat16") + " scaled, layer_norm after that"


def test_refuses_another_precision() -> None:
    assert refused(module(T5LayerNorm)) == ["x is float64, its mean square float32"]
    assert refused(module(LlamaRMSNorm)) == ["x is float64, normalized in float32, given back in float64"]
    wider = lambda x, w, b: aten.rms_norm(x.to(torch.float64), [D], None, EPS).to(torch.float32)  # noqa: E731
    assert refused(wider, torch.float32) == ["x is float32, normalized in float64, given back in float32"]
    assert refused(module(GemmaRMSNorm), torch.bfloat16) == ["the weight is float32, x is bfloat16"]
    own = lambda x, w, b: aten.rms_norm(x.float(), [D], None, None).to(x.dtype)  # noqa: E731
    assert refused(own, torch.bfloat16) == ["eps is left to rms_norm, which takes another one for each dtype"]


KEPT: dict[str, tuple[str, Norm, str]] = {
    "another power": (
        "to_rms_norm",
        lambda x, w, b: x * torch.rsqrt((x**4).mean(-1, keepdim=True) + EPS),
        "the power is 4",
    ),
    "another dim": ("to_rms_norm", lambda x, w, b: x * torch.rsqrt((x**2).mean(1, keepdim=True) + EPS), "the literal"),
    "an unbiased variance": (
        "to_layer_norm",
        lambda x, w, b: centered(x) / torch.sqrt(x.var(-1, keepdim=True) + EPS),
        "var",
    ),
    "a bias of another shape": (
        "scale_layer_norm",
        lambda x, w, b: F.layer_norm(x, [D]) + x,
        "the bias is [3, 5, 32], the norm takes [32]",
    ),
    "a weight of one number": (
        "scale_rms_norm",
        lambda x, w, b: F.rms_norm(x, [D], None, EPS) * w[:1],
        "the weight is [1], the norm takes [32]",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_leaves_alone(case: str) -> None:
    rule, norm, reason = KEPT[case]
    check_left_alone(NORMS, f"norms.{rule}", norm, inputs(torch.float64), reason)


def test_complex_stays() -> None:
    args = [torch.randn(2, 4, dtype=torch.complex64)] * 3
    check_left_alone(NORMS, "norms.to_rms_norm", RMS["bare"], args, "x has dtype complex64")


@pytest.mark.parametrize("name", MODULES)
def test_before_and_after(name: str, fx_snapshot: Any) -> None:
    check_stages(traced(module(MODULES[name]), *inputs(torch.bfloat16)), fx_snapshot, after=NORMS)
