"""Collectives of parameters alone, a layer at a time: shards are gathered one layer ahead, gradients averaged together.

    all_gather(a), all_gather(b), all_gather(c), ...   ->   ab, cd = all_gather(cat(a, b)), all_gather(cat(c, d))
    layer 0 reads a, b; layer 1 reads c, d                  a, b = split(wait(ab)); layer 0
                                                            ef = all_gather(cat(e, f))
                                                            c, d = split(wait(cd)); layer 1

A *gathered* value is computed of parameters alone and of an all-gather. All that is gathered is placed right before it
is first read, so that few layers are whole at a time, and has the tag by which AOTAutograd's partitioner computes it
again in the backward pass: kept, all of them together would be the whole model. What is gathered last is kept, since
the backward pass begins with it, and so is what `Stored(..., kept=True)` says. What one layer reads first is gathered
by one collective (a bucket), whose adjoint is one reduce-scatter, and which starts where the bucket before is first
read. What is gathered over several axes has a bucket of each, and each starts a layer ahead of what reads it.
What is first read while gradients are off, and has other readers too, is gathered before they were switched off.
A layer is a module of a list, the outermost if they are nested; parameters outside of lists share buckets with their
neighbours. A bucket's values have one axis and dtype, and all or none of them require gradients.

    to(all_gather(x), bfloat16)                  ->   gather_cast(x, bfloat16)

What every reader casts to one narrower dtype, as autocast does, is cast before it is sent. Its gradient is cast back
before it is reduced, as it was.

    mean_gradient(all_gather(x))                 ->   all_gather(mean_gradient(x))

Ranks of other axes average the shard of a gradient, after it is scattered: those of a bucket by one collective.

    mean_gradient(a), mean_gradient(b), ...      ->   mean_gradients([a, b, ...])

So are the gradients of a layer's other parameters.

A backend without AOTAutograd, such as "eager", ignores the tag and keeps what is gathered.
Numerics: exact. Source: Zhao et al. (arXiv 2304.11277, sections 3.3 and 4.2: resharding after the forward pass, one
collective for a flat parameter, prefetching).
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.walk import reached
from fxrewrite.ops import is_parameter, is_pure, key, memory_written, without_gradients
from fxrewrite.plan import RuleSet
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.operators.gradient_ops import (
    GATHER_CAST,
    MEAN_GRADIENT,
    MEAN_GRADIENTS,
    PASS_GRADIENT,
    SCALE_GRADIENT,
)
from fxrewrite.spmd.parallelism.local_gradients import LocalGradients
from fxrewrite.spmd.propagation.place import KEPT

__all__ = ["SCHEDULE", "layer_of"]

aten = torch.ops.aten
_GATHER, _WAIT = COLLECTIVES["all_gather"], COLLECTIVES["wait"]
_GATHERS = (_GATHER, GATHER_CAST)
_REORDERS = ("aten::reshape", "aten::permute", "aten::contiguous", "aten::narrow")
"""What puts gathered chunks into the order of the whole value, as `lower.collectives` writes it."""
_Means: TypeAlias = "tuple[tuple[Any, ...], ...]"
"""Of each mean over ranks that is taken of a gradient: the name of the axis, the group, and the number of its ranks."""
_regions = itertools.count(1 << 20)
"""Numbers of recomputed regions, apart from those of checkpoints."""


class Schedule:
    """The step that buckets, moves and tags collectives of parameters alone, over any axis."""

    name = "schedule"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        means = self._send_less(edit)
        return self._average_together(edit) + self._gather_late(edit, means, context)

    def _send_less(self, edit: Edit) -> dict[fx.Node, _Means]:
        """Cast before gathers, and average after their adjoints; returns the means that are left to take of each.

        Over several axes, means are handed on to the first gather, whose gradient is the smallest.
        """
        depth = _depths(edit.nodes())
        gathers = [node for node in depth if node.target in _GATHERS]
        means: dict[fx.Node, _Means] = {}
        for node in sorted(gathers, key=depth.__getitem__, reverse=True):
            read, of_gradient = _read_as(node)
            averaged = self._gradients_first(edit, node, of_gradient)
            gather = self._cast_first(edit, node, read)
            means[gather] = averaged if depth[node] == 1 else ()
            if depth[node] > 1:
                self._average(edit, gather, _sent(gather), averaged)
        return means

    def _gather_late(self, edit: Edit, means: Mapping[fx.Node, _Means], context: SpmdContext) -> int:
        """Gather what one layer reads by one collective of each axis, a layer ahead if stated; returns how many nodes
        were moved.

        The last gathers are placed first: where they start is where the gathers before them are read.
        """
        reads = _Reads.of(edit.nodes())
        for node in reads.nodes:
            edit.move(node, reads.first[node])
        starts = [node for node in reads.gathers if reads.depth[node] == 1]
        buckets = _buckets(edit, starts, reads.first, apart=reads.differentiated)
        self._compute_again(edit, reads, buckets, context)
        last = max(reads.left.values(), default=0)
        for left in range(last + 1):
            one = _Reads.of(edit.nodes(), left) if last else reads
            if last:
                buckets = _buckets(edit, one.gathers, one.first, apart=one.differentiated)
            self._place(edit, one, buckets, means, is_ahead=context.is_ahead)
        return len(reads.first)

    def _compute_again(
        self, edit: Edit, reads: _Reads, buckets: Sequence[Sequence[fx.Node]], context: SpmdContext
    ) -> None:
        """Tag what is gathered to be gathered again in the backward pass, but for what is kept."""
        kept = {node for bucket in buckets for node in bucket if node.meta.get("recompute") == KEPT}
        if buckets and not context.is_part:  # the backward pass reads the last layer at once
            last = layer_of(_look(buckets[-1][0])[0])
            of_last = itertools.takewhile(lambda bucket: layer_of(_look(bucket[0])[0]) == last, reversed(buckets))
            kept |= set(itertools.chain(*of_last))
        again, given_up = set[fx.Node](), set(reads.depth) - kept
        region = next(_regions)  # one: between two regions the partitioner saves what one reads of the other
        for node in reads.nodes:
            starts = node in given_up and node.target in _GATHERS and reads.depth[node] == 1
            if starts or not again.isdisjoint(node.all_input_nodes):
                again.add(node)
                edit.set_meta(node, "recompute", CheckpointPolicy.MUST_RECOMPUTE)
                edit.set_meta(node, "ac_graph_id", region)

    def _place(
        self,
        edit: Edit,
        reads: _Reads,
        buckets: Sequence[Sequence[fx.Node]],
        means: Mapping[fx.Node, _Means],
        *,
        is_ahead: bool,
    ) -> None:
        """Start each bucket's collective where the bucket before is first read, or where it is read itself."""
        waits = [min(bucket[0].users) for bucket in buckets]
        for position, bucket in enumerate(buckets):
            before = waits[max(position - is_ahead, 0)]
            if bucket[0] in reads.differentiated:
                before = reads.off.get(reads.first[before], before)
            for needed in _operands(bucket):
                if not needed < before:
                    edit.move(needed, before)
            if len(bucket) == 1:
                edit.move(bucket[0], before)
                self._average(edit, bucket[0], _sent(bucket[0]), means[bucket[0]])
            else:
                self._together(edit, bucket, means, before)

    def _gradients_first(self, edit: Edit, gather: fx.Node, of_gradient: Sequence[fx.Node]) -> _Means:
        """Remove these nodes after a gather; scales go to its operand, and the means are returned, with its own."""
        means = list[tuple[Any, ...]]()
        node = _sent(gather)
        # What reads another value as well may be a chunk, and ranks that average have others: a row of an index.
        while (
            node.op == "call_function"
            and node.target not in _GATHERS
            and len(node.users) == len(node.all_input_nodes) == 1
        ):
            before = node.all_input_nodes[0]
            if node.target == MEAN_GRADIENT:
                means.append((node.meta["axis"], *node.args[1:]))
                edit.replace_uses(node, before)
                edit.erase(node)
            node = before
        for node in of_gradient:
            if node.target == SCALE_GRADIENT:
                sent = _sent(gather)
                scaled = edit.call(SCALE_GRADIENT, (sent, *node.args[1:]), before=gather, like=sent, rule=self.name)
                edit.replace_uses(sent, scaled, [gather])
            else:
                means.append((node.meta["axis"], *node.args[1:]))
            edit.replace_uses(node, node.all_input_nodes[0])
            edit.erase(node)
        return tuple(means)

    def _cast_first(self, edit: Edit, gather: fx.Node, read: fx.Node) -> fx.Node:
        """Send what all readers cast to one narrower dtype in that dtype; returns the gather."""
        readers = list(read.users)
        dtype, held = _cast_to(readers[0]) if readers else None, gather.meta["val"].dtype
        if dtype is None or any(_cast_to(reader) != dtype for reader in readers):
            return gather
        if not (dtype.is_floating_point and held.is_floating_point and dtype.itemsize < held.itemsize):
            return gather
        cast = edit.call(GATHER_CAST, (*gather.args, dtype), before=gather, like=gather, rule=self.name)
        edit.set_meta(cast, "axis", gather.meta["axis"])
        edit.replace_uses(gather, cast)
        edit.erase(gather)
        node = cast
        while node is not read:
            (node,) = node.users
            edit.set_meta(node, "val", node.meta["val"].to(dtype))
        for reader in readers:
            edit.replace_uses(reader, read)
            edit.erase(reader)
        return cast

    def _average(self, edit: Edit, reader: fx.Node, value: fx.Node, means: _Means) -> None:
        """Take these means of the gradient that the reader has of a value."""
        for axis, *mean in means:
            averaged = edit.call(MEAN_GRADIENT, (value, *mean), before=reader, like=value, rule=self.name)
            edit.set_meta(averaged, "axis", axis)
            edit.replace_uses(value, averaged, [reader])
            value = averaged

    def _average_together(self, edit: Edit) -> int:
        """One mean of all gradients of a layer's parameters that ranks average alike; returns how many there are."""
        depth = _depths(edit.nodes())
        means = [node for node in depth if node.target == MEAN_GRADIENT and node.users]
        own = [node for node in means if len(node.all_input_nodes[0].users) == 1]
        first_read = {node: min(node.users) for node in own}
        found = [bucket for bucket in _buckets(edit, own, first_read) if len(bucket) > 1]
        for bucket in found:
            first, values = min(bucket), [node.all_input_nodes[0] for node in bucket]
            for needed in _operands(bucket):
                if not needed < first:
                    edit.move(needed, first)
            call = (MEAN_GRADIENTS, (values, *first.args[1:]))
            together = edit.call(*call, before=first, like=first, rule=self.name)
            edit.set_meta(together, "axis", first.meta["axis"])
            for i, node in enumerate(bucket):
                part = edit.call(operator.getitem, (together, i), before=first, like=node, rule=self.name)
                edit.replace_uses(node, part)
                edit.erase(node)
        return len(found)

    def _together(
        self, edit: Edit, bucket: Sequence[fx.Node], means: Mapping[fx.Node, _Means], before: fx.Node
    ) -> None:
        """One collective in place of several: of rows of what each of them sends, and split when it has come."""

        def made(target: Any, *args: Any, before: fx.Node, like: fx.Node) -> fx.Node:
            return edit.call(target, args, before=before, like=like, rule=self.name)

        def joined(rows: list[fx.Node]) -> fx.Node:
            return made(aten.cat.default, rows, 1, before=before, like=_sent(first)) if len(rows) > 1 else rows[0]

        averaged = sorted(bucket, key=lambda node: repr(means[node]))
        alike = [list(group) for _, group in itertools.groupby(averaged, key=means.__getitem__)]
        bucket = [node for group in alike for node in group]
        first, waits = bucket[0], [min(node.users) for node in bucket]
        row = {n: made(aten.reshape.default, n.args[0], [1, -1], before=before, like=_sent(n)) for n in bucket}
        rows = [joined([row[node] for node in group]) for group in alike]
        sent = joined(rows)
        gathered = made(first.target, sent, *first.args[1:], before=before, like=first)
        edit.set_meta(gathered, "axis", first.meta["axis"])
        for of_group, group in zip(rows, alike, strict=True):
            self._average(edit, sent if len(rows) > 1 else gathered, of_group, means[group[0]])
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
            "for the last layer and what is stated to be kept; gradients are averaged a layer at a time, those of "
            "shards after they are scattered"
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
        depth, off = _depths(nodes), without_gradients(nodes)
        at = {node: position for position, node in enumerate(nodes)}
        more, first, differentiated = dict[fx.Node, int](), dict[fx.Node, fx.Node](), set[fx.Node]()
        for node in reversed(nodes):  # users first
            if not depth.get(node) or not node.users:
                continue
            more[node] = max((more[user] + (user.target in _GATHERS) for user in node.users if user in more), default=0)
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
        return [node for node in self.nodes if node.target in _GATHERS]


def _depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many gathers lie on the way from parameters to each node that is computed of them alone, in their order.

    What is written to is left out, with all that reads it: behind a write it would be another value.
    """
    depth, off = dict[fx.Node, int](), without_gradients(nodes)
    written = memory_written(nodes[0].graph) if nodes else set[fx.Node]()
    for node in nodes:
        if node in written:
            continue
        if node.op == "placeholder":
            if is_parameter(node):
                depth[node] = 0
            continue
        reads = node.all_input_nodes
        is_repeatable = is_pure(node) or node.target in COLLECTIVES.values()
        if (
            node.op == "call_function"
            and is_repeatable
            and node not in off
            and reads
            and all(read in depth for read in reads)
        ):
            depth[node] = max(depth[read] for read in reads) + (node.target in _GATHERS)
    return depth


def _read_as(gather: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The value that is read of what is gathered, in its order, and what is done to its gradient on the way there."""
    read, of_gradient = gather, list[fx.Node]()
    node = gather
    while len(node.users) == 1:
        (node,) = node.users
        if node.target in (SCALE_GRADIENT, MEAN_GRADIENT):
            of_gradient.append(node)
        elif node.target in (_WAIT, PASS_GRADIENT) or key(node) in _REORDERS:
            read = node
        else:
            break
    return read, of_gradient


def _cast_to(node: fx.Node) -> torch.dtype | None:
    dtype = node.args[1] if node.target == aten.to.dtype and len(node.args) == 2 else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _buckets(
    edit: Edit,
    nodes: Sequence[fx.Node],
    first_read: Mapping[fx.Node, fx.Node],
    apart: Container[fx.Node] = (),
) -> list[list[fx.Node]]:
    """The nodes, each of one parameter, that are one collective; in the order in which those of a bucket are read.

    Those `apart` share no bucket with others.
    """
    at = {node: position for position, node in enumerate(edit.nodes())}
    ordered = sorted(nodes, key=lambda node: (at[first_read[node]], at[node]))
    looks = {node: _look(node) for node in ordered}
    found: list[list[fx.Node]] = []
    for layer, of_layer in itertools.groupby(ordered, lambda node: layer_of(looks[node][0])):
        del layer
        alike: dict[Any, list[fx.Node]] = {}
        for node in of_layer:
            alike.setdefault((looks[node][1], node in apart), []).append(node)
        found += alike.values()
    return found


def _look(node: fx.Node) -> tuple[str, Any]:
    """The name of the parameter that a node starts from, and in what nodes of one bucket are alike."""
    parameter = min(n for n in reached([node]) if n.op == "placeholder")
    needs_gradient = getattr(parameter.meta.get("example_value"), "requires_grad", True)
    value = node.meta["val"]
    how = (*node.args[1:], value.dtype, value.device, node.meta.get("recompute"), needs_gradient)
    return input_name(parameter), how


def _operands(bucket: Sequence[fx.Node]) -> list[fx.Node]:
    """What is computed before these nodes, in the order of the graph."""
    walk = reached(read for node in bucket for read in node.all_input_nodes)
    return sorted(node for node in walk if node.op != "placeholder")


def _sent(gather: fx.Node) -> fx.Node:
    """What an all-gather sends."""
    return gather.all_input_nodes[0]


def layer_of(parameter: str) -> str:
    """The outermost module of a list that a parameter belongs to: `model.layers.0`; "" where there is none."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.)", parameter)
    return found[0] if found else ""


SCHEDULE = RuleSet("schedule", LocalGradients(), Schedule())
