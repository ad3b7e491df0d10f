"""Every step computes what torch computes, and its gradients are those of autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it

from rules.tiling import steps
from rules.tiling.steps import dtype_after, grads_of_steps, run_steps, step_of
from tests.rewriting import traced

CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add(v0, v1)": lambda a, b: a + b,
    "add(v0, v0); mul(v2, v0); sub(v3, v1)": lambda a, b: (a + a) * a - b,
    "add(v0, 1.5); sub(v2, v1)": lambda a, b: a + 1.5 - b,
    "clamp(v0, -0.5, 1.0); mul(v2, v1)": lambda a, b: a.clamp(-0.5, 1.0) * b,
    "clamp(v0, None, 0.25); div(v2, v1)": lambda a, b: a.clamp(max=0.25) / b,
    "div(v0, 3); mul(v2, v1)": lambda a, b: a / 3 * b,
    "gelu(v0, 'none'); gelu(v1, 'tanh'); mul(v2, v3)": lambda a, b: F.gelu(a) * F.gelu(b, approximate="tanh"),
    "leaky_relu(v0, 0.1); sigmoid(v1); mul(v2, v3)": lambda a, b: F.leaky_relu(a, 0.1) * b.sigmoid(),
    "mish(v0); tanh(v1); sub(v2, v3)": lambda a, b: F.mish(a) - b.tanh(),
    "neg(v0); relu(v1); mul(v2, v3)": lambda a, b: -a * b.relu(),
    "part(v0, 0, 3, 1); part(v0, 1, 6, 2); mul(v2, v3); add(v4, v1)": lambda a, b: a[..., :3] * a[..., 1::2] + b,
    "pow(v0, 3.0); pow(v1, 2); mul(v2, v3)": lambda a, b: a**3.0 * b**2,
    "pow(v0, 0); mul(v2, v1); add(v3, v0)": lambda a, b: a**0 * b + a,
    "relu(v0); square(v2); mul(v3, v1)": lambda a, b: a.relu().square() * b,
    "to(v0, 'float64'); mul(v2, v1)": lambda a, b: a * b,
    "silu(v0); softplus(v1, 2.0, 1.0); mul(v2, v3)": lambda a, b: F.silu(a) * F.softplus(b, 2.0, 1.0),
}


@pytest.mark.parametrize("steps", CASES)
def test_values_and_gradients_are_those_of_torch(steps: str) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = (6, 3) if "part" in steps else (6, 6)
    a, b = (torch.randn(5, width, generator=generator, dtype=torch.float64) for width in widths)
    a[0, :3] = torch.tensor([0.0, -0.5, 1.0])
    expected = CASES[steps](a.requires_grad_(), b.requires_grad_())
    seed = torch.rand(expected.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        values = run_steps(steps, [a, b])
        grads = grads_of_steps(steps, values, seed)
    torch.testing.assert_close(values[-1], expected, rtol=1e-14, atol=1e-14)
    for grad, want in zip(grads, torch.autograd.grad(expected, (a, b), seed), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-13, atol=1e-14)


def test_every_kind_of_step_has_a_case() -> None:
    kinds = steps._BY_NAME  # pyright: ignore[reportPrivateUsage]
    assert not [name for name in kinds if not any(f"{name}(" in steps for steps in CASES)]


def test_columns_that_are_counted_from_the_end() -> None:
    gm = traced(lambda x: (x.split([2, 4], -1)[0], torch.narrow(x, -1, -3, 3)), torch.rand(2, 6))
    x = next(iter(gm.graph.nodes))
    item, narrow = (next(n for n in gm.graph.nodes if name in n.name) for name in ("getitem", "narrow"))
    item.update_arg(1, -1)
    names = {x: "v0"}
    assert [step_of(node, names) for node in (item, narrow)] == ["part(v0, 2, 6, 1)", "part(v0, 3, 6, 1)"]


def test_the_dtype_of_a_result_is_promoted() -> None:
    steps = "to(v0, 'float32'); to(v1, 'bfloat16'); mul(v1, v2)"
    assert dtype_after(steps, torch.bfloat16) is run_steps(steps, [torch.ones(2, dtype=torch.bfloat16)])[-1].dtype
    assert dtype_after("mul(v0, 2.0)", torch.float16) is torch.float16
