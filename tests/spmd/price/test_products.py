"""Operations of products, forward and backward: matrix products, convolutions, and what rules declare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import rules.layouts  # declares attention
import rules.tiling.loss  # noqa: F401  # declares the tiled loss
from fxrewrite.spmd.price.products import backward_operations, operations
from fxrewrite.spmd.price.program_price import program_price
from rules.tiling.mlp import tiled_mlp

aten = torch.ops.aten
X, FILTER = torch.rand(2, 3, 8, 8), torch.rand(5, 3, 4, 4)
ROWS, UP, DOWN = torch.rand(6, 8), torch.rand(16, 8), torch.rand(8, 16)
HEADS = torch.rand(2, 4, 6, 8)

CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], float, float]] = {
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=4), (X, FILTER), 2 * 2 * 5 * 2 * 2 * 3 * 4 * 4, 2),
    "conv_transpose2d": (F.conv_transpose2d, (X, FILTER[:3]), 2 * 2 * 3 * 8 * 8 * 3 * 4 * 4, 2),
    "linear": (F.linear, (ROWS, UP), 2 * 6 * 8 * 16, 2),
    "attention": (F.scaled_dot_product_attention, (HEADS, HEADS, HEADS), 2 * 2 * 2 * 4 * 6 * 6 * 8, 2.5),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (HEADS, HEADS, HEADS),
        2 * 2 * 4 * 6 * 6 * 8,
        2.5,
    ),
    "a tiled MLP": (
        lambda x, a, b: tiled_mlp(x, [a, b], [], [False, False], "relu(x0)", 64),
        (ROWS, UP, DOWN),
        2 * 6 * 2 * 8 * 16,
        3,
    ),
    "a tiled loss": (
        lambda x, w: torch.ops.fxrewrite_rules.tiled_cross_entropy(
            x, w, None, torch.zeros(6, dtype=torch.int64), None, "", "sum", -100, 0.0, 64
        ),
        (ROWS, UP),
        2 * 6 * 8 * 16,
        2,
    ),
}


def _product(gm: fx.GraphModule) -> fx.Node:
    (node,) = (node for node in gm.graph.nodes if node.op == "call_function" and operations(node))
    return node


@pytest.mark.parametrize("name", CALLS)
def test_operations_forward_and_backward(name: str) -> None:
    call, values, forward, backward = CALLS[name]
    gm = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*values)
    node = _product(gm)
    assert operations(node) == forward
    assert backward_operations(node, set(gm.graph.nodes)) == backward * forward


def test_a_factor_without_a_gradient_takes_no_product() -> None:
    gm = make_fx(lambda x, w: F.conv2d(x, w, stride=4), tracing_mode="fake", pre_dispatch=True)(X, FILTER)
    node = _product(gm)
    *_, weight = gm.graph.find_nodes(op="placeholder")
    assert backward_operations(node, {weight}) == operations(node)
    assert program_price(gm, {}).flops == 3 * operations(node)
