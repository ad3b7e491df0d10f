"""AutoSP as a torch.compile backend."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError, raised_as_autosp_error
from autosp_rules.gradients import EnteredGradients
from autosp_rules.inputs import why_not_called
from autosp_rules.memory.checkpoint import checkpoint_text
from autosp_rules.memory.offload import offloaded
from autosp_rules.parallelism import autosp_parallelism
from autosp_rules.report import AutoSPReport
from autosp_rules.transform import NO_SEQUENCE_HINT, NoSequenceError, transform
from fxrewrite import FxRewriteError
from fxrewrite.backends import (
    OVERLAP,
    RECOMPUTE_LATE,
    backend_name,
    capture,
    compiled_function,
    graph_break_hint,
    keep_graph_whole_under_ddp,
    refuse_precompile,
)
from fxrewrite.report import bytes_text
from fxrewrite.spmd import Advice, Axis, Border, ChunkedTensor, Program, SpmdBackend, axis_of

log = logging.getLogger(__name__)


ADVICE = Advice(
    inputs="pass the same whole batch on every rank of the axis: if it is random, call torch.manual_seed(seed) with "
    "one seed; sample by the data axis, as DistributedSampler(dataset, num_replicas=mesh['dp'].size(), "
    "rank=mesh.get_local_rank('dp')); or let autosp_rules.integrations share a trainer's batches",
    parameters="start every rank with equal weights, by one torch.manual_seed(seed) before the model is made or from "
    "one checkpoint; and average gradients over all ranks, those of this axis too, or compile with "
    "autosp(gradients='done')",
    generators="seed all ranks alike, torch.manual_seed(seed), and let what only some ranks draw, such as a data "
    "loader's order, draw by a torch.Generator of its own",
)


@dataclass(kw_only=True, eq=False)
class _WholePart(Program):
    """The program of a part of a model without a sequence, which every rank runs whole."""

    before: Callable[[], None]
    """Called at every call."""
    function: int | None = field(default_factory=compiled_function)
    """A number of what Dynamo compiled, the same for each of its programs."""
    calls: int = 0
    """How often it was called."""

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        self.before()
        return super().__call__(*inputs)


class AutoSPBackend(SpmdBackend[AutoSPReport]):
    """A torch.compile backend that shards the sequence over a mesh axis, and passes the rest to an inner backend.

    It is the backend of the parallelism `autosp_parallelism(config)` for inputs and parameters that every rank holds
    whole, whose gradients are averaged over the ranks by whoever averages them over replicas.

    `reports` has one AutoSPReport per compiled graph; `str(backend)` summarizes them.
    """

    _errors = staticmethod(raised_as_autosp_error)
    _advice = ADVICE

    def __init__(self, config: AutoSPConfig, mesh: DeviceMesh | None = None) -> None:
        with raised_as_autosp_error():
            super().__init__(
                autosp_parallelism(config),
                mesh=mesh,
                inner=config.inner,
                timeout=config.timeout,
                breaks="dtensor" if config.breaks == "dtensor" else "gather",
                regions=config.regions,
                compare_ranks=config.compare_ranks,
            )
        self.__name__ = "autosp"
        keep_graph_whole_under_ddp()
        self.config = config

    def __reduce__(self) -> tuple[Any, ...]:
        """A compiled model that is loaded from a file compiles again."""
        return AutoSPBackend, (self.config, self.mesh)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Program:
        """Returns this rank's compiled program; `options` are `mode` and `options` of `torch.compile`, for `inner`."""
        with raised_as_autosp_error():
            refuse_precompile()
            self._find_mesh(example_inputs)
            if why := _why_left_alone(self.config, self._sequence_axis):
                border = self._border(gm, example_inputs, why)
                self._report_whole(why, border)
                return Program(self._inner(gm, **options)(gm, border.examples(gm, example_inputs)), border)
            _refuse_dtensors(gm)
            # A graph without a sequence is an error, unless it is a part of a model: then another part may have one.
            try:
                sharded = super().__call__(gm, example_inputs, **options)
                sharded.run = offloaded(sharded.run) if self.config.offload else sharded.run
                return sharded
            except NoSequenceError:
                border = self._border(gm, example_inputs, why := "the graph has no sequence")
                if not (border.graph_break or self.reports):
                    raise
            self._report_whole("no sequence found", border)
            part = f" (a part of the model: {border.graph_break})" if border.graph_break else ""
            level = logging.INFO if border.graph_break or not torch.is_grad_enabled() else logging.WARNING
            log.log(level, "autosp: a graph without a sequence%s runs whole on every rank", part)
            run = self._inner(gm, **options)(gm, border.examples(gm, example_inputs))
            enter, compared = self._enter(gm, border, is_sharded=False), self._comparisons.of_whole(gm)
            whole = _WholePart(run, border, compared, enter, self._errors, before=self._refuse_no_sequence)
            self._programs.append(whole)
            return whole

    @property
    def _sequence_axis(self) -> Axis:
        return axis_of(self._on, self.config.axis)

    def _lowered(self, gm: fx.GraphModule, border: Border) -> tuple[fx.GraphModule, AutoSPReport]:
        """Raises AutoSPError if the model breaks the graph and the settings do not allow that."""
        why = border.graph_break
        if why and (self.config.breaks == "refuse" or self.config.strict):
            raise AutoSPError.of(
                f"the model does not compile to one graph: {why}",
                hint=f"{graph_break_hint(why)}; or allow it: breaks='gather', without strict=True",
            )
        if why and self.config.memory is not None:
            raise AutoSPError.of(
                f"memory is a budget for a step that is one graph, and the model does not compile to one: {why}",
                hint=f"{graph_break_hint(why)}; or set checkpoint, mlp_tile and loss_tile yourself",
            )
        return transform(gm, self.config, self._sequence_axis, border)

    def _settings(self, program: fx.GraphModule) -> str:
        how = f"inner={backend_name(self.inner)}, overlap={self.config.overlap}, {super()._settings(program)}"
        return f"{how}\n{checkpoint_text(program)}"

    def _inner(self, program: fx.GraphModule, **options: Any) -> Callable[..., Any]:
        more = OVERLAP if self.config.overlap else {}
        if self.inner == "inductor" and checkpoint_text(program):
            more = {**RECOMPUTE_LATE, **more}
        if more:
            options["options"] = {**more, **(options.get("options") or {})}
        return super()._inner(program, **options)

    def _enter(self, program: fx.GraphModule, border: Border, *held: Any, is_sharded: bool = True) -> EnteredGradients:
        is_eager = self.inner == "eager" or not isinstance(self.inner, str)
        return EnteredGradients(
            program, self.config.gradients, self._sequence_axis, border, is_sharded=is_sharded, is_eager=is_eager
        )

    def _report_whole(self, why: str, border: Border) -> None:
        report = AutoSPReport.of_graph_left_alone(self._sequence_axis, why, border.graph_break)
        report.events.extend(border.events)
        self.reports.append(report)

    def _refuse_no_sequence(self) -> None:
        """Raises NoSequenceError if all parts of the model were called again, and none has a sequence.

        A part that a model calls several times, as for each of its weights, says nothing of those that come later.
        """
        if any(report.tokens_per_rank for report in self.reports):
            return
        calls = Counter[int | None]()
        for program in self._programs:
            if isinstance(program, _WholePart):
                calls[program.function] += program.calls
        if min(calls.values()) > 1:
            raise NoSequenceError.of(
                f"no sequence found in any of the {len(self.reports)} graphs that were compiled",
                hint=NO_SEQUENCE_HINT,
            )

    def __str__(self) -> str:
        sharded = [report for report in self.reports if report.tokens_per_rank]
        breaks = [report for report in self.reports if report.graph_break]
        gathered = sum(report.bytes_gathered_at_break for report in breaks)
        rows = [f"AutoSP over axis {self.config.axis}: {len(self.reports)} graphs compiled, {len(sharded)} sharded"]
        if breaks:
            rows.append(f"{len(breaks)} graph breaks, at which {bytes_text(gathered)} are gathered on each rank:")
            rows += [f"  {report.graph_break}: {bytes_text(report.bytes_gathered_at_break)}" for report in breaks]
        return "\n".join(rows)


def autosp(
    inner: str | Callable[..., Any] = "inductor", *, mesh: DeviceMesh | None = None, axis: str = "sp", **options: Any
) -> AutoSPBackend:
    """Returns the backend for `torch.compile(model, backend=autosp(...))`.

    Every rank passes the whole batch. The loss that the model returns is the global loss, and parameter gradients
    averaged over the ranks of the axis are the gradients of a single device.

    Args:
        inner: backend that compiles the rewritten graph.
        mesh: device mesh that has the axis; None is the default process group as one axis.
        axis: name of the mesh axis.
        options: further fields of AutoSPConfig.

    Raises:
        AutoSPError: at compile time, inside torch's BackendCompilerFailed, if the model cannot be run exactly.
    """
    if isinstance(inner, AutoSPConfig):
        raise AutoSPError.of(
            "inner is an AutoSPConfig, and should be the name of a backend, or one",
            hint="write AutoSPBackend(config), or autosp(inner=..., ...) with the settings by name",
        )
    return AutoSPBackend(AutoSPConfig(inner=inner, axis=axis, **options), mesh)


def dry_run(
    model: Callable[..., Any], inputs: Mapping[str, Any], *, num_ranks: int, config: AutoSPConfig | None = None
) -> tuple[fx.GraphModule, AutoSPReport]:
    """Returns what AutoSP would do with `model(**inputs)` on `num_ranks` ranks: every rank's program, and the report.

    Needs no process group, and runs only the capture. The program cannot be run, because its axis has no group.

    Raises:
        AutoSPError: the model cannot be run exactly, or cannot be called so; `num_ranks` is not an int of 1 or more.
    """
    config = AutoSPConfig() if config is None else config
    if not isinstance(config, AutoSPConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AutoSPError.of(f"config is a {type(config).__name__}", hint="pass an AutoSPConfig(...)")
    if not callable(model):  # pyright: ignore[reportUnnecessaryComparison]
        raise AutoSPError.of(f"the model is a {type(model).__name__}", hint="pass a module or a function")
    try:
        axis, gm = Axis(config.axis, num_ranks), capture(model, inputs)
    except FxRewriteError as error:
        raise why_not_called(model, inputs) or AutoSPError.of(str(error)) from error
    why = _why_left_alone(config, axis)
    return (gm, AutoSPReport.of_graph_left_alone(axis, why)) if why else transform(gm, config, axis)


def _why_left_alone(config: AutoSPConfig, axis: Axis) -> str:
    """Says why a graph that is compiled now runs whole on every rank, or returns ''."""
    if axis.size == 1:
        return f"axis {axis.name} has one rank" + (", and the budget memory is not kept" if config.memory else "")
    if config.disable_in_eval and not torch.is_grad_enabled():
        return "gradients are disabled, and so is AutoSP then (disable_in_eval)"
    return ""


def _refuse_dtensors(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor) and not isinstance(value, ChunkedTensor):
            raise AutoSPError.of(
                f"input {node.target} is a DTensor, placed as {tuple(value.placements)}: parameters that the graph "
                "itself gathers (torchtitan's SimpleFSDP) or that tensor parallelism cuts are not supported",
                hint="shard parameters with torch.distributed.fsdp.fully_shard, on the whole model or by layer; or "
                "state their sharding, ZERO3 | AUTOSP, for the backend spmd: docs/write-a-parallelism.md",
            )
