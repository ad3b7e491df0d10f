"""The ranks of a mesh in one process: a lowered graph run forward and backward on torch's LocalTensorMode.

The only file that uses `torch.distributed._local_tensor`. Collectives exchange data between the simulated ranks, so
outputs and gradients are those that P processes would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from operator import add
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, _for_each_rank_run_func
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fxrewrite.capture.custom_backward import APPLY
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.sizes import size_hint
from fxrewrite.graph.source import with_source
from fxrewrite.ops import bodies_of_communicating, key
from fxrewrite.spmd.group import axis_rank, fix_rank, positions_of
from fxrewrite.spmd.placement import Placement, Replicate, Shard, Zigzag, as_placement, check_num_ranks
from fxrewrite.spmd.propagation.input_placements import Placements, input_placements


class RankRun:
    """What simulated ranks computed.

    Attributes:
        outputs: by rank, what the graph returned.
        grads: by rank, a gradient for each input, None where it has none; empty where nothing was differentiated.
    """

    def __init__(
        self, outputs: list[Any], grads: list[list[torch.Tensor | None]], cuts: Sequence[Cut | None] = ()
    ) -> None:
        self.outputs = outputs
        self.grads = grads
        self._cuts = cuts

    def gradients(self) -> list[torch.Tensor | None]:
        """Each input's gradient: of what all ranks hold the mean over them, of chunks all of them together.

        For a graph that was lowered with `SpmdContext.gradients` "done" or "mean" that is one device's; `grads` has
        what each rank got.
        """
        found: list[torch.Tensor | None] = []
        for index, grads in enumerate(zip(*self.grads, strict=True)):
            present = [grad for grad in grads if grad is not None]
            cut = self._cuts[index] if self._cuts else None
            if not present:
                found.append(None)
            else:
                found.append(torch.stack(present).mean(0) if cut is None else cut.joined(present))
        return found


def run_on_ranks(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    ranks: int | DeviceMesh,
    *,
    placements: Mapping[int, Placements] | None = None,
    backward: int | Sequence[torch.Tensor | None] | None = None,
) -> RankRun:
    """Run `gm` on simulated ranks, one process for all.

    Args:
        gm: a lowered graph.
        inputs: whole values, one for each input of the graph.
        ranks: how many, or a mesh of any number of axes. A process group of as many fake ranks must be initialized
            (`fxrewrite.testing.fake_mesh`).
        placements: how the ranks hold inputs, by position; they hold the others whole. By default what the plan that
            lowered the graph says of them (`fxrewrite.spmd.propagation.input_placements`).
        backward: position of the output (a scalar) to differentiate, or the gradient of each output on every rank, None
            for one that has none; gradients are of every floating-point input that requires them.

    Raises:
        FxRewriteError: `ranks` is not a number of ranks, or not a mesh where inputs are sharded; the ranks of a
            placement do not divide the input.
    """
    if not isinstance(ranks, DeviceMesh):
        check_num_ranks(ranks)
    num_ranks = ranks.size() if isinstance(ranks, DeviceMesh) else ranks
    for operator, body in bodies_of_communicating().items():
        _run_inside(operator, body)
    _conjugate_numbers()
    cuts: list[Cut | None] = [None] * len(inputs)
    stated = dict(enumerate(input_placements(gm))) if placements is None else placements
    for index, placed in stated.items():
        of_axes = {axis: as_placement(placement) for axis, placement in placed.items()}
        if all(placement == Replicate() for placement in of_axes.values()):
            continue
        if not isinstance(ranks, DeviceMesh):
            raise FxRewriteError(
                f"input {index} is sharded over {', '.join(of_axes)}: pass the mesh in place of the number of ranks"
            )
        cuts[index] = Cut(ranks, inputs[index], of_axes)
    with LocalTensorMode(num_ranks):
        args = [_spread(value, num_ranks, cut) for value, cut in zip(inputs, cuts, strict=True)]
        flat, spec = pytree.tree_flatten(_RankInterpreter(gm, num_ranks).run(*args))
        if isinstance(backward, int):
            backward = [None] * backward + [torch.ones_like(_on_rank(flat[backward], 0))]
        pairs = [(x, grad) for x, grad in zip(flat, backward or (), strict=False) if grad is not None]
        pairs = [(x, _spread(grad, num_ranks)) for x, grad in pairs if x.requires_grad]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
    outputs = [pytree.tree_unflatten([_on_rank(v, rank) for v in flat], spec) for rank in range(num_ranks)]
    grads = [[_on_rank(getattr(a, "grad", None), rank) for a in args] for rank in range(num_ranks)]
    return RankRun(outputs, grads, cuts)


class Cut:
    """How a value is cut for the ranks of a mesh: for each rank, the number of every entry that it holds."""

    def __init__(self, mesh: DeviceMesh, whole: torch.Tensor, placements: Mapping[str, Placement | Zigzag]) -> None:
        self._shape = whole.shape
        self._entries = [self._of_rank(mesh, rank, placements) for rank in range(mesh.size())]

    def _of_rank(self, mesh: DeviceMesh, rank: int, placements: Mapping[str, Placement | Zigzag]) -> torch.Tensor:
        """The numbers of the rank's entries, in the shape of its chunk; -1 for padding."""
        names = mesh.mesh_dim_names or ()
        (at,) = (mesh.mesh == rank).nonzero().tolist()
        held = torch.arange(self._shape.numel()).view(self._shape)
        for axis, placement in placements.items():
            if placement == Replicate():
                continue
            if axis not in names or not isinstance(placement, (Shard, Zigzag)):
                raise FxRewriteError(f"a value cannot be placed as {axis}: {placement}; Shard(dim) on {names} can")
            dim, num, here = placement.dim, mesh.size(names.index(axis)), at[names.index(axis)]
            blocks = 2 * num if isinstance(placement, Zigzag) else int(placement.outer) * num
            if isinstance(placement, Shard) and placement.uneven:
                blocks, missing = num, -held.shape[dim] % num
                padding = held.new_full([*held.shape[:dim], missing, *held.shape[dim + 1 :]], -1)
                held = torch.cat([held, padding], dim)
            if held.shape[dim] % blocks:
                raise FxRewriteError(f"{placement} over {axis}={num} does not divide a value of {list(self._shape)}")
            own = [here, blocks - 1 - here] if isinstance(placement, Zigzag) else range(here, blocks, num)
            of_blocks = held.unflatten(dim, (blocks, -1)).index_select(dim, torch.tensor(own))
            held = of_blocks.flatten(dim, dim + 1)
        return held

    def chunk(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What the rank has, with zeros for entries that are padding."""
        flat = torch.cat([whole.flatten(), whole.new_zeros(1)])  # of which the last is what -1 reads
        return flat[self._entries[rank].to(whole.device)]

    def real(self, whole: torch.Tensor, rank: int, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that the rank found, and those that it has of the whole, without padding."""
        entries = self._entries[rank]
        is_real = entries >= 0
        return found[is_real.to(found.device)], whole.flatten()[entries[is_real].to(whole.device)]

    def joined(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the ranks have, each where its chunk is; of a chunk that several ranks hold, their mean."""
        num = self._shape.numel()
        flat = chunks[0].new_zeros(num + 1)
        for chunk, entries in zip(chunks, self._entries, strict=True):
            flat.index_put_((entries.to(chunk.device),), chunk, accumulate=True)
        held = sum(int((entries >= 0).sum()) for entries in self._entries)
        return flat[:-1].view(self._shape) * (max(num, 1) / held)


@cache
def _run_inside(operator: OpOverload, body: Callable[..., Any]) -> None:
    """From now on, among simulated ranks, an operator that communicates inside runs its body on the values of all."""

    def run(mode: LocalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with LocalTensorMode(mode.ranks):  # leaving `mode` itself would leave it disabled
            return body(*args, **kwargs)

    torch.library.register_torch_dispatch(operator, LocalTensorMode, run)


@cache
def _conjugate_numbers() -> None:
    """From now on, among simulated ranks, a number of Python has a conjugate, which a gradient by a product with it is.

    LocalTensorMode fails on it, as it looks for the memory of the number that the result would be a view of.
    """

    def run(mode: LocalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _for_each_rank_run_func(func, mode.ranks, args, kwargs, alias=isinstance(args[0], torch.Tensor))

    torch.library.register_torch_dispatch(torch.ops.aten._conj.default, LocalTensorMode, run)


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
        self._positions: dict[str, torch.SymInt] = {}

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        _check_shape(n, found)
        return found

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is axis_rank:
            return self._position(*args)
        if target is APPLY:
            bodies = [copy_module(body) for body in args[:2]]
            for body in bodies:
                fix_rank(body, self._position)
            args = (*bodies, *args[2:])
        if key(target) in _RANK_BY_RANK:
            return _run_rank_by_rank(target, args, kwargs)
        if target is torch.sym_sum:  # of numbers that differ between ranks it calls itself without end
            return reduce(add, *args)
        return super().call_function(target, args, kwargs)

    def _position(self, group: str) -> Any:
        if group not in self._positions:
            self._positions[group] = torch.SymInt(LocalIntNode(positions_of(group, self._num_ranks)))
        return self._positions[group]

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _spread(super().get_attr(target, args, kwargs), self._num_ranks)


def _check_shape(node: fx.Node, found: Any) -> None:
    """Raise where an operator gives a rank another shape than its layout rule says, which no reader would expect."""
    said = node.meta.get("val")
    if (
        node.op != "call_function"
        or not isinstance(said, torch.Tensor)
        or not isinstance(found, torch.Tensor)
        or not _is_static(said, found)
    ):
        return
    if tuple(found.shape) != tuple(said.shape):
        raise FxRewriteError(
            f"{key(node)} at {with_source(node)} gives a rank {list(found.shape)}, and by its layout rule "
            f"{list(said.shape)}: the rule says something false of how results follow from operands"
        )


def _is_static(*values: torch.Tensor) -> bool:
    return all(type(size) is int for value in values for size in value.shape)


def _spread(value: Any, num_ranks: int, cut: Cut | None = None) -> Any:
    if isinstance(value, torch.SymInt):
        return size_hint(value)  # Dynamo's symbol for a length: the length at hand
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.detach()
    chunks = {rank: whole if cut is None else cut.chunk(whole, rank) for rank in range(num_ranks)}
    local = LocalTensor({rank: chunk.clone() for rank, chunk in chunks.items()})
    return local.requires_grad_(value.requires_grad)


def _on_rank(value: Any, rank: int) -> Any:
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank].detach()
    return value
