"""Dense attention masks are replaced by what they mean, if that is proved.

    sdpa(q, k, v, mask)  ->  sdpa(q, k, v, is_causal=True)        where mask[..., i, j] is j <= i
    sdpa(q, k, v, mask)  ->  sdpa(q, k, v)                        where mask hides nothing

Matches a mask that depends on sizes only, as Hugging Face models build for every decoder: bool, or added, with 0 and
the least number of a dtype. A dense mask takes S * S bytes (16 GiB at 128K), and its float copy is kept for the
backward. The meaning is proved (`rules.masks.proofs`): for every length from the form of the expression, or, if the
length is a number, tile by tile. A mask that is not such an expression is computed in full if it has few enough
entries. Refuses a mask that looks causal or open but has no proof, with a line in the report. Leaves a mask that
depends on data (padding, documents), or that means something else, unchanged.
Shapes: q [B, H, S, E], k [B, H, S, E], v [B, H, S, D], mask broadcasts to [B, H, S, S].
Numerics: reassociates; a kernel without a mask may sum in another order.
Source: PyTorch, torch/nn/functional.py (scaled_dot_product_attention says what is_causal means).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from fxrewrite import Match, Rule, RuleSet, cap, refuse, where
from fxrewrite.graph import ClosedValues, LargeValueError, OpenValueError, expression, symbols_of
from fxrewrite.ops import fake_value
from fxrewrite.spmd import is_same_size
from rules.attention.operator import sdpa_rule
from rules.masks.expressions import Leaf, MaskCall, Term, kept_and_hidden, parse_mask
from rules.masks.positions import LONGEST, leaves_of
from rules.masks.proofs import MOST_ENTRIES, above_diagonal, is_true_everywhere, is_true_within, up_to_diagonal
from rules.masks.reading import ReadMask, read_mask

__all__ = ["MASKS"]

aten = torch.ops.aten

Meaning = Literal["causal", "nothing hidden"]
_MEANINGS: tuple[Meaning, ...] = ("causal", "nothing hidden")
_LENGTHS = (7, 331, 1 << 18)
"""Lengths tried to refute a meaning if the length is symbolic; the last exceeds every window."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a mask means. `why` says why it has neither meaning, or, if not `is_known`, why that is unknown."""

    meaning: Meaning | None
    why: str = ""
    is_known: bool = True


_found: dict[str, _Found] = {}
"""Meanings by the text of the mask's expression: all layers of a model read the same mask."""


def _meaning(mask: fx.Node) -> _Found:
    text = expression(mask)
    if text not in _found:
        _found[text] = _look(mask)
    return _found[text]


def _look(mask: fx.Node) -> _Found:
    shape = fake_value(mask).shape
    if len(shape) < 2 or not is_same_size(shape[-2], shape[-1]):
        return _Found(None, "its rows and columns are not as many")
    if is_same_size(shape[-1], 1):
        return _Found(None, "it is one number for all rows and columns")
    read = read_mask(mask)
    meaning = _by_form(mask, read) if isinstance(read, ReadMask) else None
    if meaning is not None:
        return _Found(meaning)
    try:
        return _by_entries(mask, read)
    except LargeValueError as error:
        return _Found(None, str(error), is_known=False)
    except OpenValueError as error:
        return _Found(None, str(error))


def _by_form(mask: fx.Node, read: ReadMask) -> Meaning | None:
    """Returns the meaning that the form of the expression proves, for any data and any batch size, or None."""
    length = fake_value(mask).shape[-1]
    longest = length if isinstance(length, int) else LONGEST
    kept, hidden = kept_and_hidden(parse_mask(read.text).term, fake_value(mask).dtype)
    leaves = leaves_of(read)
    if is_true_within(up_to_diagonal(longest), kept, leaves):
        if is_true_within(above_diagonal(longest), hidden, leaves):
            return "causal"
        if is_true_within(above_diagonal(longest), kept, leaves):
            return "nothing hidden"
    return None


def _by_entries(mask: fx.Node, read: ReadMask | str) -> _Found:
    """Evaluates all entries: proves a meaning if sizes are numbers; if some are symbolic, it can only refute.

    Raises OpenValueError if the mask depends on more than sizes.
    """
    length = fake_value(mask).shape[-1]
    term, num_leaves = (Leaf(0), 1) if isinstance(read, str) else (parse_mask(read.text).term, len(read.places))
    kept, hidden = kept_and_hidden(term, fake_value(mask).dtype)
    sides = Leaf(num_leaves), Leaf(num_leaves + 1)
    is_causal = MaskCall("where", (MaskCall("le", sides), kept, hidden))
    left: dict[Meaning, Term] = dict(zip(_MEANINGS, (is_causal, kept), strict=True))
    symbols = symbols_of(length)
    for at in _LENGTHS if symbols else (0,):
        closed = ClosedValues(dict.fromkeys(symbols, at))
        size = closed.size(length)
        values = [closed(mask)] if isinstance(read, str) else [read.value(i, closed) for i in range(num_leaves)]
        values += [torch.arange(size), torch.arange(size)[:, None]]
        found: dict[Meaning, bool | None] = {m: is_true_everywhere(left[m], values, size, size) for m in left}
        for meaning, is_so in found.items():
            if is_so is False:
                del left[meaning]
        if not left:
            return _Found(None, f"it is neither causal nor open at length {size}")
        if not symbols and not closed.others:
            proved: Meaning | None = next((meaning for meaning, is_so in found.items() if is_so), None)
            why = f"{MOST_ENTRIES:,} entries do not tell whether it is {' or '.join(left)}"
            return _Found(proved) if proved else _Found(None, why, is_known=False)
    why = f"it may be {' or '.join(left)}, and there is no proof for every length and batch"
    return _Found(None, why, is_known=False)


def _read(meaning: Meaning) -> Rule:
    @where.predicate("mask", text=f"means[{meaning}]")
    def means(mask: fx.Node) -> bool | str:
        found = _meaning(mask)
        if not found.is_known and meaning == "causal":  # reported once, by the first of the two rules
            refuse(f"what the mask means is not known: {found.why}", node=mask, hint="is_causal=True says it")
        return found.meaning == meaning or found.meaning or found.why

    name = f"masks.{meaning.replace(' ', '_')}"
    made = sdpa_rule(name, means, optional=True, attn_mask=cap("mask"), is_causal=False)

    @made.replacement
    def _(match: Match, q: Any, k: Any, v: Any, dropout_p: float, scale: Any, enable_gqa: bool) -> Any:
        """scaled_dot_product_attention without a mask"""
        attend = aten.scaled_dot_product_attention
        is_causal = meaning == "causal"
        return attend(q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return made


MASKS = RuleSet("masks", _read("causal"), _read("nothing hidden"))
