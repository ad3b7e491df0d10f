"""Bounds of a mask's entries per tile, by interval arithmetic on its expression.

    and(le(x0, x1), eq(x2, x3))      is False in a whole tile whose least x0 exceeds its greatest x1, or where the
                                     intervals of x2 and x3 do not overlap

Each leaf has a least and a greatest value per run of rows or columns. Operators are evaluated on these bounds, with
rows / tile x columns / tile entries where the mask has rows x columns. Bounds of a tile hold for all its entries. NaN,
overflow, and operators that are not listed here give the full range of the dtype.
Shapes: a leaf [..., L, 1] or [..., 1, S] -> bounds [..., L / rows, 1] or [..., 1, S / columns].
Numerics: exact; bounds are computed by the operators and in the dtypes of the expression, whose rounding is monotone.
Source: Moore, Interval Analysis (1966).

>>> from rules.masks.expressions import parse_mask
>>> positions = torch.arange(6)
>>> low, high = mask_bounds(parse_mask("le(x0, x1)"), [positions, positions[:, None]], rows=2, columns=3)
>>> high
tensor([[ True, False],
        [ True,  True],
        [ True,  True]])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch

from rules.masks.expressions import POINTWISE, Leaf, MaskCall, MaskExpression, Term

Bounds: TypeAlias = "tuple[Any, Any]"
"""The least and the greatest value: two tensors, or twice a literal of the expression."""

_LARGE = 2.0**62
"""Limit of integers that are compared as float64; far enough below the greatest int64 that rounding is harmless."""


def mask_bounds(mask: MaskExpression, leaves: Sequence[torch.Tensor], *, rows: int, columns: int) -> Bounds:
    """Returns the bounds of tiles of `rows` x `columns` entries; they broadcast to the number of tiles."""
    cut = [_of_runs(_of_runs((leaf, leaf), -2, rows), -1, columns) for leaf in leaves]
    return term_bounds(mask.term, cut, {})


def _of_runs(leaf: Bounds, dim: int, size: int) -> Bounds:
    """Returns the bounds per run of `size` rows or columns; the last run may be shorter."""
    length = leaf[0].shape[dim] if leaf[0].dim() >= -dim else 1
    if length == 1:
        return leaf
    entries = torch.arange(-(-length // size) * size, device=leaf[0].device).clamp(max=length - 1)
    low, high = (x.index_select(dim, entries).unflatten(dim, (-1, size)) for x in leaf)
    return _without_nan(low.amin(dim), high.amax(dim))


def term_bounds(term: Term, leaves: Sequence[Bounds], known: dict[MaskCall, Bounds]) -> Bounds:
    """Returns the bounds of a term, given those of its leaves; adds the bounds of its subterms to `known`."""
    if isinstance(term, Leaf):
        return leaves[term.index]
    if not isinstance(term, MaskCall):
        return term, term
    if term not in known:
        operands = [term_bounds(arg, leaves, known) for arg in term.args]
        rule = _any if _narrows(operands) else _RULES.get(term.name, _any)
        known[term] = rule(term.name, *operands)
    return known[term]


def _narrows(operands: Sequence[Bounds]) -> bool:
    """Whether a 0-dim integer operand is converted to a narrower dtype, where it may overflow."""
    tensors = [low for low, _ in operands if isinstance(low, torch.Tensor) and not low.is_floating_point()]
    return any(torch.result_type(a, b).itemsize < a.dtype.itemsize for a, b in itertools.permutations(tensors, 2))


def _any(name: str, *operands: Bounds) -> Bounds:
    """Returns the full range of the result's dtype: nothing is known."""
    like = POINTWISE[name](*(low for low, _ in operands))
    least, greatest = dtype_range(like.dtype)
    return torch.full_like(like, least), torch.full_like(like, greatest)


def dtype_range(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the least and the greatest number that the dtype can represent."""
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _without_nan(low: torch.Tensor, high: torch.Tensor) -> Bounds:
    """Widens bounds that are NaN to -inf and inf."""
    if not low.is_floating_point():
        return low, high
    may_be_nan = low.isnan() | high.isnan()
    return low.masked_fill(may_be_nan, -math.inf), high.masked_fill(may_be_nan, math.inf)


def _is_finite(x: Any) -> Any:
    return x * 0 == 0


def _compare(name: str, a: Bounds, b: Bounds) -> Bounds:
    op = POINTWISE[name]
    if name in ("lt", "le"):
        sure, maybe = op(a[1], b[0]) & _is_finite(b[0]), op(a[0], b[1])  # NaN is not even less than infinity
    elif name in ("gt", "ge"):
        sure, maybe = op(a[0], b[1]) & _is_finite(b[1]), op(a[1], b[0])
    else:
        sure = POINTWISE["eq"](a[0], b[1]) & POINTWISE["eq"](a[1], b[0])
        maybe = POINTWISE["le"](a[0], b[1]) & POINTWISE["ge"](a[1], b[0])
    return (~maybe, ~sure) if name == "ne" else (sure, maybe)


def _connect(name: str, *operands: Bounds) -> Bounds:
    """Logical connectives of bools are monotone; a negation swaps the bounds."""
    if any(not isinstance(low, torch.Tensor) or low.dtype != torch.bool for low, _ in operands):
        return _any(name, *operands)
    low, high = (POINTWISE[name](*side) for side in zip(*operands, strict=True))
    return (high, low) if name.endswith("not") else (low, high)


def _choose(name: str, *operands: Bounds) -> Bounds:
    """Returns the bounds of the chosen operand where the condition is certain, else of both."""
    condition = 0 if name == "where" else 1
    if operands[condition][0].dtype != torch.bool:
        return _any(name, *operands)

    def side(index: int) -> list[torch.Tensor]:
        values = [operand[index] for operand in operands]
        return [POINTWISE[name](*values[:condition], c, *values[condition + 1 :]) for c in operands[condition]]

    return torch.minimum(*side(0)), torch.maximum(*side(1))


def _corners(name: str, *operands: Bounds) -> Bounds:
    """For operators of at most two operands, monotone in each: the extremes are at corners of the operands' bounds."""
    if len(operands) > 2:
        return _any(name, *operands)
    found = [POINTWISE[name](*corner) for corner in itertools.product(*operands)]
    wide = [POINTWISE[name](*map(_widened, corner)) for corner in itertools.product(*operands)]
    return _where_it_fits(reduce(torch.minimum, found), reduce(torch.maximum, found), wide)


def _where_it_fits(low: torch.Tensor, high: torch.Tensor, wide: Sequence[torch.Tensor]) -> Bounds:
    """Returns the bounds, or the full range where one of `wide` (the same in float64) overflows their dtype."""
    if low.is_floating_point() or low.dtype == torch.bool:
        return _without_nan(low, high)
    least, greatest = dtype_range(low.dtype)
    fits = [(x >= max(least, -_LARGE)) & (x <= min(greatest, _LARGE)) for x in wide]
    overflows = ~reduce(torch.logical_and, fits)
    return low.masked_fill(overflows, least), high.masked_fill(overflows, greatest)


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) else x


def _divide(name: str, x: Bounds, divisor: Bounds) -> Bounds:
    is_number = isinstance(divisor[0], (int, float)) and divisor[0] != 0
    return _corners(name, x, divisor) if is_number else _any(name, x, divisor)


def _extreme(name: str, a: Bounds, b: Bounds) -> Bounds:
    """minimum and maximum propagate NaN, which infinite bounds may hide, so real operands get the full range."""
    is_real = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in (a[0], b[0]))
    return _any(name, a, b) if is_real else _corners(name, a, b)


def _absolute(name: str, x: Bounds) -> Bounds:
    if x[0].is_floating_point():
        return _any(name, x)
    low, high = _corners(name, x)
    return torch.where((x[0] < 0) & (x[1] > 0), low.clamp(max=0), low), high


def _cast(name: str, x: Bounds, dtype: Bounds) -> Bounds:
    if dtype[0] == torch.bool and x[0].dtype != torch.bool:
        return (x[0] > 0) | (x[1] < 0), (x[0] != 0) | (x[1] != 0)
    if x[0].is_floating_point() and not dtype[0].is_floating_point:
        return _any(name, x, dtype)
    low, high = (POINTWISE[name](side, dtype[0]) for side in x)
    return _where_it_fits(low, high, [side.double() for side in x])


def _number(name: str, number: Bounds, dtype: Bounds) -> Bounds:
    found = POINTWISE[name](number[0], dtype[0])
    return found, found


_RULES: dict[str, Callable[..., Bounds]] = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _compare),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not"), _connect),
    **dict.fromkeys(("where", "masked_fill"), _choose),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "neg"), _corners),
    **dict.fromkeys(("div", "floor_divide"), _divide),
    **dict.fromkeys(("minimum", "maximum"), _extreme),
    "abs": _absolute,
    "to": _cast,
    "full": _number,
}
