"""Whether the ranks of a mesh run one program on what they share: looked at before it compiles, and at each call.

    comparisons = RankComparisons(plan, mesh, timeout)
    comparisons.agree_on_chunks(gm, chunks, example_inputs)     before a graph is lowered
    comparisons.of(program, chunks, settings)                   agrees on a lowered one; returns what each call compares
    with compiling(comparisons.axes, timeout):                  agrees that every rank compiled it

Along an axis with `data="shared"` ranks share all values that they do not hold in chunks, along one with `data="own"`
parameters alone. Errors name what differs, on every rank (`fxrewrite.spmd.runtime.rank_checks`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxrewrite.graph.differentiable import requires_gradient
from fxrewrite.graph.inputs import input_name, is_buffer
from fxrewrite.graph.sizes import size_hint
from fxrewrite.graph.text import graph_text
from fxrewrite.ops import is_parameter, key, tensors_of
from fxrewrite.spmd.group import axis_of
from fxrewrite.spmd.operators.draws import draws_alike
from fxrewrite.spmd.operators.send_rows import SEND_ROWS
from fxrewrite.spmd.parallelism.arguments import Stated
from fxrewrite.spmd.parallelism.parallelism import AnyPlan, Parallelism
from fxrewrite.spmd.parallelism.schedule.local_gradients import is_leaf
from fxrewrite.spmd.placement import Axis, Replicate
from fxrewrite.spmd.propagation.input_placements import input_placements
from fxrewrite.spmd.runtime.agree import agree, agree_along
from fxrewrite.spmd.runtime.rank_checks import Advice, DistinctChunks, RankChecks, SameProgram

ADVICE = Advice(
    inputs='pass the same values on every rank of an axis with data="shared", and sample by the axes along which each '
    "rank has its own",
    parameters="start every rank with equal weights, by one torch.manual_seed(seed) before the model is made or from "
    "one checkpoint, and step every rank by the same optimizer",
    generators="seed all ranks of the axis alike, before the model is made and before it is called",
)
_SAME_PARAMETERS = (
    "every rank must use the same parameters at the same call, whatever its batch, and in the same order, which a set "
    "has not; where a batch does not need a part of the model, run that part all the same, and multiply what it gives "
    "by 0"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What compares the ranks of an axis at each call of a program.

    Attributes:
        at: positions of the inputs of which the ranks hold the same.
        checks: get these inputs before the program runs.
    """

    at: Sequence[int]
    checks: RankChecks | DistinctChunks


class RankComparisons:
    """Of all programs of one backend. See the module.

    Args:
        plan: of the backend.
        mesh: has its axes.
        timeout: seconds to wait for other ranks to compile the same.
        advice: what errors say to do.
        every_call: whether calls after the first are compared along axes with shared data.
    """

    def __init__(
        self, plan: AnyPlan, mesh: DeviceMesh, timeout: float, advice: Advice = ADVICE, *, every_call: bool = True
    ) -> None:
        self._plan, self._mesh, self._timeout = plan, mesh, timeout
        self._advice, self._every_call = advice, every_call
        self._same: dict[str, SameProgram] = {}
        """By axis with own data."""
        self._known: dict[tuple[str, str], RankChecks] = {}
        """By axis with own data and what programs share, of those that all its ranks have agreed on."""
        self.axes: list[Axis] = []
        """Those whose ranks compile the program that they agreed on last."""

    def agree_on_chunks(self, gm: fx.GraphModule, chunks: Mapping[int, Stated], example_inputs: Sequence[Any]) -> None:
        """Refuse chunks of different sizes, before the ranks compile programs of different sizes."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        lines = [f"{input_name(placeholders[i])} {[size_hint(n) for n in example_inputs[i].shape]}" for i in chunks]
        for name in dict.fromkeys(entry[0] for here in chunks.values() for entry in here):
            agree(
                axis_of(self._mesh, name),
                "\n".join(lines),
                timeout=self._timeout,
                differ="hold chunks of different sizes",
                hint="cut every batch into equal chunks, one for each rank; pad it to a length that they divide",
            )

    def of(self, program: fx.GraphModule, chunks: Container[int], settings: str) -> list[Comparison]:
        """What compares the ranks at each call of a lowered program.

        Ranks with batches of their own may compile for other sizes, and at other calls, what reads and sends the same.

        Args:
            program: as it will run.
            chunks: positions of the arguments of which each rank passes its chunk.
            settings: what else ranks must compile alike.

        Raises:
            FxRewriteError: other ranks compile another program, and would wait for this one in its collectives.
        """
        without = _offsets(program)
        whole_text = graph_text(program, without=without, canonical_order=True)
        texts = dict[str, str]()
        agreements = list[tuple[Axis, str, Mapping[str, Any]]]()
        for member in self._plan.members:
            axis, is_own = axis_of(self._mesh, member.axis), member.data == "own"
            text = f"{settings}\n{_shared_text(program, member.axis) if is_own else whole_text}"
            texts[axis.name] = text
            if not is_own:
                agreements.append((axis, text, {"timeout": self._timeout}))
            elif (axis.name, text) not in self._known:
                agreements.append((axis, text, {"timeout": self._timeout, "hint": _SAME_PARAMETERS}))
        agree_along(agreements)
        self.axes = [axis for axis, *_ in agreements]
        found = [
            self._comparison(program, member, texts[member.axis], without)
            for member in self._plan.members
            if axis_of(self._mesh, member.axis).size > 1
        ]
        return [*found, *self._distinct_chunks(program, chunks)]

    def of_whole(self, gm: fx.GraphModule) -> list[Comparison]:
        """What compares, in training, the ranks that run a graph whole; parameters are left to their gradients.

        Equal inputs give equal gradients, and a rank may run the graph alone, to evaluate.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        at = [i for i, node in enumerate(placeholders) if not is_parameter(node)]
        axes = [axis_of(self._mesh, member.axis) for member in self._plan.members]
        return [self._shared(gm, at, axis, in_training=True) for axis in axes if self._every_call]

    def _shared(self, program: fx.GraphModule, at: Sequence[int], axis: Axis, *, in_training: bool) -> Comparison:
        """Compares these inputs along an axis with shared data."""
        placeholders = program.graph.find_nodes(op="placeholder")
        checks = RankChecks(
            [placeholders[i] for i in at],
            axis,
            self._advice,
            drawn=draws_alike(program, axis),
            in_training=in_training,
            every_call=self._every_call,
        )
        return Comparison(at, checks)

    def _comparison(
        self, program: fx.GraphModule, member: Parallelism, text: str, without: Container[fx.Node]
    ) -> Comparison:
        """What compares the ranks along the axis of one parallelism at each call."""
        axis, is_own = axis_of(self._mesh, member.axis), member.data == "own"
        placeholders, held = program.graph.find_nodes(op="placeholder"), input_placements(program)
        # Buffers may be statistics of what a rank has seen, as those of BatchNorm, and of own data they differ.
        at = [
            i
            for i, (node, of) in enumerate(zip(placeholders, held, strict=True))
            if of.get(axis.name, Replicate()) == Replicate()
            and node not in without
            and not is_leaf(node)
            and not (is_own and (is_buffer(node) or not is_parameter(node)))
        ]
        if not is_own:
            return self._shared(program, at, axis, in_training=False)
        if (axis.name, text) not in self._known:
            device = torch.device(self._mesh.device_type)
            same = self._same.setdefault(axis.name, SameProgram(axis, _SAME_PARAMETERS, device))
            self._known[axis.name, text] = RankChecks(
                [placeholders[i] for i in at], axis, self._advice, same=same, text=text, in_training=True
            )
        return Comparison(at, self._known[axis.name, text])

    def _distinct_chunks(self, program: fx.GraphModule, chunks: Container[int]) -> list[Comparison]:
        """What refuses a batch that is not cut, for each axis over which arguments are in chunks."""
        placeholders, found = program.graph.find_nodes(op="placeholder"), list[Comparison]()
        for axis in (axis_of(self._mesh, member.axis) for member in self._plan.members):
            held = (of.get(axis.name, Replicate()) for of in input_placements(program))
            at = [i for i, placed in enumerate(held) if i in chunks and placed != Replicate()]
            if at and axis.size > 1:
                found.append(Comparison(at, DistinctChunks([placeholders[i] for i in at], axis)))
        return found


def _shared_text(program: fx.GraphModule, axis: str) -> str:
    """What programs of ranks with batches of their own must share, whatever the sizes of these.

    These are the parameters, whose shards and gradients are joined with those of other ranks, and what is sent, in this
    order: of what is computed of parameters alone, with their names, as others may have the same shapes.
    """
    lines, of_parameters = list[str](), _of_parameters(program)
    for node in program.graph.find_nodes(op="placeholder"):
        if is_parameter(node) and not is_buffer(node):
            frozen = "" if requires_gradient(node) else " frozen"
            lines.append(f"{input_name(node)} {list(node.meta['val'].shape)}{frozen}")
    for node in program.graph.nodes:
        if node.meta.get("axis") == axis:
            first = 1 if node.target is SEND_ROWS else 0  # of rows, ranks may send any number
            of = f" of {', '.join(of_parameters[node])}" if of_parameters.get(node) else ""
            lines += [f"{key(node)} {list(value.shape[first:])}{of}" for value in tensors_of(node)]
    return "\n".join(lines)


def _of_parameters(program: fx.GraphModule) -> dict[fx.Node, tuple[str, ...]]:
    """What is computed of parameters alone, and their names, in the order in which they are read."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if is_parameter(node):
                found[node] = (input_name(node),)
        elif node.all_input_nodes and all(operand in found for operand in node.all_input_nodes):
            found[node] = tuple(dict.fromkeys(name for operand in node.all_input_nodes for name in found[operand]))
    return found


def _offsets(program: fx.GraphModule) -> set[fx.Node]:
    """Integer inputs that nothing reads and that are no size of a tensor: where in a batch a rank's chunk starts."""
    placeholders = program.graph.find_nodes(op="placeholder")
    sizes = {str(size) for node in placeholders for value in tensors_of(node) for size in value.shape}
    numbers = (n for n in placeholders if isinstance(n.meta.get("val"), torch.SymInt) and not n.users)
    return {node for node in numbers if str(node.meta["val"]) not in sizes}
