"""Computed in tiles, a function has its value and its gradients, and holds one tile of what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosp_rules import AutoSPError, tiled_compute

BATCH, LENGTH, WIDTH, INNER, CLASSES = 2, 37, 8, 64, 11


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        return self.down(self.drop(F.silu(self.up(x)))) * scale


class Largest(TorchDispatchMode):
    """The largest number of entries of any result."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in (made if isinstance(made, (tuple, list)) else (made,)) if torch.is_tensor(t)]
        self.size = max(self.size, *sizes, 0)
        return made


def inputs() -> tuple[MLP, torch.Tensor]:
    torch.manual_seed(0)
    return MLP().double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def assert_equal(loss: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for grad, want in pairs:
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shards", [1, 5, 100])
def test_ragged_tiles_and_parameters_used_elsewhere(shards: int) -> None:
    mlp, x = inputs()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    cut = {"seqlen": LENGTH, "shards": shards, "kwargs_to_shard": {"x": x}, "kwargs_to_pass": {"scale": scale}}
    tiled = tiled_compute(mlp, **cut, grad_requiring_tensor_key="x", output_reduction=None)
    leaves = [x, scale, *mlp.parameters()]
    assert_equal((tiled + mlp(x[:, :1])).square().sum(), (mlp(x, scale) + mlp(x[:, :1])).square().sum(), leaves)


@pytest.mark.parametrize("counted", [False, True])
def test_a_mean_is_the_mean_of_tokens(counted: bool) -> None:
    mlp, x = inputs()
    labels = torch.randint(CLASSES, (BATCH, LENGTH))
    labels[:, 3 : 20 if counted else 3] = -100  # whole tiles without a token that counts
    head = nn.Linear(WIDTH, CLASSES).double()

    def loss(x: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return F.cross_entropy(head(mlp(x)).flatten(0, 1), labels.flatten(), reduction=reduction)

    how: dict[str, Any] = {"count": (labels != -100).sum(), "kwargs_to_pass": {"reduction": "sum"}} if counted else {}
    tiled = tiled_compute(loss, seqlen=LENGTH, shards=6, kwargs_to_shard={"x": x, "labels": labels}, **how)
    assert_equal(tiled, loss(x, labels), [x, *head.parameters(), *mlp.parameters()])


def test_results_of_tokens_are_summed_or_averaged() -> None:
    mlp, x = inputs()
    for reduction, expected in (("sum", mlp(x).sum()), ("mean", mlp(x).mean())):
        tiled = tiled_compute(mlp, seqlen=LENGTH, shards=4, kwargs_to_shard={"x": x}, output_reduction=reduction)
        assert_equal(tiled, expected, [x])


def test_the_backward_draws_what_the_forward_drew() -> None:
    mlp, x = inputs()
    mlp.drop.p = 0.5
    out = tiled_compute(mlp, seqlen=LENGTH, shards=3, kwargs_to_shard={"x": x}, output_reduction="sum")
    grad = torch.autograd.grad(out, mlp.down.weight)[0]
    kept = torch.autograd.grad(mlp.down.weight.mul(grad).sum(), mlp.down.weight)[0]
    torch.testing.assert_close((mlp.down.weight * kept).sum() + mlp.down.bias.sum() * BATCH * LENGTH, out)


def test_nothing_inside_is_held_whole() -> None:
    mlp, x = inputs()
    with Largest() as largest:
        tiled_compute(mlp, seqlen=LENGTH, shards=10, kwargs_to_shard={"x": x}, output_reduction="sum").backward()
    assert largest.size <= max(BATCH * 4 * INNER, BATCH * LENGTH * WIDTH)


def test_it_compiles_to_one_graph() -> None:
    mlp, x = inputs()

    def step(x: torch.Tensor) -> torch.Tensor:
        return tiled_compute(mlp, seqlen=LENGTH, shards=3, kwargs_to_shard={"x": x}, output_reduction="sum")

    assert_equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), mlp(x).sum(), [x])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shards": 0}, "0 tiles of a sequence of 37; pass shards=1"),
        ({"kwargs_to_shard": {}}, "nothing to shard"),
        ({"seqlen": 36}, r"x has shape \(2, 37, 8\), which has not 36 in dimension 1"),
        ({"kwargs_to_pass": {"x": 1}}, "x is both in kwargs_to_shard and in kwargs_to_pass"),
        ({"grad_requiring_tensor_key": "y"}, "grad_requiring_tensor_key='y' names no tensor"),
        ({"output_reduction": "max"}, "output_reduction='max'"),
        ({"count": 3, "output_reduction": "sum"}, "a count is what a mean is over"),
        ({"output_unshard_dimension": 0, "output_reduction": None}, r"a tile of 8 gave a result of shape \(2, 8, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], why: str) -> None:
    mlp, x = inputs()
    with pytest.raises(AutoSPError, match=why):
        tiled_compute(mlp, **{"seqlen": LENGTH, "shards": 5, "kwargs_to_shard": {"x": x}, **options})
