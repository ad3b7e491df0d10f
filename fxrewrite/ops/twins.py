"""Twins: calls of different operators that torch defines as one function, so that a pattern of one finds the others.

Only what is the same for all values, dtypes and gradients is here: `x * x` and `x ** 2` round alike, but autograd does
not save the same of them; `x.reshape(-1)` and `x.flatten()` are equal for some sizes alone. What depends on the rank of
an operand says which. A differential test (tests/ops/test_twins.py) runs every entry.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""An operator of ATen, and its arguments by name: a letter, a number, a list of numbers, or a call, such as a size."""


@dataclass(frozen=True)
class Twins:
    """Calls that are equal wherever their letters are; x and y are no Python values, other letters may be.

    Attributes:
        calls: any two of them are twins.
        ranks: the least and the largest rank that x must have for that; None for any.
    """

    calls: tuple[Call, ...]
    ranks: tuple[int, int] | None = None


def _twins(*calls: Call, ranks: tuple[int, int] | None = None) -> Twins:
    return Twins(calls, ranks)


def _call(name: str, **arguments: Any) -> Call:
    return f"aten::{name}", arguments


_SIZE_OF_Y = _call("size", self="y")
_LAST_TWO = _call("transpose", self="x", dim0=-2, dim1=-1)
_OF_MATRICES = (
    _call("t", self="x"),
    _call("numpy_T", self="x"),
    _call("permute", self="x", dims=[1, 0]),
)
TWINS: tuple[Twins, ...] = (
    _twins(_call("square", self="x"), _call("pow", self="x", exponent=2)),
    _twins(_call("clamp_min", self="x", min="n"), _call("clamp", self="x", min="n")),
    _twins(_call("clamp_max", self="x", max="n"), _call("clamp", self="x", max="n")),
    _twins(_call("maximum", self="x", other="y"), _call("max", self="x", other="y")),
    _twins(_call("minimum", self="x", other="y"), _call("min", self="x", other="y")),
    _twins(_call("lt", self="x", other="y"), _call("gt", self="y", other="x")),
    _twins(_call("le", self="x", other="y"), _call("ge", self="y", other="x")),
    _twins(_call("sub", self="n", other="x"), _call("rsub", self="x", other="n")),
    _twins(_call("transpose", self="x", dim0="n", dim1="m"), _call("swapaxes", self="x", axis0="n", axis1="m")),
    _twins(_LAST_TWO, _call("mT", self="x"), ranks=(2, 64)),
    _twins(_LAST_TWO, *_OF_MATRICES, ranks=(2, 2)),
    _twins(_call("transpose", self="x", dim0=0, dim1=1), _call("mT", self="x"), *_OF_MATRICES, ranks=(2, 2)),
    *(
        twins
        for name in ("var", "std")
        for keepdim in ({}, {"keepdim": "m"})
        for twins in (
            _twins(
                _call(name, self="x", dim="n", unbiased=False, **keepdim),
                _call(name, self="x", dim="n", correction=0, **keepdim),
            ),
            _twins(
                _call(name, self="x", dim="n", **keepdim),
                _call(name, self="x", dim="n", correction=1, **keepdim),
            ),
        )
    ),
    _twins(_call("expand", self="x", size="n"), _call("broadcast_to", self="x", size="n")),
    _twins(_call("expand", self="x", size=_SIZE_OF_Y), _call("expand_as", self="x", other="y")),
    _twins(_call("view", self="x", size=_SIZE_OF_Y), _call("view_as", self="x", other="y")),
    _twins(_call("reshape", self="x", shape=_SIZE_OF_Y), _call("reshape_as", self="x", other="y")),
)


@functools.cache
def twins_of(key: str) -> tuple[tuple[Mapping[str, Any], tuple[int, int] | None, tuple[Call, ...]], ...]:
    """The calls of an operator that have twins: their arguments, the ranks that x must have, and the twins."""
    return tuple(
        (arguments, twins.ranks, tuple(other for other in twins.calls if other is not call))
        for twins in TWINS
        for call in twins.calls
        for name, arguments in (call,)
        if name == key
    )
