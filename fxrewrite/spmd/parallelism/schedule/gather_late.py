"""Shards of parameters are gathered a layer at a time, one layer ahead, and again in the backward pass.

    all_gather(a), all_gather(b), all_gather(c), ...   ->   ab, cd = all_gather(cat(a, b)), all_gather(cat(c, d))
    layer 0 reads a, b; layer 1 reads c, d                  a, b = split(wait(ab)); layer 0
                                                            ef = all_gather(cat(e, f))
                                                            c, d = split(wait(cd)); layer 1

All that is gathered is placed right before it is first read, so that few layers are whole at a time, and has the tag by
which AOTAutograd's partitioner computes it again in the backward pass: kept, all of them together would be the whole
model. What is gathered last is kept, since the backward pass begins with it, and so is what `Stored(..., kept=True)`
says. What one layer reads first is gathered by one collective (a bucket), whose adjoint is one reduce-scatter, and
which starts where the bucket before is first read. What is gathered over several axes has a bucket of each, and each
starts a layer ahead of what reads it.
What is first read while gradients are off, and has other readers too, is gathered before they were switched off.
A backend without AOTAutograd, such as "eager", ignores the tag and keeps what is gathered.
Numerics: exact. Source: Zhao et al. (arXiv 2304.11277, sections 3.3 and 4.2: resharding after the forward pass, one
collective for a flat parameter, prefetching).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import without_gradients
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.parallelism.schedule.buckets import buckets_of, layer_read_by, move_operands, parameter_of
from fxrewrite.spmd.parallelism.schedule.gathered import GATHERS, MEANS, Means, depths, sent_by, take_means
from fxrewrite.spmd.propagation.place import KEPT

aten = torch.ops.aten
_WAIT = COLLECTIVES["wait"]
_regions = itertools.count(1 << 20)
"""Numbers of recomputed regions, apart from those of checkpoints."""


class GatherLate:
    """The step that buckets, moves and tags gathers of parameters, over any axis."""

    name = "gather_late"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        """The last gathers are placed first: where they start is where the gathers before them are read."""
        reads = _Reads.of(edit.nodes())
        for node in reads.nodes:
            edit.move(node, reads.first[node])
        starts = [node for node in reads.gathers if reads.depth[node] == 1]
        buckets = buckets_of(edit, starts, reads.first, apart=reads.differentiated)
        self._compute_again(edit, reads, buckets, context)
        last = max(reads.left.values(), default=0)
        for left in range(last + 1):
            one = _Reads.of(edit.nodes(), left) if last else reads
            if last:
                buckets = buckets_of(edit, one.gathers, one.first, apart=one.differentiated)
            self._place(edit, one, buckets, is_ahead=context.is_ahead)
        return len(reads.first)

    def _compute_again(
        self, edit: Edit, reads: _Reads, buckets: Sequence[Sequence[fx.Node]], context: SpmdContext
    ) -> None:
        """Tag what is gathered to be gathered again in the backward pass, but for what is kept."""
        kept = {node for bucket in buckets for node in bucket if node.meta.get("recompute") == KEPT}
        if buckets and not context.is_part:  # the backward pass reads the last layer at once
            last = layer_read_by(buckets[-1])
            of_last = itertools.takewhile(lambda bucket: layer_read_by(bucket) == last, reversed(buckets))
            kept |= set(itertools.chain(*of_last))
        again, given_up = set[fx.Node](), set(reads.depth) - kept
        region = next(_regions)  # one: between two regions the partitioner saves what one reads of the other
        for node in reads.nodes:
            starts = node in given_up and node.target in GATHERS and reads.depth[node] == 1
            if starts or not again.isdisjoint(node.all_input_nodes):
                again.add(node)
                edit.set_meta(node, "recompute", CheckpointPolicy.MUST_RECOMPUTE)
                edit.set_meta(node, "ac_graph_id", region)

    def _place(self, edit: Edit, reads: _Reads, buckets: Sequence[Sequence[fx.Node]], *, is_ahead: bool) -> None:
        """Start each bucket's collective where the bucket before is first read, or where it is read itself."""
        waits = [min(bucket[0].users) for bucket in buckets]
        for position, bucket in enumerate(buckets):
            before = waits[max(position - is_ahead, 0)]
            if bucket[0] in reads.differentiated:
                before = reads.off.get(reads.first[before], before)
            move_operands(edit, bucket, before)
            if len(bucket) == 1:
                edit.move(bucket[0], before)
                take_means(edit, bucket[0], sent_by(bucket[0]), _means_of(bucket[0]), self.name)
            else:
                self._together(edit, bucket, before)

    def _together(self, edit: Edit, bucket: Sequence[fx.Node], before: fx.Node) -> None:
        """One collective in place of several: of rows of what each of them sends, and split when it has come."""

        def made(target: Any, *args: Any, before: fx.Node, like: fx.Node) -> fx.Node:
            return edit.call(target, args, before=before, like=like, rule=self.name)

        def joined(rows: list[fx.Node]) -> fx.Node:
            return made(aten.cat.default, rows, 1, before=before, like=sent_by(first)) if len(rows) > 1 else rows[0]

        # by name: ranks may read parameters in other orders
        averaged = sorted(bucket, key=lambda node: (repr(_means_of(node)), parameter_of(node)))
        alike = [list(group) for _, group in itertools.groupby(averaged, key=_means_of)]
        bucket = [node for group in alike for node in group]
        first, waits = bucket[0], [min(node.users) for node in bucket]
        row = {n: made(aten.reshape.default, n.args[0], [1, -1], before=before, like=sent_by(n)) for n in bucket}
        rows = [joined([row[node] for node in group]) for group in alike]
        sent = joined(rows)
        gathered = made(first.target, sent, *first.args[1:], before=before, like=first)
        edit.set_meta(gathered, "axis", first.meta["axis"])
        for of_group, group in zip(rows, alike, strict=True):
            reader = sent if len(rows) > 1 else gathered
            take_means(edit, reader, of_group, _means_of(group[0]), self.name)
        earliest = min(waits)
        came = made(_WAIT, gathered, before=earliest, like=earliest)
        lengths = [row[node].meta["val"].shape[1] for node in bucket]
        parts = made(aten.split_with_sizes.default, came, lengths, 1, before=earliest, like=earliest)
        for i, (node, wait) in enumerate(zip(bucket, waits, strict=True)):
            part = made(operator.getitem, parts, i, before=wait, like=wait)
            whole = made(aten.reshape.default, part, list(node.meta["val"].shape), before=wait, like=wait)
            edit.replace_uses(wait, whole)
            edit.erase(wait)
            edit.erase(node)

    def text(self) -> str:
        return (
            "shards of parameters are gathered a layer at a time, one layer ahead, and again in the backward pass, but "
            "for the last layer and what is stated to be kept"
        )


@dataclass(frozen=True, slots=True)
class _Reads:
    """Where what is gathered of parameters is first read."""

    depth: dict[fx.Node, int]
    """Of all that is computed of parameters alone: how many gathers lie on the way to it."""
    left: dict[fx.Node, int]
    """Of what is gathered: how many gathers, over other axes, lie on the way from it to what reads it."""
    first: dict[fx.Node, fx.Node]
    """The first reader of each gathered node that is read."""
    differentiated: set[fx.Node]
    """Gathered nodes that are read while gradients are on."""
    off: Mapping[fx.Node, fx.Node]
    """Of nodes that run while gradients are off: where they were switched off."""

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], left: int | None = None) -> _Reads:
        """Of all that is gathered, or of that in front of so many more gathers, to which these are readers."""
        depth, off = depths(nodes), without_gradients(nodes)
        at = {node: position for position, node in enumerate(nodes)}
        more, first, differentiated = dict[fx.Node, int](), dict[fx.Node, fx.Node](), set[fx.Node]()
        for node in reversed(nodes):  # users first
            if not depth.get(node) or not node.users:
                continue
            more[node] = max((more[user] + (user.target in GATHERS) for user in node.users if user in more), default=0)
            if any(user in differentiated or (not depth.get(user) and user not in off) for user in node.users):
                differentiated.add(node)
            if left is None or more[node] == left:
                readers = [first.get(user, user) for user in node.users]
                if node in differentiated:
                    readers = [off.get(reader, reader) for reader in readers]
                first[node] = min(readers, key=at.__getitem__)
        return cls(depth, more, first, differentiated, off)

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """Those with a reader, in the order of the graph."""
        return (node for node in self.depth if node in self.first)

    @property
    def gathers(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.target in GATHERS]


def _means_of(gather: fx.Node) -> Means:
    return MEANS.of(gather) or ()
