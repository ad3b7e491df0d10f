"""A parallelism as a torch.compile backend: `torch.compile(model, backend=spmd(plan, mesh=mesh))`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar, get_args

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial as TorchPartial

from fxrewrite.backends import (
    compile_regions,
    find_backend,
    inner_compiler,
    normalized,
    reached_recompile_limit,
    refuse_dependence_on_values,
    refuse_precompile,
)
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.garbage import few_collections
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.other_sizes import check_sizes
from fxrewrite.ops import is_parameter, tensors_in
from fxrewrite.spmd.context import SpmdContext, contexts
from fxrewrite.spmd.events import ProgramIsLast, RegionsCompiled
from fxrewrite.spmd.group import axis_mesh, axis_of, fix_rank
from fxrewrite.spmd.parallelism.accumulate import Unreduced, unreduced_leaves
from fxrewrite.spmd.parallelism.alternatives import chosen_for, require_chosen
from fxrewrite.spmd.parallelism.arguments import Stated, stated_arguments, without_joined
from fxrewrite.spmd.parallelism.captured import check_dense_gradients
from fxrewrite.spmd.parallelism.comparisons import ADVICE, Comparison, RankComparisons
from fxrewrite.spmd.parallelism.parallelism import AnyPlan, check_axes
from fxrewrite.spmd.parallelism.parameters import local_value, local_values, torch_placements, without_whole
from fxrewrite.spmd.parallelism.schedule.local_gradients import add_leaves, leaves_of
from fxrewrite.spmd.placement import Axis, Replicate, Zigzag, local_shape
from fxrewrite.spmd.price.report import ProgramReport, SpmdReport
from fxrewrite.spmd.propagation.input_placements import input_placements
from fxrewrite.spmd.runtime.agree import compiling
from fxrewrite.spmd.runtime.borders import Border
from fxrewrite.spmd.runtime.chunked_tensor import check_dtensors

Breaks: TypeAlias = Literal["gather", "dtensor"]
"""What programs pass to each other where ranks hold it in chunks: whole values, or DTensors."""
ReturnedOutputs: TypeAlias = Literal["auto", "gather"]
"""What the caller gets of outputs in chunks: beside a scalar loss, tensors that are gathered when they are first used
("auto"), or whole values ("gather")."""
CompiledRegions: TypeAlias = Literal["whole", "once"]
"""Whether a program is compiled whole, or each distinct region of it once."""


log = logging.getLogger(__name__)
R = TypeVar("R", bound=ProgramReport)


@dataclass(eq=False)
class Program:
    """A compiled program as Dynamo calls it: the ranks are compared, and it gets what this rank holds."""

    run: Callable[..., Any]
    border: Border
    comparisons: Sequence[Comparison] = ()
    enter: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    """What `run` gets of what enters by the border."""
    errors: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around what may find that ranks differ."""
    has_dtensors: bool = False
    """Whether DTensors enter."""

    def __call__(self, *inputs: Any) -> Any:
        entered = self.border.entered(inputs)
        held = list(map(local_value, entered)) if self.has_dtensors else entered
        with self.errors():
            for comparison in self.comparisons:
                comparison.checks.before([held[i] for i in comparison.at])
        given = self.enter(entered)
        try:
            values = self.run(*given)
        except Exception:
            self.settle()  # if the ranks differ, this raises the cause
            raise
        return self.border.left(values, given)

    def settle(self) -> None:
        """Read what came of comparing the ranks in the last call."""
        with self.errors():
            for comparison in self.comparisons:
                comparison.checks.settle()


@few_collections()
def lowered(
    gm: fx.GraphModule,
    border: Border,
    lower: Callable[[fx.GraphModule], R],
    *,
    breaks: str,
    outputs: str,
    is_part: bool,
) -> tuple[fx.GraphModule, R]:
    """The program that `lower` makes of a graph in normal form, and its report; `gm` is unchanged.

    What leaves in chunks is decided by the other arguments, and written to the border (`Border.decide`).
    """
    program = normalized(gm)
    border.decide(program.graph, breaks=breaks, outputs=outputs, is_part=is_part)
    report = lower(program)
    check_sizes(program)
    report.events.extend(border.events)
    return program, report.at_break(border.graph_break, border.gathered_bytes)


class SpmdBackend(Generic[R]):
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
        mesh: has the axes of the plan; None is the default process group, as the one axis of a plan over one.
        inner: the backend that compiles the lowered graph.
        strict: refuse an operator without layout rule instead of gathering its operands.
        timeout: seconds to wait for other ranks to compile the same graph.
        breaks: what passes between graphs of a model that ranks hold in chunks: it is gathered ("gather"), or there
            are DTensors ("dtensor"), also of the results.
        outputs: what a model that is one graph returns beside a scalar loss, such as logits, is gathered when it is
            first used, which all ranks must do then ("auto"), or always ("gather"). Without a loss, outputs are whole.
        regions: the program is compiled whole ("whole"), or each distinct region of it once, such as a layer ("once",
            `fxrewrite.backends.regional`). What a region reads is then gathered where it begins, not a layer ahead.
        compare_ranks: compare at every call what ranks along an axis with shared data pass, and their parameters at
            calls 1, 2, 4, 8, ..., in the background; otherwise at the first call alone.

    Attributes:
        plan: the parallelism, or several.
        mesh: whose axes they are over.
        inner: the backend that compiles the program of a rank.
        reports: one for each compiled graph, in order.

    Raises:
        FxRewriteError: no such backend, or no such axis. At compile time, inside torch's BackendCompilerFailed: the
            plan does not fit the model.
    """

    _errors: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Around what finds that ranks differ, when a program is called."""
    _advice = ADVICE
    """What to do then."""

    def __init__(
        self,
        plan: AnyPlan,
        *,
        mesh: DeviceMesh | None,
        inner: str | Callable[..., Any] = "inductor",
        strict: bool = False,
        timeout: float = 3600.0,
        breaks: Breaks = "gather",
        outputs: ReturnedOutputs = "auto",
        regions: CompiledRegions = "whole",
        compare_ranks: bool = True,
    ) -> None:
        find_backend(inner)
        _check_choice("breaks", breaks, get_args(Breaks))
        _check_choice("outputs", outputs, get_args(ReturnedOutputs))
        _check_choice("regions", regions, get_args(CompiledRegions))
        if breaks == "dtensor":
            check_dtensors()
        if mesh is not None or len(plan.members) > 1:
            check_axes(plan, mesh)
        require_chosen(plan)
        self.__name__ = "spmd"
        self.plan, self.mesh, self.inner = plan, mesh, inner
        self.reports: list[R] = []
        self._strict, self._breaks, self._outputs = strict, breaks, outputs
        self._regions, self._timeout, self._compare_ranks = regions, timeout, compare_ranks
        self._programs: list[Program] = []
        self._axis: Axis | None = None
        """Of the default process group, where no mesh was given."""
        if mesh is not None:
            self._use(mesh)

    def _use(self, mesh: DeviceMesh) -> None:
        """Sets what depends on the mesh."""
        self._on = mesh
        shared = tuple(member.axis for member in self.plan.members if member.data == "shared")
        self._shared = mesh[shared] if shared else None
        """The axes along which ranks share what programs pass to each other."""
        self._stated = stated_arguments(self.plan, mesh)
        self._comparisons = RankComparisons(
            self.plan, mesh, self._timeout, self._advice, every_call=self._compare_ranks
        )

    def __getstate__(self) -> dict[str, Any]:
        """Plans hold functions that pickle does not find by name.

        Raises:
            FxRewriteError: always; it says what can be pickled.
        """
        raise FxRewriteError(
            "a compiled model whose backend has a plan cannot be pickled: save its state_dict(), or the model as it "
            "was before torch.compile (compiled._orig_mod), and compile what is loaded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The backend itself, as a function is: copies of a compiled model, as for averaged weights, share it."""
        return self

    def check_ranks(self) -> None:
        """Reads the results of comparing the ranks in the last calls, which otherwise the next calls would read.

        Call it on every rank at the end of a training, before weights are saved.

        Raises:
            FxRewriteError: on every rank, where the ranks of an axis were called with different values.
        """
        for program in self._programs:
            program.settle()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Program:
        """Returns this rank's compiled program; `options` are `mode` and `options` of `torch.compile`, for `inner`."""
        refuse_precompile()
        self._find_mesh(example_inputs)
        dtensors = without_whole(gm, example_inputs)
        border = self._border(gm, example_inputs)
        chunks = without_joined(gm, self._stated, is_part=bool(border.graph_break))
        self._comparisons.agree_on_chunks(gm, chunks, example_inputs)
        program, report = self._lowered(gm, border)
        self._check_inputs(program, dtensors, chunks, border.chunks)
        comparisons = self._comparisons.of(program, chunks, self._settings(program))
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
        enter = self._enter(program, border, sizes, unreduced)
        run = self._compiled(program, local, self._inner(program, **options), border, report)
        compiled = Program(run, border, comparisons, enter, self._errors, has_dtensors=bool(dtensors))
        self._programs.append(compiled)
        return compiled

    def _find_mesh(self, example_inputs: Sequence[Any]) -> None:
        """Where no mesh was given, that of the default process group."""
        if self.mesh is None:
            axis = axis_of(None, self.plan.members[0].axis)
            if self._axis != axis:
                self._axis = axis
                self._use(axis_mesh(axis, next((x.device.type for x in tensors_in(example_inputs)), "cpu")))

    def _border(self, gm: fx.GraphModule, example_inputs: Sequence[Any], why_whole: str = "") -> Border:
        """What crosses the border of a graph in chunks, or why it reads nothing so; it starts from whole values."""
        border = Border(self._shared, timeout=self._timeout, errors=self._errors)
        border.enter(gm, example_inputs, why_whole=why_whole)
        return border

    def _settings(self, program: fx.GraphModule) -> str:
        """What ranks must compile alike, beside the program."""
        return f"regions={self._regions}"

    def _inner(self, program: fx.GraphModule, **options: Any) -> Callable[..., Any]:
        """What compiles the program, with these options of `torch.compile`."""
        return inner_compiler(self.inner, **options)

    def _enter(
        self,
        program: fx.GraphModule,
        border: Border,
        sizes: Mapping[int, torch.Size],
        unreduced: Sequence[Unreduced],
        /,
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Gives, at each call, what the program runs on: what this rank holds, through which gradients flow."""
        reduced = set(sizes) - {one.position for one in unreduced}
        placeholders = program.graph.find_nodes(op="placeholder")
        chunks = [
            position
            for position, (node, of) in enumerate(zip(placeholders, input_placements(program), strict=True))
            if not is_parameter(node) and any(placement != Replicate() for placement in of.values())
        ]

        def entered(inputs: Sequence[Any]) -> Sequence[Any]:
            given = [*local_values(inputs, sizes, reduced), *unreduced_leaves(unreduced, inputs)]
            for position in chunks:
                given[position] = given[position].contiguous()
            return given

        return entered

    def _compiled(
        self,
        program: fx.GraphModule,
        examples: Sequence[Any],
        compile_inner: Callable[..., Any],
        border: Border,
        report: R,
    ) -> Callable[..., Any]:
        """Compiles the program that the ranks agreed on, which is changed: whole, or each distinct region once."""
        if limit := reached_recompile_limit():
            report.events.append(ProgramIsLast(limit=limit))
            log.warning("%s: %s", self.__name__, report.events[-1])
        self.reports.append(report)
        report.events.extend(border.prepare(program))
        fix_rank(program)
        with compiling(self._comparisons.axes, self._timeout), refuse_dependence_on_values(self.inner):
            if self._regions == "whole":
                return compile_inner(program, examples)
            run, found = compile_regions(program, examples, compile_inner)
            report.events.append(RegionsCompiled(found=found))
            return run

    def _lowered(self, gm: fx.GraphModule, border: Border) -> tuple[fx.GraphModule, Any]:
        """The program of every rank, and what was done; the border gets what leaves in chunks."""
        is_part = bool(border.graph_break)

        def lower(program: fx.GraphModule) -> SpmdReport:
            check_dense_gradients(program)
            add_leaves(program)

            def tried() -> dict[str, SpmdContext]:
                return self._contexts(Border(self._shared, border.leaving), is_part=is_part)

            plan = chosen_for(self.plan, program, tried).plan()
            report = plan.apply(program, context=self._contexts(border, is_part=is_part))
            sizes = {member.axis: axis_of(self._on, member.axis).size for member in self.plan.members}
            return SpmdReport.of(report, program, sizes)

        return lowered(gm, border, lower, breaks=self._breaks, outputs=self._outputs, is_part=is_part)

    def _contexts(self, border: Border, *, is_part: bool) -> dict[str, SpmdContext]:
        """What the plan is told of each axis; ranks that share data return to each other what the border says."""
        found = contexts(self._on, strict=self._strict, is_part=is_part, is_ahead=self._regions == "whole")
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
            shape = local_shape(shape, placed, axis_of(self._on, axis).size)  # pyright: ignore[reportArgumentType]
        if tuple(shape) != tuple(leaf.meta["val"].shape) or any(getattr(p, "uneven", False) for p in held.values()):
            raise FxRewriteError(
                f"the gradient of {input_name(program.graph.find_nodes(op='placeholder')[position])} has shape "
                f"{tuple(leaf.meta['val'].shape)} where it should leave unreduced, not {tuple(shape)}; train without "
                "no_sync, and report this model"
            )
        placements = torch_placements(held, self._on)  # pyright: ignore[reportArgumentType]
        for axis in axes:
            placements[(self._on.mesh_dim_names or ()).index(axis)] = TorchPartial()
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
                wanted = tuple(torch_placements(shards, self._on))
                if dtensor.device_mesh != self._on or tuple(dtensor.placements) != wanted:
                    raise FxRewriteError(
                        f"{name} is held as {tuple(dtensor.placements)} over {dtensor.device_mesh}, and the plan says "
                        f"{wanted} over {self._on}; give shard_parameters and spmd the same plan and mesh"
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


spmd = SpmdBackend[SpmdReport]
