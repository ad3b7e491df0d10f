"""What is written of a graph as steps computes the same, and has the same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it

from rules.tiling.steps import dtype_after, run_steps, step_of, why_no_step
from tests.rewriting import traced, value_and_gradients

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CASES: dict[str, Function] = {
    "add(v0, v0); mul(v2, v0); sub(v3, v1)": lambda a, b: (a + a) * a - b,
    "add(v0, 1.5); sub(v2, v1, alpha=2)": lambda a, b: torch.sub(a + 1.5, b, alpha=2),
    "clamp(v0, -0.5, 1.0); mul(v2, v1)": lambda a, b: a.clamp(-0.5, 1.0) * b,
    "clamp(v0, None, 0.25); div(v2, v1)": lambda a, b: a.clamp(max=0.25) / b,
    "gelu(v0); gelu(v1, approximate='tanh'); mul(v2, v3)": lambda a, b: F.gelu(a) * F.gelu(b, approximate="tanh"),
    "part(v0, 0, 3, 1); part(v0, 1, 6, 2); mul(v2, v3); add(v4, v1)": lambda a, b: a[..., :3] * a[..., 1::2] + b,
    "pow(v0, 0); erf(v1); rsub(v2, v3)": lambda a, b: torch.rsub(a**0, b.erf()),
    "silu(v0); softplus(v1, 2, 1.0); mul(v2, v3)": lambda a, b: F.silu(a) * F.softplus(b, 2, 1.0),
    "to(v0, 'float32'); to(v2, 'float64'); mul(v3, v1)": lambda a, b: a.float().double() * b,
}


@pytest.mark.parametrize("steps", CASES)
def test_a_graph_as_steps(steps: str) -> None:
    widths = (6, 3) if "part" in steps else (6, 6)
    a, b = (torch.randn(5, width, dtype=torch.float64) for width in widths)
    assert written(CASES[steps], a, b) == steps
    expected = value_and_gradients(CASES[steps], [a, b])
    found = value_and_gradients(lambda *given: run_steps(steps, given), [a, b])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def written(function: Function, a: torch.Tensor, b: torch.Tensor) -> str:
    gm = traced(function, a, b)
    first, second, *calls, _ = gm.graph.nodes
    names, steps = {first: "v0", second: "v1"}, list[str]()
    for node in calls:
        assert not why_no_step(node)
        steps.append(step_of(node, names))
        names[node] = f"v{len(names)}"
    return "; ".join(steps)


def test_columns_that_are_counted_from_the_end() -> None:
    gm = traced(lambda x: (x.split([2, 4], -1)[0], torch.narrow(x, -1, -3, 3)), torch.rand(2, 6))
    x = next(iter(gm.graph.nodes))
    item, narrow = (next(n for n in gm.graph.nodes if name in n.name) for name in ("getitem", "narrow"))
    item.update_arg(1, -1)
    names = {x: "v0"}
    assert [step_of(node, names) for node in (item, narrow)] == ["part(v0, 2, 6, 1)", "part(v0, 3, 6, 1)"]


def test_the_dtype_of_a_result_is_promoted() -> None:
    steps = "to(v0, 'float32'); to(v1, 'bfloat16'); mul(v1, v2)"
    assert dtype_after(steps, torch.bfloat16) is run_steps(steps, [torch.ones(2, dtype=torch.bfloat16)]).dtype
    assert dtype_after("mul(v0, 2.0)", torch.float16) is torch.float16
