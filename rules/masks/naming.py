"""Names what a mask means, by its expression.

    bitwise_and(bitwise_and(le(x0, x1), gt(x0, x2)), x3)   ->   causal and window 4096 and key padding

The expression is split at its ands. A part that depends on sizes only is compared in every entry with what it would be
if it were causal, a window, and so on (`rules.masks.proofs`), at lengths up to 262,144 if the length is symbolic; a
part that is always true is dropped. A part that depends on data is named by its form: a per-row value that equals a
per-column value separates documents, a value per column only is key padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import Edit, Report
from fxrewrite.graph import ClosedValues, OpenValueError, symbols_of
from fxrewrite.ops import bind, fake_value
from rules.attention.operator import attentions
from rules.masks.expressions import Leaf, MaskCall, MaskExpression, Term, parse_mask
from rules.masks.kinds import MASK_KIND, MaskCondition, MaskKind, MaskPart, name_mask
from rules.masks.proofs import is_true_everywhere
from rules.masks.reading import ReadMask, is_dense, read_mask

__all__ = ["NameMasks", "mask_kind"]

_LENGTHS = (7, 331, 1 << 18)
"""Lengths tried if the length is symbolic; the last exceeds every window."""
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
    looks = list(_looks(mask, read))
    parts = [_part(term, read, looks) for term in _conjuncts(parse_mask(read.text).term)]
    return MaskKind(tuple(dict.fromkeys(part for part in parts if part is not None)))


class _Look:
    """Evaluates parts of a mask at one length."""

    def __init__(self, mask: fx.Node, read: ReadMask, closed: ClosedValues) -> None:
        self.num_rows, self.num_columns = (closed.size(size) for size in fake_value(mask).shape[-2:])
        self._read, self._closed = read, closed
        self._leaves: dict[int, torch.Tensor] = {}

    def row(self, term: Term, row: int) -> torch.Tensor:
        """Returns a row of a part, [columns] (-1: the last). Raises OpenValueError if data or the batch decide it."""
        row %= self.num_rows
        found = MaskExpression(term).part(self._leaves_of(term), (row, row + 1), (0, self.num_columns))
        wide = found.expand(*found.shape[:-1], self.num_columns).reshape(-1, self.num_columns)
        if not bool((wide == wide[0]).all()):
            raise OpenValueError("sequences of a batch differ")
        return wide[0]

    def is_everywhere(self, term: Term, kept: Term) -> bool:
        """Whether a part equals `kept`, an expression of columns, `Leaf(0)`, and rows, `Leaf(1)`, in every entry."""
        leaves = [torch.arange(self.num_columns), torch.arange(self.num_rows)[:, None], *self._leaves_of(term)]
        condition = MaskCall("eq", (_renumbered(term, 2), kept))
        return is_true_everywhere(condition, leaves, self.num_rows, self.num_columns) is True

    def _leaves_of(self, term: Term) -> list[torch.Tensor]:
        numbers = _leaves(term)
        for number in numbers - self._leaves.keys():
            self._leaves[number] = self._read.value(number, self._closed)
        return [self._leaves[number] if number in numbers else _NONE for number in range(1 + max(numbers, default=0))]


_NONE = torch.empty(())
"""Placeholder for a leaf that a part does not read."""


def _renumbered(term: Term, by: int) -> Term:
    if isinstance(term, Leaf):
        return Leaf(term.index + by)
    return MaskCall(term.name, tuple(_renumbered(arg, by) for arg in term.args)) if isinstance(term, MaskCall) else term


def _looks(mask: fx.Node, read: ReadMask) -> Iterator[_Look]:
    symbols = {symbol for size in fake_value(mask).shape[-2:] for symbol in symbols_of(size)}
    for length in _LENGTHS if symbols else (0,):
        yield _Look(mask, read, ClosedValues(dict.fromkeys(symbols, length)))


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


def _part(term: Term, read: ReadMask, looks: Sequence[_Look]) -> MaskPart | None:
    """Returns what a part means, or None if it keeps all keys."""
    try:
        ends = [looks[-1].row(term, row) for row in (0, -1)]
        if ends[0].dtype != torch.bool:
            return MaskPart(MaskCondition.BIAS_OF_POSITIONS)
        for condition, row, kept in _CONDITIONS:
            number = int(ends[row].sum())
            if number and all(look.is_everywhere(term, parse_mask(kept.format(n=number)).term) for look in looks):
                return None if condition is None else MaskPart(condition, number if "{}" in condition.value else 0)
    except OpenValueError:
        return MaskPart(_by_form(term, read))
    return MaskPart(MaskCondition.POSITIONS)


_CONDITIONS = (
    (None, 0, "ge(x0, 0)"),
    (MaskCondition.CAUSAL, 0, "le(x0, x1)"),
    (MaskCondition.WINDOW, -1, "gt(x0, sub(x1, {n}))"),
    (MaskCondition.WINDOW_TO_BOTH_SIDES, 0, "bitwise_and(lt(sub(x0, x1), {n}), lt(sub(x1, x0), {n}))"),
    (MaskCondition.CHUNKS, 0, "eq(floor_divide(x0, {n}), floor_divide(x1, {n}))"),
    (MaskCondition.PREFIX, 0, "bitwise_or(le(x0, x1), lt(x0, {n}))"),
)
"""Candidates: a meaning, the row whose number of kept columns is `n`, and the condition on columns x0 and rows x1."""


def _by_form(term: Term, read: ReadMask) -> MaskCondition:
    """Names a part that depends on data."""
    sides = [{dim for dim in (-2, -1) for number in _leaves(t) if read.has(number, dim)} for t in (term, *_args(term))]
    whole, *operands = sides
    if len(whole) < 2:
        return MaskCondition.QUERY_PADDING if whole == {-2} else MaskCondition.KEY_PADDING
    name = term.name if isinstance(term, MaskCall) else ""
    if name in ("eq", "le", "lt", "ge", "gt") and all(len(operand) == 1 for operand in operands):
        return MaskCondition.DOCUMENTS if name == "eq" else MaskCondition.GIVEN_POSITIONS
    return MaskCondition.BIAS if name in ("mul", "sub", "div", "neg") else MaskCondition.DATA


def _args(term: Term) -> tuple[Term, ...]:
    return term.args if isinstance(term, MaskCall) else ()


def _leaves(term: Term) -> set[int]:
    if isinstance(term, Leaf):
        return {term.index}
    return {number for arg in _args(term) for number in _leaves(arg)}
