"""Symbolic values of integer tensors at every length: an offset plus slopes times the indices of an entry.

    arange(S)[:, None] + 1                              ->   1 + row
    cumsum(diff(arange(S), prepend=-ones(1)) != 1, 0)   ->   0

This reads operators that keep a value affine: arange, fills, arithmetic, comparisons with the same result everywhere,
views, differences of neighbours, running sums, indexing. For everything else the answer is None: values that depend on
data, sizes in arithmetic, and integers that may overflow in a sequence of `LONGEST` tokens.
Numerics: exact; integers have slopes, and constants are computed by the operators themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from fxrewrite.graph import operands_first
from fxrewrite.ops import bind, fake_value, filled_with, key, operators, value
from fxrewrite.spmd import is_same_size
from rules.masks.expressions import POINTWISE
from rules.masks.reading import POINTWISE_KEYS, MaskPlace, ReadMask, UnreadableError, looked_through, place_of

LONGEST = 1 << 30
"""Upper limit of the length of a sequence, and of the batch size. Integers must not overflow below it."""

Corners: TypeAlias = "Sequence[tuple[int, int]]"
"""Corners (row, column) of the polygon that contains all entries under consideration."""


@dataclass(frozen=True, slots=True)
class Affine:
    """offset + slopes[0] * index[0] + slopes[1] * index[1] + ..."""

    slopes: tuple[int, ...]
    offset: float
    dtype: torch.dtype

    @property
    def is_constant(self) -> bool:
        """Whether all entries are equal."""
        return not any(self.slopes)

    def bounds(self, corners: Corners | None = None) -> tuple[float, float]:
        """Returns the least and the greatest value; with corners, of these rows and columns (the last two dims)."""
        if self.is_constant:
            return self.offset, self.offset
        *outer, row, column = (0, 0, *self.slopes)
        inner = [row * r + column * c for r, c in corners or _SQUARE]
        low, high = (sum(pick(0, slope) * LONGEST for slope in outer) for pick in (min, max))
        return self.offset + low + min(inner), self.offset + high + max(inner)


_SQUARE: Corners = ((0, 0), (0, LONGEST), (LONGEST, 0), (LONGEST, LONGEST))
_COUNTING = (torch.int32, torch.int64)


def _made(slopes: Sequence[int], offset: float, dtype: torch.dtype) -> Affine | None:
    """Returns the value, or None if an entry of it may overflow."""
    found = Affine((*slopes,), offset, dtype)
    if found.is_constant:
        return found
    if dtype not in _COUNTING:
        return None
    low, high = found.bounds()
    return found if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max else None


def pointwise(name: str, operands: Sequence[Any], corners: Corners | None = None) -> Affine | None:
    """Evaluates an operator of `POINTWISE` on affine values and literals; with corners, only for those entries."""
    if any(operand is None for operand in operands) or len(operands) != len(_LINEAR.get(name, operands)):
        return None
    values = [operand for operand in operands if isinstance(operand, Affine)]
    if all(operand.is_constant for operand in values):
        return _constant(name, operands)
    if name == "to":
        return _made(values[0].slopes, values[0].offset, operands[1])
    if len({operand.dtype for operand in values}) > 1 or values[0].dtype not in _COUNTING:
        return None
    literals = [operand for operand in operands if not isinstance(operand, Affine)]
    if not all(type(literal) is int for literal in literals):
        return None
    dtype, rank = values[0].dtype, max(len(operand.slopes) for operand in values)
    terms = [_term(operand, rank) for operand in operands]
    # A comparison of affine values is constant if their difference has the same sign in all entries.
    if name in _COMPARISONS:
        difference = _made(*_combined(terms, (1, -1)), dtype)
        is_true = None if difference is None else _COMPARISONS[name](*difference.bounds(corners))
        return None if is_true is None else Affine((0,) * rank, is_true, torch.bool)
    if name == "mul":
        (slopes, offset), (others, factor) = terms if any(terms[0][0]) else reversed(terms)
        return None if any(others) else _made([slope * factor for slope in slopes], offset * factor, dtype)
    return _made(*_combined(terms, _LINEAR[name]), dtype) if name in _LINEAR else None


_LINEAR: Mapping[str, tuple[int, ...]] = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1), "neg": (-1,)}
"""Factors of the operands before they are added."""


def _is(is_true: bool, is_false: bool) -> bool | None:
    return True if is_true else False if is_false else None


_COMPARISONS: Mapping[str, Callable[[float, float], bool | None]] = {
    "lt": lambda low, high: _is(high < 0, low >= 0),
    "le": lambda low, high: _is(high <= 0, low > 0),
    "gt": lambda low, high: _is(low > 0, high <= 0),
    "ge": lambda low, high: _is(low >= 0, high < 0),
    "eq": lambda low, high: _is(low == high == 0, low > 0 or high < 0),
    "ne": lambda low, high: _is(low > 0 or high < 0, low == high == 0),
}
"""Result of a comparison, given bounds of the difference of its operands; None if it varies."""

_Terms: TypeAlias = "tuple[tuple[int, ...], Any]"


def _term(operand: Any, rank: int) -> _Terms:
    if not isinstance(operand, Affine):
        return (0,) * rank, operand
    return (0,) * (rank - len(operand.slopes)) + operand.slopes, operand.offset


def _combined(terms: Sequence[_Terms], factors: Sequence[int]) -> tuple[list[int], int]:
    slopes = [
        sum(f * s for f, s in zip(factors, column, strict=True)) for column in zip(*(t[0] for t in terms), strict=True)
    ]
    return slopes, sum(f * offset for f, (_, offset) in zip(factors, terms, strict=True))


def _constant(name: str, operands: Sequence[Any]) -> Affine | None:
    def given(operand: Any) -> Any:
        if not isinstance(operand, Affine):
            return operand
        return torch.full((1,) * len(operand.slopes), operand.offset, dtype=operand.dtype)

    found = POINTWISE[name](*map(given, operands))
    number = found.item()
    return None if math.isnan(number) else Affine((0,) * found.dim(), number, found.dtype)


def leaves_of(read: ReadMask) -> list[Affine | torch.Tensor]:
    """Returns each leaf of a mask as an affine value, or as a meta tensor that only has its rank and dtype."""
    return [_leaf(place) for place in read.places]


def _leaf(place: MaskPlace) -> Affine | torch.Tensor:
    rank = max((-dim for dim in place.dims if dim is not None), default=0)
    counts = Affine((1,), 0, torch.int64)
    found = _placed(affine_of(place.node) if place.counted is None else counts, place, rank)
    return found or torch.empty((1,) * rank, dtype=fake_value(place.node).dtype, device="meta")


def _placed(x: Affine | None, place: MaskPlace, rank: int) -> Affine | None:
    """Returns what the value of a place is in a mask of so many dimensions."""
    for cut in place.cuts:
        dim = place.dim_of(cut.dim)
        if x is not None and dim is not None:
            start, *_, step = (*cut.args[:1], 1, *cut.args[2:])
            x = _cut(x, dim, start, step)
    if x is None:
        return None
    slopes = [0] * rank
    for i, dim in enumerate(place.dims):
        if dim is not None and place.dim_of(dim) == i:
            slopes[dim] = x.slopes[i]
    return Affine((*slopes,), x.offset, x.dtype)


_Values: TypeAlias = "Mapping[fx.Node, Affine | None]"
"""Affine values of operands, as far as they are known."""


def affine_of(node: fx.Node) -> Affine | None:
    """What a value of the graph is in all its entries, at every length that the graph admits."""

    def is_read(n: fx.Node) -> bool:
        return n.op == "call_function" and key(n) in _RULES

    known: dict[fx.Node, Affine | None] = {}
    for current in operands_first(node, lambda n: n.all_input_nodes if is_read(n) else ()):
        known[current] = _read(current, known) if is_read(current) else None
    return known[node]


def _read(node: fx.Node, known: _Values) -> Affine | None:
    found = value(node)
    made = _RULES[key(node)](node, known) if isinstance(found, torch.Tensor) else None
    if made is None:
        return None
    # Along a dimension of size 1 the index is always 0, so the slope does not matter. It must be 0, because the
    # dimension may be expanded later.
    ones = [is_same_size(size, 1) for size in found.shape]
    return _made([0 if one else slope for slope, one in zip(made.slopes, ones, strict=True)], made.offset, found.dtype)


def _source(node: fx.Node, known: _Values) -> Affine | None:
    """Returns the affine value of the first argument."""
    source = node.args[0]
    return known[source] if isinstance(source, fx.Node) else None


def _cast(node: fx.Node, known: _Values) -> Affine | None:
    return pointwise("to", [_source(node, known), fake_value(node).dtype])


def _operated(node: fx.Node, known: _Values) -> Affine | None:
    if node.kwargs:
        return None
    operands = [known[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
    return pointwise(POINTWISE_KEYS[key(node)], operands)


def _counted(node: fx.Node, known: _Values) -> Affine | None:
    start, step = (bind(node).get(name, default) for name, default in (("start", 0), ("step", 1)))
    is_whole = type(start) is int and type(step) is int
    return _made((step,), start, fake_value(node).dtype) if is_whole else None


def _filled(node: fx.Node, known: _Values) -> Affine | None:
    given, like = filled_with(node), fake_value(node)
    if not isinstance(given, (bool, int, float)) or math.isnan(given):
        return None
    return Affine((0,) * like.dim(), torch.full((), given, dtype=like.dtype).item(), like.dtype)


def _viewed(node: fx.Node, known: _Values) -> Affine | None:
    """Reads a view as a mask reads it; a constant may have any shape."""
    x, rank = _source(node, known), fake_value(node).dim()
    if x is None or x.is_constant:
        return x and Affine((0,) * rank, x.offset, x.dtype)
    try:
        return _placed(x, looked_through(place_of(node)), rank)
    except UnreadableError:
        return None


def _cut(x: Affine, dim: int, start: Any, step: Any) -> Affine | None:
    """Takes every `step`th entry along a dimension, from `start` on."""
    dim, start = dim % len(x.slopes), 0 if start is None else start
    if x.slopes[dim] == 0:
        return x
    if type(start) is not int or type(step) is not int or start < 0:
        return None
    slopes = (*x.slopes[:dim], x.slopes[dim] * step, *x.slopes[dim + 1 :])
    return _made(slopes, x.offset + x.slopes[dim] * start, x.dtype)


def _selected(node: fx.Node, known: _Values) -> Affine | None:
    x, args = _source(node, known), bind(node)
    if x is None:
        return None
    dim, index = args["dim"] % len(x.slopes), args["index"]
    rest, slope = (*x.slopes[:dim], *x.slopes[dim + 1 :]), x.slopes[dim]
    if slope and not (type(index) is int and index >= 0):
        return None
    return _made(rest, x.offset + slope * index if slope else x.offset, x.dtype)


def _differences(node: fx.Node, known: _Values) -> Affine | None:
    """Neighbours differ by the slope; a prepended entry must differ from the first by the same."""
    x, args = _source(node, known), bind(node)
    if x is None or x.dtype not in _COUNTING or args["n"] != 1 or args["append"] is not None:
        return None
    dim, before = args["dim"] % len(x.slopes), args["prepend"]
    slope, rest = x.slopes[dim], (*x.slopes[:dim], 0, *x.slopes[dim + 1 :])
    if before is not None:
        first = known[before]
        expected = Affine(rest, x.offset - slope, x.dtype)
        if not is_same_size(fake_value(before).shape[dim], 1) or first != expected:
            return None
    return Affine((0,) * len(x.slopes), slope, x.dtype)


def _running_sum(node: fx.Node, known: _Values) -> Affine | None:
    x, args = _source(node, known), bind(node)
    if x is None or not x.is_constant or x.dtype.is_floating_point or not x.slopes:
        return None
    slopes = [0] * len(x.slopes)
    slopes[args["dim"]] = int(x.offset)
    return _made(slopes, int(x.offset), fake_value(node).dtype)


def _indexed(node: fx.Node, known: _Values) -> Affine | None:
    """An index contributes its value times the slope of its dimension. Negative ones count from the end: not affine."""
    x, indices = _source(node, known), bind(node)["indices"]
    if x is None or len(indices) != len(x.slopes):
        return None
    found: Any = Affine((0,) * fake_value(node).dim(), x.offset, x.dtype)
    for slope, index in zip(x.slopes, indices, strict=True):
        if index is None or fake_value(index).dtype not in _COUNTING:
            return None
        if slope:
            at = pointwise("to", [known[index], x.dtype])
            if at is None or at.bounds()[0] < 0:
                return None
            found = pointwise("add", [found, pointwise("mul", [at, slope])])
    return found


_RULES: Mapping[str, Callable[[fx.Node, _Values], Affine | None]] = {
    **dict.fromkeys(POINTWISE_KEYS, _operated),
    **dict.fromkeys(operators("cast"), _cast),
    "aten::arange": _counted,
    **dict.fromkeys(operators("zeros", "ones", "full"), _filled),
    **dict.fromkeys(operators("same", "detach", "expand", "reshape", "squeeze", "permute", "slice"), _viewed),
    "aten::select": _selected,
    "aten::diff": _differences,
    "aten::cumsum": _running_sum,
    "aten::index": _indexed,
}
