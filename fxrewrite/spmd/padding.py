"""Which entries a rank's chunk holds where the ranks do not divide them: nodes in front of the graph, each made once.

    S = 5 over 4 ranks      held: [0, 1] [2, 3] [4, 4] [4, 4]      padding: the second of rank 2, both of rank 3

Padding repeats the last entry, so what a rank computes of it is as finite as what it computes of a real one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import Size, SizeNodes
from fxrewrite.spmd.layout import Shard, local_shape

__all__ = ["EntryNodes"]

aten = torch.ops.aten


class EntryNodes:
    """Nodes over the entries 0 to S - 1 of a dimension, for one graph of which `rank` holds a rank's position."""

    def __init__(self, edit: Edit, sizes: SizeNodes, rank: fx.Node, num_ranks: int) -> None:
        self._edit, self._sizes, self._rank, self._num_ranks = edit, sizes, rank, num_ranks
        self._made: dict[tuple[Any, ...], fx.Node] = {}

    def held(self, entries: Size, device: torch.device) -> fx.Node:
        """The entries in this rank's chunk, `[ceil(S / P)]`; padding is the last one again."""
        return self._once("held", entries, device, lambda: self._at_most(self._numbers(entries, device), entries))

    def is_padding(self, entries: Size, device: torch.device) -> fx.Node:
        """What of this rank's chunk is padding, `[ceil(S / P)]` of bool."""
        numbers = self._numbers(entries, device)
        return self._once("is_padding", entries, device, lambda: self._call(aten.ge.Scalar, numbers, entries))

    def of_all_chunks(self, entries: Size, device: torch.device) -> fx.Node:
        """The entries in all chunks, `[P * ceil(S / P)]`; padding is the last one again."""
        total = self.chunk(entries) * self._num_ranks
        return self._once("of_all_chunks", entries, device, lambda: self._at_most(self._arange(total, device), entries))

    def chunk(self, entries: Size) -> Size:
        """How many entries a chunk has: ceil(S / P)."""
        return local_shape([entries], Shard(0, uneven=True), self._num_ranks)[0]

    def _numbers(self, entries: Size, device: torch.device) -> fx.Node:
        """The entries in this rank's chunk, counted on behind the last."""

        def make() -> fx.Node:
            chunk = self.chunk(entries)
            product = self._edit.call(operator.mul, (self._rank, self._sizes(chunk)), before=self._sizes.anchor, val=0)
            first = self._sizes.stand_in_front(product)
            return self._call(aten.add.Tensor, self._arange(chunk, device), first)

        return self._once("numbers", entries, device, make)

    def _arange(self, size: Size, device: torch.device) -> fx.Node:
        return self._call(aten.arange.default, size, device=device, pin_memory=False)

    def _at_most(self, numbers: fx.Node, entries: Size) -> fx.Node:
        return self._call(aten.clamp_max.default, numbers, entries - 1)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        written = tuple(arg if isinstance(arg, fx.Node) else self._sizes(arg) for arg in args)
        return self._sizes.stand_in_front(self._edit.call(target, written, kwargs, before=self._sizes.anchor))

    def _once(self, what: str, entries: Size, device: torch.device, make: Callable[[], fx.Node]) -> fx.Node:
        at = (what, entries if isinstance(entries, int) else entries.node.expr, device)
        if at not in self._made:
            self._made[at] = make()
        return self._made[at]
