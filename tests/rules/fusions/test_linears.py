"""Parallel linears are one linear, split; those that cannot be put under each other stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from rules.fusions.linears import LINEARS, STACKED_LINEARS
from tests.rewriting import check_left_alone, check_stages, exported

Forward = Callable[[Any, torch.Tensor], Any]
D = 8


class Model(nn.Module):
    """Linears of `sizes`, used by `forward`."""

    def __init__(self, forward: Forward, bias: tuple[bool, ...] = (False, False, False)) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, n, bias=b) for n, b in zip((8, 4, 6), bias, strict=True))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


def qkv(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return m.q(x).relu(), m.k(x).tanh(), m.v(x)


def swiglu(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.silu(m.q(x)[..., :4]) * m.k(x)


CASES: dict[str, tuple[Model, dict[str, int]]] = {
    "q k v": (Model(qkv), {"merge": 1}),
    "q k v with biases": (Model(qkv, (True, True, True)), {"merge_biased": 1}),
    "one without a bias": (Model(qkv, (True, False, True)), {"merge_biased": 1}),
    "two inputs": (Model(lambda m, x: (m.q(x), m.k(x), m.v(x + 1), m.q(x + 2))), {"merge": 1}),
    "gate and up": (Model(swiglu), {"merge": 1}),
    "one after another's use": (Model(lambda m, x: (m.q(x).relu() + m.v(x).sum(-1, True), m.k(x))), {"merge": 1}),
}


def called(model: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[fx.GraphModule, torch.Tensor]:
    x = torch.randn(2, 3, D).to(dtype)
    return exported(model, x), x


def values_and_gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    values = model(x)
    values = values if isinstance(values, tuple) else (values,)
    torch.autograd.backward([value.square().sum() for value in values])
    found = {f"value {i}": value.detach() for i, value in enumerate(values)}
    assert x.grad is not None
    return {
        **found,
        "x": x.grad,
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_one_linear(case: str, dtype: torch.dtype) -> None:
    model, rewrites = CASES[case]
    model = model.to(dtype)
    gm, x = called(model, dtype)
    before = sum(node.target is torch.ops.aten.linear.default for node in gm.graph.nodes)
    report = LINEARS.apply(gm)
    assert {e.rule.partition(".")[2]: e.rewrites for e in report.rules if e.rewrites} == rewrites
    gm.graph.lint()
    after = sum(node.target is torch.ops.aten.linear.default for node in gm.graph.nodes)
    assert after == {"one without a bias": 2, "two inputs": 3}.get(case, 1) < before
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(
        values_and_gradients(gm, x), values_and_gradients(model, x), rtol=tolerance, atol=tolerance
    )
    assert LINEARS.apply(gm).rewrites == 0


@pytest.mark.parametrize("case", CASES)
def test_stacked_once(case: str) -> None:
    model, rewrites = CASES[case]
    gm, x = called(model.double())
    report = STACKED_LINEARS.apply(gm)
    assert {e.rule.partition(".stack")[2]: e.rewrites for e in report.rules if e.rewrites} == {
        name.removeprefix("merge"): count for name, count in rewrites.items()
    }
    torch.testing.assert_close(gm(x), model(x), rtol=1e-12, atol=1e-12)
    stacked = {name for name in gm.state_dict() if name.startswith(("weights", "biases"))}
    single = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")} - stacked
    assert stacked
    assert set(gm.state_dict()) <= stacked | single | set(model.state_dict())
    assert not {"weights", "weights_1"} <= stacked or case == "two inputs"
    assert STACKED_LINEARS.apply(gm).rewrites == 0


@pytest.mark.parametrize(
    ("rule", "forward", "reason"),
    [
        ("merge", lambda m, x: m.q(x).relu(), "sibling"),
        (
            "merge",
            lambda m, x: (m.q(x), F.linear(x, m.k.weight * 2)),
            "expected a parameter at root.weight, found aten::mul (%mul)",
        ),
        ("merge", lambda m, x: (F.linear(x, m.q.weight), F.linear(x, m.vector)), "w has rank 1"),
        (
            "merge_biased",
            lambda m, x: (F.linear(x, m.q.weight, m.one), F.linear(x, m.k.weight, m.one)),
            "size(b, 0) is 1",
        ),
    ],
)
def test_leaves_alone(rule: str, forward: Forward, reason: str) -> None:
    model = Model(forward)
    model.vector, model.one = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(1))
    gm, x = called(model.float(), torch.float32)
    check_left_alone(LINEARS, f"linears.{rule}", gm, [x], reason)


def test_refuses_weights_of_several_dtypes() -> None:
    def autocast(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return m.q(x), m.k(x)

    gm, _ = called(Model(autocast).float(), torch.float32)
    other = next(node for node in gm.graph.nodes if node.op == "get_attr" and "k" in str(node.target))
    other.meta["val"] = other.meta["val"].to(torch.bfloat16)  # what a graph traced under autocast can hold
    (refusal,) = LINEARS.apply(gm).refusals
    assert refusal.reason == "the weights are float32 on cpu, bfloat16 on cpu"


def test_before_and_after(fx_snapshot: Any) -> None:
    model = Model(lambda m, x: F.silu(m.q(x)) * m.k(x).sum() + m.v(x).sum(), (True, False, False))
    check_stages(called(model.double())[0], fx_snapshot, after=LINEARS)
