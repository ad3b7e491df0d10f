"""AutoSP as a torch.compile backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError
from autosp_rules.report import AutoSPReport
from autosp_rules.transform import transform
from fxrewrite import FxRewriteError, graph_text
from fxrewrite.backends import capture, find_backend, graph_break_reason
from fxrewrite.spmd import Axis, agree, axis_of

__all__ = ["AutoSPBackend", "autosp", "autosp_backend", "dry_run"]


class AutoSPBackend:
    """A torch.compile backend that shards the sequence over a mesh axis and hands the rest to an inner backend.

    `reports` has one AutoSPReport for each graph that was compiled.
    """

    def __init__(self, config: AutoSPConfig, mesh: DeviceMesh | None = None) -> None:
        self.config = config
        self.mesh = mesh
        self.reports: list[AutoSPReport] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reason = graph_break_reason(gm)
        if reason:
            raise AutoSPError.of(
                f"the model does not compile to one graph: {reason}",
                hint="use torch.compile(..., fullgraph=True) to see the break, and remove it",
            )
        axis = _axis(self.mesh, self.config.axis)
        if axis.size == 1:
            self.reports.append(AutoSPReport.of_one_rank(axis))
            return find_backend(self.config.inner)(gm, list(example_inputs))
        program, report = transform(gm, self.config, axis)
        try:
            agree(axis, graph_text(program), timeout=self.config.timeout)
        except FxRewriteError as error:
            raise AutoSPError.of(str(error)) from error
        self.reports.append(report)
        return find_backend(self.config.inner)(program, list(example_inputs))


def autosp(
    inner: str | Callable[..., Any] = "inductor", *, mesh: DeviceMesh | None = None, axis: str = "sp", **options: Any
) -> AutoSPBackend:
    """The backend for `torch.compile(model, backend=autosp(...))`.

    Every rank passes the whole batch; the loss that the model returns is the global loss, and parameter gradients
    averaged over the ranks of the axis are the single-device gradients.

    Args:
        inner: backend that compiles the rewritten graph.
        mesh: device mesh that has the axis; None is the default process group as one axis.
        axis: name of the mesh axis.
        options: further fields of AutoSPConfig.

    Raises:
        AutoSPError: at compile time, inside torch's BackendCompilerFailed, where the model cannot be run exactly.
    """
    return AutoSPBackend(AutoSPConfig(inner=inner, axis=axis, **options), mesh)


def autosp_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The entry point of `torch.compile(model, backend="autosp", options={...})`; options as for `autosp`."""
    return autosp(**dict(options or {}))(gm, example_inputs)


def dry_run(
    model: Callable[..., Any], inputs: Mapping[str, Any], *, num_ranks: int, config: AutoSPConfig | None = None
) -> tuple[fx.GraphModule, AutoSPReport]:
    """What AutoSP would do with `model(**inputs)` on `num_ranks` ranks: the program of every rank, and the report.

    Needs no process group and runs nothing but the capture; the program cannot run, its axis has no group.
    """
    if num_ranks < 1:
        raise AutoSPError.of(f"{num_ranks} ranks", hint="pass num_ranks=1 or more")
    config = config or AutoSPConfig()
    gm = capture(model, inputs)
    return transform(gm, config, Axis(config.axis, num_ranks))


def _axis(mesh: DeviceMesh | None, name: str) -> Axis:
    try:
        return axis_of(mesh, name)
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error
