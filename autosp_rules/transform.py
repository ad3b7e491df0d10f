"""A Dynamo graph in, the local program of every rank out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError
from autosp_rules.memory.offload import MIN_BYTES
from autosp_rules.report import AutoSPReport, summarize
from autosp_rules.rule_set import rule_set
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import Event, FxRewriteError, RefusedError
from fxrewrite.backends import normalized
from fxrewrite.graph import check_sizes, few_collections, reached
from fxrewrite.ops import is_parameter, is_tensor, mutated
from fxrewrite.spmd import (
    Axis,
    Crossing,
    Placement,
    Replicate,
    Shard,
    Size,
    SpmdContext,
    num_entries,
    product,
    size_hint,
)

__all__ = ["NO_SEQUENCE_HINT", "Border", "Chunk", "NoSequenceError", "transform"]

NO_SEQUENCE_HINT = (
    "pass token ids with the sequence as their last dimension, or hidden states with features as the last, and weights "
    "that are arguments, as of torch.func.functional_call, as nn.Parameters; if this is a part of a model, "
    "torch.compile(..., fullgraph=True) shows where its graph breaks"
)


class NoSequenceError(AutoSPError):
    """A graph has no value from which on the sequence could be sharded."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An output of which a rank returns its part."""

    shape: tuple[Size, ...]
    """The global one."""
    placement: Shard


@dataclass(slots=True)
class Border:
    """What surrounds a graph, for `transform`; and, filled by it, what its outputs are."""

    graph_break: str = ""
    """Why the graph is a part of the compiled function, with the line; empty where it is all of it."""
    ends_early: bool = False
    """Whether code that is not compiled goes on with what the graph returns, all of which is then gathered."""
    chunks: dict[int, Chunk] = field(default_factory=dict[int, Chunk])
    """Outputs that return as this rank's part, by position."""
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
        outputs = _OutputPolicy(normal, config, axis, border)
        context = SpmdContext(axis, strict=config.strict, output_placement=outputs, gradients="mean")
        report = rule_set(config).apply(normal, context=context)
        check_sizes(normal)
    except RefusedError as error:
        raise AutoSPError(error.refusal, error.located_at) from error
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error
    report.events.extend([*outputs.events, *border.crossing.events])
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


class OutputSharded(Event, frozen=True):
    """An output returns as this rank's chunk."""

    kind: Literal["output"] = "output"
    node: str
    shape: tuple[int, ...] = Field(description="of the whole output, at the sizes at hand")
    placement: str
    is_deferred: bool = Field(description="whether it is gathered when it is first used")
    num_bytes: int = Field(description="of the whole output")
    num_held: int = Field(description="entries along its dimension that all ranks hold together")
    num_padding: int = Field(description="of these, how many at the end of the last ranks are padding")

    def __str__(self) -> str:
        if self.is_deferred:
            when = f"is gathered when it is first used, {self.num_bytes:,} bytes on each rank"
            return f"output %{self.node} {self.shape} {self.placement} {when}"
        last = f"the last {self.num_padding} of {self.num_held} entries, at the end of the last ranks, are padding"
        padding = f", and {last}" if self.num_padding else ""
        what = f"output %{self.node} {self.shape} returns as this rank's chunk {self.placement}"
        return f"{what}{padding}; outputs='gather' returns it whole"


class _OutputPolicy:
    """How the graph's outputs return: see `AutoSPConfig.outputs`."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border) -> None:
        self._num_ranks, self._border, self._how = axis.size, border, config.outputs
        self._said: dict[fx.Node, OutputSharded] = {}
        has_loss = any(map(_is_loss, gm.graph.output_node().all_input_nodes))
        is_auto = config.outputs == "auto"
        self._as_dtensors = border.crossing.outputs.on(axis) if config.breaks == "dtensor" and is_auto else None
        keep = has_loss and not border.ends_early and self._as_dtensors is None
        self._keep = config.outputs == "shard" or (is_auto and keep)
        self._bytes: dict[fx.Node, int] = {}

    @property
    def events(self) -> list[OutputSharded]:
        return list(self._said.values())

    def __call__(self, node: fx.Node, placement: Placement) -> Placement:
        if self._as_dtensors is not None and self._as_dtensors(node, placement) != Replicate():
            self._bytes.pop(node, None)
            self._border.gathered_bytes = sum(self._bytes.values())
            return placement
        for position, value in enumerate(tree_leaves(node.graph.output_node().args[0])):
            if value is node:
                self._border.chunks.pop(position, None)
                if isinstance(placement, Shard) and self._keep:
                    self._border.chunks[position] = Chunk(tuple(node.meta["val"].shape), placement)
        value = node.meta["val"]
        is_sharded = isinstance(placement, Shard)
        self._bytes[node] = size_hint(product(value.shape)) * value.element_size() if is_sharded else 0
        self._said.pop(node, None)
        if not isinstance(placement, Shard) or not self._keep:
            self._border.gathered_bytes = sum(self._bytes.values())
            return Replicate()
        entries = size_hint(num_entries(value.shape, placement))
        held = -(-entries // self._num_ranks) * self._num_ranks if placement.uneven else entries
        self._said[node] = OutputSharded(
            node=node.name,
            shape=tuple(size_hint(n) for n in value.shape),
            placement=str(placement),
            is_deferred=self._how != "shard",
            num_bytes=self._bytes[node],
            num_held=held,
            num_padding=held - entries,
        )
        return placement


def _is_loss(node: fx.Node) -> bool:
    """Whether the output is one number that is computed of what the model is called with, and not of weights alone."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        return False
    return any(n.op == "placeholder" and is_tensor(n) and not is_parameter(n) for n in reached([node]))
