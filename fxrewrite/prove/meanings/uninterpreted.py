"""Operators as functions that nobody interprets: of entries, of whole operands, and sums of such functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy import Symbol
from torch import fx

from fxrewrite import ops
from fxrewrite.prove.call import SymbolicCall
from fxrewrite.prove.indices import Expr
from fxrewrite.prove.reals import apply, expanded
from fxrewrite.prove.value import SymbolicTensor, UnknownError, is_number, items_of, tensors_in

LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "soft_margin_loss"),
        *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "triplet_margin_loss", "margin_ranking_loss"),
        *("hinge_embedding_loss", "poisson_nll_loss"),
    }
)
"""Losses whose `reduction` "mean" and "sum" are those of their losses under "none", without weights in the count."""
_MEAN, _SUM = 1, 2
"""Values of the argument `reduction`; 0 is "none"."""


def of_entries(call: SymbolicCall) -> Any:
    """Returns a function of the entries of the operands at the same index, and of all other arguments."""
    if call.args.get("reduction", 0) != 0:
        return NotImplemented
    if any(isinstance(value, (list, tuple)) and tensors_in(value) for value in call.args.values()):
        return NotImplemented
    tensors = [value for value in call.args.values() if isinstance(value, SymbolicTensor)]
    others = [f"{n}={call.text_of(v)}" for n, v in call.args.items() if not tensors_in(v) and not is_number(v)]
    numbers = {n: v for n, v in call.args.items() if is_number(v)}
    written = [sympy.Tuple(Symbol(n), call.arithmetic.number(v)) for n, v in numbers.items()]
    is_swapped = ops.is_commutative(call.key) and len(tensors) == 2 and all(v == 1 for v in numbers.values())
    is_mixed = len({x.dtype for x in tensors}) > 1

    def kind(x: SymbolicTensor) -> str:
        """A tensor without dimensions does not decide in which dtype mixed operands are computed."""
        return ops.dtype_name(x.dtype) + ("" if x.shape or not is_mixed else " alone")

    def at(index: Sequence[Expr]) -> Expr:
        found = [(kind(x), expanded(call.read(x, index))) for x in tensors]
        if is_swapped:
            found.sort(key=lambda one: (one[0], sympy.srepr(one[1])))
        kinds = ",".join(kind for kind, _ in found)
        name = f"{call.key.removeprefix('aten::')}[{kinds}->{ops.dtype_name(call.dtype)};{','.join(others)}]"
        return apply(name, *(entry for _, entry in found), *written)

    return call.value(at)


def of_operands(call: SymbolicCall) -> Any:
    """Returns a function of everything that the operator is given.

    In the reals its operands count by their entries, else by the calls that made them.
    """
    if not isinstance(call.result, (torch.Tensor, list, tuple)):
        raise UnknownError(f"{call.key} gives {type(call.result).__name__}")
    name, operands = call.text(), list[Expr]()
    if call.arithmetic.is_real:
        name, operands = _name_of_call(call, call.args), _whole_operands(call, call.args)
    if not all(isinstance(part, torch.Tensor) for part in items_of(call.result)):
        raise UnknownError(f"{call.key} gives a list with more than tensors")

    def made(result: torch.Tensor, number: str) -> SymbolicTensor:
        def at(index: Sequence[Expr]) -> Expr:
            where = sympy.Tuple(*map(sympy.expand, index))
            return apply(f"{name}{number}:{ops.dtype_name(result.dtype)}", where, *operands)

        return SymbolicTensor(call.arithmetic.shape(result), result.dtype, at, call.text() + number)

    if isinstance(call.result, torch.Tensor):
        return made(call.result, "")
    return [made(part, f"[{n}]") for n, part in enumerate(call.result)]


def of_losses(call: SymbolicCall) -> SymbolicTensor:
    """Returns a mean or a sum of losses, as the documentation of the argument `reduction` says."""
    reduction = call.args.get("reduction")
    if reduction not in (_MEAN, _SUM):
        return of_operands(call)
    shape = _shape_of_losses(call)
    args = {**call.args, "reduction": 0}
    name, operands = _name_of_call(call, args), _whole_operands(call, args)
    over = [call.indices.fresh(size) for size in shape]
    entry = apply(f"{name}:{ops.dtype_name(call.dtype)}", sympy.Tuple(*over), *operands)
    summed = call.total(entry, over)
    return call.value(lambda _: summed / (sympy.prod(shape) if reduction == _MEAN else 1))


def _shape_of_losses(call: SymbolicCall) -> tuple[Expr, ...]:
    target: Any = call.node.target
    bound = ops.bind(call.node)
    args = {name: ops.value(value) if isinstance(value, fx.Node) else value for name, value in bound.items()}
    return call.arithmetic.shape(target(**{**args, "reduction": 0}))


def _name_of_call(call: SymbolicCall, args: Mapping[str, Any]) -> str:
    """The call, without its tensors and numbers."""

    def shown(value: Any) -> str:
        if isinstance(value, SymbolicTensor):
            return "@"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(shown, value))}]"
        return "#" if is_number(value) else call.text_of(value)

    return f"{call.key}({', '.join(f'{name}={shown(value)}' for name, value in args.items())})"


def _whole_operands(call: SymbolicCall, args: Mapping[str, Any]) -> list[Expr]:
    """All tensors and numbers among the arguments, those in lists too."""
    tensors = [_whole(call, x) for argument in args.values() for x in tensors_in(argument)]
    numbers = [call.arithmetic.number(v) for argument in args.values() for v in items_of(argument) if is_number(v)]
    return [*tensors, *numbers]


def _whole(call: SymbolicCall, x: SymbolicTensor) -> Expr:
    """A whole tensor: its shape, and its entry at any index."""
    index = [call.indices.fresh(size) for size in x.shape]
    entry = expanded(x.at(index))
    names = {i: Symbol(f"_p{n}", integer=True, nonnegative=True) for n, i in enumerate(index)}
    return sympy.Tuple(Symbol(ops.dtype_name(x.dtype)), sympy.Tuple(*x.shape), entry.xreplace(names))
