"""What the table calls linear is linear, operator by operator, in numbers; what is not is not called so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import ops
from fxrewrite.graph import linear
from fxrewrite.graph.linear import is_linear

aten = torch.ops.aten
X, Y = (torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
M = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
ROWS, MASK = torch.tensor([2, 0, 3, 1]), X > 0
ZERO = torch.zeros_like(X)

LINEAR: dict[str, Callable[..., Any]] = {
    "clone": lambda g: aten.clone(g),
    "contiguous": lambda g: aten.contiguous(g.t()),
    "detach": lambda g: aten.detach(g),
    "detach_copy": lambda g: aten.detach_copy(g),
    "alias": lambda g: aten.alias(g),
    "expand": lambda g: aten.expand(g, [3, 4, 6]),
    "expand_as": lambda g: aten.expand_as(g, torch.ones(3, 4, 6)),
    "flatten": lambda g: aten.flatten(g),
    "flip": lambda g: aten.flip(g, [0]),
    "gather": lambda g: aten.gather(g, 0, ROWS[:, None]),
    "index": lambda g: aten.index(g, [ROWS]),
    "index_select": lambda g: aten.index_select(g, 0, ROWS),
    "mean": lambda g: aten.mean(g, [0]),
    "movedim": lambda g: aten.movedim(g, 0, 1),
    "narrow": lambda g: aten.narrow(g, 0, 1, 2),
    "neg": lambda g: aten.neg(g),
    "permute": lambda g: aten.permute(g, [1, 0]),
    "repeat": lambda g: aten.repeat(g, [2, 1]),
    "ravel": lambda g: aten.ravel(g),
    "reshape": lambda g: aten.reshape(g, [24]),
    "reshape_as": lambda g: aten.reshape_as(g, torch.ones(24)),
    "roll": lambda g: aten.roll(g, [1], [0]),
    "select": lambda g: aten.select(g, 0, 1),
    "slice": lambda g: aten.slice(g, 0, 1, 3),
    "split": lambda g: aten.split(g, 2)[1],
    "split_with_sizes": lambda g: aten.split_with_sizes(g, [1, 3])[1],
    "chunk": lambda g: aten.chunk(g, 2)[1],
    "squeeze": lambda g: aten.squeeze(g[:, :1]),
    "sum": lambda g: aten.sum(g, [1]),
    "sum_to_size": lambda g: aten.sum_to_size(g, [1, 6]),
    "t": lambda g: aten.t(g),
    "to": lambda g: aten.to(g, torch.complex128),
    "_to_copy": lambda g: aten._to_copy(g, dtype=torch.complex128),
    "type_as": lambda g: aten.type_as(g, Y),
    "transpose": lambda g: aten.transpose(g, 0, 1),
    "swapaxes": lambda g: aten.swapaxes(g, 0, 1),
    "tril": lambda g: aten.tril(g),
    "triu": lambda g: aten.triu(g),
    "diagonal": lambda g: aten.diagonal(g),
    "unbind": lambda g: aten.unbind(g)[1],
    "_unsafe_view": lambda g: aten._unsafe_view(g, [24]),
    "unflatten": lambda g: aten.unflatten(g, 1, [2, 3]),
    "unfold": lambda g: aten.unfold(g, 0, 2, 1),
    "unsqueeze": lambda g: aten.unsqueeze(g, 0),
    "view": lambda g: aten.view(g, [24]),
    "view_as": lambda g: aten.view_as(g, torch.ones(24)),
    "cumsum": lambda g: aten.cumsum(g, 0),
    "add": lambda g: aten.add(g, aten.neg(g), alpha=3),
    "sub": lambda g: aten.sub(g, aten.flip(g, [0])),
    "rsub": lambda g: aten.rsub(g, aten.flip(g, [0])),
    "where": lambda g: aten.where(MASK, g, aten.zeros_like(g)),
    "scatter_add": lambda g: aten.scatter_add(g, 0, ROWS[:, None], aten.neg(g)),
    "slice_scatter": lambda g: aten.slice_scatter(g, aten.neg(g[:2]), 0, 1, 3),
    "select_scatter": lambda g: aten.select_scatter(g, aten.neg(g[0]), 0, 2),
    "index_add": lambda g: aten.index_add(g, 0, ROWS, aten.neg(g)),
    "index_put": lambda g: aten.index_put(g, [ROWS], aten.neg(g)),
    "cat": lambda g: aten.cat([g, aten.neg(g)]),
    "stack": lambda g: aten.stack([g, aten.neg(g)]),
    "div": lambda g: aten.div(g, Y),
    "masked_fill": lambda g: aten.masked_fill(g, MASK, 0),
    "mul": lambda g: aten.mul(Y, g),
    "matmul": lambda g: aten.matmul(g, M),
    "mm": lambda g: aten.mm(M, aten.t(g)),
    "bmm": lambda g: aten.bmm(g[None], M[None]),
    "linear": lambda g: aten.linear(g, M),
    "mv": lambda g: aten.mv(g, M[0]),
    "dot": lambda g: aten.dot(g[0], M[0]),
    "outer": lambda g: aten.outer(g[0], M[0]),
    "zeros": lambda g: aten.zeros_like(g) * g + aten.new_zeros(g, [4, 6]),
}
NOT_LINEAR: dict[str, Callable[..., Any]] = {
    "a constant": lambda g: Y * 2,
    "a constant is added": lambda g: g + 1,
    "a constant tensor is added": lambda g: g + Y,
    "a product of both": lambda g: g * g,
    "in the denominator": lambda g: Y / g,
    "clipped": lambda g: g.clamp(-1, 1),
    "its sign": lambda g: g.sign(),
    "normalized": lambda g: g / g.norm(),
    "where it is positive": lambda g: aten.where(g > 0, g, ZERO),
    "where, or a constant": lambda g: aten.where(MASK, g, Y),
    "filled with a number": lambda g: aten.masked_fill(g, MASK, 1.0),
    "indexed by itself": lambda g: aten.index(Y, [g.argmax(0)]),
    "as integers": lambda g: g.to(torch.int64).to(torch.float64),
    "rounded": lambda g: aten.div(g, 2.0, rounding_mode="floor"),
    "with a bias": lambda g: aten.linear(g, M, M[0]),
    "joined with a constant": lambda g: aten.cat([g, Y]),
    "ones of its shape": lambda g: aten.ones_like(g),
    "one of two results": lambda g: (g * 2, g + 1),
}


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    return make_fx(function, pre_dispatch=True)(X)


def says(function: Callable[..., Any]) -> bool:
    gm = traced(function)
    return is_linear(gm.graph, gm.graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_called_linear_is(name: str) -> None:
    function = LINEAR[name]
    assert says(function)
    torch.testing.assert_close(function(3 * X + 2 * Y), 3 * function(X) + 2 * function(Y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_is_not_called_so(name: str) -> None:
    assert not says(NOT_LINEAR[name])


def test_every_operator_of_the_table_is_tested() -> None:
    called = {ops.key(node) for function in LINEAR.values() for node in traced(function).graph.nodes}
    affine = {"aten::addmm", "aten::baddbmm", "aten::_grouped_mm"}  # they add, or read where groups end
    table = {*linear._JOINTLY, *linear._EACH} - affine
    assert table <= called, sorted(table - called)


def test_other_inputs_are_constants() -> None:
    gm = make_fx(lambda g, x: g * x.exp(), pre_dispatch=True)(X, Y)
    gradient, saved = gm.graph.find_nodes(op="placeholder")
    assert is_linear(gm.graph, [gradient])
    assert not is_linear(gm.graph, [saved])


def test_what_is_filled_with_a_number_of_an_input_is_not_constant() -> None:
    graph = torch.fx.Graph()
    g = graph.placeholder("g")
    number = graph.call_function(aten.item.default, (g,))
    graph.output(graph.call_function(aten.full_like.default, (g, number)))
    assert not linear.is_linear(graph, [g])
    filled = next(node for node in graph.nodes if ops.key(node) == "aten::full_like")
    assert linear._fact(filled, {g: "linear", number: "other"}) == "other"
