"""torch.vmap has no trace in the normal form, which computes the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxrewrite.graph import source_line
from tests.capture.test_functionalize import assert_equal, normal_and_inputs, weights

aten = torch.ops.aten
Body = Callable[..., torch.Tensor]


def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda a, b: (a * b).softmax(0) + a.sum())(x, y) * 2


def columns_of_two_results(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    up, down = torch.vmap(lambda a, b: (a + b, a - b), in_dims=(1, None), out_dims=(0, 1))(x, y[:, 0])
    return up @ down


def nested(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.vmap(lambda a, b: a.sin() * b))(x, y)


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.dot)(torch.vmap(torch.mul)(x, y), y)


def detached(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda a, b: a * b + (a * b).detach().sum() * a)(x, y)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "body", [rows, columns_of_two_results, nested, twice, detached], ids=lambda body: body.__name__
)
def test_values_and_gradients_are_bitwise_equal(body: Body, dynamic: bool) -> None:
    gm, normal, inputs = normal_and_inputs(body, *weights(), dynamic=dynamic)
    assert any("_add_batch_dim" in str(node.target) for node in gm.graph.nodes)
    assert all("batch_dim" not in str(n.target) and "vmap" not in str(n.target) for n in normal.graph.nodes)
    assert_equal(gm, normal, inputs)


def test_source_lines_and_checkpoints_are_kept() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> Any:
        return checkpoint(nested, x, y, use_reentrant=False)

    gm, normal, inputs = normal_and_inputs(body, *weights())
    assert_equal(gm, normal, inputs)
    (sine,) = normal.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert source_line(sine).startswith("test_vmap.py:")
    assert sine.meta["recompute"] == CheckpointPolicy.PREFER_RECOMPUTE


def test_a_switch_of_autograd_inside_is_refused() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = a.sum()
            return b * scale

        return torch.vmap(row)(x, y)

    with pytest.raises(Exception, match="a vmap whose function is not a plain composition of operators"):
        normal_and_inputs(body, *weights())
