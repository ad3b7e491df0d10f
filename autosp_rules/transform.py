"""A Dynamo graph in, the local program of every rank out."""

from __future__ import annotations

import time

import torch
from torch import fx

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError
from autosp_rules.report import AutoSPReport, summarize
from autosp_rules.rule_set import RULES
from autosp_rules.sequence import shard_input_ids
from fxrewrite import FxRewriteError, RefusedError
from fxrewrite.graph import normalize
from fxrewrite.ops import key
from fxrewrite.spmd import Axis, Layout, Replicated, Shard, SpmdContext, product, size_hint

__all__ = ["transform"]


def transform(gm: fx.GraphModule, config: AutoSPConfig, axis: Axis) -> tuple[fx.GraphModule, AutoSPReport]:
    """The sequence-parallel program of `gm` over `axis`, the same on every rank, and what was done; `gm` is unchanged.

    Inputs stay whole on every rank. Raises AutoSPError where it cannot be done exactly.
    """
    started = time.perf_counter()
    try:
        normal = normalize(gm)
        outputs = _OutputPolicy(normal, config)
        context = SpmdContext(axis, strict=config.strict, output_layout=outputs)
        report = RULES.once().apply(normal, context=context)
    except RefusedError as error:
        raise AutoSPError(error.refusal, error.located_at) from error
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error
    report.lines.extend(outputs.lines)
    tokens = _num_tokens(normal)
    if not tokens:
        raise AutoSPError.of(
            "no sequence found: no embedding looks up an integer input [batch, sequence] of the model's call as it is",
            hint="pass token ids, not inputs_embeds, with the sequence as the last dimension",
        )
    return normal, summarize(normal, report, axis, tokens, time.perf_counter() - started)


class _OutputPolicy:
    """How the graph's outputs return: see `AutoSPConfig.outputs`."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig) -> None:
        self.lines: list[str] = []
        values = [node.meta.get("val") for node in gm.graph.output_node().all_input_nodes]
        has_loss = any(isinstance(v, torch.Tensor) and v.dim() == 0 and v.is_floating_point() for v in values)
        self._keep = config.outputs == "shard" or (config.outputs == "auto" and has_loss)

    def __call__(self, node: fx.Node, layout: Layout) -> Layout:
        if not isinstance(layout, Shard):
            return Replicated()
        shape = tuple(size_hint(n) for n in node.meta["val"].shape)
        if self._keep:
            what = f"output %{node.name} {shape} returns as this rank's chunk {layout}"
            self.lines.append(f"{what}; outputs='gather' returns it whole")
            return layout
        return Replicated()


def _num_tokens(gm: fx.GraphModule) -> int:
    """Tokens of the whole batch, from the lookups that are sharded; 0 where there are none."""
    made = [node for node in gm.graph.nodes if shard_input_ids.id in node.meta.get("fxrewrite", ())]
    shapes = [n.meta["global_shape"] for n in made if key(n) == "aten::embedding" and "global_shape" in n.meta]
    return max((size_hint(product(shape[:-1])) for shape in shapes), default=0)
