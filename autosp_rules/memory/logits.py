"""Drops logits from the graph's outputs: those from which the loss is computed become None.

A model that returns its logits holds all of them, [B, S / P, V] on every rank, and their gradient. If nobody reads
them, the loss can be computed in tiles (`rules.tiling.loss`). The model's output then has `logits=None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import fx
from torch.fx.node import map_arg

from autosp_rules.memory.costs import bytes_of, planned_for
from fxrewrite import Edit, Event, Report, refuse
from fxrewrite.graph import Fact, is_same_size, source_line
from fxrewrite.ops import bind, has_trait, is_view, key, value
from fxrewrite.report import bytes_text
from rules.tiling.tiles import TILE_BYTES

_SPELLED = {"aten::log_softmax", "aten::logsumexp"}
"""Operators in which a cross entropy is written out."""
_LOSSES = {"aten::cross_entropy_loss": "self", "aten::nll_loss_nd": "self", "aten::nll_loss": "self"}


class LogitsDropped(Event, frozen=True):
    """Outputs that are logits of a loss are None."""

    kind: Literal["logits dropped"] = "logits dropped"
    outputs: dict[str, tuple[str, ...]] = Field(description="their nodes and shapes")

    def __str__(self) -> str:
        shapes = {name: ", ".join(shape) + "," * (len(shape) == 1) for name, shape in self.outputs.items()}
        return "; ".join(f"output %{name} ({shape}) is None: logits='drop'" for name, shape in shapes.items())


class LogitsNoOutput(Event, frozen=True):
    """Logits of a loss are not among the outputs, so that dropping them changes nothing."""

    kind: Literal["logits no output"] = "logits no output"
    node: str
    other_user: str = Field(description="a node that reads them besides their loss, or empty")

    def __str__(self) -> str:
        besides = f", and %{self.other_user} reads them besides their loss" if self.other_user else ""
        return f"logits='drop' changes nothing: the logits %{self.node} are not an output{besides}"


class LogitsHeld(Event, frozen=True):
    """A rank holds the logits of a loss nevertheless, since the loss is not computed in tiles."""

    kind: Literal["logits held"] = "logits held"
    node: str
    source: str
    num_bytes: int
    planned: str = Field(description="for which length that is, where the length is a symbol")

    def __str__(self) -> str:
        return (
            f"whole: %{self.node} {self.source}: its loss is not computed in tiles, and a rank holds "
            f"{bytes_text(self.num_bytes)} of logits{self.planned}; rules.tiling.loss says what it matches"
        )


_IS_DROPPED = Fact[bool]("dropped logits")
"""Known of logits of a loss that are not to be held."""


class DropLogits:
    """The step after which outputs that are logits of a loss of the graph are None.

    Of logits that are no output, it reports that this changes nothing.

    Raises:
        RefusedError: the graph has no logits of a cross entropy.
    """

    name = "drop_logits"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        output, heads = edit.graph.output_node(), _heads(edit.graph)
        if not heads:
            reason = "logits='drop', and the graph has no logits of a cross entropy"
            refuse(reason, node=output, hint=_hint(edit.graph))
        dropped = {node: head for node in output.all_input_nodes if (head := _head_shown(node, heads))}
        edit.set_args(output, map_arg(output.args, lambda node: None if node in dropped else node))
        for head in dict.fromkeys(heads.values()):
            edit.set_fact(head, _IS_DROPPED, True)
            shown = {n.name: tuple(map(str, n.meta["val"].shape)) for n in dropped if dropped[n] is head}
            report.events.append(LogitsDropped(outputs=shown) if shown else _no_output(head, heads))
        return len(dropped)

    def text(self) -> str:
        return "outputs that are logits of a loss become None"


class FindHeldLogits:
    """The step that reports logits which were to be dropped and are held nevertheless, of more than a tile."""

    name = "find_held_logits"

    def __init__(self, loss_tile: int | Literal["auto"]) -> None:
        self._tile_bytes = TILE_BYTES if isinstance(loss_tile, str) else loss_tile

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        for node in edit.nodes():
            if _IS_DROPPED.of(node) and node.users and bytes_of(node) > self._tile_bytes:
                where, planned = source_line(node), planned_for([node])
                event = LogitsHeld(node=node.name, source=where, num_bytes=bytes_of(node), planned=planned)
                report.events.append(event)
        return 0

    def text(self) -> str:
        return f"an event where a rank holds more than {bytes_text(self._tile_bytes)} of dropped logits"


def _no_output(head: fx.Node, heads: Mapping[fx.Node, fx.Node]) -> LogitsNoOutput:
    users = [user for node in heads if heads[node] is head for user in node.users]
    others = [u for u in users if u not in heads and key(u) not in _LOSSES and isinstance(value(u), torch.Tensor)]
    return LogitsNoOutput(node=head.name, other_user=others[0].name if others else "")


def _hint(graph: fx.Graph) -> str:
    spelled = next((node for node in graph.nodes if key(node) in _SPELLED), None)
    if spelled is None:
        return "pass labels, so that the model computes its loss, or use logits='keep'"
    return (
        f"a loss of %{spelled.name} ({key(spelled)}) that is not a cross entropy needs the logits: write it as "
        "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none'), which is minus the log "
        "probability of each label, or use logits='keep'"
    )


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
