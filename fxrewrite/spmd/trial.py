"""Is an operator's layout rule true? The operator is run whole and on shards, forward and backward, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from fxrewrite.ops import possible_keys
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import Gathered
from fxrewrite.spmd.layout import AnyPlacement, Axis, Layout, Replicated, Shard, as_layout
from fxrewrite.spmd.notation import IndexMap
from fxrewrite.spmd.redistribute import redistribute
from fxrewrite.spmd.rule import Call, LayoutRule, LayoutRules
from fxrewrite.spmd.slices import is_float

__all__ = ["LayoutTrial", "free_dims", "index_map_of", "try_layout"]

Apply = Callable[[fx.GraphModule, SpmdContext], Report]
"""Turns a graph with redistributions into a local program, in place; returns the report of that."""
Run = Callable[[fx.GraphModule, Sequence[Any], int], tuple[list[Any], list[torch.Tensor | None]]]
"""Runs a local program on so many ranks: the outputs of each, and each input's gradient averaged over the ranks."""


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """One operator run with its tensor operands lying as `layouts`."""

    layouts: tuple[Layout, ...]
    gathered: bool
    """Whether some operand had to be made whole: the rule allows no sharding here."""
    error: float
    """Largest absolute difference of a result or gradient from the operator run whole, over all ranks."""


def index_map_of(
    rules: LayoutRules, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[LayoutRule, IndexMap] | None:
    """The rule of a call and its indices; None where no rule speaks of it. Nothing is run but on fake tensors."""
    if not any(rules.get(key) for key in possible_keys(target)):
        return None
    call = Call.of(_Trial(target, args, kwargs or {}).traced().node)
    rule = rules.get(call.key)
    indices = rule.map(call) if rule is not None else None
    return None if rule is None or indices is None else (rule, indices)


def free_dims(
    rules: LayoutRules, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> set[tuple[int, int]] | None:
    """The (operand, dimension) pairs that the operator's rule lets be sharded; None where no rule speaks of the call.

    Nothing is run but on fake tensors. Operands are counted in schema order.
    """
    known = index_map_of(rules, target, args, kwargs)
    if known is None:
        return None
    _, indices = known
    parts = {
        (operand, dim): indices.locate(terms, Shard(dim))
        for operand, terms in enumerate(indices.operands)
        for dim in range(len(terms))
    }
    return {place for place, part in parts.items() if part is not None and part.index not in indices.whole}


def try_layout(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layouts: Sequence[AnyPlacement],
    *,
    axis: Axis,
    apply: Apply,
    run: Run,
) -> LayoutTrial:
    """Run the operator with each tensor operand lying as its place in `layouts` says, replicated or sharded.

    `target` is a torch operator, `args` and `kwargs` hold real tensors; what requires a gradient is differentiated.
    """
    return _Trial(target, args, kwargs).run([as_layout(layout) for layout in layouts], axis, apply, run)


class _Trial:
    """One call of an operator, whose tensors are the leaves of its arguments."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.target = target
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def call(self, tensors: Iterable[Any]) -> Any:
        """The operator on other tensors, real, fake or proxies."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.target(*args, **kwargs)

    def traced(self) -> fx.Proxy:
        """The call in a graph of its own, on fake tensors."""
        return _Graph(self, [tensor.detach() for tensor in self.tensors]).result

    def run(self, layouts: Sequence[Layout], axis: Axis, apply: Apply, run: Run) -> LayoutTrial:
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.tensors]
        expected = _flat(self.call(inputs))
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(_parts(v).shape, dtype=_parts(v).dtype, generator=generator) for v in _floats(expected)]
        terms = [(_parts(v) * w).sum() for v, w in zip(_floats(expected), weights, strict=True)]
        loss = sum(terms, torch.zeros((), dtype=torch.float64))
        if loss.requires_grad:
            loss.backward()
        gm = _Graph(self, inputs, layouts, axis).weighted(weights)
        report = apply(gm, SpmdContext(axis, output_layout=_whole, gradients="mean"))
        given = [*(x.detach().requires_grad_(x.requires_grad) for x in inputs), *weights]
        outputs, grads = run(gm, given, axis.size)
        error = 0.0
        for results in outputs:
            for found, want in zip(results[1:], expected, strict=True):
                assert (found.shape, found.dtype) == (want.shape, want.dtype), (found.shape, want.shape)
                error = max(error, _difference(found, want.detach()))
        for found, value in zip(grads, inputs, strict=False):
            if value.grad is not None:
                assert found is not None, "a gradient is missing"
                error = max(error, _difference(found, value.grad))
        return LayoutTrial(tuple(layouts), any(isinstance(event, Gathered) for event in report.events), error)


class _Graph:
    """A graph that calls the operator on its inputs, each lying as its layout."""

    def __init__(
        self,
        trial: _Trial,
        inputs: Sequence[torch.Tensor],
        layouts: Sequence[Layout] = (),
        axis: Axis | None = None,
    ) -> None:
        self.graph = fx.Graph()
        self.tracer = GraphAppendingTracer(self.graph)
        self.mode = FakeTensorMode()
        operands = [self.placeholder(value) for value in inputs]
        for place, layout in enumerate(layouts):
            if layout != Replicated():
                source = operands[place].node
                move: tuple[Any, ...] = (source, Replicated(), layout, axis)
                moved = self.graph.call_function(redistribute, move)
                moved.meta["val"] = source.meta["val"]
                operands[place] = fx.Proxy(moved, self.tracer)
        self.result: fx.Proxy = trial.call(operands)
        with self.mode:
            self.result.node.meta["val"] = trial.call(p.node.meta["val"] for p in operands)

    def placeholder(self, value: torch.Tensor) -> fx.Proxy:
        last = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with self.graph.inserting_before(last) if last is not None else nullcontext():
            node = self.graph.placeholder(f"x{len(self.graph.find_nodes(op='placeholder'))}")
        node.meta["val"] = self.mode.from_tensor(value)
        return fx.Proxy(node, self.tracer)

    def weighted(self, weights: Sequence[torch.Tensor]) -> fx.GraphModule:
        """output((sum of results * weights), results ...)"""
        value = self.result.node.meta["val"]
        is_many = isinstance(value, (list, tuple))
        results = [_item(self.result, i, v) for i, v in enumerate(value)] if is_many else [self.result]
        floats = [r for r in results if is_float(r.node.meta["val"])]
        total = None
        for r, weight in zip(floats, map(self.placeholder, weights), strict=True):
            parts = torch.ops.aten.view_as_real.default(torch.ops.aten.resolve_conj.default(r)) if _is_complex(r) else r
            term = torch.ops.aten.sum.default(torch.ops.aten.mul.Tensor(parts, weight))
            total = term if total is None else torch.ops.aten.add.Tensor(total, term)
        self.graph.output(((total.node if total is not None else None), *(r.node for r in results)))
        gm = fx.GraphModule({}, self.graph)
        with self.mode:
            for node in self.graph.nodes:
                if node.op == "call_function" and "val" not in node.meta:
                    node.meta["val"] = node.target(*map_arg(node.args, lambda n: n.meta["val"]))
        return gm


def _whole(node: fx.Node, layout: Layout) -> Layout:
    return Replicated()


def _flat(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _floats(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value for value in values if is_float(value)]


def _is_complex(proxy: fx.Proxy) -> bool:
    return proxy.node.meta["val"].is_complex()


def _parts(value: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _item(result: fx.Proxy, index: int, value: Any) -> fx.Proxy:
    item = result[index]  # pyright: ignore[reportIndexIssue]  # fx adds Proxy's operators at run time
    item.node.meta["val"] = value
    return item


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = _parts(a).double(), _parts(b).double()
    nan = 0.0 if bool((a.isnan() == b.isnan()).all()) else float("inf")
    return torch.where(a == b, 0.0, a - b).abs().nan_to_num(nan).max().item()
