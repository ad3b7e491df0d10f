"""Is an operator's layout rule true? The operator is run whole and on shards, forward and backward, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from fxrewrite.ops import is_inexact, possible_keys
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import Gathered
from fxrewrite.spmd.layouts.notation import IndexMap
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules
from fxrewrite.spmd.placement import AnyPlacement, Axis, Placement, Replicate, Shard, as_placement
from fxrewrite.spmd.redistribute import redistribute

aten = torch.ops.aten

Apply = Callable[[fx.GraphModule, SpmdContext], Report]
"""Turns a graph with redistributions into a local program, in place; returns the report of that."""
Run = Callable[[fx.GraphModule, Sequence[Any], int], tuple[list[Any], list[torch.Tensor | None]]]
"""Runs a local program on so many ranks: the outputs of each, and each input's gradient averaged over the ranks."""


@dataclass(frozen=True, slots=True)
class PlacementTrial:
    """One operator run with its tensor operands placed as `placements`."""

    placements: tuple[Placement, ...]
    gathered: bool
    """Whether some operand had to be made whole: the rule allows no sharding here."""
    error: float
    """Largest absolute difference of a result or gradient from the operator run whole, over all ranks."""


def traced_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """The call in a graph of its own, run on fake tensors."""
    return _Trial(target, args, kwargs or {}).traced()


def index_map_of(
    rules: LayoutRules, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[LayoutRule, IndexMap] | None:
    """The rule of a call and its indices; None where no rule speaks of it. Nothing is run but on fake tensors."""
    if not any(rules.get(key) for key in possible_keys(target)):
        return None
    _, rule, indices = rules.of(traced_call(target, args, kwargs))
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


def try_placements(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    placements: Sequence[AnyPlacement],
    *,
    axis: Axis,
    apply: Apply,
    run: Run,
) -> PlacementTrial:
    """Run the operator with its tensor operands placed as `placements`, replicated or sharded.

    `target` is a torch operator, `args` and `kwargs` hold real tensors; what requires a gradient is differentiated.
    """
    return _Trial(target, args, kwargs).run([as_placement(placement) for placement in placements], axis, apply, run)


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

    def traced(self) -> fx.Node:
        """The call in a graph of its own, on fake tensors."""
        graph = fx.Graph()
        result = self.call(_placeholders(graph, self.tensors))
        graph.output(result.node)
        FakeTensorProp(fx.GraphModule({}, graph)).propagate(*(tensor.detach() for tensor in self.tensors))
        return result.node

    def run(self, placements: Sequence[Placement], axis: Axis, apply: Apply, run: Run) -> PlacementTrial:
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.tensors]
        returned = self.call(inputs)
        expected: Sequence[torch.Tensor] = [returned] if isinstance(returned, torch.Tensor) else returned
        floats = [_parts(value) for value in expected if is_inexact(value)]
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in floats]
        terms = [(value * weight).sum() for value, weight in zip(floats, weights, strict=True)]
        loss = sum(terms, torch.zeros((), dtype=torch.float64))
        if loss.requires_grad:
            loss.backward()
        given = [*(x.detach().requires_grad_(x.requires_grad) for x in inputs), *weights]
        graph = fx.Graph()
        operands = _placeholders(graph, given)
        factors = operands[len(inputs) :]
        for place, placement in enumerate(placements):
            if placement != Replicate():
                move: tuple[Any, ...] = (operands[place].node, Replicate(), placement, axis)
                operands[place] = fx.Proxy(graph.call_function(redistribute, move), operands[place].tracer)
        result: Any = self.call(operands)
        results = [result] if isinstance(returned, torch.Tensor) else [result[i] for i in range(len(expected))]
        graph.output((_weighted(results, expected, factors), *(r.node for r in results)))
        gm = fx.GraphModule({}, graph)
        FakeTensorProp(gm).propagate(*given)
        report = apply(gm, SpmdContext(axis, gradients="mean"))
        outputs, grads = run(gm, given, axis.size)
        error = 0.0
        for found_results in outputs:
            for found, want in zip(found_results[1:], expected, strict=True):
                assert (found.shape, found.dtype) == (want.shape, want.dtype), (found.shape, want.shape)
                error = max(error, _difference(found, want.detach()))
        for found, value in zip(grads, inputs, strict=False):
            if value.grad is not None:
                assert found is not None, "a gradient is missing"
                error = max(error, _difference(found, value.grad))
        return PlacementTrial(tuple(placements), any(isinstance(event, Gathered) for event in report.events), error)


def _placeholders(graph: fx.Graph, values: Sequence[object]) -> list[fx.Proxy]:
    tracer = GraphAppendingTracer(graph)
    return [fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(values))]


def _weighted(results: Sequence[Any], expected: Sequence[torch.Tensor], weights: Sequence[fx.Proxy]) -> fx.Node | None:
    """The sum of the real and complex results, each times its weights; None where there are none of them."""
    floats = [(r, value) for r, value in zip(results, expected, strict=True) if is_inexact(value)]
    total = None
    for (r, value), weight in zip(floats, weights, strict=True):
        parts = aten.view_as_real.default(aten.resolve_conj.default(r)) if value.is_complex() else r
        term = aten.sum.default(aten.mul.Tensor(parts, weight))
        total = term if total is None else aten.add.Tensor(total, term)
    return None if total is None else total.node


def _parts(value: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = _parts(a).double(), _parts(b).double()
    nan = 0.0 if bool((a.isnan() == b.isnan()).all()) else float("inf")
    return torch.where(a == b, 0.0, a - b).abs().nan_to_num(nan).max().item()
