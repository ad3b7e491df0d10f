"""Norms and gates become one with their quantization, in both forms of functional graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.backends import inductor_table
from fxrewrite.errors import RuleDefinitionError
from rules.fusions.quantization import quantized

HOP, HOP2 = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2
LIBRARY = torch.library.Library("tests_quantization", "FRAGMENT")
OPS = torch.ops.tests_quantization


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def added(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    r.add_(x)
    x.copy_(norm(r, w, eps))


def added_and_rounded(o: torch.Tensor, x: torch.Tensor, r: torch.Tensor, w: Any, s: Any, eps: float) -> None:
    r.add_(x)
    o.copy_(rounded(norm(r, w, eps), s))


def void(*_: Any) -> None:
    """What an operator that writes returns."""


FUNCTIONS: dict[str, Any] = {
    "rms_norm(Tensor(a!) result, Tensor input, Tensor weight, float epsilon)": (
        lambda o, x, w, e: void(o.copy_(norm(x, w, e)))
    ),
    "add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon)": added,
    "quant(Tensor(a!) result, Tensor input, Tensor scale)": lambda o, x, s: void(o.copy_(rounded(x, s))),
    "rms_norm_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor scale, float epsilon)": (
        lambda o, x, w, s, e: void(o.copy_(rounded(norm(x, w, e), s)))
    ),
    "add_rms_norm_quant(Tensor(a!) result, Tensor input, Tensor(b!) residual, Tensor weight, Tensor scale, "
    "float epsilon)": (added_and_rounded),
    "relu_quant(Tensor(a!) result, Tensor input, Tensor zeros)": void,
}
for _schema, _function in FUNCTIONS.items():
    LIBRARY.define(f"{_schema} -> ()")
    LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
NAMES = [
    f"tests_quantization::{name}"
    for name in ("rms_norm", "add_rms_norm", "quant", "rms_norm_quant", "add_rms_norm_quant")
]
NORM, ADDED, QUANT, NORM_QUANT, ADDED_QUANT = NAMES
INPUTS = [torch.rand(3, 8), torch.rand(8), torch.rand(1) * 0.01]


def after_autograd(model: Any) -> fx.GraphModule:
    gm = make_fx(model, decomposition_table=dict(inductor_table()), tracing_mode="symbolic")(*INPUTS)
    gm.graph.eliminate_dead_code()
    return gm


def quant(x: Any, scale: Any, *, second: bool) -> Any:
    out = torch.empty_like(x, dtype=torch.int8)
    if second:
        return HOP2(OPS.quant.default, input=x, scale=scale, _result_base_index=0, _all_bases=[out])[1]
    return HOP(OPS.quant.default, result=out, input=x, scale=scale)[1]


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_norms(epsilon: float, second: bool) -> None:
    def plain(x: Any, w: Any, scale: Any) -> Any:
        out = HOP(OPS.rms_norm.default, result=torch.empty_like(x), input=x, weight=w, epsilon=epsilon)[1]
        return quant(out, scale, second=second)

    def with_residual(x: Any, w: Any, scale: Any) -> Any:
        both = HOP(OPS.add_rms_norm.default, input=x, residual=x + 1, weight=w, epsilon=epsilon)
        return quant(both[1], scale, second=second), both[2]

    def last(x: Any, w: Any, scale: Any) -> Any:
        return with_residual(x, w, scale)[0]

    added_norms = quantized(ADDED, QUANT, ADDED_QUANT)
    for model, rules, fired in (
        (plain, quantized(NORM, QUANT, NORM_QUANT), "rms_norm_quant.fuse"),
        (with_residual, added_norms, "add_rms_norm_quant.fuse"),
        (last, added_norms, "add_rms_norm_quant.without_residual"),
    ):
        gm = after_autograd(model)
        expected = gm(*INPUTS)
        assert rules.once().expect(fired).apply(gm).rewrites == 1
        torch.testing.assert_close(gm(*INPUTS), expected)
        assert rules.apply(gm).rewrites == 0


def test_a_result_that_is_read_elsewhere_stays() -> None:
    def model(x: Any, w: Any, scale: Any) -> Any:
        out = HOP(OPS.rms_norm.default, result=torch.empty_like(x), input=x, weight=w, epsilon=1e-5)[1]
        return quant(out, scale, second=False), out.sum()

    gm = after_autograd(model)
    (one,) = quantized(NORM, QUANT, NORM_QUANT).rules()
    why = one.explain(gm)
    assert why.num_matches == 0
    assert "outside the match" in str(why)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((NORM, QUANT, "tests_quantization::relu_quant"), "takes zeros, which neither of the others has"),
        ((NORM, QUANT, "tests_quantization::missing"), "there is no operator tests_quantization::missing"),
        (("aten::relu", QUANT, NORM_QUANT), "aten::relu"),
    ],
)
def test_operators_that_do_not_fit(names: tuple[str, str, str], said: str) -> None:
    with pytest.raises(RuleDefinitionError, match=said):
        quantized(*names)
