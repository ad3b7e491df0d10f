"""AutoSP as a torch.compile backend."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError, raised_as_autosp_error
from autosp_rules.inputs import why_not_called
from autosp_rules.memory.checkpoint import checkpoint_text
from autosp_rules.memory.offload import offloaded
from autosp_rules.program import Program
from autosp_rules.report import AutoSPReport
from autosp_rules.transform import NO_SEQUENCE_HINT, NoSequenceError, transform
from fxrewrite import FxRewriteError, graph_text
from fxrewrite.backends import (
    OVERLAP,
    RECOMPUTE_LATE,
    backend_name,
    capture,
    graph_break_hint,
    inner_compiler,
    keep_graph_whole_under_ddp,
    refuse_precompile,
)
from fxrewrite.spmd import (
    Axis,
    Border,
    ChunkedTensor,
    RanksBackend,
    agree,
    axis_mesh,
    axis_of,
    check_dtensors,
)

log = logging.getLogger(__name__)


class AutoSPBackend(RanksBackend[AutoSPReport, Program]):
    """A torch.compile backend that shards the sequence over a mesh axis, and passes the rest to an inner backend.

    `reports` has one AutoSPReport per compiled graph; `str(backend)` summarizes them.
    """

    def __init__(self, config: AutoSPConfig, mesh: DeviceMesh | None = None) -> None:
        with raised_as_autosp_error():
            super().__init__("autosp", config.inner, regions=config.regions, timeout=config.timeout)
            if config.breaks == "dtensor":
                check_dtensors()
        keep_graph_whole_under_ddp()
        self.config = config
        self.mesh = mesh

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Returns this rank's compiled program; `options` are `mode` and `options` of `torch.compile`, for `inner`."""
        compile_whole = self._inner(**options)
        with raised_as_autosp_error():
            refuse_precompile()
            axis = axis_of(self.mesh, self.config.axis)
        why = _why_left_alone(self.config, axis)
        border = self._border(gm, example_inputs, axis, why)
        # One rank, or evaluation: compile the graph unchanged.
        if why:
            self._report_whole(axis, why, border)
            run = compile_whole(gm, border.examples(gm, example_inputs))
            return lambda *inputs: run(*border.entered(inputs))
        _refuse_dtensors(gm)
        self._refuse_break(border.graph_break)
        # A graph without a sequence is an error, unless it is a part of a model: then another part may have one.
        try:
            program, report = transform(gm, self.config, axis, border)
        except NoSequenceError:
            if not (border.graph_break or self.reports):
                raise
            border = self._border(gm, example_inputs, axis, "the graph has no sequence")
            self._report_whole(axis, "no sequence found", border)
            part = f" (a part of the model: {border.graph_break})" if border.graph_break else ""
            level = logging.INFO if border.graph_break or not torch.is_grad_enabled() else logging.WARNING
            log.log(level, "autosp: a graph without a sequence%s runs whole on every rank", part)
            whole = Program(gm, self.config, axis, border, is_sharded=False, before=self._refuse_no_sequence)
            whole.run = compile_whole(gm, border.examples(gm, example_inputs))
            self._programs.append(whole)
            return whole
        # Ranks with different graphs would hang in their collectives, so compare the programs before the first call.
        recomputed = checkpoint_text(program)
        text = f"{_order_of(self.config)}\n{recomputed}{graph_text(program, canonical_order=True)}"
        with raised_as_autosp_error():
            agree(axis, text, timeout=self.config.timeout)
        sharded = Program(program, self.config, axis, border, is_sharded=True)
        compile_inner = self._inner(**options, recomputes=bool(recomputed))
        examples = border.examples(program, example_inputs)
        with raised_as_autosp_error():
            run = self._compiled(program, examples, compile_inner, [axis], border, report)
        sharded.run = offloaded(run) if self.config.offload else run
        self._programs.append(sharded)
        return sharded

    def _refuse_break(self, why: str) -> None:
        """Raises AutoSPError if the model breaks the graph (`why` says where) and the settings do not allow that."""
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

    def _border(self, gm: fx.GraphModule, example_inputs: Sequence[Any], axis: Axis, why_whole: str) -> Border:
        """What passes as DTensors; the graph reads inputs that are some whole from now on."""
        tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
        mesh = None
        if tensors and (self.config.breaks == "dtensor" or any(isinstance(x, ChunkedTensor) for x in tensors)):
            mesh = axis_mesh(self.mesh, axis, tensors[0].device.type)
        border = Border(mesh, timeout=self.config.timeout, errors=raised_as_autosp_error)
        border.enter(gm, example_inputs, why_whole=why_whole)
        return border

    def _report_whole(self, axis: Axis, why: str, border: Border) -> None:
        report = AutoSPReport.of_graph_left_alone(axis, why, border.graph_break)
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
            rows.append(f"{len(breaks)} graph breaks, at which {gathered:,} bytes are gathered on each rank:")
            rows += [f"  {report.graph_break}: {report.bytes_gathered_at_break:,} bytes" for report in breaks]
        return "\n".join(rows)

    def _inner(
        self, *, mode: str | None = None, options: Mapping[str, Any] | None = None, recomputes: bool = False
    ) -> Callable[..., Any]:
        if self.config.overlap:
            options = {**OVERLAP, **(options or {})}
        if recomputes and self.config.inner == "inductor":
            options = {**RECOMPUTE_LATE, **(options or {})}
        return inner_compiler(self.config.inner, mode=mode, options=options)


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
        if isinstance(value, DTensor):
            raise AutoSPError.of(
                f"input {node.target} is a DTensor, placed as {tuple(value.placements)}: parameters that the graph "
                "itself gathers (torchtitan's SimpleFSDP) or that tensor parallelism cuts are not supported",
                hint="shard parameters with torch.distributed.fsdp.fully_shard, on the whole model or by layer; or "
                "state their sharding, ZERO3 | AUTOSP, for the backend spmd: docs/write-a-parallelism.md",
            )


def _order_of(config: AutoSPConfig) -> str:
    """Returns what determines the order of collectives in the compiled program, besides the graph."""
    return f"inner={backend_name(config.inner)}, overlap={config.overlap}, regions={config.regions}"
