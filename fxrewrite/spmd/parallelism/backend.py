"""A parallelism as a torch.compile backend: `torch.compile(model, backend=spmd(plan, mesh=mesh))`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial as TorchPartial

from fxrewrite.backends import (
    inner_compiler,
    normalized,
    refuse_precompile,
)
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.garbage import few_collections
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.other_sizes import check_sizes
from fxrewrite.ops import is_parameter
from fxrewrite.spmd.context import SpmdContext, contexts
from fxrewrite.spmd.group import axis_of
from fxrewrite.spmd.parallelism.accumulate import Unreduced, unreduced_leaves
from fxrewrite.spmd.parallelism.alternatives import chosen_for, require_chosen
from fxrewrite.spmd.parallelism.arguments import Stated, stated_arguments, without_joined
from fxrewrite.spmd.parallelism.captured import check_dense_gradients
from fxrewrite.spmd.parallelism.comparisons import Comparison, RankComparisons
from fxrewrite.spmd.parallelism.parallelism import AnyPlan, check_axes
from fxrewrite.spmd.parallelism.parameters import local_value, local_values, torch_placements, without_whole
from fxrewrite.spmd.parallelism.schedule.local_gradients import add_leaves, leaves_of
from fxrewrite.spmd.placement import Replicate, Zigzag, local_shape
from fxrewrite.spmd.price.report import SpmdReport
from fxrewrite.spmd.propagation.input_placements import input_placements
from fxrewrite.spmd.runtime.borders import Border, is_with_loss
from fxrewrite.spmd.runtime.chunked_tensor import check_dtensors
from fxrewrite.spmd.runtime.ranks_backend import RanksBackend

Breaks: TypeAlias = Literal["gather", "dtensor"]
"""What programs pass to each other where ranks hold it in chunks: whole values, or DTensors."""
ReturnedOutputs: TypeAlias = Literal["auto", "gather"]
"""What the caller gets of outputs in chunks: beside a scalar loss, tensors that are gathered when they are first used
("auto"), or whole values ("gather")."""
CompiledRegions: TypeAlias = Literal["whole", "once"]
"""Whether a program is compiled whole, or each distinct region of it once."""


class _Program:
    """A compiled program as Dynamo calls it: it gets what this rank holds."""

    def __init__(
        self,
        gm: fx.GraphModule,
        run: Callable[..., Any],
        comparisons: Sequence[Comparison],
        sizes: Mapping[int, torch.Size],
        unreduced: Sequence[Unreduced],
        border: Border,
    ) -> None:
        self._run, self._sizes, self._unreduced = run, sizes, unreduced
        self._border, self._comparisons = border, comparisons
        self._reduced = set(sizes) - {one.position for one in unreduced}
        """Positions of parameters to whose shards gradients flow."""
        self._is_chunk = [
            not is_parameter(node) and any(placement != Replicate() for placement in of.values())
            for node, of in zip(gm.graph.find_nodes(op="placeholder"), input_placements(gm), strict=True)
        ]

    def __call__(self, *inputs: Any) -> Any:
        inputs = tuple(self._border.entered(inputs))
        passed = (*inputs, *(None for _ in self._unreduced))
        for comparison in self._comparisons:
            comparison.checks.before([local_value(passed[i]) for i in comparison.at])
        given = local_values(inputs, self._sizes, self._reduced)
        given += unreduced_leaves(self._unreduced, inputs)
        given = [x.contiguous() if chunk else x for x, chunk in zip(given, self._is_chunk, strict=True)]
        return self._border.left(self._run(*given), given)

    def settle(self) -> None:
        """Read what came of comparing the ranks in the last call."""
        for comparison in self._comparisons:
            comparison.checks.settle()


class SpmdBackend(RanksBackend[SpmdReport, _Program]):
    """A backend for `torch.compile(shard_parameters(model, plan, mesh), backend=spmd(plan, mesh=mesh))`.

    Ranks along an axis with `data="shared"` pass the same values, or their chunks of one value where the plan states
    `inputs` in chunks, and get the same; those along one with `data="own"`
    pass their part of a batch, and get the loss of that part. Gradients of all parameters are complete: those of the
    mean of the losses, of shards in shards. Nothing else may average them. Where the model breaks into several graphs,
    what passes between them is whole, so that code which is not compiled sees what it would see on one device; or, with
    `breaks="dtensor"`, what ranks hold in chunks are DTensors (`fxrewrite.spmd.runtime.borders`), also in the results.

    Args:
        plan: a Parallelism, or several joined by `|`. Of alternatives the cheapest is chosen for each graph; those that
            differ in how ranks hold parameters or inputs are chosen before (`choose_alternatives`).
        mesh: has the axes of the plan.
        inner: the backend that compiles the lowered graph.
        strict: refuse an operator without layout rule instead of gathering its operands.
        timeout: seconds to wait for other ranks to compile the same graph.
        breaks: what passes between graphs of a model that ranks hold in chunks: it is gathered ("gather"), or there
            are DTensors ("dtensor"), also of the results.
        outputs: what a model that is one graph returns beside a scalar loss, such as logits, is gathered when it is
            first used, which all ranks must do then ("auto"), or always ("gather"). Without a loss, outputs are whole.
        regions: the program is compiled whole ("whole"), or each distinct region of it once, such as a layer ("once",
            `fxrewrite.backends.regional`). What a region reads is then gathered where it begins, not a layer ahead.

    Attributes:
        plan: the parallelism, or several.
        mesh: whose axes they are over.
        reports: one for each compiled graph, in order.

    Raises:
        FxRewriteError: no such backend, or no such axis. At compile time, inside torch's BackendCompilerFailed: the
            plan does not fit the model.
    """

    def __init__(
        self,
        plan: AnyPlan,
        *,
        mesh: DeviceMesh,
        inner: str | Callable[..., Any] = "inductor",
        strict: bool = False,
        timeout: float = 3600.0,
        breaks: Breaks = "gather",
        outputs: ReturnedOutputs = "auto",
        regions: CompiledRegions = "whole",
    ) -> None:
        super().__init__("spmd", inner, regions=regions, timeout=timeout)
        _check_choice("breaks", breaks, get_args(Breaks))
        _check_choice("outputs", outputs, get_args(ReturnedOutputs))
        _check_choice("regions", regions, get_args(CompiledRegions))
        if breaks == "dtensor":
            check_dtensors()
        check_axes(plan, mesh)
        require_chosen(plan)
        self.plan, self.mesh = plan, mesh
        self._strict, self._breaks, self._outputs = strict, breaks, outputs
        shared = tuple(member.axis for member in plan.members if member.data == "shared")
        self._shared = mesh[shared] if shared else None
        """The axes along which ranks share what programs pass to each other."""
        self._stated = stated_arguments(plan, mesh)
        self._comparisons = RankComparisons(plan, mesh, timeout)
        self._lowering = None if any(member.alternatives for member in plan.members) else plan.plan()

    def __getstate__(self) -> dict[str, Any]:
        """Plans hold functions that pickle does not find by name.

        Raises:
            FxRewriteError: always; it says what can be pickled.
        """
        raise FxRewriteError(
            "a compiled model whose backend has a plan cannot be pickled: save its state_dict(), or the model as it "
            "was before torch.compile (compiled._orig_mod), and compile what is loaded"
        )

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Returns this rank's compiled program; `options` are `mode` and `options` of `torch.compile`, for `inner`."""
        refuse_precompile()
        dtensors = without_whole(gm, example_inputs)
        border = Border(self._shared, timeout=self._timeout)
        border.enter(gm, example_inputs)
        chunks = without_joined(gm, self._stated, is_part=bool(border.graph_break))
        self._comparisons.agree_on_chunks(gm, chunks, example_inputs)
        program, report = self._lowered(gm, border)
        self._check_inputs(program, dtensors, chunks, border.chunks)
        comparisons = self._comparisons.of(program, chunks, f"regions={self._regions}")
        placeholders = program.graph.find_nodes(op="placeholder")
        sizes = {i: placeholders[i].meta["val"].shape for i in dtensors}
        unreduced = [self._unreduced(program, dtensors[leaf[0]], *leaf) for leaf in leaves_of(program)]
        unreduced_at = {one.position for one in unreduced}
        local = border.examples(program, example_inputs)
        for i, value in enumerate(local):
            if i in dtensors:
                local[i] = _local_fake(dtensors[i], sizes[i], is_leaf=i not in unreduced_at)
            elif i in chunks:
                local[i] = _contiguous_fake(value)
        local += [_leaf_fake(dtensors[one.position], one) for one in unreduced]
        compile_inner = inner_compiler(self.inner, **options)
        run = self._compiled(program, local, compile_inner, self._comparisons.axes, border, report)
        compiled = _Program(program, run, comparisons, sizes, unreduced, border)
        self._programs.append(compiled)
        return compiled

    def _lowered(self, gm: fx.GraphModule, border: Border) -> tuple[fx.GraphModule, SpmdReport]:
        """The program of every rank, and what was done; the border gets what leaves in chunks."""
        is_part = bool(border.graph_break)
        with few_collections():
            program = normalized(gm)
            check_dense_gradients(program)
            add_leaves(program)
            if self._breaks == "dtensor":
                border.leaving = "dtensor"
            elif self._outputs == "auto" and not is_part and is_with_loss(program.graph):
                border.leaving = "deferred"

            def tried() -> dict[str, SpmdContext]:
                return self._contexts(Border(self._shared, border.leaving), is_part=is_part)

            lowering = self._lowering or chosen_for(self.plan, program, tried).plan()
            report = lowering.apply(program, context=self._contexts(border, is_part=is_part))
            check_sizes(program)
        sizes = {member.axis: axis_of(self.mesh, member.axis).size for member in self.plan.members}
        summary = SpmdReport.of(report, program, sizes)
        summary.events.extend(border.events)
        return program, summary.at_break(border.graph_break, border.gathered_bytes)

    def _contexts(self, border: Border, *, is_part: bool) -> dict[str, SpmdContext]:
        """What the plan is told of each axis; ranks that share data return to each other what the border says."""
        found = contexts(self.mesh, strict=self._strict, is_part=is_part, is_ahead=self._regions == "whole")
        found = {name: replace(given, finish=border.without_gradients) for name, given in found.items()}
        shared = () if self._shared is None else self._shared.mesh_dim_names or ()
        return found | {name: replace(found[name], output_placement=border.on(found[name].axis)) for name in shared}

    def _unreduced(
        self, program: fx.GraphModule, traced: DTensor, position: int, axes: tuple[str, ...], leaf: fx.Node
    ) -> Unreduced:
        """The gradient of a leaf of the program, which is a sum over these axes; the parameter is `traced`."""
        held = {axis: placed for axis, placed in input_placements(program)[position].items() if axis not in axes}
        shape: Sequence[Any] = traced.shape
        for axis, placed in held.items():
            shape = local_shape(shape, placed, axis_of(self.mesh, axis).size)  # pyright: ignore[reportArgumentType]
        if tuple(shape) != tuple(leaf.meta["val"].shape) or any(getattr(p, "uneven", False) for p in held.values()):
            raise FxRewriteError(
                f"the gradient of {input_name(program.graph.find_nodes(op='placeholder')[position])} has shape "
                f"{tuple(leaf.meta['val'].shape)} where it should leave unreduced, not {tuple(shape)}; train without "
                "no_sync, and report this model"
            )
        placements = torch_placements(held, self.mesh)  # pyright: ignore[reportArgumentType]
        for axis in axes:
            placements[(self.mesh.mesh_dim_names or ()).index(axis)] = TorchPartial()
        return Unreduced(position, leaf.meta["val"].shape, tuple(placements))

    def _check_inputs(
        self,
        program: fx.GraphModule,
        dtensors: dict[int, DTensor],
        chunks: Mapping[int, Stated],
        kept: Container[int],
    ) -> None:
        """Refuse inputs that are not held as the program reads them."""
        placeholders = program.graph.find_nodes(op="placeholder")
        for position, held in enumerate(input_placements(program)):
            name = input_name(placeholders[position])
            dtensor = dtensors.get(position)
            sharded = {axis: p for axis, p in held.items() if p != Replicate()}
            if position in kept:
                continue
            if position in chunks and sharded.keys() == {entry[0] for entry in chunks[position]}:
                continue
            if dtensor is None and sharded:
                said = ", ".join(f"{axis}: {p}" for axis, p in sharded.items())
                raise FxRewriteError(
                    f"{name} is stated in shards ({said}), and the model holds it whole; call "
                    "shard_parameters(model, plan, mesh) before torch.compile"
                )
            if dtensor is not None:
                shards = {axis: p for axis, p in sharded.items() if not isinstance(p, Zigzag)}
                wanted = tuple(torch_placements(shards, self.mesh))
                if dtensor.device_mesh != self.mesh or tuple(dtensor.placements) != wanted:
                    raise FxRewriteError(
                        f"{name} is held as {tuple(dtensor.placements)} over {dtensor.device_mesh}, and the plan says "
                        f"{wanted} over {self.mesh}; give shard_parameters and spmd the same plan and mesh"
                    )

    def __str__(self) -> str:
        return f"{len(self.reports)} graphs compiled, each\n{self.plan}"


def _local_fake(traced: DTensor, size: torch.Size, *, is_leaf: bool) -> torch.Tensor:
    """What this rank's program reads of a DTensor, as Dynamo traced it: a fake value of static sizes."""
    held = traced.to_local().detach()
    value = held if held.shape == size else held.new_empty(size)
    return value.requires_grad_(traced.requires_grad and is_leaf)


def _leaf_fake(traced: DTensor, leaf: Unreduced) -> torch.Tensor:
    """What the program reads of a parameter whose gradient leaves unreduced: nothing but its shape."""
    return traced.to_local().detach().new_empty(()).expand(leaf.shape).requires_grad_()


def _check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise FxRewriteError(f"{name}={given!r} is not one of {choices}")


def _contiguous_fake(chunk: torch.Tensor) -> torch.Tensor:
    """A rank's chunk as its program gets it."""
    return chunk.detach().contiguous().requires_grad_(chunk.requires_grad)


spmd = SpmdBackend
