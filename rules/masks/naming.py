"""Names what a mask means, by its expression.

    bitwise_and(bitwise_and(le(x0, x1), gt(x0, x2)), x3)   ->   causal and window 4096 and key padding

The expression is split at its ands. A part that depends on sizes only is compared in every entry with what it would be
if it were causal, a window, and so on (`rules.masks.meanings`), at lengths up to 262,144 if the length is symbolic; a
part that is always true is dropped. A part that depends on data is named by its form: a per-row value that equals a
per-column value separates documents, a value per column only is key padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import Edit, Report
from fxrewrite.graph import OpenValueError
from fxrewrite.ops import bind
from rules.attention.operator import attentions
from rules.masks.expressions import MaskCall, Term, leaves_in, parse_mask
from rules.masks.kinds import MASK_KIND, MaskCondition, MaskKind, MaskPart, name_mask
from rules.masks.meanings import COLUMN, ROW, MaskAt
from rules.masks.reading import ReadMask, is_dense, read_mask

_LOW = -1e4
"""Numbers up to this one hide a key when they are added to its score."""


class NameMasks:
    """A step that records the meaning of every dense attention mask, for `kind_of`."""

    name = "name_masks"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Records the meaning of dense masks. Changes no node."""
        for node in attentions(edit.nodes()):
            mask = bind(node)["attn_mask"]
            if isinstance(mask, fx.Node) and MASK_KIND.of(mask) is None and is_dense(mask):
                read = read_mask(mask)
                if isinstance(read, ReadMask):
                    name_mask(edit, mask, mask_kind(mask, read))
        return 0

    def text(self) -> str:
        return "what every dense mask of attention means, for costs and reports"


def mask_kind(mask: fx.Node, read: ReadMask) -> MaskKind:
    """Derives what a mask means from its expression."""
    looks = list(MaskAt.at_lengths(mask, read))
    parts = [_part(term, read, looks) for term in _conjuncts(parse_mask(read.text).term)]
    return MaskKind(tuple(dict.fromkeys(part for part in parts if part is not None)))


def _conjuncts(term: Term) -> list[Term]:
    """Splits a term into conditions that must all hold for a kept key, and biases that are added."""
    match term:
        case MaskCall("bitwise_and" | "logical_and", (a, b)) | MaskCall("add", (a, b)):
            return [*_conjuncts(a), *_conjuncts(b)]
        case MaskCall("where", (kept, 0 | MaskCall("full", (0, _)), float() as low)) if low <= _LOW:
            return _conjuncts(kept)
        case MaskCall("masked_fill", (base, MaskCall("bitwise_not" | "logical_not", (kept,)), float() as low)) if (
            low <= _LOW
        ):
            return [*_conjuncts(base), *_conjuncts(kept)]
        case MaskCall("masked_fill", (base, hidden, float() as low)) if low <= _LOW:
            return [*_conjuncts(base), MaskCall("bitwise_not", (hidden,))]
        case MaskCall("full", (0, _)):
            return []
        case MaskCall("to", (x, torch.dtype() as dtype)) if dtype != torch.bool:
            return _conjuncts(x)
        case _:
            return [term]


def _part(term: Term, read: ReadMask, looks: Sequence[MaskAt]) -> MaskPart | None:
    """Returns what a part means, or None if it keeps all keys."""
    try:
        ends = [looks[-1].row(term, row) for row in (0, -1)]
        if ends[0].dtype != torch.bool:
            return MaskPart(MaskCondition.BIAS_OF_POSITIONS)
        for condition, row, kept in _CONDITIONS:
            number = int(ends[row].sum())
            meant = MaskCall("eq", (term, kept(number)))
            if number and all(look.holds(meant) is True for look in looks):
                return None if condition is None else MaskPart(condition, number if "{}" in condition.value else 0)
    except OpenValueError:
        return MaskPart(_by_form(term, read))
    return MaskPart(MaskCondition.POSITIONS)


def _call(name: str, *args: Term) -> Term:
    return MaskCall(name, args)


_CAUSAL = _call("le", COLUMN, ROW)
_CONDITIONS: tuple[tuple[MaskCondition | None, int, Callable[[int], Term]], ...] = (
    (None, 0, lambda _: _call("ge", COLUMN, 0)),
    (MaskCondition.CAUSAL, 0, lambda _: _CAUSAL),
    (MaskCondition.WINDOW, -1, lambda n: _call("gt", COLUMN, _call("sub", ROW, n))),
    (MaskCondition.WINDOW_TO_BOTH_SIDES, 0, lambda n: _call("lt", _call("abs", _call("sub", COLUMN, ROW)), n)),
    (MaskCondition.CHUNKS, 0, lambda n: _call("eq", *(_call("floor_divide", side, n) for side in (COLUMN, ROW)))),
    (MaskCondition.PREFIX, 0, lambda n: _call("bitwise_or", _CAUSAL, _call("lt", COLUMN, n))),
)
"""Candidates: a meaning, the row whose number of kept columns is `n`, and the condition on columns and rows."""


def _by_form(term: Term, read: ReadMask) -> MaskCondition:
    """Names a part that depends on data."""
    terms = (term, *term.args) if isinstance(term, MaskCall) else (term,)
    sides = [{dim for dim in (-2, -1) for number in leaves_in(part) if read.has(number, dim)} for part in terms]
    whole, *operands = sides
    if len(whole) < 2:
        return MaskCondition.QUERY_PADDING if whole == {-2} else MaskCondition.KEY_PADDING
    name = term.name if isinstance(term, MaskCall) else ""
    if name in ("eq", "le", "lt", "ge", "gt") and all(len(operand) == 1 for operand in operands):
        return MaskCondition.DOCUMENTS if name == "eq" else MaskCondition.GIVEN_POSITIONS
    return MaskCondition.BIAS if name in ("mul", "sub", "div", "neg") else MaskCondition.DATA
