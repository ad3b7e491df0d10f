"""Layout rules as a Markdown table, and its place in a document."""

from __future__ import annotations

import re

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules

_PLACE = re.compile(r"(<!-- layout rules -->\n).*?(<!-- end of layout rules -->)", re.DOTALL)


def layout_table(rules: LayoutRules) -> str:
    """One row for each rule, in the order of the rules: what it says, what it does where it must, its operators."""
    rows = ["| rule | indices | where it must be whole | operators |", "|---|---|---|---|"]
    for rule in rules:
        operators = ", ".join(f"`{op.removeprefix('aten::')}`" for op in sorted(rule.ops))
        rows.append(f"| `{rule.id}` | {_cell(rule.says())} | {_otherwise(rule)} | {operators} |")
    return "\n".join(rows)


def with_table(document: str, rules: LayoutRules) -> str:
    """The document with the table between `<!-- layout rules -->` and `<!-- end of layout rules -->`.

    Raises:
        FxRewriteError: it has no such lines.
    """
    if not _PLACE.search(document):
        raise FxRewriteError("the document has no lines <!-- layout rules --> and <!-- end of layout rules -->")
    return _PLACE.sub(lambda found: f"{found[1]}{layout_table(rules)}\n{found[2]}", document)


def _otherwise(rule: LayoutRule) -> str:
    otherwise = f"moved to {', '.join(rule.move_to)}, else gathered" if rule.move_to else "gathered"
    parts = ", ".join(f"`{op.removeprefix('aten::')}`" for op in sorted(rule.parts))
    if not parts:
        return otherwise
    return "in parts" if len(rule.parts) == len(rule.ops) else f"in parts: {parts}; else {otherwise}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
