"""A sharded result of a compiled program, as a tensor of global shape that is gathered when it is first used.

    deferred_gather(chunk, cuts)     a DeferredGather; no communication, no memory but the chunk's

A chunk that returns to eager code looks like a tensor of a smaller batch or of fewer rows: its last row `y[:, -1]` or
a mean over it is silently wrong on every rank. A DeferredGather has the global shape. Any operator that reads it runs
on the gathered value, which is kept from then on; what only renames it or casts it (detach, clone, to) stays deferred.
Ranks of several axes may hold it in chunks: each `Cut` is of what the one before it has left.
Autograd sees an ordinary tensor: the gradient of the gathered value is reduced and scattered to the chunks.

The gather is a collective: every rank must use the same values, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.utils import _pytree as pytree

from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.placement import Axis, Shard, num_entries
from fxrewrite.spmd.runtime.gradients import refuse_second_derivatives
from fxrewrite.spmd.runtime.late_gradients import Tail

log = logging.getLogger(__name__)
aten = torch.ops.aten
Used: TypeAlias = Literal["value", "gradient"]
"""What of a deferred output ranks exchange: they gather its value, or reduce its gradient."""
Before: TypeAlias = "Callable[[Axis, Used], None]"

_ALIASES = {aten.detach.default, aten.alias.default}
"""Operators whose result shares the memory of their operand."""
_OF_EACH_ELEMENT = {aten.clone.default, aten._to_copy.default}
"""Operators that act on each element alone, so that they can run on the chunk, and give new memory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranks of one axis hold a value in chunks.

    Attributes:
        axis: whose ranks hold it.
        placement: how.
        shape: of the value that they hold together.
    """

    axis: Axis
    placement: Shard
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Memory:
    """What stands for the memory of a deferred tensor; all of its aliases have one."""

    chunk: torch.Tensor
    cuts: Sequence[Cut]
    before: Before
    whole: torch.Tensor | None = None

    def gathered(self) -> torch.Tensor:
        if self.whole is None:
            value = self.chunk
            for cut in reversed(self.cuts):
                self.before(cut.axis, "value")
                log.info("gathering %s of %s over %s: it is used", cut.shape, value.dtype, cut.axis)
                value = _gather(value, cut)
            self.whole = value
        return self.whole

    def mapped(self, func: Callable[[torch.Tensor], torch.Tensor]) -> _Memory:
        """Other memory, with what the function of each element makes of what is here."""
        whole = None if self.whole is None else func(self.whole)
        return _Memory(func(self.chunk), self.cuts, self.before, whole)


class DeferredGather(torch.Tensor):
    """A tensor of global shape, of which this rank holds a chunk until any operator reads it. See the module."""

    _memory: _Memory

    @staticmethod
    def __new__(cls: type[DeferredGather], memory: _Memory) -> DeferredGather:  # noqa: PYI034  # torch makes the object
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        new = make(cls, memory.cuts[0].shape, dtype=memory.chunk.dtype, device=memory.chunk.device)
        new._memory = memory
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        axes = ", ".join(str(cut.axis) for cut in self._memory.cuts)
        state = "gathered" if self._memory.whole is not None else f"gathered over {axes} at the first use"
        return f"DeferredGather(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"

    def gathered(self) -> torch.Tensor:
        """The whole value, as an ordinary tensor without autograd; the first call communicates."""
        return self._memory.gathered()

    @classmethod
    @torch.compiler.disable
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OUTSIDE_THE_DISPATCHER:  # they read memory, which the wrapper has not
            args = pytree.tree_map_only(DeferredGather, _whole, args)
        elif func in _OF_MEMORY:
            args = pytree.tree_map_only(DeferredGather, DeferredGather.gathered, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = args[0] if args else None
        if isinstance(value, DeferredGather) and func in _ALIASES:
            return DeferredGather(value._memory)
        if isinstance(value, DeferredGather) and func in _OF_EACH_ELEMENT and _stays(value, kwargs):
            return DeferredGather(value._memory.mapped(lambda x: func(x, *args[1:], **kwargs)))
        whole_args, whole_kwargs = pytree.tree_map_only(DeferredGather, DeferredGather.gathered, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        same = next((x for x in pytree.tree_leaves((args, kwargs)) if _holds(x, result)), None)
        return result if same is None else same  # written in place: what was passed is what returns


def _stays(value: DeferredGather, kwargs: dict[str, Any]) -> bool:
    """Whether the result is on the device over whose process group the value is gathered."""
    return torch.device(kwargs.get("device") or value.device).type == value.device.type


def _holds(value: Any, result: Any) -> bool:
    return isinstance(value, DeferredGather) and isinstance(result, torch.Tensor) and value._memory.whole is result


def _whole(value: DeferredGather) -> torch.Tensor:
    """The gathered value for what does not go through the dispatcher, with autograd's history if it has one."""
    if value.requires_grad:
        return cast("torch.Tensor", _Plain.apply(value))
    return value.gathered()


class _Plain(torch.autograd.Function):
    """The ordinary tensor of a deferred one; gradients pass."""

    @staticmethod
    def forward(ctx: Any, value: DeferredGather) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.gathered().view_as(value.gathered())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


_OUTSIDE_THE_DISPATCHER = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__format__,
}
_OF_MEMORY = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.share_memory_}
"""What asks for the memory alone, without autograd: Dynamo does of the base of a view, where operators are fake."""


def _nothing(axis: Axis, what: Used) -> None:
    return None


def deferred_gather(
    chunk: torch.Tensor,
    cuts: Sequence[Cut],
    *,
    before: Before = _nothing,
    tail: Tail | None = None,
    operands: Sequence[Any] = (),
) -> torch.Tensor:
    """A tensor of the shape of the first cut, of which every rank holds `chunk`; see the module.

    Args:
        chunk: what this rank holds, with its padding where a placement is uneven.
        cuts: at least one, each of a chunk of the one before it.
        before: called when the value is used, or its gradient comes, before the collective over each axis: the place to
            see whether every rank comes.
        tail: through which the gradient of the chunk goes on, if not through the chunk itself; `operands` are its own.
    """
    return cast("torch.Tensor", _Deferred.apply(chunk, tuple(cuts), before, tail, *operands))


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, chunk: torch.Tensor, cuts: tuple[Cut, ...], before: Before, tail: Tail | None, *operands: Any
    ) -> DeferredGather:
        ctx.of = (chunk.shape, cuts, before, tail)
        ctx.set_materialize_grads(False)
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in operands]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in operands))
        return DeferredGather(_Memory(chunk.detach(), cuts, before))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        chunk_shape, cuts, before, tail = ctx.of
        if grad is None:
            return None, None, None, None, *(None for _ in ctx.numbers)
        if isinstance(grad, DeferredGather):
            grad = grad.gathered()
        grad = grad.detach()
        for cut, shape in zip(cuts, [*(inner.shape for inner in cuts[1:]), chunk_shape], strict=True):
            before(cut.axis, "gradient")
            grad = _reduce_scatter(grad, cut).reshape(shape)
        if torch.is_grad_enabled():  # create_graph=True
            of = f"an output of shape {cuts[0].shape} that is sharded over {cuts[0].axis}"
            grad = cast("torch.Tensor", *refuse_second_derivatives([grad], of))
        if tail is None:
            return grad, None, None, None
        operands = [n if x is None else x for x, n in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        return None, None, None, None, *tail.gradients(operands, grad)


def _runs(shape: Sequence[int], placement: Shard, entries: int) -> list[int]:
    """The shape with the sharded dimension split into [outer, entries, inner]."""
    return [*shape[: placement.dim], int(placement.outer), entries, int(placement.inner), *shape[placement.dim + 1 :]]


_SENT_AS_BYTES = (torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""What not every process group sends."""


def _gather(chunk: torch.Tensor, cut: Cut) -> torch.Tensor:
    axis, placement = cut.axis, cut.placement
    entries = int(num_entries(cut.shape, placement))
    held, at = -(-entries // axis.size), placement.dim + 1
    runs = chunk.detach().reshape(_runs(cut.shape, placement, held)).movedim(at, 0).contiguous()
    sent = runs.view(torch.uint8) if runs.dtype in _SENT_AS_BYTES else runs
    received = COLLECTIVES["wait"](COLLECTIVES["all_gather"](sent, axis.size, axis.group))
    whole = received.view(runs.dtype).narrow(0, 0, entries)
    return whole.movedim(0, at).reshape(cut.shape).contiguous()


def _reduce_scatter(grad: torch.Tensor, cut: Cut) -> torch.Tensor:
    axis, placement = cut.axis, cut.placement
    entries = int(num_entries(cut.shape, placement))
    held, at = -(-entries // axis.size), placement.dim + 1
    runs = grad.reshape(_runs(cut.shape, placement, entries)).movedim(at, 0)
    padding = held * axis.size - entries
    if padding:
        runs = torch.cat([runs, runs.new_zeros(padding, *runs.shape[1:])])
    scatter = COLLECTIVES["reduce_scatter"](runs.contiguous(), "sum", axis.size, axis.group)
    return COLLECTIVES["wait"](scatter).movedim(0, at)
