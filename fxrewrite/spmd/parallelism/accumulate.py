"""Gradients of several backward passes that are reduced once, after the last one.

    with no_sync(model):                # for all micro-batches but the last
        step(first).backward()
    step(last).backward()               # reduces the sum of both, as many bytes as of one

Inside of `no_sync`, a program's gradients leave it before they are reduced over ranks. Each is a DTensor that says so:
the sum over the ranks of an axis is the gradient (`Partial`), and a rank holds its summand whole. So `parameter.grad`
is true at any time: autograd adds to it, `zero_grad` drops it, and what reads it through DTensor reads the gradient.

A forward pass decides, as with torch's replicas: its backward pass reduces unless it ran inside. After `no_sync`, the
program that does not reduce serves for the last micro-batch, too. When its backward pass has ended, the gradients of
the model are reduced, a layer at a time: scattered over axes that hold the parameter in shards, from the innermost to
the outermost, then summed over the others. So are those of parameters that the last micro-batch did not use.

Dynamo guards `Accumulation.keeps`, which it reads while it traces (`fxrewrite.spmd.parallelism.parameters`); so a call
runs the program that it needs, and each is compiled once.
Source: `no_sync` of Li et al. (arXiv 2006.15704, section 3.2.4); DTensor's `Partial`.
A gradient is made with the private `_spec` of its parameter; `DTensor.from_local` would make a new one, in 70 % of the
time of a backward. `queue_callback` of autograd is private, and torch's own wrappers use it for the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.utils.hooks import unserializable_hook

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.group import COLLECTIVES, axis_of
from fxrewrite.spmd.parallelism.schedule.buckets import layer_of
from fxrewrite.spmd.placement import Shard

_ATTRIBUTE = "_accumulation"
"""The name under which each module that has parameters in shards, and each parameter after `no_sync`, has it."""


class Accumulation:
    """How gradients of a model are accumulated.

    Attributes:
        keeps: whether programs of the model leave gradients unreduced; Dynamo's guards compare it.
        depth: how many `no_sync` of the model are open.
        parameters: by name, as the last `no_sync` found them.
    """

    def __init__(self) -> None:
        self.keeps, self.depth = False, 0
        self.parameters: dict[str, nn.Parameter] = {}

    @contextmanager
    def open(self, parameters: Mapping[str, nn.Parameter]) -> Generator[None]:
        self.parameters = dict(parameters)
        for parameter in parameters.values():
            setattr(parameter, _ATTRIBUTE, self)
            _join_reduced(parameter)
        self.keeps = True
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def reduce(self) -> None:
        """Afterwards no gradient of the model is unreduced, and its programs reduce again outside of `no_sync`."""
        _reduce(self.parameters)
        self.keeps = self.depth > 0


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Gradients of forward passes that run inside are not reduced over ranks until a later forward pass's are.

    Run a micro-batch's forward and backward pass inside, and those of the last one outside: afterwards gradients are
    what reducing each time would have given. Until then `parameter.grad` is this rank's summand, as large as the whole
    parameter (but for what inner axes cut of it), and an optimizer's step is an error. It covers the whole model
    that was given to `shard_parameters`, and nothing of other models that run inside.

    Raises:
        FxRewriteError: no parameter of the model is held as `shard_parameters` holds it.
    """
    with ExitStack() as opened:
        for accumulation, parameters in _accumulations(model).items():
            opened.enter_context(accumulation.open(parameters))
        yield


def reduce_gradients(model: nn.Module) -> None:
    """Gradients that `no_sync` has left are reduced now, as where data end before the last micro-batch of a step.

    All ranks call it. Nothing happens where none are left.
    """
    for accumulation, parameters in _accumulations(model).items():
        accumulation.parameters = parameters
        accumulation.reduce()


def reduce_left(parameters: Iterable[torch.Tensor]) -> None:
    """Reduce the gradients of the models whose parameters these are if any is left: a reduced one is about to come."""
    left = dict.fromkeys(vars(parameter)[_ATTRIBUTE] for parameter in parameters if is_unreduced(parameter))
    for accumulation in left:  # of several models, in an order that is the same on all ranks
        accumulation.reduce()


def _accumulations(model: nn.Module) -> dict[Accumulation, dict[str, nn.Parameter]]:
    """The parameters of each model in shards that is in this one, by name."""
    found: dict[Accumulation, dict[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        accumulation = vars(module).get(_ATTRIBUTE)
        if accumulation is not None:
            own = found.setdefault(accumulation, {})
            own |= {f"{prefix}.{name}": p for name, p in module._parameters.items() if p is not None}
    if not found:
        raise FxRewriteError(
            f"{type(model).__name__} has no parameters that shard_parameters holds, so nothing of it accumulates "
            "gradients; call shard_parameters(model, plan, mesh) first, and pass that model"
        )
    return found


def refuse_unreduced(parameters: Iterable[torch.Tensor]) -> None:
    """Raises FxRewriteError where an optimizer is about to step with gradients that are not reduced."""
    left = sum(map(is_unreduced, parameters))
    if left:
        raise FxRewriteError(
            f"gradients of {left} parameters are not reduced over the ranks yet: run the forward pass of the last "
            "micro-batch outside of no_sync(model), or call fxrewrite.spmd.reduce_gradients(model) before the step"
        )


def is_unreduced(parameter: torch.Tensor) -> bool:
    """Whether the parameter's gradient is a summand of this rank."""
    grad = parameter.grad
    return isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements)


def reduced_gradient(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """The local gradient, which is held as the parameter is; padding is cut off.

    Leading rows are cut off as a view: a copy would come on top of the bucket, which other gradients keep in memory.
    """
    held = parameter.to_local().shape
    own = local if local.shape == held else local[tuple(map(slice, held))].contiguous()
    return DTensor(own, parameter._spec, requires_grad=False)


def unshared(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients, of which none shares memory with another one or with itself.

    A program gives `w` and `v` one gradient where it reads `w + v`, and of `x.sum()` one number for all entries. What
    is written to gradients, as by clipping or the next backward pass, would otherwise be written twice. Autograd
    copies such gradients of ordinary parameters, but not what a DTensor holds.
    """
    found = list(grads)
    held: dict[int, list[int]] = {}
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            held.setdefault(grad.untyped_storage().data_ptr(), []).append(i)
    for positions in held.values():
        end = 0
        for start, stop, i in sorted((*_memory(grads[i]), i) for i in positions):
            grad = found[i]
            if grad is not None and (start < end or _repeats_entries(grad)):
                found[i] = grad.clone(memory_format=torch.contiguous_format)
            end = max(end, stop)
    return found


def _repeats_entries(value: torch.Tensor) -> bool:
    """Whether some entries are one number in memory, as those of what was expanded."""
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _memory(value: Any) -> tuple[int, int]:
    """Where a tensor's entries begin and end."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


# gradients that leave a program


@dataclass(frozen=True)
class Unreduced:
    """A gradient that leaves a program before it is reduced.

    Attributes:
        position: of the parameter among the program's inputs.
        shape: of the gradient on this rank.
        placements: of the gradient over the mesh.
    """

    position: int
    shape: torch.Size
    placements: tuple[TorchPlacement, ...]
    _specs: dict[torch.dtype, Any] = field(default_factory=dict[torch.dtype, Any], compare=False)

    def gradient(self, local: torch.Tensor, parameter: DTensor) -> DTensor:
        """The local gradient, which says what it is."""
        spec = self._specs.get(local.dtype)
        if spec is None:
            mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
            made = DTensor.from_local(local, mesh, self.placements, run_check=False, shape=shape, stride=stride)
            spec = self._specs[local.dtype] = made._spec
        return DTensor(local, spec, requires_grad=False)


def unreduced_leaves(unreduced: Sequence[Unreduced], values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What the program reads in place of parameters to differentiate by; nobody reads the entries.

    Args:
        unreduced: the gradients that leave the program.
        values: what the program is called with.
    """
    parameters = [values[one.position] for one in unreduced]
    return _Leaves.apply(unreduced, *parameters) if parameters else ()  # pyright: ignore[reportReturnType]


class _Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unreduced: Sequence[Unreduced], *parameters: DTensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.unreduced, ctx.parameters = unreduced, parameters
        found = (getattr(parameter, _ATTRIBUTE, None) for parameter in parameters)
        # in the order of the program, which is the same on all ranks, since each of them is reduced by itself
        ctx.ending = list(dict.fromkeys(one for one in found if one is not None and not one.depth))
        return tuple(p.to_local().new_empty(()).expand(one.shape) for one, p in zip(unreduced, parameters, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: list[DTensor | None] = []
        for one, parameter, local in zip(ctx.unreduced, ctx.parameters, unshared(grads), strict=True):
            found.append(None if local is None else one.gradient(local, parameter))
            if local is not None and parameter.grad is not None and not is_unreduced(parameter):
                parameter.grad = _summand(parameter.grad, found[-1])
        for accumulation in ctx.ending:
            torch.autograd.Variable._execution_engine.queue_callback(accumulation.reduce)
        return None, *found


def _join_reduced(parameter: nn.Parameter) -> None:
    """From now on gradients that come reduced, as of a penalty that eager code computes, are added to unreduced ones.

    torch cannot add them: "redistribute from S(0) to P(sum) not supported".
    """
    hooks: Mapping[int, Any] = parameter._backward_hooks or {}  # a copy of a parameter has none
    if not parameter.requires_grad or any(isinstance(hook, _JoinReduced) for hook in hooks.values()):
        return
    parameter.register_hook(unserializable_hook(_JoinReduced(ref(parameter))))


class _JoinReduced:
    def __init__(self, parameter: ref[nn.Parameter]) -> None:
        self._parameter = parameter

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        parameter = self._parameter()
        if parameter is None or not isinstance(grad, DTensor) or not is_unreduced(parameter):
            return grad
        if any(placement.is_partial() for placement in grad.placements):
            return grad
        return _summand(grad, parameter.grad)


def _summand(grad: DTensor, like: Any) -> DTensor:
    """Of a gradient that is reduced, what this rank adds to a sum that is it, held as `like`; nothing is sent."""
    local, mesh, shape = grad.to_local(), grad.device_mesh, like.to_local().shape
    whole = local.new_zeros(shape)
    where = torch.arange(whole.numel(), device=local.device).view(shape)
    for dim in reversed(range(mesh.ndim)):
        if like.placements[dim].is_partial():
            cut = _Cut.of(grad, dim)
            if cut is not None:
                where = cut.chunks(where, fill=-1)[mesh.get_local_rank(dim)]
            elif mesh.get_local_rank(dim):
                local = torch.zeros_like(local)
    where = where[where >= 0]
    whole.view(-1)[where] = local.reshape(-1)
    return DTensor(whole, like._spec, requires_grad=False)


# reducing


@dataclass(frozen=True)
class _Cut:
    """How the ranks of one dimension of a mesh cut what the inner ones have left of a parameter."""

    placement: Shard
    ranks: int

    @staticmethod
    def of(parameter: DTensor, dim: int) -> _Cut | None:
        """None where they hold it whole."""
        mesh, placement = parameter.device_mesh, parameter.placements[dim]
        if isinstance(placement, TorchReplicate):
            return None
        at: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        inner = [p for p in parameter.placements[dim + 1 :] if getattr(p, "dim", None) == at]
        runs = 1 if inner else getattr(placement, "split_factor", 1)  # torch writes inner cuts as runs, too
        return _Cut(Shard(at, outer=runs), mesh.size(dim))

    def chunks(self, value: torch.Tensor, *, fill: float = 0) -> torch.Tensor:
        """Those of all ranks, [ranks, ...], of one size."""
        at, runs = self.placement.dim, int(self.placement.outer)
        missing = -value.shape[at] % (self.ranks * runs)
        if missing:
            padding = value.new_full([*value.shape[:at], missing, *value.shape[at + 1 :]], fill)
            value = torch.cat([value, padding], at)
        return value.unflatten(at, (runs, self.ranks, -1)).movedim(at + 1, 0).flatten(at + 1, at + 2)


class _Reducing:
    """A gradient on the way to its parameter's placement."""

    def __init__(self, parameter: Any) -> None:
        self.parameter, grad = parameter, parameter.grad
        self.local: torch.Tensor = grad.to_local()
        self.mesh: DeviceMesh = grad.device_mesh
        left = [dim for dim in reversed(range(self.mesh.ndim)) if grad.placements[dim].is_partial()]
        cuts = {dim: _Cut.of(parameter, dim) for dim in left}
        self.scatters = {dim: cut for dim, cut in cuts.items() if cut is not None}
        self.sums = [dim for dim, cut in cuts.items() if cut is None]

    @cached_property
    def look(self) -> Any:
        """Gradients that are equal in this are reduced together."""
        return tuple(self.scatters), tuple(self.sums), self.local.dtype, self.local.device

    def finish(self) -> None:
        self.parameter.grad = reduced_gradient(self.local, self.parameter)


def _reduce(parameters: Mapping[str, nn.Parameter]) -> None:
    """Afterwards gradients of these parameters that were unreduced are held as the parameters are."""
    left = {p: layer_of(name) for name, p in parameters.items() if is_unreduced(p)}  # tied ones once
    with torch.no_grad():
        for _, of_layer in itertools.groupby(left, left.__getitem__):
            buckets: dict[Any, list[_Reducing]] = {}
            for one in map(_Reducing, of_layer):
                one.parameter.grad = None
                buckets.setdefault(one.look, []).append(one)
            for bucket in buckets.values():
                _reduce_together(bucket)


def _reduce_together(bucket: Sequence[_Reducing]) -> None:
    first = bucket[0]
    for dim in first.scatters:
        chunks = [one.scatters[dim].chunks(one.local) for one in bucket]
        total = _sent("reduce_scatter", [chunk.flatten(1) for chunk in chunks], first.mesh, dim)
        for one, part, chunk in zip(bucket, total, chunks, strict=True):
            one.local = part.view(chunk.shape[1:])
    for dim in first.sums:
        total = _sent("all_reduce", [one.local.reshape(1, -1) for one in bucket], first.mesh, dim)
        for one, part in zip(bucket, total, strict=True):
            one.local = part.view(one.local.shape)
    for one in bucket:
        one.finish()


def _sent(kind: str, rows: Sequence[torch.Tensor], mesh: DeviceMesh, dim: int) -> Iterable[torch.Tensor]:
    """What comes of a sum over ranks of each of these, by one collective."""
    axis = axis_of(mesh, (mesh.mesh_dim_names or ())[dim])
    arguments = ("sum", axis.size) if kind == "reduce_scatter" else ("sum",)
    total = COLLECTIVES["wait"](COLLECTIVES[kind](torch.cat(list(rows), 1), *arguments, axis.group))
    return total.split([row.shape[1] for row in rows], 1)
