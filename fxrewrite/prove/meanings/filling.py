"""Operators whose entries are numbers, copies, casts, or chosen by a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxrewrite.prove.arithmetic import cast
from fxrewrite.prove.call import Meaning, SymbolicCall
from fxrewrite.prove.indices import Expr
from fxrewrite.prove.reals import apply, where
from fxrewrite.prove.value import SymbolicTensor, UnknownError


def _fill(call: SymbolicCall, number: Any) -> Any:
    if isinstance(number, SymbolicTensor):
        return NotImplemented
    if call.result.layout is not torch.strided:
        raise UnknownError("a sparse tensor")
    entry = call.arithmetic.entry(number, call.dtype)
    return call.value(lambda _: entry)


# Copies and casts


def _copy(call: SymbolicCall) -> SymbolicTensor:
    x = call.first
    return SymbolicTensor(x.shape, x.dtype, x.at, call.text())


def _detach(call: SymbolicCall) -> SymbolicTensor:
    x = call.first
    return call.value(lambda i: apply("detach", x.at(i)), x.shape)  # other gradients: another function


def _dropout(call: SymbolicCall) -> Any:
    return call.first if call.args["train"] is False or call.args["p"] == 0 else NotImplemented


def convert(call: SymbolicCall) -> SymbolicTensor:
    """Returns the entries of the first operand in the dtype of the result; only `to` may give the operand itself."""
    x = call.first
    if call.result.layout is not torch.strided:
        raise UnknownError("a sparse tensor")
    if x.dtype == call.dtype:
        return x if call.name == "to" else _copy(call)
    return call.value(lambda i: cast(x.at(i), x.dtype, call.dtype), x.shape)


# Choices


def _where(call: SymbolicCall) -> SymbolicTensor:
    condition, a, b = call.args["condition"], call.args["self"], call.args["other"]
    return call.value(
        lambda i: where(call.read(condition, i), _chosen(call, a, i, call.dtype), _chosen(call, b, i, call.dtype))
    )


def _masked_fill(call: SymbolicCall) -> SymbolicTensor:
    x, mask, value = call.args["self"], call.args["mask"], call.args["value"]
    return call.value(lambda i: where(call.read(mask, i), _chosen(call, value, i, x.dtype), call.read(x, i)))


def _chosen(call: SymbolicCall, operand: Any, index: Sequence[Expr], dtype: torch.dtype) -> Expr:
    """The entry of an operand, or a number, as an entry of `dtype`."""
    if isinstance(operand, SymbolicTensor):
        return call.read(operand, index, dtype)
    return call.arithmetic.entry(operand, dtype)


FILLING: Mapping[str, Meaning] = {
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), lambda call: _fill(call, 0)),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), lambda call: _fill(call, 1)),
    **dict.fromkeys(("full", "new_full", "full_like"), lambda call: _fill(call, call.args["fill_value"])),
    **dict.fromkeys(("clone", "contiguous"), _copy),
    "alias": lambda call: call.first,
    "detach": _detach,
    "dropout": _dropout,
    **dict.fromkeys(("to", "_to_copy", "type_as"), convert),
    "where": _where,
    "masked_fill": _masked_fill,
}
"""Operators that make, copy or choose entries, of any dtype."""
