"""What is computed of each part of a value and joined again is computed of the whole value.

    cat([f(part) for part in split(x, n, dim)], dim)             ->  f(x)
    cat([f(x[:, :n]), f(x[:, n : 2 * n]), ...], 1)               ->  f(x)

Loops over chunks of rows save memory on one device. In shards, a part is on one rank or on a few, so that all rows
would be gathered for the loop; and a rank has few of them in any case. `f` may be any operators that keep the entries
of the dimension apart, as their layout rules say: a head, log_softmax, an entropy, a loss of each row. It may read
several values in parts, as logits with their labels, and others whole.
Matches parts that are all of a value, in order, of which `f` is the same. Does not match, in these words: "it does not
join all parts of a value"; "a batch is in parts"; "%add keeps no entries apart"; "%relu is read elsewhere"; "%index_put
writes, or sets a mode, between the parts and where they are joined".
Shapes: x [..., S, ...] -> those of f(x). Numerics: reassociates (products and sums of rows, by other kernels).
Source: apply_chunking_to_forward of transformers; entropy_from_logits of trl.

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def entropies(logits):
...     parts = (part.log_softmax(-1) for part in logits.split(3, 0))
...     return torch.cat([-(x.exp() * x).sum(-1) for x in parts])
>>> gm = make_fx(entropies, tracing_mode="fake", pre_dispatch=True)(torch.rand(8, 5))
>>> JOINED_PARTS.apply(gm).rewrites > 0
True
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten

from fxrewrite import DeadCode, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.graph import operands_first
from fxrewrite.ops import bind, fake_value, is_pure, key, mutates
from fxrewrite.spmd import Call, Shard, Size, is_same_size, product, size_proxy
from rules.canonical.entries import below

_SPLITS = ("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split")


class _RefusedError(Exception):
    """Says why parts are not joined."""


@dataclass
class _Parts:
    """The nodes that compute the first part, in order, and what stands for each in the other parts."""

    joined: fx.Node
    alike: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict[fx.Node, "tuple[fx.Node, ...]"])
    wholes: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    """By the node that takes the first part of a value, that value."""
    placements: dict[fx.Node, Shard] = field(default_factory=dict[fx.Node, Shard])
    """Where the first part's entries are in each of these nodes."""
    num_whole: Size = 0

    @staticmethod
    def of(joined: fx.Node) -> _Parts:
        """The parts that a concatenation joins.

        Raises:
            _RefusedError: it does not join what is the same function of all parts.
        """
        found, args = _Parts(joined), bind(joined)
        tensors = args["tensors"]
        if len(set(tensors)) < 2:
            raise _RefusedError("it does not join all parts of a value")
        found.alike[tensors[0]] = tuple(tensors)
        for node in operands_first(tensors[0], found._operands):
            found._place(node)
        if found.placements.get(tensors[0]) != Shard(args["dim"] % fake_value(joined).dim(), uneven=True):
            raise _RefusedError("it does not join all parts of a value")
        found._check()
        return found

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The operands that are another node in each part; none of what takes the part."""
        column = self.alike[node]
        taken = _taken(column)
        if taken is not None:
            whole, dim = taken
            if dim == 0 and fake_value(whole).dim() > 2:
                raise _RefusedError("a batch is in parts")
            self.wholes[node], self.placements[node] = whole, Shard(dim, uneven=True)
            self.num_whole = fake_value(whole).shape[dim]
            return []
        leaves = [tree_flatten((other.args, other.kwargs)) for other in column]
        if len({key(other) for other in column}) > 1 or any(spec != leaves[0][1] for _, spec in leaves):
            raise _RefusedError("it does not join all parts of a value")
        found = list[fx.Node]()
        for values in zip(*(values for values, _ in leaves), strict=True):
            if all(isinstance(value, fx.Node) for value in values) and len(set(values)) == len(column):
                self.alike.setdefault(values[0], values)
                found.append(values[0])
                if self.alike[values[0]] == values:
                    continue
            if any(value is not values[0] and value != values[0] for value in values):
                raise _RefusedError("it does not join all parts of a value")
        return found

    def _place(self, node: fx.Node) -> None:
        if node in self.wholes:
            return
        call = Call.of(node)
        placed = {i: self.placements[operand] for i, operand in enumerate(call.operands) if operand in self.placements}
        found = below(call, placed) if placed and is_pure(node) else None
        if found is None:
            raise _RefusedError(f"%{node.name} keeps no entries apart")
        self.placements[node] = found

    def _check(self) -> None:
        """Raise if a part is read elsewhere, or autograd or memory differs where the whole would be computed."""
        made = {node for first, column in self.alike.items() if first not in self.wholes for node in column}
        for node in made:
            if not made.issuperset(user for user in node.users if user is not self.joined):
                raise _RefusedError(f"%{node.name} is read elsewhere")
        starts = {node for first in self.wholes for node in self.alike[first]} | made
        node = min(starts)
        while node is not self.joined:
            if mutates(node):
                raise _RefusedError(f"%{node.name} writes, or sets a mode, between the parts and where they are joined")
            node = node.next


def _taken(column: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """The value of which these are all parts, in order, and the dimension; None if they are not."""
    first = column[0]
    if first.target is operator.getitem:
        split: Any = first.args[0]
        is_all = [(node.target, *node.args) for node in column] == [
            (operator.getitem, split, i) for i in range(len(column))
        ]
        if key(split) not in _SPLITS or not is_all or len(split.meta["val"]) != len(column):
            return None
        args = bind(split)
        return args["self"], args["dim"] % fake_value(args["self"]).dim()
    if any(key(node) != "aten::slice" for node in column):
        return None
    given = [bind(node) for node in column]
    whole, dim = given[0]["self"], given[0]["dim"]
    at: Size = 0
    for node, args in zip(column, given, strict=True):
        start = 0 if args["start"] is None else args["start"]
        is_next = not isinstance(start, fx.Node) and is_same_size(start, at)
        if (args["self"], args["dim"], args["step"]) != (whole, dim, 1) or not is_next:
            return None
        at = at + fake_value(node).shape[dim]
    return (whole, dim % fake_value(whole).dim()) if is_same_size(at, fake_value(whole).shape[dim]) else None


@where.predicate("root", text="joins_all_parts")
def _joins_all_parts(root: fx.Node) -> bool | str:
    try:
        _Parts.of(root)
    except _RefusedError as error:
        return str(error)
    return True


join_parts = Rule(
    "joined_parts.compute_whole",
    Pattern((op("cat", cap("tensors", "any"), cap("dim", "any")),), (_joins_all_parts,)),
    numerics="reassociates",
    optional=True,
)


@join_parts.replacement
def _(match: Match) -> Any:
    """f(x)"""
    parts = _Parts.of(match.root)
    made = dict(parts.wholes)
    for node, placement in parts.placements.items():
        if node in made:
            continue
        args: Any = map_arg(node.args, lambda n: made.get(n, n))
        kwargs: Any = map_arg(node.kwargs, lambda n: made.get(n, n))
        if key(node) == "aten::reshape" and args[1][placement.dim] != -1:
            size = size_proxy(match, product((placement.outer, parts.num_whole, placement.inner)))
            args = args[0], [*args[1][: placement.dim], getattr(size, "node", size), *args[1][placement.dim + 1 :]]
        made[node] = match.edit.call(node.target, args, kwargs, before=match.root, like=node, rule=join_parts.id)
    return match.proxy(made[parts.joined.all_input_nodes[0]])


JOINED_PARTS = RuleSet("joined_parts", join_parts, DeadCode("parts"))
