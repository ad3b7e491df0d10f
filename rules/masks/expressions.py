"""A mask as text: pointwise operators over values of its rows, values of its columns, and numbers.

    bitwise_and(le(x0, x1), x2)      x0 [1, 1, 1, S] and x1 [1, 1, S, 1] are positions, x2 [B, 1, 1, S] is padding

Leaves broadcast to the mask's shape [B, H, L, S], and each has at most one of the last two dimensions. So they are
small where the mask is large, and any part of the mask can be computed from parts of its leaves.
The text is Python: calls of ATen operators by name, `x0`, `x1`, ... for leaves, numbers, dtypes of torch.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fxrewrite.errors import FxRewriteError

aten = torch.ops.aten

Range: TypeAlias = "tuple[int, int]"
"""Half-open range of rows or columns: the first, and one past the last."""

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
"""The operators that an expression may call. `to(x, dtype)` casts; `full(number, dtype)` is a 0-dim tensor."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value at this index in the list of leaves."""

    index: int


@dataclass(frozen=True, slots=True)
class MaskCall:
    """A pointwise operator, named as in `POINTWISE`, applied to terms."""

    name: str
    args: tuple[Term, ...]


Term: TypeAlias = "Leaf | MaskCall | float | bool | torch.dtype | None"


def leaves_in(term: Term) -> set[int]:
    """Returns the indices of the leaves that a term reads."""
    if isinstance(term, Leaf):
        return {term.index}
    return {number for arg in term.args for number in leaves_in(arg)} if isinstance(term, MaskCall) else set()


def kept_and_hidden(term: Term, dtype: torch.dtype) -> tuple[Term, Term]:
    """Returns terms for "this entry keeps its key" and "it hides it"; an entry with another value does neither."""
    if dtype == torch.bool:
        return term, MaskCall("bitwise_not", (term,))
    return MaskCall("eq", (term, 0.0)), MaskCall("le", (term, torch.finfo(dtype).min / 2))


@dataclass(frozen=True, slots=True)
class MaskExpression:
    """How a mask is computed from its leaves."""

    term: Term

    def part(self, leaves: Sequence[torch.Tensor], rows: Range, columns: Range) -> torch.Tensor:
        """Returns these rows and columns of the mask, in a shape that broadcasts to them."""
        return evaluate(self.term, [_cut(_cut(leaf, -2, rows), -1, columns) for leaf in leaves], _compute, {})

    def dtype(self, leaves: Sequence[torch.dtype]) -> torch.dtype:
        """Returns the dtype of the mask if its leaves have these dtypes."""
        given = [torch.empty((), dtype=dtype, device="meta") for dtype in leaves]
        return self.part(given, (0, 1), (0, 1)).dtype


def evaluate(term: Term, leaves: Sequence[Any], call: Callable[..., Any], known: dict[MaskCall, Any]) -> Any:
    """Evaluates a term by `call(name, *args)`, each call once; adds their values to `known`.

    Not a recursive closure: that would keep `known` alive until garbage collection.
    """
    if isinstance(term, Leaf):
        return leaves[term.index]
    if not isinstance(term, MaskCall):
        return term
    if term not in known:
        known[term] = call(term.name, *(evaluate(arg, leaves, call, known) for arg in term.args))
    return known[term]


def _compute(name: str, *args: Any) -> torch.Tensor:
    return POINTWISE[name](*args)


def _cut(leaf: torch.Tensor, dim: int, part: Range) -> torch.Tensor:
    if leaf.dim() < -dim or leaf.shape[dim] == 1:
        return leaf
    start, end = part
    return leaf.narrow(dim, start, end - start)


@functools.cache
def parse_mask(text: str) -> MaskExpression:
    """Parses the text of a mask expression.

    Raises:
        FxRewriteError: it is not an expression, or calls a name that is not in `POINTWISE`.
    """
    try:
        return MaskExpression(_term(ast.parse(text, mode="eval").body))
    except SyntaxError as error:
        raise FxRewriteError(f"{text!r} is not a mask expression: {error.msg}") from error


def _term(found: ast.expr) -> Term:
    match found:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in POINTWISE:
            return MaskCall(name, tuple(map(_term, args)))
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id=name) if name[:1] == "x" and name[1:].isdecimal():
            return Leaf(int(name[1:]))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name(id="inf") as operand):
            number = _term(operand)
            assert isinstance(number, (int, float)), "a minus is followed by a number"
            return -number
        case ast.Constant(value=bool() | int() | float() | None as number):
            return number
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(
            getattr(torch, name, None), torch.dtype
        ):
            return getattr(torch, name)
        case _:
            raise FxRewriteError(f"{ast.unparse(found)!r} is not allowed in a mask; it may call {', '.join(POINTWISE)}")
