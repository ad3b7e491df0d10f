"""What a `redistribute` is on the wire: a slice, or one functional collective between two reorderings.

    to where it is, or over an axis of one rank        the value itself
    R -> S      the rank's chunk                       no communication
    S -> R      all-gather                             backward: reduce-scatter
    S -> S'     all-to-all                             backward: all-to-all
    P -> R      all-reduce                             backward: all-reduce, or nothing (`cotangents`)
    P -> S      reduce-scatter                         backward: all-gather
    R -> P      the value on one rank, else zeros      no communication, in backward neither
    S -> P      the rank's chunk among zeros           no communication

A section of less than half of the entries in chunks (`Shard.before`, `after`) is made whole by way of S -> P -> R, and
cut into even chunks by way of S -> P -> S.

A pending maximum or minimum is reduced by that instead of a sum; it is never differentiated.

Where P ranks do not divide S entries, the last entry is repeated before they are cut, and what is whole again is cut
back to S, whose adjoint gives padding no gradient. Sums over a padded dimension clear it first:

    without_padding(x, placement, axis, fill)             masked_fill, with a mask of a rank's entries made once

Matches `redistribute(x, src, dst, axis)` as `fxrewrite.spmd.PropagatePlacements` writes it, on local shapes.
Other chunks of one dimension are cut from the whole value: an all-gather and a slice.
Numerics: exact but for the order of the sums. Collectives run on dimension 0, so chunks come to the front and go back;
an inductor backend fuses these permutes into their neighbours.
Source: PyTorch, torch/distributed/_functional_collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxrewrite.errors import refuse
from fxrewrite.graph.sizes import Size, is_read_from_data, is_same_size, size_hint
from fxrewrite.graph.walk import reached
from fxrewrite.match.match import Match
from fxrewrite.ops import is_view, memory_origins, mutated
from fxrewrite.pattern import where
from fxrewrite.pattern.combinators import Literal, cap, op
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.where.base import Constraint
from fxrewrite.plan import RuleSet
from fxrewrite.rule import Rule
from fxrewrite.spmd.facts import global_shape
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.operators.gradient_ops import PASS_GRADIENT
from fxrewrite.spmd.operators.shared_nodes import EntryNodes, entry_nodes, rank_node, size_proxy
from fxrewrite.spmd.placement import (
    Axis,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    is_same_placement,
    local_shape,
    num_entries,
)
from fxrewrite.spmd.propagation.cotangents import COMPLETE
from fxrewrite.spmd.properties import COLLECTIVE_CALLS, LOCAL_SHAPES
from fxrewrite.spmd.redistribute import redistribute, without_padding

aten = torch.ops.aten


class Lowering:
    """One `redistribute` of the value `x` being lowered.

    A tensor is written as labelled pieces: a dimension that is sharded before or after is cut into its runs, the ranks
    and the chunk that one rank holds; the others stay one piece.
    """

    def __init__(self, match: Match, axis: Axis, x: fx.Node) -> None:
        self.match, self.axis = match, axis
        self.num_ranks = axis.size
        self.shape: Sequence[Size] = global_shape(x)

    def size(self, value: Size) -> Any:
        return size_proxy(self.match, value)

    def pieces(self, src: Placement, dst: Placement) -> list[tuple[str, Size]]:
        """What a rank holds under `src`, cut where `dst` will cut it."""
        cut: list[tuple[str, Size]] = []
        for dim, size in enumerate(self.shape):
            name = f"d{dim}"
            for role, placement in (("src", src), ("dst", dst)):
                if isinstance(placement, Shard) and placement.dim == dim:
                    if not is_same_size(placement.outer, 1):
                        cut.append((f"{name}.runs", placement.outer))
                    if role == "dst":
                        cut.append(("to", self.num_ranks))
                    cut.append((role, self.chunk(placement)))
                    if not is_same_size(placement.inner, 1):
                        cut.append((f"{name}.inner", placement.inner))
                    break
            else:
                cut.append((name, size))
        return cut

    def chunk(self, placement: Shard) -> Size:
        """How many entries a rank holds of each run."""
        entries = num_entries(self.shape, placement)
        return local_shape([entries], replace(placement, dim=0, outer=1, inner=1), self.num_ranks)[0]

    def reshape(self, x: fx.Proxy, sizes: Sequence[Size]) -> fx.Proxy:
        """`x` in this shape; a size that depends on data, of which there is one at most, is what the others leave."""
        return aten.reshape(x, [-1 if is_read_from_data(size) else self.size(size) for size in sizes])

    def exchange(self, kind: str, x: fx.Proxy, src: Placement, dst: Placement) -> fx.Proxy:
        """Ranks to the front, the collective, ranks back to where `src` was cut; then the shape that `dst` gives."""
        reduce_op = src.reduce_op if isinstance(src, Partial) else "sum"
        return self.received(self.collective(kind, aten.contiguous(self.sent(x, src, dst)), reduce_op), src, dst)

    def sent(self, x: fx.Proxy, src: Placement, dst: Placement) -> fx.Proxy:
        """What goes to each rank, before the collective: [ranks, *parts], or [1, *parts], the same for all."""
        if isinstance(dst, Shard) and dst.uneven:
            x = self.padded(x, src, dst)
        pieces = self.pieces(src, dst)
        names = [name for name, _ in pieces]
        x = self.reshape(x, [size for _, size in pieces])
        if "to" not in names:
            return aten.unsqueeze(x, 0)
        return aten.permute(x, [names.index("to"), *(i for i, name in enumerate(names) if name != "to")])

    def parts(self, src: Placement, dst: Placement) -> list[tuple[str, Size]]:
        """The pieces of what goes from one rank to another."""
        return [piece for piece in self.pieces(src, dst) if piece[0] != "to"]

    def received(self, x: fx.Proxy, src: Placement, dst: Placement) -> fx.Proxy:
        """The value as `dst` has it, of what came from each rank: [ranks, *parts]."""
        names = [name for name, _ in self.parts(src, dst)]
        if "src" in names:
            at = names.index("src")
            x = aten.permute(x, [*range(1, at + 1), 0, *range(at + 1, len(names) + 1)])
        if isinstance(src, Shard) and src.uneven:
            x = self.cut_back(x, src, dst)
        return self.reshape(x, local_shape(self.shape, dst, self.num_ranks))

    def runs(self, x: fx.Proxy, src: Placement, dst: Shard) -> fx.Proxy:
        """What a rank holds under `src`; the dimension that `dst` cuts becomes three: runs, entries, their elements."""
        shape = local_shape(self.shape, src, self.num_ranks)
        cut = dst.outer, num_entries(self.shape, dst), dst.inner
        return self.reshape(x, [*shape[: dst.dim], *cut, *shape[dst.dim + 1 :]])

    def padded(self, x: fx.Proxy, src: Placement, dst: Shard) -> fx.Proxy:
        """`x`, whose entries `dst` will cut into chunks, with the nearest one repeated for what is padding."""
        rows = self._entry_nodes().of_all_chunks(num_entries(self.shape, dst), dst, x.node.meta["val"].device)
        return aten.index_select(self.runs(x, src, dst), dst.dim + 1, self.match.proxy(rows))

    def cut_back(self, x: fx.Proxy, src: Shard, dst: Placement) -> fx.Proxy:
        """`x`, the gathered chunks of all ranks, without padding."""
        parts = self.parts(src, dst)
        at = [name for name, _ in parts].index("src")
        sizes = [size for _, size in parts]
        sizes[at] = sizes[at] * self.num_ranks
        entries = self.size(num_entries(self.shape, src))
        return aten.contiguous(aten.narrow(self.reshape(x, sizes), at, self.size(src.before), entries))

    def held(self, x: fx.Proxy, dst: Shard) -> fx.Proxy:
        """The rank's chunk of `x`, which is whole, with the nearest entry repeated for what is padding."""
        is_one_run = is_same_size(dst.outer, 1) and is_same_size(dst.inner, 1)
        runs, dim = (x, dst.dim) if is_one_run else (self.runs(x, Replicate(), dst), dst.dim + 1)
        if dst.uneven:
            rows = self._entry_nodes().held(num_entries(self.shape, dst), dst, x.node.meta["val"].device)
            chunk = aten.index_select(runs, dim, self.match.proxy(rows))
        else:
            size = self.size(self.chunk(dst))
            start = self.match.proxy(rank_node(self.match.edit, self.axis)) * size
            chunk = aten.narrow(runs, dim, start, size)
        return chunk if is_one_run else self.reshape(chunk, local_shape(self.shape, dst, self.num_ranks))

    def cleared(self, x: fx.Proxy, placement: Shard, fill: float) -> fx.Proxy:
        """The rank's chunk `x`, with `fill` for what is padding."""
        nodes = self._entry_nodes()
        is_padding = nodes.is_padding(num_entries(self.shape, placement), placement, x.node.meta["val"].device)
        mask = self.match.proxy(is_padding)
        after = [1] * (len(self.shape) - placement.dim - 1)
        if not (is_same_size(placement.outer, 1) and is_same_size(placement.inner, 1)):
            runs = [self.size(size) for size in (placement.outer, self.chunk(placement), placement.inner)]
            mask = aten.expand(self.reshape(mask, [1, self.chunk(placement), 1]), runs)
        size = local_shape(self.shape, placement, self.num_ranks)[placement.dim]
        return aten.masked_fill(x, self.reshape(mask, [size, *after]), fill)

    def among_zeros(self, x: fx.Proxy, src: Shard) -> fx.Proxy:
        """The whole value, with zeros in place of what is not in the rank's chunk `x`."""
        own = replace(src, dim=0, outer=1, inner=1)
        places, is_missing = self._entry_nodes().places(num_entries(self.shape, src), own, x.node.meta["val"].device)
        shape = local_shape(self.shape, src, self.num_ranks)
        runs = self.reshape(x, [*shape[: src.dim], src.outer, self.chunk(src), src.inner, *shape[src.dim + 1 :]])
        found = aten.index_select(runs, src.dim + 1, self.match.proxy(places))
        mask = self.reshape(self.match.proxy(is_missing), [-1, *[1] * (len(shape) - src.dim)])
        return self.reshape(aten.masked_fill(found, mask, 0), self.shape)

    def _entry_nodes(self) -> EntryNodes:
        return entry_nodes(self.match.edit, self.axis)

    def are_few(self, x: fx.Proxy, src: Shard) -> bool:
        """Whether fewer bytes are sent of the entries alone, as a sum over the ranks, than of all that is in chunks."""
        entries = num_entries(self.shape, src)
        held = src.before + entries + src.after
        return x.node.meta["val"].dtype != torch.bool and 2 * size_hint(entries) < size_hint(held)

    def settled(self, x: fx.Proxy, replaced: fx.Node) -> fx.Proxy:
        """The result, with the value that it replaces: `P * (S // P)` is S again, which the ShapeEnv does not see."""
        self.match.edit.set_meta(x.node, "val", replaced.meta["val"])
        return x

    def collective(self, kind: str, x: fx.Proxy, reduce_op: ReduceOp = "sum") -> fx.Proxy:
        if (dtype := x.node.meta["val"].dtype) in _NOT_SENT:
            refuse(f"process groups do not send {dtype}", node=self.match.root, hint="cast it to int32 before")
        one_each = [1] * self.num_ranks
        arguments = {
            "all_to_all": (one_each, one_each),
            "all_gather": (self.num_ranks,),
            "reduce_scatter": (reduce_op, self.num_ranks),
            "all_reduce": (reduce_op,),
        }
        sent = COLLECTIVES[kind](x, *arguments[kind], self.axis.group)
        self.match.edit.set_meta(sent.node, "axis", self.axis.name)
        return COLLECTIVES["wait"](sent)


_NOT_SENT = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that neither gloo nor NCCL knows."""


def _lowering(match: Match) -> Lowering:
    return Lowering(match, match["axis"], match["x"])


def take_chunk(match: Match, x: fx.Proxy, dst: Shard) -> fx.Proxy:
    """The rank's chunk of a value that every rank holds; a copy, if the value is written to in place."""
    low = _lowering(match)
    chunk = low.held(x, dst)
    return low.settled(aten.clone(chunk) if _is_written(match["x"]) else chunk, match.root)


def _is_written(value: fx.Node) -> bool:
    """Whether something writes to memory of the value, as to running statistics."""
    origins = memory_origins(value)
    views = reached(origins, lambda node: [user for user in node.users if is_view(user)])
    return any(node in mutated(user) for node in views for user in node.users)


redistribution = op(redistribute, cap("x"), cap("src", Literal), cap("dst", Literal), cap("axis", Literal))


def moves(src: type[Placement], dst: type[Placement]) -> Constraint:
    """Whether the redistribution is from a `src` to a `dst`."""
    return where.predicate("src", "dst", text=f"moves[{src.__name__}, {dst.__name__}]")(
        lambda before, after: isinstance(before, src) and isinstance(after, dst)
    )


@where.predicate("src", "dst", "axis", text="nothing_moves[src, dst, axis]")
def nothing_moves(src: Placement, dst: Placement, axis: Axis) -> bool:
    """Whether the value stays as it is, or the axis has one rank, which holds every chunk and every summand."""
    return axis.size == 1 or is_same_placement(src, dst)


def _lowers(name: str, condition: Constraint) -> Callable[[Callable[..., fx.Proxy]], Rule]:
    """Decorator: the rule that makes a redistribution, if it meets the condition, what the function writes."""

    def rule_of(function: Callable[..., fx.Proxy]) -> Rule:
        made = Rule(f"collectives.{name}", Pattern((redistribution,), (condition,)))
        made.replacement(function)
        return made

    return rule_of


@_lowers("stays", nothing_moves)
def stays(x: fx.Proxy) -> fx.Proxy:
    """the value itself"""
    return x


@_lowers("slice", moves(Replicate, Shard))
def slice_chunk(match: Match, x: fx.Proxy, dst: Shard) -> fx.Proxy:
    """the rank's chunk"""
    return take_chunk(match, x, dst)


@_lowers("all_gather", moves(Shard, Replicate))
def all_gather(match: Match, x: fx.Proxy, src: Shard, dst: Placement) -> fx.Proxy:
    """all-gather, or of a few entries an all-reduce"""
    low = _lowering(match)
    if low.are_few(x, src):
        return low.settled(low.collective("all_reduce", low.among_zeros(x, src)), match.root)
    return low.settled(low.exchange("all_gather", x, src, dst), match.root)


@_lowers("all_to_all", moves(Shard, Shard))
def all_to_all(match: Match, x: fx.Proxy, src: Shard, dst: Shard) -> fx.Proxy:
    """all-to-all"""
    low = _lowering(match)
    if src.dim == dst.dim and low.are_few(x, src):
        found = low.exchange("reduce_scatter", low.among_zeros(x, src), Partial(), dst)
        return low.settled(found, match.root)
    if src.dim == dst.dim:  # other runs of one dimension: by way of the whole value
        return take_chunk(match, low.exchange("all_gather", x, src, Replicate()), dst)
    return low.settled(low.exchange("all_to_all", x, src, dst), match.root)


@_lowers("all_reduce", moves(Partial, Replicate))
def all_reduce(match: Match, x: fx.Proxy, src: Partial) -> fx.Proxy:
    """all-reduce"""
    low = _lowering(match)
    if COMPLETE.of(match.root):  # backward sends nothing
        total = low.collective("all_reduce", aten.detach(x))
        return match.call(PASS_GRADIENT, total, x, float(low.num_ranks))
    return reduced(low, x, src.reduce_op)


def reduced(low: Lowering, x: fx.Proxy, reduce_op: ReduceOp) -> fx.Proxy:
    """The sum, maximum or minimum over the ranks; of extrema, NaN where any rank has one, as on one device.

    Collectives may drop it: gloo's maximum of 1 and NaN is one or the other. So it travels as a number of its own.
    """
    if reduce_op == "sum" or not x.node.meta["val"].is_floating_point():
        return low.collective("all_reduce", x, reduce_op)
    sign = 1.0 if reduce_op == "max" else -1.0
    is_nan = aten.isnan(x)
    told = aten.mul(aten.to(is_nan, x.node.meta["val"].dtype), sign)
    both = aten.stack([aten.masked_fill(x, is_nan, -sign * math.inf), told], -1)
    both = low.collective("all_reduce", both, reduce_op)
    return aten.masked_fill(aten.select(both, -1, 0), aten.ne(aten.select(both, -1, 1), 0), math.nan)


@_lowers("reduce_scatter", moves(Partial, Shard))
def reduce_scatter(match: Match, x: fx.Proxy, src: Partial, dst: Shard) -> fx.Proxy:
    """reduce-scatter"""
    low = _lowering(match)
    if src.reduce_op != "sum":
        return take_chunk(match, reduced(low, x, src.reduce_op), dst)
    return low.settled(low.exchange("reduce_scatter", x, src, dst), match.root)


@_lowers("own_summand", moves(Replicate, Partial))
def own_summand(match: Match, x: fx.Proxy, dst: Partial) -> fx.Proxy:
    """the value on the axis's first rank, zeros on the others"""
    if dst.reduce_op != "sum":
        return x  # the maximum of equal values is any of them
    low = _lowering(match)
    rank = aten.scalar_tensor(match.proxy(rank_node(match.edit, low.axis)), device=x.node.meta["val"].device)
    summand = aten.where(aten.eq(rank, 0), aten.detach(x), aten.zeros_like(x))
    return match.call(PASS_GRADIENT, summand, x, 1 / low.num_ranks)


@_lowers("own_chunk", moves(Shard, Partial))
def own_chunk(match: Match, x: fx.Proxy, src: Shard, dst: Partial) -> fx.Proxy:
    """the rank's chunk, and zeros in place of the others"""
    low = _lowering(match)
    if dst.reduce_op != "sum":  # zeros may be greater; the maximum of equal values is any of them
        return low.settled(low.exchange("all_gather", x, src, Replicate()), match.root)
    return low.settled(low.among_zeros(x, src), match.root)


clear_padding = Rule(
    "collectives.clear_padding",
    Pattern((op(without_padding, cap("x"), cap("placement", Literal), cap("axis", Literal), cap("fill", Literal)),)),
)


@clear_padding.replacement
def _(match: Match, x: fx.Proxy, placement: Shard, fill: float) -> fx.Proxy:
    """masked_fill(x, entries that are padding, fill)"""
    low = Lowering(match, match["axis"], match.root)
    return low.settled(low.cleared(x, placement, fill), match.root)


COLLECTIVE_RULES = RuleSet(
    "collectives",
    stays,
    slice_chunk,
    all_gather,
    all_to_all,
    all_reduce,
    reduce_scatter,
    own_summand,
    own_chunk,
    clear_padding,
    needs=(LOCAL_SHAPES,),
    gives=(COLLECTIVE_CALLS,),
)
