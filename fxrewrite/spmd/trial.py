"""Is an operator's layout rule true? The operator is run whole and on shards, forward and backward, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.layout import Axis, Layout, Replicated, Shard
from fxrewrite.spmd.propagate import redistribute

__all__ = ["LayoutTrial", "try_layouts"]

Apply = Callable[[fx.GraphModule, SpmdContext], Any]
"""Turns a graph with redistributions into a local program, in place; returns a report with `lines`."""
Run = Callable[[fx.GraphModule, Sequence[Any], int], tuple[list[Any], list[torch.Tensor | None]]]
"""Runs a local program on so many ranks: the outputs of each, and each input's gradient averaged over the ranks."""


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """One operator run with one operand sharded on one dimension."""

    operand: int
    dim: int
    gathered: bool
    """Whether some operand had to be made whole: the rule allows no sharding here."""
    error: float
    """Largest absolute difference of a result or gradient from the operator run whole, over all ranks."""


def try_layouts(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, axis: Axis, apply: Apply, run: Run
) -> Iterator[LayoutTrial]:
    """Shard each tensor operand on each dimension that divides over the axis, one at a time.

    `target` is a torch operator, `args` and `kwargs` hold real tensors; what requires a gradient is differentiated.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for operand, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if size and size % axis.size == 0:
                yield _trial(target, leaves, spec, operand, dim, axis, apply, run)


def _trial(
    target: Any, leaves: list[Any], spec: Any, operand: int, dim: int, axis: Axis, apply: Apply, run: Run
) -> LayoutTrial:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    expected = _flat(_call(target, leaves, spec, iter(inputs)))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(v.shape, dtype=v.dtype, generator=generator) for v in expected if v.is_floating_point()]
    weighted = [(v * w).sum() for v, w in zip([v for v in expected if v.is_floating_point()], weights, strict=True)]
    loss = sum(weighted, torch.zeros((), dtype=torch.float64))
    if loss.requires_grad:
        loss.backward()
    gm = _graph(target, leaves, spec, inputs, weights, operand, dim, axis)
    report = apply(gm, SpmdContext(axis, output_layout=_whole))
    outputs, grads = run(gm, [*(x.detach().requires_grad_(x.requires_grad) for x in inputs), *weights], axis.size)
    error = 0.0
    for results in outputs:
        for found, want in zip(results[1:], expected, strict=True):
            assert (found.shape, found.dtype) == (want.shape, want.dtype), (found.shape, want.shape)
            error = max(error, _difference(found, want.detach()))
    for found, value in zip(grads, inputs, strict=False):
        if value.grad is not None:
            assert found is not None, "a gradient is missing"
            error = max(error, _difference(found, value.grad))
    return LayoutTrial(operand, dim, any("gathered" in line for line in report.lines), error)


def _whole(node: fx.Node, layout: Layout) -> Layout:
    return Replicated()


def _call(target: Any, leaves: list[Any], spec: Any, tensors: Iterator[Any]) -> Any:
    args, kwargs = pytree.tree_unflatten([next(tensors) if isinstance(v, torch.Tensor) else v for v in leaves], spec)
    return target(*args, **kwargs)


def _flat(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _graph(
    target: Any,
    leaves: list[Any],
    spec: Any,
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    operand: int,
    dim: int,
    axis: Axis,
) -> fx.GraphModule:
    """output((sum of results * weights), results ...) with one operand lying sharded."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    mode = FakeTensorMode()
    proxies = []
    for number, value in enumerate([*inputs, *weights]):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = mode.from_tensor(value)
        proxies.append(fx.Proxy(node, tracer))
    operands = list(proxies[: len(inputs)])
    move: tuple[Any, ...] = (operands[operand].node, Replicated(), Shard(dim), axis)
    moved = graph.call_function(redistribute, move)
    moved.meta["val"] = operands[operand].node.meta["val"]
    operands[operand] = fx.Proxy(moved, tracer)
    result = _call(target, leaves, spec, iter(operands))
    with mode:
        value = _call(target, leaves, spec, iter(p.node.meta["val"] for p in operands))
    result.node.meta["val"] = value
    is_many = isinstance(value, (list, tuple))
    results = [_item(result, i, v) for i, v in enumerate(value)] if is_many else [result]
    floats = [r for r in results if r.node.meta["val"].is_floating_point()]
    total = None
    for r, weight in zip(floats, proxies[len(inputs) :], strict=True):
        product = torch.ops.aten.mul.Tensor(r, weight)
        term = torch.ops.aten.sum.default(product)
        total = term if total is None else torch.ops.aten.add.Tensor(total, term)
    graph.output(((total.node if total is not None else None), *(r.node for r in results)))
    gm = fx.GraphModule({}, graph)
    with mode:
        for node in graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = node.target(*map_arg(node.args, lambda n: n.meta["val"]))
    return gm


def _item(result: fx.Proxy, index: int, value: Any) -> fx.Proxy:
    item = result[index]  # pyright: ignore[reportIndexIssue]  # fx adds Proxy's operators at run time
    item.node.meta["val"] = value
    return item


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    nan = 0.0 if bool((a.isnan() == b.isnan()).all()) else float("inf")
    return (a.double() - b.double()).abs().nan_to_num(nan).max().item()
