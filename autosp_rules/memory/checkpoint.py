"""Activation checkpointing by tags: what each layer saves for its backward pass, chosen by the cost to recompute it.

A layer is what runs under one entry of a list of modules. Its nodes get the tags that AOTAutograd carries into the
joint graph for its partitioner: `recompute` on recomputed values, `MUST_SAVE` on saved ones, one `ac_graph_id` per
layer. So it works with every backend on AOTAutograd; a backend without it, such as "eager", ignores tags.

    "none"       no tags, and no event in the report: the partitioner decides
    "attention"  kept: the layer's input, attention's result and its log-sum-exp
    "full"       kept: the layer's input; attention runs twice
    n bytes      what costs most to compute again, per byte, as long as it fits into n bytes of all layers together
    "auto"       nothing is computed again where all fits into a quarter of the device's memory; else "attention", and
                 so many of the most expensive values that what is computed again takes at most 8 % of a step

Recomputing may include sending: an all-to-all before attention is then sent again, and the report says so. A value that
draws random numbers or has effects is never recomputed. A layer that checkpoints by itself, or in part, keeps its own
choice; the option applies to all others. A program for any length is decided for a long one.
Numerics: exact. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, Field
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autosp_rules.memory.costs import (
    bases_of,
    bytes_of,
    bytes_sent,
    computed_again,
    cost_of,
    flops_of,
    is_received,
    kept_bytes,
    planned_for,
    read_in_backward,
)
from fxrewrite import Edit, Event, Report
from fxrewrite.graph import in_canonical_order, is_recomputed, may_go_backward
from fxrewrite.ops import is_pure, is_random, key
from fxrewrite.report import bytes_text
from fxrewrite.spmd import COLLECTIVES
from rules.attention.flops import ATTENTION_KEYS

CheckpointOption: TypeAlias = Literal["auto", "none", "attention", "full"] | Annotated[int, Field(ge=0, strict=True)]

_OVERHEAD = 0.08
"""Largest share of a step's FLOPs that "auto" may add by recomputing."""
_MEMORY_SHARE = 0.25
"""Share of the device's memory that activations may take before "auto" recomputes any."""
_STEP = 3.0
"""FLOPs of a step in units of a forward pass: the backward pass counts as two."""
_ITEM = "operator.getitem"
_ENTRY = re.compile(r"^.*?(?:\.|\[')\d+(?=\.|'\]|$)")
"""Path of a module up to the first entry of a list, as in `L['self'].model.layers.0`."""


def checkpoint_text(program: fx.GraphModule) -> str:
    """Returns a digest of the tags, which must be equal on all ranks because recomputing may send; "" without tags."""
    again = " ".join(str(i) for i, node in enumerate(in_canonical_order(program.graph)) if is_recomputed(node))
    return f"recomputed {hashlib.sha256(again.encode()).hexdigest()[:16]}\n" if again else ""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A value that a layer could save, with the FLOPs that this avoids (given earlier choices) and its bytes."""

    node: fx.Node
    cost: float
    num_bytes: int

    @property
    def worth(self) -> float:
        return self.cost / max(self.num_bytes, 1)


@dataclass(eq=False)
class _Layer:
    """The nodes of a layer that may run twice, in order, and those of them that are saved."""

    nodes: list[fx.Node]
    bases: Mapping[fx.Node, fx.Node]
    """Of each node of the graph, the one that made its memory."""
    kept: set[fx.Node] = field(default_factory=set[fx.Node])

    @cached_property
    def inside(self) -> frozenset[fx.Node]:
        return frozenset(self.nodes)

    @cached_property
    def read(self) -> list[fx.Node]:
        """The values that the backward pass reads, inside the layer and outside."""
        return read_in_backward(self.nodes)

    @cached_property
    def results(self) -> list[fx.Node]:
        """The values that are read outside the layer."""
        return [node for node in self.nodes if not self.inside.issuperset(node.users)]

    @property
    def input_bytes(self) -> int:
        """Bytes of the hidden states, which one layer passes to the next."""
        return max((bytes_of(node) for node in self.results), default=0)

    def again(self, kept: set[fx.Node]) -> set[fx.Node]:
        """Returns what the backward pass recomputes if only `kept` is saved."""
        return computed_again(self.read, lambda node: node in kept or node not in self.inside)

    def cost(self, kept: set[fx.Node]) -> float:
        return sum(map(cost_of, self.again(kept)))

    def kept_bytes(self) -> int:
        return sum(kept_bytes(node) for node in self.kept if key(node) != _ITEM)

    def signature(self) -> object:
        """Returns a key that is equal for layers with the same computation, sizes and saved values."""
        at = {node: index for index, node in enumerate(self.nodes)}
        return tuple(
            (key(n), bytes_of(n), n in self.kept, tuple(at.get(read, -1) for read in n.all_input_nodes))
            for n in self.nodes
        )

    def read_bytes(self) -> int:
        """Bytes that the backward pass reads of the layer, which is what is saved if nothing is recomputed."""
        made = self.inside.intersection(map(self.bases.__getitem__, self.read))
        return sum(map(kept_bytes, made.union(self.results)))


class Recomputation(BaseModel, frozen=True, extra="forbid"):
    """What tagged layers keep, and what their backward passes compute and send again, all layers together."""

    num_layers: int
    kept_bytes: int
    read_bytes: int = Field(description="what is kept when nothing is computed again")
    input_bytes: int = Field(description="of the layers' inputs, which are one hidden size per token")
    operators: dict[str, int] = Field(description="costly operators that run again, and how many")
    share: float = Field(description="of the operations of a step, those that run again")
    num_sent: int = Field(description="values that are sent again")
    bytes_sent: int = Field(description="of these")

    def __str__(self) -> str:
        what = ", ".join(f"{count} x {name}" for name, count in self.operators.items()) or "cheap values"
        sent = f"sent again are {self.num_sent} values of {bytes_text(self.bytes_sent)}"
        return (
            f"{self.num_layers} layers keep {bytes_text(self.kept_bytes // self.num_layers)} each, "
            f"{self.kept_bytes / self.input_bytes:.2f} hidden sizes per token where all is "
            f"{self.read_bytes / self.input_bytes:.2f}; recomputed are {what}: {self.share:.1%} of the step's "
            f"operations; {sent if self.num_sent else 'nothing is sent again'}"
        )


class Checkpointed(Event, frozen=True):
    """What was decided about what layers keep for the backward pass."""

    kind: Literal["checkpoint"] = "checkpoint"
    option: str | int
    planned: str = Field(default="", description="for which length that was decided, where the length is a symbol")
    found: Recomputation | None = Field(default=None, description="None where no layer is tagged")
    why: str = Field(default="", description="why no layer is tagged")
    num_own: int = Field(default=0, description="layers that checkpoint by themselves")

    def __str__(self) -> str:
        said = str(self.found or self.why)
        if self.found is not None and isinstance(self.option, int) and self.found.kept_bytes > self.option:
            said += f"; the inputs of the layers alone take {bytes_text(self.found.kept_bytes)}, more than the budget"
        if self.num_own:
            said += f"; {self.num_own} x a layer that checkpoints by itself keeps its own choice"
        return f"checkpoint={self.option!r}{self.planned}: {said}"


class TagsUnread(Event, frozen=True):
    """Tags are in the graph, and the inner backend does not read them."""

    kind: Literal["tags unread"] = "tags unread"

    def __str__(self) -> str:
        return "checkpoint: inner='eager' reads no tags, so every layer keeps all; 'aot_eager' reads them"


class FindUnreadTags:
    """The step that reports tags which inner='eager' does not read, those of the model too."""

    name = "find_unread_tags"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        if any(map(is_recomputed, edit.nodes())):
            report.events.append(TagsUnread())
        return 0

    def text(self) -> str:
        return "an event where nodes have tags, which inner='eager' does not read"


class TagCheckpoints:
    """A step that tags every layer as `option` says, and reports what is saved, recomputed and sent again."""

    name = "checkpoint"

    def __init__(self, option: CheckpointOption = "auto") -> None:
        self.option: CheckpointOption = option

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Tags nodes, adds a line to the report, and returns the number of tagged nodes."""
        if self.option == "none":
            return 0
        if not may_go_backward(edit.graph):  # AOTAutograd stops there at tags of attention, which may draw
            report.events.append(Checkpointed(option=self.option, why=_NO_BACKWARD))
            return 0
        nodes = edit.nodes()
        layers, num_own = _layers(nodes)
        if not layers:
            report.events.append(Checkpointed(option=self.option, why=_why_no_layer(nodes)))
            return 0
        found = None if self.option == "auto" and _fits(layers) else self._chosen(nodes, layers)
        why = "" if found is not None else _ALL_FITS
        event = Checkpointed(option=self.option, planned=planned_for(nodes), found=found, why=why, num_own=num_own)
        report.events.append(event)
        return 0 if found is None else _tag(edit, nodes, layers)

    def text(self) -> str:
        return f"layers keep and recompute by tags: {self.option}"

    def _chosen(self, nodes: Sequence[fx.Node], layers: Sequence[_Layer]) -> Recomputation:
        """What layers keep, which is written into them, in numbers."""
        for layer in layers:
            layer.kept = set(layer.results)
            if self.option in ("auto", "attention"):
                layer.kept |= {node for node in layer.nodes if _is_attention(node)}
        step = _STEP * sum(map(flops_of, nodes))
        if self.option == "auto":
            _keep_until_cheap(layers, _OVERHEAD * step)
        elif isinstance(self.option, int):
            _keep_what_fits(layers, self.option)
        return _described(layers, step)


_NO_BACKWARD = "nothing is recomputed: nothing goes backward"
_ALL_FITS = "nothing is recomputed: what the layers keep takes less than a quarter of the device's memory"


def _why_no_layer(nodes: Sequence[fx.Node]) -> str:
    if any(map(is_recomputed, nodes)):
        return "the model checkpoints by itself and keeps its own choice"
    return "no layer found, nothing is tagged: a layer is an entry of a list of modules"


def _layers(nodes: Sequence[fx.Node]) -> tuple[list[_Layer], int]:
    """Returns runs of nodes under one entry of a list of modules, and how many other entries have their own tags.

    A node without a module belongs to its readers.
    """
    # Users come after their operands, so walk backwards: a node without a module gets the owner of its readers.
    owners: dict[fx.Node, str] = {}
    for node in reversed(nodes):
        stack = node.meta.get("nn_module_stack")
        if stack:
            entry = _ENTRY.match(str(list(stack.values())[-1][0]))
            owners[node] = entry[0] if entry else ""
        else:
            readers = {owners.get(user, "") for user in node.users}
            owners[node] = readers.pop() if len(readers) == 1 else ""
    own = {owners[node] for node in nodes if is_recomputed(node)} - {""}
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if owners[node] and owners[node] not in own and _may_run_twice(node):
            found.setdefault(owners[node], []).append(node)
    bases = bases_of(nodes)
    return [_Layer(group, bases) for group in found.values() if any(map(cost_of, group))], len(own)


def _may_run_twice(node: fx.Node) -> bool:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return (
        node.op == "call_function"
        and bool(tensors)
        and all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and "recompute" not in node.meta
        and (is_pure(node) or node.target in COLLECTIVES.values())
        and not is_random(node)
    )


def _is_attention(node: fx.Node) -> bool:
    return key(node.all_input_nodes[0] if key(node) == _ITEM else node) in ATTENTION_KEYS


def _fits(layers: Iterable[_Layer]) -> bool:
    device = next(node.meta["val"].device for layer in layers for node in layer.results)
    return sum(layer.read_bytes() for layer in layers) <= _MEMORY_SHARE * _memory_of(device)


def _memory_of(device: torch.device) -> int:
    """Returns bytes of memory of the device, or of this machine for CPUs."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _choices(layer: _Layer) -> list[_Choice]:
    """Returns what else the layer could save, greedily by cost avoided per byte."""
    kept, found = set(layer.kept), list[_Choice]()
    cost = layer.cost(kept)
    while cost > 0:
        # Only values that cost FLOPs or communication are worth saving; saving one may make others free.
        again = layer.again(kept)
        options = [node for node in layer.nodes if node in again and (flops_of(node) or is_received(node))]
        made = [_Choice(node, cost - layer.cost(kept | _parts(node)), kept_bytes(node)) for node in options]
        best = max(made, key=lambda choice: choice.worth, default=None)
        if best is None or best.cost <= 0:
            break
        found.append(best)
        kept |= _parts(best.node)
        cost -= best.cost
    return found


def _all_choices(layers: Sequence[_Layer]) -> list[tuple[_Layer, _Choice]]:
    """Returns the choices of all layers, the most worthwhile first; structurally equal layers are evaluated once."""
    known: dict[object, list[tuple[int, _Choice]]] = {}
    found: list[tuple[_Layer, _Choice]] = []
    for layer in layers:
        alike = layer.signature()
        if alike not in known:
            at = {node: index for index, node in enumerate(layer.nodes)}
            known[alike] = [(at[choice.node], choice) for choice in _choices(layer)]
        found += [(layer, replace(choice, node=layer.nodes[index])) for index, choice in known[alike]]
    return sorted(found, key=lambda pair: -pair[1].worth)


def _keep_until_cheap(layers: Sequence[_Layer], allowed: float) -> None:
    """Saves values until recomputing costs at most `allowed`, or nothing useful is left to save."""
    left = sum(layer.cost(layer.kept) for layer in layers) - allowed
    for layer, choice in _all_choices(layers):
        if left <= 0:
            break
        layer.kept |= _parts(choice.node)
        left -= choice.cost


def _keep_what_fits(layers: Sequence[_Layer], budget: int) -> None:
    """Saves values of at most `budget` bytes in total, including the layers' inputs, which are saved in any case."""
    left = budget - sum(layer.kept_bytes() for layer in layers)
    for layer, choice in _all_choices(layers):
        if choice.num_bytes <= left:
            layer.kept |= _parts(choice.node)
            left -= choice.num_bytes


def _parts(node: fx.Node) -> set[fx.Node]:
    """Returns a value, or the values that a node returns together."""
    return {node, *(user for user in node.users if key(user) == _ITEM)}


def _described(layers: Sequence[_Layer], step: float) -> Recomputation:
    again = [node for layer in layers for node in layer.again(layer.kept)]
    sent = [sent for sent in map(bytes_sent, again) if sent]
    what = Counter(key(node).partition("::")[2] for node in again if flops_of(node))
    return Recomputation(
        num_layers=len(layers),
        kept_bytes=sum(layer.kept_bytes() for layer in layers),
        read_bytes=sum(layer.read_bytes() for layer in layers),
        input_bytes=sum(layer.input_bytes for layer in layers),
        operators=dict(what),
        share=sum(map(flops_of, again)) / max(step, 1.0),
        num_sent=len(sent),
        bytes_sent=sum(sent),
    )


def _tag(edit: Edit, nodes: Sequence[fx.Node], layers: Sequence[_Layer]) -> int:
    tagged = 0
    numbers = _numbered(edit, nodes, layers)
    for layer in layers:
        again = layer.again(layer.kept)
        for node in layer.nodes:
            if node in layer.kept:
                policy = CheckpointPolicy.MUST_SAVE
            elif node in again or not (cost_of(node) or is_received(node)):
                policy = CheckpointPolicy.PREFER_RECOMPUTE
            else:
                continue  # the backward pass does not read it: neither saved nor recomputed
            edit.set_meta(node, "recompute", policy)
            edit.set_meta(node, "ac_graph_id", numbers[layer])
            tagged += 1
    return tagged


def _numbered(edit: Edit, nodes: Sequence[fx.Node], layers: Sequence[_Layer]) -> dict[object, int]:
    """Numbers the layers in the order in which they run, together with the model's own regions.

    The partitioner saves what a region reads of one with a lower number.
    """
    regions: dict[fx.Node, object] = {node: layer for layer in layers for node in layer.nodes}
    regions |= {node: node.meta["ac_graph_id"] for node in nodes if "ac_graph_id" in node.meta}
    numbers = {region: number for number, region in enumerate(dict.fromkeys(regions[n] for n in nodes if n in regions))}
    for part in edit.parts() if layers else ():
        for node in part.nodes():
            if "ac_graph_id" in node.meta:
                part.set_meta(node, "ac_graph_id", numbers[node.meta["ac_graph_id"]])
    return numbers
