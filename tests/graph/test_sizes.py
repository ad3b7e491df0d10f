"""Sizes: compared and divided without guards, written as nodes of the inputs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import fx

from fxrewrite import Edit
from fxrewrite.capture import normalize
from fxrewrite.graph import divide_exactly, is_same_size, product
from fxrewrite.graph.sizes import SizeNodes, is_same_stride, require_divisible, size_hint
from tests.dynamo import caught


def _graph(run: Any, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[Any]]:
    return caught(run, *inputs, inside=normalize, dynamic=True)


def _sizes() -> tuple[Any, Any]:
    gm, _ = _graph(lambda x: x + 1, torch.ones(3, 5))
    value = next(n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return value.shape


def test_plain_integers() -> None:
    assert is_same_size(4, 4)
    assert divide_exactly(12, 4) == 3
    assert divide_exactly(12, 5) is None
    assert divide_exactly(0, 0) is None
    assert product([2, 3, 4]) == 24


def test_symbols_divide_without_guards() -> None:
    a, b = _sizes()
    guards = len(a.node.shape_env.guards)
    assert is_same_size(divide_exactly(a * b, a), b)
    assert divide_exactly(a, b) is None
    assert divide_exactly(a, 2) is None
    assert not is_same_size(a, b)
    assert not is_same_size(a, 3)
    assert len(a.node.shape_env.guards) == guards


def test_strides_are_equal_where_there_are_entries() -> None:
    a, b = _sizes()
    chunk, guards = b // 4, len(a.node.shape_env.guards)
    assert not is_same_size(6 * torch.sym_max(1, chunk), 6 * chunk)
    assert is_same_stride(6 * torch.sym_max(1, chunk), 6 * chunk)
    assert not is_same_stride(6 * torch.sym_max(1, chunk), 6 * a)
    assert not is_same_stride(6 * torch.sym_max(1, chunk), 6)
    assert not is_same_stride(4, 6)
    assert len(a.node.shape_env.guards) == guards


def test_a_hint_is_at_least_so_large_where_it_grows_with_an_inner_dimension() -> None:
    gm, _ = _graph(lambda x, y: (x + 1, y[:, 1:]), torch.ones(3, 5), torch.ones(3, 104))
    x, y, *_ = [v for node in gm.graph.nodes if isinstance(v := node.meta.get("val"), torch.Tensor)]
    guards = len(x.shape[0].node.shape_env.guards)
    assert size_hint(7, at_least=100) == 7
    assert size_hint(x.shape[0], at_least=100) == 3
    assert size_hint(x.numel() * 2 // 3, at_least=100) == 200
    assert size_hint(x.numel() * 2 // 3, at_least=50) == 100
    assert size_hint(x.numel() * 2 // 3) == 10
    assert size_hint(y.numel() - x.shape[1], at_least=100) == 3 * 104 - 5
    assert len(x.shape[0].node.shape_env.guards) == guards


def test_divisibility_of_the_length_at_hand_is_guarded() -> None:
    _, b = _sizes()
    guards = len(b.node.shape_env.guards)
    assert not require_divisible(b, 2)
    assert len(b.node.shape_env.guards) == guards + 1


def test_nodes_are_made_once_of_the_inputs() -> None:
    gm, inputs = _graph(lambda x: x * 2, torch.ones(3, 5))
    value = next(n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    a, b = value.shape
    sizes = SizeNodes(gm.graph)
    node = sizes(a * b // 2)
    assert isinstance(node, fx.Node)
    assert sizes(a * b // 2) is node
    assert sizes(7) == 7
    out = gm.graph.output_node()
    out.args = ((node,),)
    gm.recompile()
    assert gm(*inputs) == (7,)


def test_nodes_that_were_taken_back_are_made_again() -> None:
    gm, inputs = _graph(lambda x: x * 2, torch.ones(3, 5))
    value = next(n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    with Edit(gm) as edit:
        sizes = SizeNodes(gm.graph, lambda op, args, before: edit.call(op, args, before=before, val=None))
        first = sizes(value.shape[0] + 1)
        with suppress(ZeroDivisionError), edit.savepoint():
            sizes(value.shape[1] + 1)
            raise ZeroDivisionError
        assert isinstance(first, fx.Node)
        edit.erase(first)
        again = [sizes(size + 1) for size in value.shape]
        gm.graph.output_node().args = (tuple(again),)
    gm.graph.lint()
    gm.recompile()
    assert gm(*inputs) == (4, 6)


def test_sizes_stand_in_front_of_what_came_to_the_front() -> None:
    gm, _ = _graph(lambda x: x * 2, torch.ones(3, 5))
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    sizes = SizeNodes(gm.graph)
    sizes(first.meta["val"].shape[0] + 1)
    with gm.graph.inserting_before(first):
        came = gm.graph.call_function(torch.neg, (first.args[0],))
    later = sizes(first.meta["val"].shape[1] * 3)
    assert isinstance(later, fx.Node)
    assert later < came
