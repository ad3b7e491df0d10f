"""Sizes: compared and divided without guards, written as nodes of the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite.graph import divide_exactly, is_same_size, normalize, product
from fxrewrite.graph.sizes import SizeNodes, require_divisible, size_hint


def _graph(run: Any, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[Any]]:
    found: list[Any] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.extend((normalize(gm), example_inputs))
        return gm

    torch.compile(run, backend=keep, fullgraph=True, dynamic=True)(*inputs)
    return found[0], [size_hint(v) if isinstance(v, torch.SymInt) else v for v in found[1]]


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
