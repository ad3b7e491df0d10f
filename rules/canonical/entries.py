"""Operators that keep the entries of a dimension apart: of a part of these they give that part of what they give."""

from __future__ import annotations

from collections.abc import Mapping

from fxrewrite.spmd import Call, Shard
from rules.layouts import LAYOUTS


def below(call: Call, placed: Mapping[int, Shard]) -> Shard | None:
    """Returns where the entries of these operands, by position, are in the result; None if they are not kept apart.

    A placement says which dimension has the entries. Other operands are read whole for each entry.
    """
    rule = LAYOUTS.get(call.key)
    if rule is None or call.reads_sizes or (rule.shape_arg and call.key != "aten::reshape"):
        return None
    indices = rule.map(call)
    if indices is None or len(indices.results) != 1:
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
