"""Coalesces the redistributions of an attention's operands: q, k and v in one all-to-all, or k and v in one all-gather.

    sdpa(redistribute(q), redistribute(k), redistribute(v))
    ->  a, b, c = bundle([q, k, v]);  sdpa(redistribute(a), redistribute(b), redistribute(c))

A value with a user before all others are computed, such as k that another layer attends to as well, is sent alone.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from fxrewrite import Edit, Report
from fxrewrite.ops import mutates
from fxrewrite.spmd import Replicate, Shard, SpmdContext, bundle, redistribute
from rules.attention.operator import attentions


class MoveTogether:
    """A step that coalesces the redistributions of each attention's operands by a `bundle`."""

    name = "autosp.move_together"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        """Coalesces redistributions, and returns the number of new bundles."""
        SpmdContext.required(context, self.name)
        position = {node: number for number, node in enumerate(edit.nodes())}
        writes = [number for node, number in position.items() if mutates(node)]
        changes = 0
        for attention in attentions(edit.nodes()):
            for moved in _alike(attention):
                changes += self._bundle(edit, moved, position, writes)
        return changes

    def _bundle(self, edit: Edit, moved: list[fx.Node], position: dict[fx.Node, int], writes: list[int]) -> int:
        moved = [node for node in moved if node in position]  # nodes made here belong to another bundle
        # The collective runs after the last value is computed, so no user may come earlier, and no write be in between.
        last = max((position[_value(node)] for node in moved), default=0)
        moved = [node for node in moved if all(position.get(user, last) > last for user in node.users)]
        end = max((position[node] for node in moved), default=0)
        if len(moved) < 2 or any(last < number < end for number in writes):
            return 0
        values = [_value(node) for node in moved]
        latest = max(values, key=position.__getitem__)
        made = edit.call(bundle, (values,), after=latest, like=moved[0], rule=self.name, val=[_val(v) for v in values])
        for index, node in reversed(list(enumerate(moved))):
            item = edit.call(getitem, (made, index), after=made, like=node, rule=self.name, val=_val(values[index]))
            again = edit.call(redistribute, (item, *node.args[1:]), after=item, like=node, val=_val(node))
            edit.replace_uses(node, again)
            edit.erase(node)
        return 1

    def text(self) -> str:
        return "coalesces redistributions of q, k and v of an attention: bundle([q, k, v]) before them"


def _alike(attention: fx.Node) -> Iterator[list[fx.Node]]:
    """Yields groups of redistributions of an attention's operands that one collective can serve."""
    operands: Any = attention.args[:3]
    alike: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in dict.fromkeys(operand for operand in operands if operand.target is redistribute):
        if kind := _collective(node):
            alike.setdefault((kind, _val(node).dtype, _val(node).device), []).append(node)
    yield from alike.values()


def _collective(moved: fx.Node) -> str:
    """Returns the kind of collective that a redistribution is lowered to, if it can be coalesced; else ""."""
    _, src, dst, _ = moved.args
    if isinstance(src, Shard) and isinstance(dst, Replicate):
        return "all_gather"
    return "all_to_all" if isinstance(src, Shard) and isinstance(dst, Shard) and src.dim != dst.dim else ""


def _value(moved: fx.Node) -> fx.Node:
    return moved.all_input_nodes[0]


def _val(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]
