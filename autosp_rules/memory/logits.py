"""Drops logits from the graph's outputs: those from which the loss is computed become None.

A model that returns its logits holds all of them, [B, S / P, V] on every rank, and their gradient. If nobody reads
them, the loss can be computed in tiles (`rules.tiling.loss`). The model's output then has `logits=None`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx
from torch.fx.node import map_arg

from autosp_rules.memory.costs import bytes_of, planned_for
from fxrewrite import Edit, refuse
from fxrewrite.graph import is_same_size, source_line
from fxrewrite.ops import bind, has_trait, is_view, key, value

__all__ = ["drop_logits", "why_not_tiled"]

_SPELLED = {"aten::log_softmax", "aten::logsumexp"}
"""Operators in which a cross entropy is written out."""
_LOSSES = {"aten::cross_entropy_loss": "self", "aten::nll_loss_nd": "self", "aten::nll_loss": "self"}


def drop_logits(gm: fx.GraphModule) -> dict[str, str]:
    """Replaces outputs that are logits of a loss by None; returns messages by the logits' name.

    If the logits are not an output, the message says that the option has no effect.

    Raises:
        RefusedError: the graph has no logits of a cross entropy.
    """
    output, heads = gm.graph.output_node(), _heads(gm.graph)
    if not heads:
        refuse(
            "logits='drop', and the graph has no logits of a cross entropy",
            node=output,
            hint=_hint(gm.graph),
        )
    dropped = {node: head for node in output.all_input_nodes if (head := _head_shown(node, heads))}
    with Edit(gm) as edit:
        edit.set_args(output, map_arg(output.args, lambda node: None if node in dropped else node))
    shown = {head: [node for node in dropped if dropped[node] is head] for head in heads.values()}
    return {head.name: _none(nodes) if nodes else _unchanged(head, heads) for head, nodes in shown.items()}


def _none(outputs: Iterable[fx.Node]) -> str:
    return "; ".join(f"output %{node.name} {tuple(node.meta['val'].shape)} is None: logits='drop'" for node in outputs)


def _unchanged(head: fx.Node, heads: Mapping[fx.Node, fx.Node]) -> str:
    users = [user for node in heads if heads[node] is head for user in node.users]
    others = [u for u in users if u not in heads and key(u) not in _LOSSES and isinstance(value(u), torch.Tensor)]
    besides = "".join(f", and %{user.name} reads them besides their loss" for user in others[:1])
    return f"logits='drop' changes nothing: the logits %{head.name} are not an output{besides}"


def _hint(graph: fx.Graph) -> str:
    spelled = next((node for node in graph.nodes if key(node) in _SPELLED), None)
    if spelled is None:
        return "pass labels, so that the model computes its loss, or use logits='keep'"
    return (
        f"a loss of %{spelled.name} ({key(spelled)}) that is not a cross entropy needs the logits: write it as "
        "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none'), which is minus the log "
        "probability of each label, or use logits='keep'"
    )


def why_not_tiled(gm: fx.GraphModule, logits: Collection[str], tile_bytes: int) -> list[str]:
    """Returns a line for each of these logits that a rank still computes as a whole, and that may exceed a tile."""
    held = [node for node in gm.graph.nodes if node.name in logits and node.users]
    return [
        f"whole: %{node.name} {source_line(node)}: its loss is not computed in tiles, and a rank holds "
        f"{bytes_of(node):,} bytes of logits{planned_for([node])}; rules.tiling.loss says what it matches"
        for node in held
        if bytes_of(node) > tile_bytes
    ]


def _heads(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Maps the logits of each loss, in every shape and dtype between head and loss, to the first of them."""
    heads: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if key(node) in _LOSSES:
            logits = [bind(node)[_LOSSES[key(node)]]]
            while (before := _read(logits[-1])) is not None:
                logits.append(before)
            heads |= dict.fromkeys(logits, logits[-1])
    return heads


def _read(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that the node reads, if it is exactly one."""
    tensors = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def _head_shown(node: fx.Node, heads: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """Returns the logits that the node is, or of which it is a view, copy or cast with all entries."""
    while node not in heads:
        before = _read(node)
        if before is None or not (is_view(node) or has_trait(node, "same", "cast")):
            return None
        if not is_same_size(value(before).numel(), value(node).numel()):
            return None
        node = before
    return heads[node]
