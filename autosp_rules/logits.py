"""The graph returns its loss alone: the logits that the loss is made of become None among the outputs.

What returns logits holds all of them, [B, S / P, V] on every rank, and their gradient. Where nobody reads them, the
loss can be computed in tiles (`rules.tiled_loss`). A model's output then has `logits=None`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import Edit, refuse
from fxrewrite.graph import size_hint, source_line
from fxrewrite.ops import bind, key

__all__ = ["drop_logits", "why_not_tiled"]

_SPELLED = {"aten::log_softmax", "aten::logsumexp"}
"""Operators in which a cross entropy is written out."""
_LOSSES = {"aten::cross_entropy_loss": "self", "aten::nll_loss_nd": "self", "aten::nll_loss": "self"}


def drop_logits(gm: fx.GraphModule) -> dict[str, str]:
    """Afterwards outputs from which a loss of the graph is made, rows of logits, are None; a line for each, by name.

    Of a graph that returns none of its logits, a line for the logits.

    Raises:
        RefusedError: the graph has no logits of a cross entropy.
    """
    output, logits = gm.graph.output_node(), _logits(gm.graph)
    if not logits:
        refuse(
            "logits='drop', and the graph has no logits of a cross entropy",
            node=output,
            hint=_hint(gm.graph),
        )
    dropped = logits & set(output.all_input_nodes)
    if not dropped:
        first = next(node for node in gm.graph.nodes if node in logits)
        return {first.name: f"logits='drop' changes nothing: the logits %{first.name} are no output"}
    with Edit(gm) as edit:

        def kept(node: fx.Node) -> Any:
            return None if node in dropped else node

        edit.set_args(output, map_arg(output.args, kept))
    return {
        node.name: f"output %{node.name} {tuple(node.meta['val'].shape)} is None: logits='drop'" for node in dropped
    }


def _hint(graph: fx.Graph) -> str:
    spelled = next((node for node in graph.nodes if key(node) in _SPELLED), None)
    if spelled is None:
        return "pass labels, so that the model computes its loss, or use logits='keep'"
    return (
        f"a loss of %{spelled.name} ({key(spelled)}) that is no cross entropy needs the logits: write it as "
        "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none'), which is minus the log "
        "probability of each label, or use logits='keep'"
    )


def why_not_tiled(gm: fx.GraphModule, dropped: Collection[str], tile_bytes: int) -> list[str]:
    """A line for each dropped output that a rank computes whole nevertheless, and that takes more than a tile."""
    held = [node for node in gm.graph.nodes if node.name in dropped and node.users]
    sizes = [(n, size_hint(n.meta["val"].numel()) * n.meta["val"].element_size()) for n in held]
    return [
        f"whole: %{node.name} {source_line(node)}: its loss is not computed in tiles, and a rank holds {size:,} bytes "
        "of logits; rules.tiled_loss says what it matches"
        for node, size in sizes
        if size > tile_bytes
    ]


def _logits(graph: fx.Graph) -> set[fx.Node]:
    """The products of matrices that a loss is made of, and what comes between: each made of the one before alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if key(node) in _LOSSES:
            above = bind(node)[_LOSSES[key(node)]]
            while isinstance(above, fx.Node) and isinstance(above.meta.get("val"), torch.Tensor):
                found.add(above)
                tensors = [n for n in above.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
                above = tensors[0] if len(tensors) == 1 else None
    return found
