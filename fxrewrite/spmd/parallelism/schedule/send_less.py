"""Parameters are cast before they are gathered, and their gradients averaged after they are scattered.

    to(all_gather(x), bfloat16)                  ->   gather_cast(x, bfloat16)

What every reader casts to one narrower dtype, as autocast does, is cast before it is sent. Its gradient is cast back
before it is reduced, as it was.

    mean_gradient(all_gather(x))                 ->   all_gather(mean_gradient(x))

Ranks of other axes average the shard of a gradient, after it is scattered. Over several axes, means are handed on to
the first gather, whose gradient is the smallest; they are written where that is placed (`gather_late`), since those of
a bucket are one collective.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.operators.gradient_ops import GATHER_CAST, MEAN_GRADIENT, PASS_GRADIENT, SCALE_GRADIENT
from fxrewrite.spmd.parallelism.schedule.gathered import GATHERS, MEANS, Means, depths, sent_by, take_means

aten = torch.ops.aten
_REORDERS = ("aten::reshape", "aten::permute", "aten::contiguous", "aten::narrow")
"""What puts gathered chunks into the order of the whole value, as `lower.collectives` writes it."""


class SendLess:
    """The step that moves casts in front of gathers, and means of gradients behind their adjoints."""

    name = "send_less"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        depth = depths(edit.nodes())
        gathers, changed = [node for node in depth if node.target in GATHERS], 0
        for node in sorted(gathers, key=depth.__getitem__, reverse=True):
            read, of_gradient = _read_as(node)
            averaged = self._gradients_first(edit, node, of_gradient)
            gather = self._cast_first(edit, node, read)
            if depth[node] == 1:
                edit.set_fact(gather, MEANS, averaged)
            else:
                take_means(edit, gather, sent_by(gather), averaged, self.name)
            changed += bool(of_gradient or averaged or gather is not node)
        return changed

    def _gradients_first(self, edit: Edit, gather: fx.Node, of_gradient: Sequence[fx.Node]) -> Means:
        """Remove these nodes after a gather; scales go to its operand, and the means are returned, with its own."""
        means = list[tuple[Any, ...]]()
        node = sent_by(gather)
        # What reads another value as well may be a chunk, and ranks that average have others: a row of an index.
        while (
            node.op == "call_function"
            and node.target not in GATHERS
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
                sent = sent_by(gather)
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

    def text(self) -> str:
        return "parameters are cast before they are gathered, and their gradients averaged after they are scattered"


def _read_as(gather: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The value that is read of what is gathered, in its order, and what is done to its gradient on the way there."""
    read, of_gradient = gather, list[fx.Node]()
    node = gather
    while len(node.users) == 1:
        (node,) = node.users
        if node.target in (SCALE_GRADIENT, MEAN_GRADIENT):
            of_gradient.append(node)
        elif node.target in (COLLECTIVES["wait"], PASS_GRADIENT) or key(node) in _REORDERS:
            read = node
        else:
            break
    return read, of_gradient


def _cast_to(node: fx.Node) -> torch.dtype | None:
    dtype = node.args[1] if node.target == aten.to.dtype and len(node.args) == 2 else None
    return dtype if isinstance(dtype, torch.dtype) else None
