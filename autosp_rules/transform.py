"""A Dynamo graph in, the local program of every rank out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from torch import fx, nn

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError, raised_as_autosp_error
from autosp_rules.memory.offload import MIN_BYTES
from autosp_rules.report import AutoSPReport, summarize
from autosp_rules.rule_set import rule_set
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import Event, FxRewriteError, RefusedError
from fxrewrite.backends import normalized
from fxrewrite.graph import check_sizes, few_collections
from fxrewrite.ops import mutated
from fxrewrite.spmd import (
    Axis,
    ChunkedOutputs,
    Crossing,
    Placement,
    Replicate,
    Shard,
    SpmdContext,
    is_with_loss,
    product,
    size_hint,
)

__all__ = ["NO_SEQUENCE_HINT", "Border", "NoSequenceError", "transform"]

NO_SEQUENCE_HINT = (
    "pass token ids with the sequence as their last dimension, or hidden states with features as the last, and weights "
    "that are arguments, as of torch.func.functional_call, as nn.Parameters; if this is a part of a model, "
    "torch.compile(..., fullgraph=True) shows where its graph breaks"
)


class NoSequenceError(AutoSPError):
    """A graph has no value from which on the sequence could be sharded."""


@dataclass(slots=True)
class Border:
    """What surrounds a graph, for `transform`; and, filled by it, what its outputs are."""

    graph_break: str = ""
    """Why the graph is a part of the compiled function, with the line; empty where it is all of it."""
    ends_early: bool = False
    """Whether code that is not compiled goes on with what the graph returns, all of which is then gathered."""
    outputs: ChunkedOutputs = field(default_factory=ChunkedOutputs)
    """Outputs that return as this rank's part, or are gathered when they are used."""
    crossing: Crossing = field(default_factory=Crossing)
    """Inputs and outputs that are DTensors."""
    gathered_bytes: int = 0
    """Bytes of the outputs that are gathered, whole on each rank."""


def _written_parameter(gm: fx.GraphModule) -> fx.Node | None:
    """A parameter that the graph holds, as Dynamo captures an optimizer's step, and writes to; a model's are inputs."""
    written = (value for node in gm.graph.nodes for value in mutated(node) if value.op == "get_attr")
    return next((value for value in written if isinstance(getattr(gm, str(value.target), None), nn.Parameter)), None)


@few_collections()
def transform(
    gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border | None = None
) -> tuple[fx.GraphModule, AutoSPReport]:
    """The sequence-parallel program of `gm` over `axis`, the same on every rank, and what was done; `gm` is unchanged.

    Inputs are whole on every rank.

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
    try:
        normal = normalized(gm)
        policy = _OutputPolicy(normal, config, axis, border)
        finish = border.outputs.without_gradients
        context = SpmdContext(axis, strict=config.strict, output_placement=policy, gradients="mean", finish=finish)
        report = rule_set(config).apply(normal, context=context)
        check_sizes(normal)
    except RefusedError as error:
        raise AutoSPError(error.refusal, error.located_at) from error
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error
    report.events.extend([*border.outputs.events, *border.crossing.events])
    if config.offload:
        report.events.append(Offloaded(min_bytes=MIN_BYTES))
    tokens = tokens_per_rank(normal)
    if not tokens:
        raise NoSequenceError.of(
            "no sequence found: nothing looks up integers [batch, sequence] of the model's call, or projects or "
            "normalizes floating values [batch, sequence, features] of it, of two tokens or more",
            hint=NO_SEQUENCE_HINT,
        )
    summary = summarize(normal, report, axis, tokens, time.perf_counter() - started)
    return normal, summary.at_break(border.graph_break, border.gathered_bytes)


class Offloaded(Event, frozen=True):
    """What is kept for the backward pass waits in host memory."""

    kind: Literal["offload"] = "offload"
    min_bytes: int

    def __str__(self) -> str:
        return f"offload: kept values of {self.min_bytes:,} bytes and more wait in host memory for backward"


class _OutputPolicy:
    """How the graph's outputs return: see `AutoSPConfig.outputs`."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border) -> None:
        self._border = border
        is_auto = config.outputs == "auto"
        self._as_dtensors = border.crossing.outputs.on(axis) if config.breaks == "dtensor" and is_auto else None
        is_kept = is_auto and self._as_dtensors is None and not border.ends_early and is_with_loss(gm.graph)
        border.outputs = ChunkedOutputs(is_deferred=is_auto, timeout=config.timeout, errors=raised_as_autosp_error)
        self._in_chunks = border.outputs.on(axis) if is_kept or config.outputs == "shard" else None
        self._bytes: dict[int, int] = {}

    def __call__(self, position: int, node: fx.Node, placement: Placement) -> Placement:
        self._bytes.pop(position, None)
        for in_chunks in (self._as_dtensors, self._in_chunks):
            if in_chunks is not None and in_chunks(position, node, placement) != Replicate():
                self._border.gathered_bytes = sum(self._bytes.values())
                return placement
        value = node.meta["val"]
        if isinstance(placement, Shard):
            self._bytes[position] = size_hint(product(value.shape)) * value.element_size()
        self._border.gathered_bytes = sum(self._bytes.values())
        return Replicate()
