"""Is an operator's layout rule true? The operator is run whole and on shards, forward and backward, and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxrewrite.ops import is_inexact
from fxrewrite.plan import Plan
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.discovery.free_dims import OperatorCall, placeholders
from fxrewrite.spmd.events import Gathered
from fxrewrite.spmd.placement import AnyPlacement, Axis, Placement, Replicate, as_placement
from fxrewrite.spmd.redistribute import redistribute
from fxrewrite.testing.ranks import run_on_ranks

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class PlacementTrial:
    """One operator run with its tensor operands placed as `placements`."""

    placements: tuple[Placement, ...]
    gathered: bool
    """Whether some operand had to be made whole: the rule allows no sharding here."""
    error: float
    """Largest absolute difference of a result or gradient from the operator run whole, over all ranks."""
    program: fx.GraphModule = field(repr=False)
    """What each rank ran."""


def try_placements(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    placements: Sequence[AnyPlacement],
    *,
    axis: Axis,
    plan: Plan,
) -> PlacementTrial:
    """Run the operator on simulated ranks, its tensor operands placed as `placements`, replicated or sharded.

    Args:
        target: a torch operator; `args` and `kwargs` hold real tensors, and those that require a gradient get one.
        axis: an axis of a fake mesh (`fxrewrite.testing.fake_mesh`), over whose ranks the operator runs.
        plan: makes a local program of a graph with redistributions.
    """
    call, placed = OperatorCall(target, args, kwargs), [as_placement(placement) for placement in placements]
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in call.tensors]
    returned = call.on(inputs)
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
    operands = placeholders(graph, given)
    factors = operands[len(inputs) :]
    for place, placement in enumerate(placed):
        if placement != Replicate():
            move: tuple[Any, ...] = (operands[place].node, Replicate(), placement, axis)
            operands[place] = fx.Proxy(graph.call_function(redistribute, move), operands[place].tracer)
    result: Any = call.on(operands)
    results = [result] if isinstance(returned, torch.Tensor) else [result[i] for i in range(len(expected))]
    loss_node = _weighted(results, expected, factors)
    graph.output((loss_node, *(r.node for r in results)))
    gm = fx.GraphModule({}, graph)
    FakeTensorProp(gm).propagate(*given)
    report = plan.apply(gm, context=SpmdContext(axis, gradients="mean"))
    ran = run_on_ranks(gm, given, axis.size, backward=None if loss_node is None else 0)
    error = 0.0
    for found_results in ran.outputs:
        for found, want in zip(found_results[1:], expected, strict=True):
            assert (found.shape, found.dtype) == (want.shape, want.dtype), (found.shape, want.shape)
            error = max(error, _difference(found, want.detach()))
    for found, value in zip(ran.gradients(), inputs, strict=False):
        if value.grad is not None:
            assert found is not None, "a gradient is missing"
            error = max(error, _difference(found, value.grad))
    return PlacementTrial(tuple(placed), any(isinstance(event, Gathered) for event in report.events), error, gm)


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
