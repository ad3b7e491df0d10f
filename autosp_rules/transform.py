"""A Dynamo graph in, the local program of every rank out."""

from __future__ import annotations

import time
from typing import Literal

from torch import fx, nn

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError, raised_as_autosp_error
from autosp_rules.memory.offload import MIN_BYTES
from autosp_rules.report import AutoSPReport, summarize
from autosp_rules.rule_set import rule_set
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import Event
from fxrewrite.ops import mutated
from fxrewrite.report import bytes_text
from fxrewrite.spmd import Axis, Border, SpmdContext, lowered

NO_SEQUENCE_HINT = (
    "pass token ids with the sequence as their last dimension, or hidden states with features as the last, and weights "
    "that are arguments, as of torch.func.functional_call, as nn.Parameters; if ids have the sequence as their only "
    "dimension, say so: autosp(sequence_dim=0); if this is a part of a model, "
    "torch.compile(..., fullgraph=True) shows where its graph breaks"
)


class NoSequenceError(AutoSPError):
    """A graph has no value from which on the sequence could be sharded."""


def _written_parameter(gm: fx.GraphModule) -> fx.Node | None:
    """A parameter that the graph holds, as Dynamo captures an optimizer's step, and writes to; a model's are inputs."""
    written = (value for node in gm.graph.nodes for value in mutated(node) if value.op == "get_attr")
    return next((value for value in written if isinstance(getattr(gm, str(value.target), None), nn.Parameter)), None)


def transform(
    gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border | None = None
) -> tuple[fx.GraphModule, AutoSPReport]:
    """The sequence-parallel program of `gm` over `axis`, the same on every rank, and what was done; `gm` is unchanged.

    Inputs are whole on every rank, but for those that the border says. It is filled with how outputs leave.

    Raises:
        NoSequenceError: nothing in the graph can be sharded.
        AutoSPError: it cannot be done exactly.
    """
    border = border or Border()
    started = time.perf_counter()
    if (written := _written_parameter(gm)) is not None:
        raise NoSequenceError.of(
            f"no sequence found: the graph is the step of an optimizer, which writes to parameter {written.target}",
            hint="compile the model, or the model and its loss",
        )

    def lower(program: fx.GraphModule) -> AutoSPReport:
        context = SpmdContext(
            axis,
            strict=config.strict,
            output_placement=border.on(axis),
            gradients="mean",
            finish=border.without_gradients,
        )
        report = rule_set(config).apply(program, context=context)
        if config.offload:
            report.events.append(Offloaded(min_bytes=MIN_BYTES))
        tokens = tokens_per_rank(program)
        if not tokens:
            raise NoSequenceError.of(
                "no sequence found: nothing looks up integers [batch, sequence] of the model's call, or projects or "
                "normalizes floating values [batch, sequence, features] of it, of two tokens or more",
                hint=NO_SEQUENCE_HINT,
            )
        return summarize(program, report, axis, tokens)

    with raised_as_autosp_error():
        program, report = lowered(
            gm, border, lower, breaks=config.breaks, outputs=config.outputs, is_part=border.ends_early
        )
    report.seconds = time.perf_counter() - started
    return program, report


class Offloaded(Event, frozen=True):
    """What is kept for the backward pass waits in host memory."""

    kind: Literal["offload"] = "offload"
    min_bytes: int

    def __str__(self) -> str:
        return f"offload: kept values of {bytes_text(self.min_bytes)} and more wait in host memory for backward"
