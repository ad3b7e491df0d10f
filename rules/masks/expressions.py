"""A mask as text: pointwise operators over values of its rows, values of its columns, and numbers.

    bitwise_and(le(x0, x1), x2)      x0 [1, 1, 1, S] and x1 [1, 1, S, 1] are positions, x2 [B, 1, 1, S] is padding

Leaves broadcast to the mask's shape [B, H, L, S] and have one of its last two dimensions at most, so that they are
small where the mask is not, and any part of the mask can be computed from parts of them.
The text is Python's: calls of operators of ATen by their names, `x0`, `x1`, ... for leaves, numbers, dtypes of torch.
Numerics: exact; a part is computed by the operators that compute the whole.

>>> positions = torch.arange(4)
>>> causal = parse_mask("le(x0, x1)")
>>> causal.part([positions, positions[:, None]], rows=(1, 3), columns=(0, 4))
tensor([[ True,  True, False, False],
        [ True,  True,  True, False]])
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fxrewrite.errors import FxRewriteError

__all__ = ["POINTWISE", "Call", "Leaf", "MaskExpression", "Range", "Term", "parse_mask"]

aten = torch.ops.aten

Range: TypeAlias = "tuple[int, int]"
"""The first of some rows or columns, and the one behind the last."""

_NAMES = """
bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not eq ne lt le gt ge
where masked_fill add sub rsub mul div floor_divide remainder fmod neg abs sign minimum maximum clamp pow exp log sqrt
"""


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def _number(number: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), number, dtype=dtype)


POINTWISE: Mapping[str, Any] = {
    **{name: getattr(aten, name) for name in _NAMES.split()},
    "to": _cast,
    "full": _number,
}
"""What an expression may call; `to(x, dtype)` casts, `full(number, dtype)` is a number of a dtype."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value at a place in the list of leaves."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """A pointwise operator on terms, by its name in `POINTWISE`."""

    name: str
    args: tuple[Term, ...]


Term: TypeAlias = "Leaf | Call | float | bool | torch.dtype | None"


@dataclass(frozen=True, slots=True)
class MaskExpression:
    """How a mask is computed from its leaves."""

    term: Term

    def part(self, leaves: Sequence[torch.Tensor], rows: Range, columns: Range) -> torch.Tensor:
        """These rows and columns of the mask; it broadcasts to them."""
        return _value(self.term, [_cut(_cut(leaf, -2, rows), -1, columns) for leaf in leaves], {})

    def dtype(self, leaves: Sequence[torch.dtype]) -> torch.dtype:
        """The dtype of the mask when its leaves have these."""
        given = [torch.empty((), dtype=dtype, device="meta") for dtype in leaves]
        return self.part(given, (0, 1), (0, 1)).dtype


def _value(term: Term, leaves: Sequence[torch.Tensor], known: dict[Call, torch.Tensor]) -> Any:
    """What a term is. A closure that calls itself would keep what is known alive until garbage is collected."""
    if isinstance(term, Leaf):
        return leaves[term.index]
    if not isinstance(term, Call):
        return term
    if term not in known:
        known[term] = POINTWISE[term.name](*(_value(arg, leaves, known) for arg in term.args))
    return known[term]


def _cut(leaf: torch.Tensor, dim: int, part: Range) -> torch.Tensor:
    if leaf.dim() < -dim or leaf.shape[dim] == 1:
        return leaf
    start, end = part
    return leaf.narrow(dim, start, end - start)


@functools.cache
def parse_mask(text: str) -> MaskExpression:
    """The expression that a text stands for.

    Raises:
        FxRewriteError: it is none, or calls what is not in `POINTWISE`.
    """
    try:
        return MaskExpression(_term(ast.parse(text, mode="eval").body))
    except SyntaxError as error:
        raise FxRewriteError(f"{text!r} is no expression of a mask: {error.msg}") from error


def _term(found: ast.expr) -> Term:
    match found:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in POINTWISE:
            return Call(name, tuple(map(_term, args)))
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id=name) if name[:1] == "x" and name[1:].isdecimal():
            return Leaf(int(name[1:]))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name(id="inf") as operand):
            number = _term(operand)
            assert isinstance(number, (int, float)), "a constant behind a minus"
            return -number
        case ast.Constant(value=bool() | int() | float() | None as number):
            return number
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(
            getattr(torch, name, None), torch.dtype
        ):
            return getattr(torch, name)
        case _:
            raise FxRewriteError(f"{ast.unparse(found)!r} is no part of a mask; one may call {', '.join(POINTWISE)}")
