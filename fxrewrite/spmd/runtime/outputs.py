"""Outputs of a program that ranks hold in chunks: they leave so, as tensors that are gathered when they are first used.

    outputs = ChunkedOutputs()
    outputs.on(axis)                 SpmdContext.output_placement, while the program is lowered over this axis
    outputs.left(values, inputs)     what the caller gets at each call, after `outputs.of(program)`

Beside a scalar loss, other outputs such as logits are often not used at all, and then cost no communication.
`is_with_loss` tells a graph that returns one. A view of what the program gets is gathered by it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite.backends.replayed_views import copy_replayed
from fxrewrite.graph.differentiable import differentiated, requires_gradient
from fxrewrite.graph.sizes import Size, SizeReader, product, size_hint
from fxrewrite.graph.walk import reached
from fxrewrite.ops import is_parameter, is_tensor
from fxrewrite.spmd.events import OutputSharded, ZerosHeld
from fxrewrite.spmd.placement import Axis, Placement, Replicate, Shard, num_entries
from fxrewrite.spmd.price.price import bytes_held
from fxrewrite.spmd.runtime.agree import agree
from fxrewrite.spmd.runtime.borders import is_view_of_input
from fxrewrite.spmd.runtime.deferred import Before, Cut, Used, deferred_gather
from fxrewrite.spmd.runtime.late_gradients import Tail, detach_outputs

__all__ = ["ChunkedOutputs", "is_with_loss"]

_NUMBERS = itertools.count(1)
"""Of programs with outputs in chunks: ranks that share one compile the same ones in the same order."""


def is_with_loss(graph: fx.Graph) -> bool:
    """Whether an output is one number that is computed of what the model is called with, and not of weights alone."""
    return any(map(_is_loss, graph.output_node().all_input_nodes))


def _is_loss(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        return False
    return any(n.op == "placeholder" and is_tensor(n) and not is_parameter(n) for n in reached([node]))


@dataclass(frozen=True, slots=True)
class _TracedCut:
    """A `Cut` whose sizes may be symbolic."""

    axis: Axis
    placement: Shard
    shape: tuple[Size, ...]

    def at(self, read: SizeReader, inputs: Sequence[Any]) -> Cut:
        outer, inner = (read(size, inputs) for size in (self.placement.outer, self.placement.inner))
        placement = Shard(self.placement.dim, outer, inner, self.placement.uneven)
        return Cut(self.axis, placement, tuple(read(size, inputs) for size in self.shape))


class ChunkedOutputs:
    """Which outputs of one program leave in chunks. See the module.

    Args:
        is_deferred: whether they are gathered when they are first used; otherwise the caller gets chunks.
        timeout: seconds that a rank which uses one waits for the others.
        errors: around what may find that ranks use different ones.
    """

    def __init__(
        self,
        *,
        is_deferred: bool = True,
        timeout: float = 3600.0,
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._is_deferred, self._timeout, self._errors = is_deferred, timeout, errors
        self._cuts: dict[int, dict[str, _TracedCut]] = {}
        """By position and name of the axis, in the order of lowering."""
        self._said: dict[tuple[int, str], OutputSharded] = {}
        self._sizes: SizeReader | None = None
        self._program = self._calls = self._num_returned = 0
        self._tails: dict[int, Tail] = {}
        self.zeros: list[ZerosHeld] = []
        """After `of`: outputs whose gradients a step holds, used or not."""

    @property
    def events(self) -> list[OutputSharded]:
        return list(self._said.values())

    def on(self, axis: Axis) -> Callable[[int, fx.Node, Placement], Placement]:
        """Keeps every output of the program in its chunks over the axis, which is lowered after those before it."""
        return functools.partial(self._decide, axis)

    def _decide(self, axis: Axis, position: int, node: fx.Node, placement: Placement) -> Placement:
        self._said.pop((position, axis.name), None)
        self._cuts.setdefault(position, {}).pop(axis.name, None)
        if not isinstance(placement, Shard) or axis.size == 1 or is_view_of_input(node):
            return Replicate()
        self._cuts[position][axis.name] = _TracedCut(axis, placement, tuple(node.meta["val"].shape))
        self._said[position, axis.name] = _event(node, placement, axis, is_deferred=self._is_deferred)
        return placement

    def of(self, program: fx.GraphModule) -> ChunkedOutputs:
        """These outputs, as the lowered program returns them, which is changed by this."""
        self._sizes = SizeReader(program.graph)
        self._num_returned = len(program.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
        if any(self._cuts.values()):
            self._program = next(_NUMBERS)
        self._tails = self.without_gradients(program)
        self.zeros = self._zeros(program)
        copy_replayed(program)
        return self

    def _zeros(self, program: fx.GraphModule) -> list[ZerosHeld]:
        """Of outputs that leave with a gradient."""
        returned: Any = program.graph.output_node().args[0]
        nodes = [returned[at] for at, cuts in self._cuts.items() if cuts and at not in self._tails]
        if not nodes or not torch.is_grad_enabled():
            return []
        flows = differentiated(list(program.graph.nodes), requires_gradient)
        held = [node for node in nodes if node in flows]
        num_bytes = sum(map(bytes_held, held))
        return [ZerosHeld(nodes=tuple(node.name for node in held), num_bytes=num_bytes)] if held else []

    def without_gradients(self, program: fx.GraphModule) -> dict[int, Tail]:
        """Changes a program: deferred outputs leave without a gradient, and one that comes goes by their tails."""
        return detach_outputs(program, [at for at, cuts in self._cuts.items() if cuts]) if self._is_deferred else {}

    def left(self, values: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """What the caller gets of what the program returned for these inputs, through which gradients flow.

        Raises:
            FxRewriteError: when one is used, on every rank: the ranks use different ones.
        """
        if not self._is_deferred or self._sizes is None or not any(self._cuts.values()):
            return values
        self._calls += 1
        found = list(values[: self._num_returned])
        for position, cuts in self._cuts.items():
            if cuts:
                at = [cut.at(self._sizes, inputs) for cut in cuts.values()]
                before, tail = self._before(position, at[0].shape), self._tails.get(position)
                operands = () if tail is None else tail.operands(values, inputs)
                found[position] = deferred_gather(found[position], at, before=before, tail=tail, operands=operands)
        return found

    def _before(self, position: int, shape: tuple[int, ...]) -> Before:
        """What sees that every rank uses this output now: one alone would wait, and two would mix theirs."""
        of = f"output {position} {list(shape)} of call {self._calls} of program {self._program}"

        def before(axis: Axis, what: Used) -> None:
            is_gradient = what == "gradient"
            with self._errors():
                agree(
                    axis,
                    f"{what} of {of}",
                    timeout=self._timeout,
                    differ="use different outputs",
                    absent="did not use an output of the compiled model, such as logits, "
                    + ("whose gradient this rank has," if is_gradient else "which this rank uses,"),
                    hint="use the same outputs on every rank, in the same order; or pass outputs='gather'",
                    together="use it on every rank, since all take part in "
                    + ("reducing its gradient" if is_gradient else "gathering it; or pass outputs='gather'"),
                )

        return before


def _event(node: fx.Node, placement: Shard, axis: Axis, *, is_deferred: bool) -> OutputSharded:
    value = node.meta["val"]
    entries = size_hint(num_entries(value.shape, placement))
    held = -(-entries // axis.size) * axis.size if placement.uneven else entries
    return OutputSharded(
        node=node.name,
        shape=tuple(size_hint(n) for n in value.shape),
        placement=str(placement),
        axis=axis.name,
        is_deferred=is_deferred,
        num_bytes=size_hint(product(value.shape)) * value.element_size(),
        num_held=held,
        num_padding=held - entries,
    )
