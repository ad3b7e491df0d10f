"""P ranks in one process: a lowered graph run forward and backward on torch's LocalTensorMode.

The only file that uses `torch.distributed._local_tensor`. Collectives exchange data between the simulated ranks, so
outputs and gradients are those that P processes would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, _for_each_rank_run_func
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fxrewrite.graph.sizes import size_hint
from fxrewrite.ops import bodies_of_communicating, differentiating, key
from fxrewrite.spmd.group import axis_rank
from fxrewrite.spmd.layout import check_num_ranks

__all__ = ["RankRun", "run_on_ranks"]


class RankRun:
    """What P simulated ranks computed: `outputs[rank]` and, where asked for, `grads[rank]`, one for each input."""

    def __init__(self, outputs: list[Any], grads: list[list[torch.Tensor | None]]) -> None:
        self.outputs = outputs
        self.grads = grads

    def mean_grads(self) -> list[torch.Tensor | None]:
        """Each input's gradient averaged over the ranks, as data parallelism averages it."""
        return [
            None if grads[0] is None else torch.stack([g for g in grads if g is not None]).mean(0)
            for grads in zip(*self.grads, strict=True)
        ]


def run_on_ranks(gm: fx.GraphModule, inputs: Sequence[Any], num_ranks: int, *, backward: int | None = None) -> RankRun:
    """Run `gm` on `num_ranks` simulated ranks that all get the same `inputs`.

    `backward` names the position of the output (a scalar) to differentiate; gradients are of every floating-point input
    that requires them. A process group of `num_ranks` fake ranks must be initialized (`fxrewrite.testing.fake_mesh`).

    Raises:
        FxRewriteError: `num_ranks` is no int, or less than 1.
    """
    check_num_ranks(num_ranks)
    for operator, body in bodies_of_communicating().items():
        _run_inside(operator, body)
    for operator in differentiating():
        _run_with_autograd(operator)
    with LocalTensorMode(num_ranks):
        args = [_spread(value, num_ranks) for value in inputs]
        flat, spec = pytree.tree_flatten(_RankInterpreter(gm, num_ranks).run(*args))
        if backward is not None and flat[backward].requires_grad:
            flat[backward].backward()
    outputs = [pytree.tree_unflatten([_on_rank(v, rank) for v in flat], spec) for rank in range(num_ranks)]
    grads = [[_on_rank(getattr(a, "grad", None), rank) for a in args] for rank in range(num_ranks)]
    return RankRun(outputs, grads)


@cache
def _run_inside(operator: OpOverload, body: Callable[..., Any]) -> None:
    """From now on, among simulated ranks, an operator that communicates inside runs its body on the values of all."""

    def run(mode: LocalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with LocalTensorMode(mode.ranks):  # leaving `mode` itself would leave it disabled
            return body(*args, **kwargs)

    torch.library.register_torch_dispatch(operator, LocalTensorMode, run)


_OUTSIDE = torch._C._dispatch_tls_local_exclude_set()
"""The dispatch keys that are switched off outside of every operator, among which autograd's are not."""


@cache
def _run_with_autograd(operator: OpOverload) -> None:
    """From now on, among simulated ranks, an operator that differentiates inside finds autograd switched on."""

    def run(mode: LocalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _OUTSIDE):
            return _for_each_rank_run_func(func, mode.ranks, args, kwargs)

    torch.library.register_torch_dispatch(operator, LocalTensorMode, run)


_RANK_BY_RANK = frozenset({"higher_order::flex_attention"})
"""Higher-order operators that LocalTensorMode does not know."""


class _RankByRank(torch.autograd.Function):
    """A function on the values of each rank, forward and backward, where LocalTensorMode is not looking."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[torch.Tensor, ...]], *given: LocalTensor) -> Any:
        ctx.ranks = sorted(given[0]._local_tensors)
        ctx.given, ctx.made = [], []
        with _disable_current_modes(), torch.enable_grad():
            for rank in ctx.ranks:
                values = [x._local_tensors[rank].detach().requires_grad_(x.requires_grad) for x in given]
                ctx.given.append(values)
                ctx.made.append(function(*values))
        made = zip(*ctx.made, strict=True)
        return tuple(LocalTensor({r: x.detach() for r, x in zip(ctx.ranks, xs, strict=True)}) for xs in made)

    @staticmethod
    def backward(ctx: Any, *grads: LocalTensor) -> Any:
        found: list[dict[int, torch.Tensor]] = [{} for _ in ctx.given[0]]
        for rank, given, made in zip(ctx.ranks, ctx.given, ctx.made, strict=True):
            where = [i for i, x in enumerate(given) if x.requires_grad]
            back = [(x, grad._local_tensors[rank]) for x, grad in zip(made, grads, strict=True) if x.requires_grad]
            with _disable_current_modes():
                inner = torch.autograd.grad([x for x, _ in back], [given[i] for i in where], [g for _, g in back])
            for i, grad in zip(where, inner, strict=True):
                found[i][rank] = grad
        return None, *(LocalTensor(on_ranks) if on_ranks else None for on_ranks in found)


def _run_rank_by_rank(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(flat) if isinstance(x, LocalTensor)]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        placed = dict(zip(where, values, strict=True))
        inner_args, inner_kwargs = pytree.tree_unflatten([placed.get(i, x) for i, x in enumerate(flat)], spec)
        return target(*inner_args, **inner_kwargs)

    return _RankByRank.apply(run, *(flat[i] for i in where))


class _RankInterpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, num_ranks: int) -> None:
        super().__init__(gm)
        self._num_ranks = num_ranks
        self._ranks = torch.SymInt(LocalIntNode({rank: rank for rank in range(num_ranks)}))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is axis_rank:
            return self._ranks
        if key(target) in _RANK_BY_RANK:
            return _run_rank_by_rank(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _spread(super().get_attr(target, args, kwargs), self._num_ranks)


def _spread(value: Any, num_ranks: int) -> Any:
    if isinstance(value, torch.SymInt):
        return size_hint(value)  # Dynamo's symbol for a length: the length at hand
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.detach()
    local = LocalTensor({rank: whole.clone() for rank in range(num_ranks)})
    return local.requires_grad_(value.requires_grad)


def _on_rank(value: Any, rank: int) -> Any:
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank].detach()
    return value
