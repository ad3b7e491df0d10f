"""What is true of a mask: proved for every length, or found at some lengths.

    on and below the diagonal it keeps, above it it hides      causal
    everywhere it keeps                                        open
    on the diagonal it keeps                                   every row keeps its own key

The form of the mask's expression proves a claim for any length, data and batch (`rules.masks.proofs`). Where it does
not, all entries are evaluated, tile by tile: that proves a claim if sizes are numbers; if some are symbolic, it can
only refute. A mask that is not an expression of rows and columns is computed in full if it has few enough entries.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from fxrewrite.graph import ClosedValues, LargeValueError, OpenValueError, expression, symbols_of
from fxrewrite.ops import fake_value
from fxrewrite.spmd import is_same_size
from rules.masks.expressions import Leaf, MaskCall, MaskExpression, Term, kept_and_hidden, leaves_in, parse_mask
from rules.masks.positions import LONGEST, leaves_of
from rules.masks.proofs import CORNERS, MOST_ENTRIES, is_true_everywhere, is_true_within
from rules.masks.reading import ReadMask, read_mask

COLUMN, ROW = Leaf(-1), Leaf(-2)
"""The positions of columns and of rows in conditions of a `MaskAt`, after the leaves of the mask."""
_LENGTHS = (7, 331, 1 << 18)
"""Lengths tried if the length is symbolic; the last exceeds every window."""
_NONE = torch.empty(())
"""Placeholder for a leaf that a condition does not read."""


class MaskAt:
    """A mask at the length of `closed`. What it is asked raises OpenValueError if data decide it."""

    def __init__(self, mask: fx.Node, read: ReadMask | str, closed: ClosedValues) -> None:
        self.num_rows, self.num_columns = (closed.size(size) for size in fake_value(mask).shape[-2:])
        self.closed = closed
        self._mask, self._read = mask, read
        self._leaves = [_NONE] * (1 if isinstance(read, str) else len(read.places))

    @staticmethod
    def at_lengths(mask: fx.Node, read: ReadMask | str) -> Iterator[MaskAt]:
        """Yields the mask at its length, or, if that is symbolic, at some lengths, the longest last."""
        symbols = {symbol for size in fake_value(mask).shape[-2:] for symbol in symbols_of(size)}
        for length in _LENGTHS if symbols else (0,):
            yield MaskAt(mask, read, ClosedValues(dict.fromkeys(symbols, length)))

    def holds(self, condition: Term) -> bool | None:
        """Whether a condition on leaves, `COLUMN` and `ROW` is true in all entries; None if these are too many."""
        return is_true_everywhere(condition, self._values_for(condition), self.num_rows, self.num_columns)

    def row(self, term: Term, row: int) -> torch.Tensor:
        """Returns a row of a part, [columns] (-1: the last), which all sequences of a batch must share."""
        row %= self.num_rows
        found = MaskExpression(term).part(self._values_for(term), (row, row + 1), (0, self.num_columns))
        wide = found.expand(*found.shape[:-1], self.num_columns).reshape(-1, self.num_columns)
        if not bool((wide == wide[0]).all()):
            raise OpenValueError("sequences of a batch differ")
        return wide[0]

    def _values_for(self, term: Term) -> list[torch.Tensor]:
        """Returns the values of the leaves that a term reads, then those of rows and columns."""
        for number in leaves_in(term):
            if number >= 0 and self._leaves[number] is _NONE:
                read, closed = self._read, self.closed
                self._leaves[number] = closed(self._mask) if isinstance(read, str) else read.value(number, closed)
        return [*self._leaves, torch.arange(self.num_rows)[:, None], torch.arange(self.num_columns)]


@dataclass(frozen=True, slots=True)
class Claim:
    """What may be true of a square mask: whether it keeps or hides where columns have a relation to rows."""

    text: str
    keeps: tuple[tuple[str, bool], ...]

    def is_proved(self, mask: fx.Node, read: ReadMask) -> bool:
        """Whether the form of the mask's expression proves it."""
        length = fake_value(mask).shape[-1]
        longest = length if isinstance(length, int) else LONGEST
        hidden_or_kept = kept_and_hidden(parse_mask(read.text).term, fake_value(mask).dtype)[::-1]
        leaves = leaves_of(read)
        return all(
            is_true_within(CORNERS[where](longest), hidden_or_kept[keeps], leaves) for where, keeps in self.keeps
        )

    def condition(self, term: Term, dtype: torch.dtype) -> Term:
        """Returns what must hold in all entries of the mask `term`."""
        hidden_or_kept = kept_and_hidden(term, dtype)[::-1]
        parts = (
            MaskCall("where", (MaskCall(where, (COLUMN, ROW)), hidden_or_kept[keeps], True))
            for where, keeps in self.keeps
        )
        return reduce(lambda a, b: MaskCall("bitwise_and", (a, b)), parts)


CAUSAL = Claim("causal", (("le", True), ("gt", False)))
OPEN = Claim("open", (("le", True), ("gt", True)))
_OWN_KEYS = Claim("open on its diagonal", (("eq", True),))


@dataclass(frozen=True, slots=True)
class Finding:
    """The claim that is true of a mask. `why` says why there is none, or, if not `is_known`, why that is unknown."""

    claim: Claim | None
    why: str = ""
    is_known: bool = True


_found: dict[tuple[str, tuple[Claim, ...]], Finding] = {}
"""By the text of the mask's expression: all layers of a model read the same mask."""


def finding(mask: fx.Node, *claims: Claim) -> Finding:
    """Returns which of the claims is true of a mask, bool or added; reads what computes the mask."""
    at = expression(mask), claims
    if at not in _found:
        try:
            _found[at] = _look(mask, claims)
        except LargeValueError as error:
            _found[at] = Finding(None, str(error), is_known=False)
        except OpenValueError as error:
            _found[at] = Finding(None, str(error))
    return _found[at]


def keeps_own_keys(mask: fx.Node) -> bool | str:
    """Whether row i of a mask keeps key i for all i; if not, says why.

    Attention with such a mask has no row without keys, in which fused kernels and written-out attention differ. Causal
    masks, windows, chunks and ALiBi have it; of padding, documents or a learned bias it is unknown.
    """
    found = finding(mask, _OWN_KEYS)
    if found.claim is not None:
        return True
    read = read_mask(mask)
    return read if isinstance(read, str) else found.why


def _look(mask: fx.Node, claims: tuple[Claim, ...]) -> Finding:
    """Raises OpenValueError if nothing is proved by the form, and the mask depends on more than sizes."""
    shape, dtype = fake_value(mask).shape, fake_value(mask).dtype
    if len(shape) < 2 or not is_same_size(shape[-2], shape[-1]):
        return Finding(None, "its rows and columns are not as many")
    read = read_mask(mask)
    if isinstance(read, ReadMask):
        proved = next((claim for claim in claims if claim.is_proved(mask, read)), None)
        if proved is not None:
            return Finding(proved)
    term = Leaf(0) if isinstance(read, str) else parse_mask(read.text).term
    left = {claim: claim.condition(term, dtype) for claim in claims}
    for at in MaskAt.at_lengths(mask, read):
        holds = {claim: at.holds(condition) for claim, condition in left.items()}
        left = {claim: condition for claim, condition in left.items() if holds[claim] is not False}
        if not left:
            neither = " nor ".join(claim.text for claim in claims)
            return Finding(None, f"it is {'neither' if claims[1:] else 'not'} {neither} at length {at.num_columns}")
        if not symbols_of(shape[-1]) and not at.closed.others:
            proved = next((claim for claim in left if holds[claim]), None)
            why = f"{MOST_ENTRIES:,} entries do not tell whether it is {_or(left)}"
            return Finding(proved) if proved else Finding(None, why, is_known=False)
    return Finding(None, f"it may be {_or(left)}, and there is no proof for every length and batch", is_known=False)


def _or(claims: dict[Claim, Term]) -> str:
    return " or ".join(claim.text for claim in claims)
