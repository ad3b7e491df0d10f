"""A Dynamo graph in, the local program of every rank out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError
from autosp_rules.masks import check_flex
from autosp_rules.memory.checkpoint import is_recomputed
from autosp_rules.memory.logits import drop_logits, why_not_tiled
from autosp_rules.memory.offload import MIN_BYTES
from autosp_rules.random import refuse_own_draws
from autosp_rules.report import AutoSPReport, summarize
from autosp_rules.rule_set import layouts_with, rule_set
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import FxRewriteError, RefusedError
from fxrewrite.backends import normalized
from fxrewrite.ops import is_parameter
from fxrewrite.spmd import Axis, Layout, Replicated, Shard, Size, SpmdContext, num_entries, product, size_hint

__all__ = ["NO_SEQUENCE_HINT", "Border", "Chunk", "NoSequenceError", "transform"]

NO_SEQUENCE_HINT = (
    "pass token ids with the sequence as their last dimension, or hidden states with features as the last; if this is "
    "a part of a model, torch.compile(..., fullgraph=True) shows where its graph breaks"
)

MOST_WHOLE = 0.1
"""Largest share of the operations of matrix products that every rank may compute whole under `strict=True`: a head for
one token of a long sequence is below it, a layer that is gathered is not."""


class NoSequenceError(AutoSPError):
    """A graph has no value from which on the sequence could be sharded."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An output of which a rank returns its part."""

    shape: tuple[Size, ...]
    """The global one."""
    layout: Shard


@dataclass(slots=True)
class Border:
    """What surrounds a graph, for `transform`; and, filled by it, what its outputs are."""

    graph_break: str = ""
    """Why the graph is a part of the compiled function, with the line; empty where it is all of it."""
    ends_early: bool = False
    """Whether code that is not compiled goes on with what the graph returns, all of which is then gathered."""
    chunks: dict[int, Chunk] = field(default_factory=dict[int, Chunk])
    """Outputs that return as this rank's part, by position."""
    gathered_bytes: int = 0
    """Bytes of the outputs that are gathered, whole on each rank."""


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
    try:
        normal = normalized(gm)
        dropped = drop_logits(normal) if config.logits == "drop" else {}
        outputs = _OutputPolicy(normal, config, axis, border)
        context = SpmdContext(axis, strict=config.strict, output_layout=outputs, gradients="mean")
        rules = rule_set(
            config.attention,
            config.rng,
            config.checkpoint,
            config.loss_tile,
            config.mlp_tile,
            "rows" if config.mask_kernel == "auto" and config.inner != "inductor" else config.mask_kernel,
            skip_all_but_last_attention=config.skip_all_but_last_attention,
            sequence_dim=config.sequence_dim,
            rules=config.rules,
            layouts=layouts_with(config.layouts),
        )
        report = rules.apply(normal, context=context)
        if config.rng == "global":
            refuse_own_draws(normal)
        report.lines.extend(check_flex(normal, config.inner))
    except RefusedError as error:
        raise AutoSPError(error.refusal, error.located_at) from error
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error
    report.lines.extend([*dropped.values(), *why_not_tiled(normal, dropped, config.loss_tile), *outputs.lines])
    if config.inner == "eager" and any(map(is_recomputed, normal.graph.nodes)):
        report.lines.append("checkpoint: inner='eager' reads no tags, so every layer keeps all; 'aot_eager' reads them")
    if config.offload:
        report.lines.append(f"offload: kept values of {MIN_BYTES:,} bytes and more wait in host memory for backward")
    tokens = tokens_per_rank(normal)
    if not tokens:
        raise NoSequenceError.of(
            "no sequence found: nothing looks up integers [batch, sequence] of the model's call, or projects or "
            "normalizes floating values [batch, sequence, features] of it, of two tokens or more",
            hint=NO_SEQUENCE_HINT,
        )
    if config.strict and tokens > 1 and report.shares["whole"] > MOST_WHOLE:
        whole = next(line for line in report.lines if line.startswith("whole: "))
        raise AutoSPError.of(
            f"strict=True: {whole}",
            hint=f"more than {MOST_WHOLE:.0%} is no sequence parallelism; without strict=True it runs so",
        )
    summary = summarize(normal, report, axis, tokens, time.perf_counter() - started)
    return normal, summary.at_break(border.graph_break, border.gathered_bytes)


class _OutputPolicy:
    """How the graph's outputs return: see `AutoSPConfig.outputs`."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border) -> None:
        self._num_ranks, self._border, self._how = axis.size, border, config.outputs
        self._said: dict[fx.Node, str] = {}
        has_loss = any(map(_is_loss, gm.graph.output_node().all_input_nodes))
        self._keep = config.outputs == "shard" or (config.outputs == "auto" and has_loss and not border.ends_early)
        self._bytes: dict[fx.Node, int] = {}

    @property
    def lines(self) -> list[str]:
        return list(self._said.values())

    def __call__(self, node: fx.Node, layout: Layout) -> Layout:
        for position, value in enumerate(tree_leaves(node.graph.output_node().args[0])):
            if value is node:
                self._border.chunks.pop(position, None)
                if isinstance(layout, Shard) and self._keep:
                    self._border.chunks[position] = Chunk(tuple(node.meta["val"].shape), layout)
        value = node.meta["val"]
        is_sharded = isinstance(layout, Shard)
        self._bytes[node] = size_hint(product(value.shape)) * value.element_size() if is_sharded else 0
        self._said.pop(node, None)
        if not isinstance(layout, Shard) or not self._keep:
            self._border.gathered_bytes = sum(self._bytes.values())
            return Replicated()
        shape = tuple(size_hint(n) for n in value.shape)
        if self._how == "shard":
            what = f"output %{node.name} {shape} returns as this rank's chunk {layout}"
            self._said[node] = f"{what}{self._padding(node, layout)}; outputs='gather' returns it whole"
        else:
            cost = f"{self._bytes[node]:,} bytes on each rank"
            self._said[node] = f"output %{node.name} {shape} {layout} is gathered when it is first used, {cost}"
        return layout

    def _padding(self, node: fx.Node, layout: Shard) -> str:
        if not layout.uneven:
            return ""
        entries = size_hint(num_entries(node.meta["val"].shape, layout))
        held = -(-entries // self._num_ranks) * self._num_ranks
        return f", and the last {held - entries} of {held} entries, at the end of the last ranks, are padding"


def _is_loss(node: fx.Node) -> bool:
    """Whether the output is one number that is computed of what the model is called with, and not of weights alone."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        return False
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor) and not is_parameter(node):
            return True
        waiting.extend(operand for operand in node.all_input_nodes if operand not in seen)
        seen.update(node.all_input_nodes)
    return False
