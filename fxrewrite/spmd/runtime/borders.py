"""What crosses the border of one compiled program in chunks: inputs that are DTensors, and outputs that ranks hold so.

    border = Border(mesh, leaving=...)
    border.enter(gm, example_inputs)     before the graph is lowered: it starts from whole values from now on
    border.decide(graph, ...)            in normal form: how outputs leave
    border.on(axis)                      SpmdContext.output_placement, while the program is lowered over this axis
    border.prepare(program)              once it is lowered, before it is compiled for `border.examples(...)`
    border.entered(inputs)               at each call: what the program gets
    border.left(values, inputs)          and what its caller gets of what it returned

Outputs that ranks hold in chunks leave in one of four ways (`Leaving`). Beside a scalar loss, other outputs such as
logits are often not used at all: those that are gathered when they are first used then cost no communication.
A view of what the program gets is gathered by it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard

from fxrewrite.backends import graph_break_reason, untraced_callers
from fxrewrite.backends.replayed_views import copy_replayed, is_view_of_input
from fxrewrite.graph.differentiable import differentiated, requires_gradient
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.sizes import Size, SizeReader, is_same_size, product, size_hint
from fxrewrite.graph.walk import reached
from fxrewrite.ops import is_parameter, is_tensor
from fxrewrite.spmd.events import AtBorder, OutputSharded, ZerosHeld
from fxrewrite.spmd.placement import Axis, Placement, Replicate, Shard, num_entries
from fxrewrite.spmd.price.price import bytes_held
from fxrewrite.spmd.propagation.place import CHUNK
from fxrewrite.spmd.runtime.agree import agree
from fxrewrite.spmd.runtime.chunked_tensor import ChunkedTensor, chunked, num_chunks, whole_fake
from fxrewrite.spmd.runtime.deferred import Before, Cut, Used, deferred_gather
from fxrewrite.spmd.runtime.gradients import change_gradients
from fxrewrite.spmd.runtime.late_gradients import Tail, detach_outputs

Leaving: TypeAlias = Literal["whole", "deferred", "dtensor", "chunk"]
"""How outputs leave that ranks hold in chunks: gathered by the program; gathered when they are first used; as DTensors,
or gathered where these cannot say how ranks hold them; or as this rank's chunk."""
_NUMBERS = itertools.count(1)
"""Of programs with outputs in chunks: ranks that share one compile the same ones in the same order."""
_NO_FLOATS = "it holds no floating-point numbers"


def _is_loss(node: fx.Node) -> bool:
    """Whether an output is one number that is computed of what the model is called with, and not of weights alone."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        return False
    return any(n.op == "placeholder" and is_tensor(n) and not is_parameter(n) for n in reached([node]))


@dataclass(frozen=True, slots=True)
class _Entry:
    """How a program reads an input that is a DTensor."""

    whole: torch.Tensor
    """The fake value of what all ranks hold."""
    why_gathered: str
    """Why it is gathered before the program runs; where empty, that starts from what the rank holds."""
    is_chunk: bool
    """Whether the program starts from a chunk, of whose gradient it gives that of one device."""
    event: AtBorder


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


class Border:
    """What passes between one program and others in chunks. See the module.

    Args:
        mesh: of the axes that the program is for; None where nothing enters or leaves as a DTensor.
        leaving: how outputs leave; may be decided until the program is lowered.
        timeout: seconds that a rank which uses a deferred output waits for the others.
        errors: around what may find that ranks use different ones.

    Attributes:
        graph_break: why the graph is a part of the compiled function, with the line; empty where it is all of it.
        ends_early: whether code that is not compiled goes on with what the graph returns.
        chunks: positions of inputs of which the program starts from this rank's chunk.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        leaving: Leaving = "whole",
        *,
        timeout: float = 3600.0,
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.mesh = mesh
        self.leaving: Leaving = leaving
        self.graph_break, self.ends_early = "", False
        self.chunks: frozenset[int] = frozenset()
        self._timeout, self._errors = timeout, errors
        self._entries: dict[int, _Entry] = {}
        self._cuts: dict[int, dict[str, _TracedCut]] = {}
        """Of outputs that leave in chunks, by position and name of the axis, in the order of lowering."""
        self._said: dict[tuple[int, str], AtBorder | OutputSharded] = {}
        self._gathered: dict[tuple[int, str], int] = {}
        """Bytes of the outputs that are gathered, by position and axis."""
        self._sizes: SizeReader | None = None
        self._program = self._calls = self._num_returned = 0
        self._tails: dict[int, Tail] = {}

    @property
    def events(self) -> list[AtBorder | OutputSharded]:
        """What the report says of inputs and, once the program is lowered, of outputs."""
        entries = (entry.event for entry in self._entries.values() if entry.why_gathered or entry.is_chunk)
        return [*entries, *self._said.values()]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the outputs that the program gathers, whole on each rank."""
        return sum(self._gathered.values())

    # inputs

    def enter(self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, why_whole: str = "") -> None:
        """Afterwards the graph, as Dynamo captured it, starts from the whole values of inputs that are ChunkedTensors.

        Args:
            gm: changed.
            example_inputs: what Dynamo traced it with; of a view of a ChunkedTensor the graph has an ordinary fake
                value.
            why_whole: why this program reads nothing in chunks; '' where it may.
        """
        callers = untraced_callers()
        self.graph_break = graph_break_reason(gm)
        self.ends_early = bool(self.graph_break)
        if callers and not self.graph_break:
            self.graph_break = f"{callers[-1]} cannot be traced, and runs as it is"
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            given, fake = example_inputs[position], node.meta.get("example_value")
            if isinstance(given, ChunkedTensor) and isinstance(fake, torch.Tensor):
                self._entries[position] = self._entry(node, given, fake, why_whole)
        self.chunks = frozenset(position for position, entry in self._entries.items() if entry.is_chunk)

    def _entry(self, node: fx.Node, given: ChunkedTensor, fake: torch.Tensor, why_whole: str) -> _Entry:
        held = fake if isinstance(fake, ChunkedTensor) else given
        why = why_whole or _why_gathered(held, self.mesh)
        axes = list(zip(held.device_mesh.mesh_dim_names or (), held.placements, strict=True))
        cut = {} if why else {axis: Shard(p.dim) for axis, p in axes if isinstance(p, TorchShard)}
        whole = whole_fake(fake).requires_grad_(given.requires_grad)
        node.meta["example_value"], node.meta[CHUNK] = whole, cut
        event = AtBorder(
            value=f"input {input_name(node)}",
            shape=tuple(map(size_hint, held.shape)),
            placement=", ".join(f"{axis}: {placement}" for axis, placement in axes),
            why=why,
        )
        return _Entry(whole, why, bool(cut), event)

    def examples(self, program: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """What the lowered program is compiled for, of what Dynamo traced it with."""
        found, placeholders = list(inputs), program.graph.find_nodes(op="placeholder")
        for position, entry in self._entries.items():
            held = entry.whole
            if entry.is_chunk:
                held = held.new_empty(placeholders[position].meta["val"].shape).requires_grad_(held.requires_grad)
            found[position] = held
        return found

    def entered(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What the program gets of its inputs: the rank's chunk, or what is gathered; gradients flow through both."""
        if not self._entries:
            return inputs
        found = list(inputs)
        for position, entry in self._entries.items():
            value = cast("ChunkedTensor", inputs[position])
            found[position] = (value.full_tensor() if entry.why_gathered else value.to_local()).contiguous()
        return found

    # outputs

    def decide(self, graph: fx.Graph, *, breaks: str, outputs: str, is_part: bool) -> None:
        """Afterwards outputs leave as these settings say for a graph in normal form.

        Args:
            graph: is looked at for a loss.
            breaks: "dtensor" where they leave as DTensors.
            outputs: "shard", each rank's chunk; "gather", whole; or "auto": as DTensors if `breaks` says so; beside a
                loss gathered when they are first used, unless the graph is a part; else whole.
            is_part: whether more of the model may read them.
        """
        if outputs != "auto":
            self.leaving = "chunk" if outputs == "shard" else "whole"
        elif breaks == "dtensor":
            self.leaving = "dtensor"
        elif not is_part and any(map(_is_loss, graph.output_node().all_input_nodes)):
            self.leaving = "deferred"

    def on(self, axis: Axis) -> Callable[[int, fx.Node, Placement], Placement]:
        """How outputs are returned over the axis, which is lowered after those before it."""
        return functools.partial(self._decide, axis)

    def _decide(self, axis: Axis, position: int, node: fx.Node, placement: Placement) -> Placement:
        """Propagation may ask several times for an output, whose last placement counts."""
        at, cuts = (position, axis.name), self._cuts.setdefault(position, {})
        cuts.pop(axis.name, None)
        self._said.pop(at, None)
        self._gathered.pop(at, None)
        if not isinstance(placement, Shard) or axis.size == 1:
            return Replicate()
        value = node.meta["val"]
        why = self._why_output_gathered(node, placement, cuts)
        if self.leaving == "dtensor":
            first = next(iter(cuts.values()), None)
            whole = value.shape if first is None else first.shape
            shape, placed = tuple(map(size_hint, whole)), f"{axis.name}: {placement}"
            self._said[at] = AtBorder(value=f"output %{node.name}", shape=shape, placement=placed, why=why)
        elif not why:
            self._said[at] = _output_sharded(node, placement, axis, is_deferred=self.leaving == "deferred")
        if why:
            self._gathered[at] = size_hint(product(value.shape)) * value.element_size()
            return Replicate()
        cuts[axis.name] = _TracedCut(axis, placement, tuple(value.shape))
        return placement

    def _why_output_gathered(self, node: fx.Node, placement: Shard, cuts: Mapping[str, _TracedCut]) -> str:
        """Why the program gathers an output that other axes have cut so, or ''."""
        if self.leaving == "whole":
            return "what the program returns is whole"
        if is_view_of_input(node):
            return "it is a view of an input"
        if self.leaving != "dtensor":
            return ""
        if placement.dim in {cut.placement.dim for cut in cuts.values()}:
            return "another axis cuts the same dimension"
        if not node.meta["val"].is_floating_point():
            return _NO_FLOATS
        if placement.uneven:
            return "the ranks do not divide it"
        if not is_same_size(placement.outer, 1) or not is_same_size(placement.inner, 1):
            return "the ranks hold chunks of parts of a dimension, for which DTensors have no placement"
        return ""

    def without_gradients(self, program: fx.GraphModule) -> dict[int, Tail]:
        """Changes a program: deferred outputs leave without a gradient, and one that comes goes by their tails."""
        return detach_outputs(program, [at for at, cuts in self._cuts.items() if cuts and self.leaving == "deferred"])

    def prepare(self, program: fx.GraphModule) -> list[ZerosHeld]:
        """Afterwards the lowered program returns what `left` reads, which is more than its outputs.

        Returns:
            what the report says of outputs whose gradients a step holds, used or not.
        """
        self._cuts = {position: cuts for position, cuts in self._cuts.items() if cuts}
        self._num_returned = len(program.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
        if self._cuts:
            self._program, self._sizes = next(_NUMBERS), SizeReader(program.graph)
        self._tails = self.without_gradients(program)
        zeros = self._zeros(program)
        copy_replayed(program)
        return zeros

    def _zeros(self, program: fx.GraphModule) -> list[ZerosHeld]:
        """Of outputs that leave with a gradient; DTensors are for programs that use them."""
        returned: Any = program.graph.output_node().args[0]
        nodes = [returned[at] for at in self._cuts if at not in self._tails and self.leaving != "dtensor"]
        if not nodes or not torch.is_grad_enabled():
            return []
        flows = differentiated(list(program.graph.nodes), requires_gradient)
        held = [node for node in nodes if node in flows]
        num_bytes = sum(map(bytes_held, held))
        return [ZerosHeld(nodes=tuple(node.name for node in held), num_bytes=num_bytes)] if held else []

    def left(self, values: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """What the caller gets of what the program returned for these inputs, through which gradients flow.

        Raises:
            FxRewriteError: when a deferred output is used, on every rank: the ranks use different ones.
        """
        if not self._cuts or self.leaving == "chunk":
            return values
        self._calls += 1
        found = list(values[: self._num_returned])
        for position, cuts in self._cuts.items():
            if self.leaving == "dtensor":
                found[position] = self._dtensor(values[position], cuts)
            else:
                found[position] = self._deferred(position, values, inputs)
        return found

    def _dtensor(self, chunk: torch.Tensor, cuts: Mapping[str, _TracedCut]) -> ChunkedTensor:
        """A chunk as a DTensor over the mesh; axes that are not named hold it whole.

        The program gets its gradient times the number of ranks, as the sum of all ranks' losses gives it.
        """
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names or ()
        placed = [TorchShard(cuts[name].placement.dim) if name in cuts else TorchReplicate() for name in names]
        (chunk,) = change_gradients([chunk], float(prod(cut.axis.size for cut in cuts.values())))
        return chunked(DTensor.from_local(chunk, self.mesh, placed, run_check=False))

    def _deferred(self, position: int, values: Sequence[Any], inputs: Sequence[Any]) -> torch.Tensor:
        assert self._sizes is not None
        cuts = [cut.at(self._sizes, inputs) for cut in self._cuts[position].values()]
        before, tail = self._before(position, cuts[0].shape), self._tails.get(position)
        operands = () if tail is None else tail.operands(values, inputs)
        return deferred_gather(values[position], cuts, before=before, tail=tail, operands=operands)

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


def _why_gathered(held: ChunkedTensor, mesh: DeviceMesh | None) -> str:
    """Why a program over this mesh gathers an input, or ''."""
    if not held.is_floating_point():
        return _NO_FLOATS
    if held.device_mesh != mesh:
        return f"it is over {held.device_mesh}, and the program is over {mesh}"
    cut = [p.dim for p in held.placements if type(p) is TorchShard]
    if len(set(cut)) != len(cut) or any(type(p) not in (TorchShard, TorchReplicate) for p in held.placements):
        return f"no program starts from {tuple(held.placements)}"
    uneven = [dim for dim in cut if size_hint(held.shape[dim]) % num_chunks(held.placements, held.device_mesh, dim)]
    return f"the ranks do not divide dimension {uneven[0]}" if uneven else ""


def _output_sharded(node: fx.Node, placement: Shard, axis: Axis, *, is_deferred: bool) -> OutputSharded:
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
