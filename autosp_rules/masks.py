"""What masks mean and what they cost: a line in the report for every kind of mask that attention reads."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxrewrite import Edit, Report
from fxrewrite.graph import product, size_hint, source_line
from fxrewrite.ops import bind, fake_value, key
from rules.attention_by_rows import why_not_by_rows
from rules.attention_parts import ATTENTIONS
from rules.mask_kinds import kind_of
from rules.mask_reading import is_dense

__all__ = ["DescribeMasks"]

_LONG = 131_072
"""Tokens for which a dense mask is priced."""


class DescribeMasks:
    """The step that reports masks that are computed by rows, and dense ones with the reason and the price."""

    name = "describe_masks"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        alike: dict[str, list[fx.Node]] = {}
        for node in edit.nodes():
            line = _line(node)
            if line:
                alike.setdefault(line, []).append(node)
        for line, (first, *more) in alike.items():
            where = f"; the first is %{first.name} {source_line(first)}".rstrip()
            report.lines.append(f"masks: {1 + len(more)} x {line}{where}")
        return 0

    def text(self) -> str:
        return "a line in the report for every kind of mask: what it means, or why it is dense and what it costs"


def _line(node: fx.Node) -> str:
    if key(node) == "fxrewrite_rules::attention_by_rows":
        return f"{kind_of(node) or 'an expression of rows and columns'}, computed by rows"
    if key(node) not in ATTENTIONS:
        return ""
    given = bind(node)
    mask = given["attn_mask"]
    if not isinstance(mask, fx.Node) or not is_dense(mask):
        return ""
    why = why_not_by_rows(given["query"], given["key"], given["value"], mask, given.get("dropout_p", 0.0))
    return f"dense: {why}; {_price(mask):,} bytes at {_LONG:,} tokens"


def _price(mask: fx.Node) -> int:
    """Bytes that a rank's part of the mask takes at `_LONG` tokens."""
    found = fake_value(mask)
    *outer, rows, columns = map(size_hint, found.shape)
    return round(product(outer) * _LONG * (_LONG * rows / columns)) * found.element_size()
