"""Whether every row of a mask keeps at least its own key: the diagonal of the mask hides nothing.

    causal, windows, chunks, ALiBi of distances                      kept, by the form of the expression
    padding, documents, a bias that is learned                       unknown: data may hide all keys of a row

Attention with such a mask has no row without keys, in which fused kernels and written-out attention differ.
Numerics: exact.
"""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite.graph import ClosedValues, LargeValueError, OpenValueError, expression, symbols_of
from fxrewrite.ops import fake_value
from fxrewrite.spmd import is_same_size
from rules.masks.expressions import Leaf, MaskCall, kept_and_hidden, parse_mask
from rules.masks.positions import LONGEST, leaves_of
from rules.masks.proofs import diagonal, is_true_everywhere, is_true_within
from rules.masks.reading import read_mask

__all__ = ["keeps_own_keys"]

_UNKNOWN = "a row may keep no key"
_known: dict[str, bool | str] = {}
"""By the text of the mask's expression: all layers of a model read the same mask."""


def keeps_own_keys(mask: fx.Node) -> bool | str:
    """Whether row i of a mask, bool or added, keeps key i for all i; if not, says why. Reads what computes the mask."""
    text = expression(mask)
    if text not in _known:
        _known[text] = _look(mask)
    return _known[text]


def _look(mask: fx.Node) -> bool | str:
    shape = fake_value(mask).shape
    if len(shape) < 2 or not is_same_size(shape[-2], shape[-1]):
        return "its rows and columns are not as many"
    read = read_mask(mask)
    if isinstance(read, str):
        return read
    length = shape[-1]
    kept, _ = kept_and_hidden(parse_mask(read.text).term, fake_value(mask).dtype)
    if is_true_within(diagonal(length if isinstance(length, int) else LONGEST), kept, leaves_of(read)):
        return True
    if symbols_of(length):
        return _UNKNOWN
    closed, num_leaves = ClosedValues({}), len(read.places)
    size = closed.size(length)
    sides = [torch.arange(size), torch.arange(size)[:, None]]
    is_own = MaskCall("eq", (Leaf(num_leaves), Leaf(num_leaves + 1)))
    try:
        values = [*(read.value(i, closed) for i in range(num_leaves)), *sides]
        is_kept = is_true_everywhere(MaskCall("where", (is_own, kept, True)), values, size, size)
    except (LargeValueError, OpenValueError) as error:
        return str(error)
    if closed.others:  # another size, as that of the batch, decides: what holds for its hint may not for others
        return _UNKNOWN
    return is_kept is True or _UNKNOWN
