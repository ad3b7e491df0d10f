"""What a `redistribute` is on the wire: a slice, or one functional collective between two reorderings.

    R -> S      the rank's chunk                       no communication
    S -> R      all-gather                             backward: reduce-scatter
    S -> S'     all-to-all                             backward: all-to-all
    P -> R      all-reduce                             backward: all-reduce
    P -> S      reduce-scatter                         backward: all-gather

Matches `redistribute(x, src, dst, axis)` as `fxrewrite.spmd.PropagateLayouts` writes it, on local shapes.
Other runs of one dimension are cut from the whole value: an all-gather and a slice.
Numerics: exact but for the order of the sums. Collectives run on dimension 0, so chunks come to the front and go back;
an inductor backend fuses these permutes into their neighbours.
Source: PyTorch, torch/distributed/_functional_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import Constraint, Literal, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.spmd import (
    COLLECTIVES,
    Layout,
    Partial,
    Replicated,
    Shard,
    Size,
    SpmdContext,
    global_shape,
    is_same_size,
    local_shape,
    redistribute,
    size_proxy,
)

__all__ = ["COLLECTIVE_RULES", "moves", "redistribution", "take_chunk"]

aten = torch.ops.aten


class _Lowering:
    """One `redistribute` being lowered.

    A tensor is written as labelled pieces: a dimension that is sharded before or after is cut into its runs, the ranks
    and the chunk that one rank holds; the others stay one piece.
    """

    def __init__(self, match: Match) -> None:
        self.match, self.axis = match, match["axis"]
        self.num_ranks: int = self.axis.size
        self.shape: Sequence[Size] = global_shape(match["x"])

    def size(self, value: Size) -> Any:
        return size_proxy(self.match, value)

    def pieces(self, src: Layout, dst: Layout) -> list[tuple[str, Size]]:
        """What a rank holds under `src`, cut where `dst` will cut it."""
        cut: list[tuple[str, Size]] = []
        for dim, size in enumerate(self.shape):
            name = f"d{dim}"
            for role, layout in (("src", src), ("dst", dst)):
                if isinstance(layout, Shard) and layout.dim == dim:
                    if not is_same_size(layout.outer, 1):
                        cut.append((f"{name}.runs", layout.outer))
                    if role == "dst":
                        cut.append(("to", self.num_ranks))
                    cut.append((role, size // layout.outer // self.num_ranks))
                    break
            else:
                cut.append((name, size))
        return cut

    def reshape(self, x: fx.Proxy, sizes: Sequence[Size]) -> fx.Proxy:
        return aten.reshape(x, [self.size(size) for size in sizes])

    def exchange(self, kind: str, x: fx.Proxy, src: Layout, dst: Layout) -> fx.Proxy:
        """Ranks to the front, the collective, ranks back to where `src` was cut; then the shape that `dst` gives."""
        pieces = self.pieces(src, dst)
        names = [name for name, _ in pieces]
        x = self.reshape(x, [size for _, size in pieces])
        if "to" in names:
            x = aten.permute(x, [names.index("to"), *(i for i, name in enumerate(names) if name != "to")])
            names.remove("to")
        else:
            x = aten.unsqueeze(x, 0)
        x = self.collective(kind, aten.contiguous(x))
        if "src" in names:
            at = names.index("src")
            x = aten.permute(x, [*range(1, at + 1), 0, *range(at + 1, len(names) + 1)])
        return self.reshape(x, local_shape(self.shape, dst, self.num_ranks))

    def settled(self, x: fx.Proxy) -> fx.Proxy:
        """The result, with the value that it replaces: `P * (S // P)` is S again, which the ShapeEnv does not see."""
        self.match.edit.set_meta(x.node, "val", self.match.root.meta["val"])
        return x

    def collective(self, kind: str, x: fx.Proxy) -> fx.Proxy:
        one_each = [1] * self.num_ranks
        arguments = {
            "all_to_all": (one_each, one_each),
            "all_gather": (self.num_ranks,),
            "reduce_scatter": ("sum", self.num_ranks),
            "all_reduce": ("sum",),
        }
        sent = COLLECTIVES[kind](x, *arguments[kind], self.axis.group)
        self.match.edit.set_meta(sent.node, "axis", self.axis.name)
        return COLLECTIVES["wait"](sent)


def take_chunk(match: Match, x: fx.Proxy, dst: Shard) -> fx.Proxy:
    """The rank's chunk of a value that every rank holds."""
    low = _Lowering(match)
    pieces = low.pieces(Replicated(), dst)
    at = [name for name, _ in pieces].index("dst") - 1
    sizes = [size for name, size in pieces if name != "to"]
    sizes[at] = low.shape[dst.dim] // dst.outer
    chunk = low.size(pieces[at + 1][1])
    context = SpmdContext.required(match.context, "this rule")
    start = match.proxy(context.rank_node(match.edit)) * chunk
    if len(sizes) == len(low.shape):
        return aten.narrow(x, at, start, chunk)
    cut = aten.narrow(low.reshape(x, sizes), at, start, chunk)
    return low.settled(low.reshape(cut, local_shape(low.shape, dst, low.num_ranks)))


redistribution = op(redistribute, cap("x"), cap("src", Literal), cap("dst", Literal), cap("axis", Literal))


def moves(src: type[Layout], dst: type[Layout]) -> Constraint:
    """Whether the redistribution is from a `src` to a `dst`."""
    return where.predicate("src", "dst", text=f"moves[{src.__name__}, {dst.__name__}]")(
        lambda before, after: isinstance(before, src) and isinstance(after, dst)
    )


slice_chunk = Rule("collectives.slice", Pattern((redistribution,), (moves(Replicated, Shard),)))
all_gather = Rule("collectives.all_gather", Pattern((redistribution,), (moves(Shard, Replicated),)))
all_to_all = Rule("collectives.all_to_all", Pattern((redistribution,), (moves(Shard, Shard),)))
all_reduce = Rule("collectives.all_reduce", Pattern((redistribution,), (moves(Partial, Replicated),)))
reduce_scatter = Rule("collectives.reduce_scatter", Pattern((redistribution,), (moves(Partial, Shard),)))


@slice_chunk.replacement
def _(match: Match, x: fx.Proxy, src: Layout, dst: Shard) -> fx.Proxy:
    """the rank's chunk"""
    return take_chunk(match, x, dst)


@all_gather.replacement
def _(match: Match, x: fx.Proxy, src: Shard, dst: Layout) -> fx.Proxy:
    """all-gather"""
    low = _Lowering(match)
    return low.settled(low.exchange("all_gather", x, src, dst))


@all_to_all.replacement
def _(match: Match, x: fx.Proxy, src: Shard, dst: Shard) -> fx.Proxy:
    """all-to-all"""
    low = _Lowering(match)
    if src.dim == dst.dim:  # other runs of one dimension: by way of the whole value
        return take_chunk(match, low.exchange("all_gather", x, src, Replicated()), dst)
    return low.settled(low.exchange("all_to_all", x, src, dst))


@all_reduce.replacement
def _(match: Match, x: fx.Proxy, src: Layout, dst: Layout) -> fx.Proxy:
    """all-reduce"""
    return _Lowering(match).collective("all_reduce", x)


@reduce_scatter.replacement
def _(match: Match, x: fx.Proxy, src: Layout, dst: Shard) -> fx.Proxy:
    """reduce-scatter"""
    low = _Lowering(match)
    return low.settled(low.exchange("reduce_scatter", x, src, dst))


COLLECTIVE_RULES = RuleSet("collectives", slice_chunk, all_gather, all_to_all, all_reduce, reduce_scatter)
