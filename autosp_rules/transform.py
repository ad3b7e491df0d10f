"""A Dynamo graph in, the local program of every rank out."""

from __future__ import annotations

import time

import torch
from torch import fx

from autosp_rules.checkpoint import is_recomputed
from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError
from autosp_rules.logits import drop_logits, why_not_tiled
from autosp_rules.masks import check_flex
from autosp_rules.offload import MIN_BYTES
from autosp_rules.random import refuse_own_draws
from autosp_rules.report import AutoSPReport, summarize
from autosp_rules.rule_set import rule_set
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import FxRewriteError, RefusedError
from fxrewrite.backends import normalized
from fxrewrite.ops import is_parameter
from fxrewrite.spmd import Axis, Layout, Replicated, Shard, SpmdContext, num_entries, size_hint

__all__ = ["transform"]


def transform(gm: fx.GraphModule, config: AutoSPConfig, axis: Axis) -> tuple[fx.GraphModule, AutoSPReport]:
    """The sequence-parallel program of `gm` over `axis`, the same on every rank, and what was done; `gm` is unchanged.

    Inputs stay whole on every rank. Raises AutoSPError where it cannot be done exactly.
    """
    started = time.perf_counter()
    try:
        normal = normalized(gm)
        dropped = drop_logits(normal) if config.logits == "drop" else {}
        outputs = _OutputPolicy(normal, config, axis)
        context = SpmdContext(axis, strict=config.strict, output_layout=outputs)
        rules = rule_set(
            config.attention,
            config.rng,
            config.checkpoint,
            config.loss_tile,
            config.mlp_tile,
            "rows" if config.mask_kernel == "auto" and config.inner != "inductor" else config.mask_kernel,
            skip_all_but_last_attention=config.skip_all_but_last_attention,
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
        raise AutoSPError.of(
            "no sequence found: nothing looks up integers [batch, sequence] of the model's call, or projects or "
            "normalizes floating values [batch, sequence, features] of it, of two tokens or more",
            hint="pass token ids with the sequence as their last dimension, or hidden states with features as the "
            "last; if this is a part of a model, torch.compile(..., fullgraph=True) shows where its graph breaks (FSDP "
            "by layer breaks it: shard the model as one)",
        )
    return normal, summarize(normal, report, axis, tokens, time.perf_counter() - started)


class _OutputPolicy:
    """How the graph's outputs return: see `AutoSPConfig.outputs`."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig, axis: Axis) -> None:
        self._num_ranks = axis.size
        self.lines: list[str] = []
        has_loss = any(map(_is_loss, gm.graph.output_node().all_input_nodes))
        self._keep = config.outputs == "shard" or (config.outputs == "auto" and has_loss)

    def __call__(self, node: fx.Node, layout: Layout) -> Layout:
        if not isinstance(layout, Shard):
            return Replicated()
        shape = tuple(size_hint(n) for n in node.meta["val"].shape)
        if self._keep:
            what = f"output %{node.name} {shape} returns as this rank's chunk {layout}"
            self.lines.append(f"{what}{self._padding(node, layout)}; outputs='gather' returns it whole")
            return layout
        return Replicated()

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
