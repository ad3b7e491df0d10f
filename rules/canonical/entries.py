"""Operators that keep the entries of a dimension apart: of a part of these they give that part of what they give."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxrewrite.spmd import Call, Shard
from rules.layouts import LAYOUTS


def below(call: Call, placed: Mapping[int, Shard]) -> Shard | None:
    """Returns where the entries of these operands, by position, are in the result; None if they are not kept apart.

    A placement says which dimension has the entries. Other operands are read whole for each entry.
    """
    _, rule, indices = LAYOUTS.of(call.node)
    if rule is None or indices is None or call.num_read or (rule.shape_arg and call.key != "aten::reshape"):
        return None
    parts = [indices.locate(indices.operands[position], placement) for position, placement in placed.items()]
    part = parts[0]
    if part is None or part.index in indices.whole or any(other != part for other in parts):
        return None
    others = (terms for position, terms in enumerate(indices.operands) if position not in placed)
    if any(indices.has(terms, part.index) for terms in others):
        return None  # these would have to be cut as well
    found = indices.placement(indices.results[0], part)
    return found if isinstance(found, Shard) else None


def above(node: fx.Node, placement: Shard) -> tuple[fx.Node, Shard] | None:
    """Returns the first operand, if it alone has the entries that the result has there, and where it has them."""
    call, rule, indices = LAYOUTS.of(node)
    if rule is None or indices is None or call.num_read or rule.shape_arg:
        return None
    part = indices.locate(indices.results[0], placement)
    if part is None or part.index in indices.whole:
        return None
    having = [at for at, terms in enumerate(indices.operands) if indices.has(terms, part.index)]
    found = indices.placement(indices.operands[0], part) if having == [0] else None
    is_first = call.operands[:1] == (node.args[0],) and node.args.count(node.args[0]) == 1
    if not isinstance(found, Shard) or not is_first or found != Shard(found.dim, uneven=True):
        return None
    return call.operands[0], found
