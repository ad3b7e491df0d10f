"""Nodes that a lowered graph has once, before all others: sizes, this rank's position on an axis, entries of chunks."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import Size, SizeNodes, is_same_size, is_there
from fxrewrite.match import Match
from fxrewrite.ops import fake_value
from fxrewrite.spmd.group import axis_rank
from fxrewrite.spmd.placement import Axis, Shard, local_shape

aten = torch.ops.aten


def first_call(edit: Edit) -> fx.Node:
    """The first node that is not an input, which may be one that another axis has put after inputs."""
    return next(node for node in edit.graph.nodes if node.op != "placeholder")


def size_nodes(edit: Edit) -> SizeNodes:
    """Writes sizes as nodes before all others of the graph, each once; in a body from its integer inputs alone."""

    def make() -> SizeNodes:
        return SizeNodes(
            edit.graph,
            lambda op, args, before: edit.call(op, args, before=before, val=None),
            of_tensors=not edit.path,  # the tensors that a body is given may be chunks
        )

    return edit.shared("sizes", make)


def size_proxy(match: Match, size: Size) -> Any:
    """A size as a replacement can use it: the int, or the proxy of the node that computes it from the inputs."""
    if isinstance(size, int):
        return size
    node = size_nodes(match.edit)(size)
    return match.proxy(node) if isinstance(node, fx.Node) else node


def rank_node(edit: Edit, axis: Axis) -> fx.Node:
    """The node that holds this rank's position on the axis."""
    made: dict[Axis, fx.Node] = edit.shared("ranks", dict)
    if axis not in made or not is_there(made[axis]):
        # its value is 0 for shape computations only: shapes are equal on all ranks, and so is the graph's text
        rank = edit.call(axis_rank, (axis.group,), before=first_call(edit), val=0)
        edit.set_meta(rank, "axis", axis.name)
        made[axis] = size_nodes(edit).add_first(rank)
    return made[axis]


def entry_nodes(edit: Edit, axis: Axis) -> EntryNodes:
    """Writes nodes over the entries of chunks that are padded."""
    return edit.shared(("entries", axis), lambda: EntryNodes(edit, axis))


class EntryNodes:
    """Which entries of 0 to S - 1 a rank's chunk holds where P ranks do not divide S.

        S = 5 over 4 ranks      held: [0, 1] [2, 3] [4, 4] [4, 4]      padding: the second of rank 2, both of rank 3

    Padding repeats the last entry, so what a rank computes of it is as finite as what it computes of a real one. A
    section of a longer dimension has padding before its first entry too, which repeats that.
    """

    def __init__(self, edit: Edit, axis: Axis) -> None:
        self._edit, self._axis, self._sizes = edit, axis, size_nodes(edit)
        self._made: dict[tuple[Any, ...], fx.Node] = {}
        self._last: list[fx.Node] = []
        """The nodes in order: after sizes, and before those of axes that the graph was lowered over before, which are
        values as any others for this axis."""

    def held(self, entries: Size, placement: Shard, device: torch.device) -> fx.Node:
        """The entries in this rank's chunk, `[ceil(S / P)]`; padding is the nearest one again."""
        return self._nearest(self._numbers(entries, placement, device), entries, placement.before)

    def is_padding(self, entries: Size, placement: Shard, device: torch.device) -> fx.Node:
        """What of this rank's chunk is padding, `[ceil(S / P)]` of bool."""
        return self._is_outside(self._numbers(entries, placement, device), entries, placement.before)

    def of_all_chunks(self, entries: Size, placement: Shard, device: torch.device) -> fx.Node:
        """The entries in all chunks, `[P * ceil(S / P)]`; padding is the nearest one again."""
        return self._nearest(self._in_all_chunks(entries, placement, device), entries, placement.before)

    def is_padding_of_all(self, entries: Size, placement: Shard, device: torch.device) -> fx.Node:
        """What of all chunks is padding, `[P * ceil(S / P)]` of bool."""
        return self._is_outside(self._in_all_chunks(entries, placement, device), entries, placement.before)

    def places(self, entries: Size, placement: Shard, device: torch.device) -> tuple[fx.Node, fx.Node]:
        """Where in this rank's chunk each entry is, `[S]`, and which are not there: for these it is the nearest."""
        chunk, first = self.first(entries, placement)
        numbers = self._on(self._arange(entries, device), aten.sub.Tensor, first)
        return self._nearest(numbers, chunk, first), self._is_outside(numbers, chunk, first)

    def first(self, entries: Size, placement: Shard) -> tuple[Size, fx.Node]:
        """How many entries a chunk has, and the number of its first one, which may be negative."""
        (chunk,) = local_shape([entries], replace(placement, dim=0, outer=1, inner=1), self._axis.size)
        first = self._call(operator.mul, rank_node(self._edit, self._axis), chunk, val=0)
        if not is_same_size(placement.before, 0):
            first = self._call(operator.sub, first, placement.before, val=-placement.before)
        return chunk, first

    def _numbers(self, entries: Size, placement: Shard, device: torch.device) -> fx.Node:
        """The entries in this rank's chunk, counted on before the first and after the last."""
        chunk, first = self.first(entries, placement)
        return self._on(self._arange(chunk, device), aten.add.Tensor, first)

    def _in_all_chunks(self, entries: Size, placement: Shard, device: torch.device) -> fx.Node:
        numbers = self._arange(self.first(entries, placement)[0] * self._axis.size, device)
        if is_same_size(placement.before, 0):
            return numbers
        return self._on(numbers, aten.sub.Tensor, placement.before)

    def _arange(self, size: Size, device: torch.device) -> fx.Node:
        return self._call(aten.arange.default, size, kwargs={"device": device, "pin_memory": False})

    def _nearest(self, numbers: fx.Node, entries: Size, before: Any) -> fx.Node:
        """The numbers, of which those that are less than 0 (if `before` is not) or too large become the nearest."""
        found = self._on(numbers, aten.clamp_max.default, entries - 1)
        return found if _is_zero(before) else self._on(found, aten.clamp_min.default, 0)

    def _is_outside(self, numbers: fx.Node, entries: Size, before: Any) -> fx.Node:
        found = self._on(numbers, aten.ge.Scalar, entries, dtype=torch.bool)
        if _is_zero(before):
            return found
        is_before = self._on(numbers, aten.lt.Scalar, 0, dtype=torch.bool)
        return self._on(found, aten.logical_or.default, is_before, dtype=torch.bool)

    def _on(self, numbers: fx.Node, target: Any, other: Any, dtype: torch.dtype = torch.int64) -> fx.Node:
        """The call on each number. Its value has their size as it is stated: run on a size that is 1 for the lengths
        of the trace, and may be another, broadcasting would make it 1."""
        like = fake_value(numbers)
        return self._call(target, numbers, other, val=like.new_empty(like.shape, dtype=dtype))

    def _call(self, target: Any, *args: Any, **how: Any) -> fx.Node:
        """The call, which the graph has once: what asks for the same is given the same node."""
        written = tuple(arg if isinstance(arg, fx.Node) else self._sizes(arg) for arg in args)
        at = target, written, str(how.get("kwargs"))
        if at not in self._made or not is_there(self._made[at]):
            while self._last and not is_there(self._last[-1]):
                self._last.pop()
            before = self._last[-1].next if self._last else self._sizes.anchor
            self._made[at] = self._edit.call(target, written, before=before, **how)
            self._last.append(self._made[at])
        return self._made[at]


def _is_zero(size: Any) -> bool:
    return not isinstance(size, fx.Node) and is_same_size(size, 0)
