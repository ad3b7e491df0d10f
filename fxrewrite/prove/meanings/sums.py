"""Sums over dimensions and what is made of them: means, variances, softmax and norms, over the reals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy import Integer, Symbol

from fxrewrite.prove.arithmetic import cast
from fxrewrite.prove.call import Meaning, SymbolicCall
from fxrewrite.prove.indices import Expr
from fxrewrite.prove.reals import apply, expanded
from fxrewrite.prove.value import SymbolicTensor


def _sum(call: SymbolicCall) -> SymbolicTensor:
    return call.reduced(call.total)


def _mean(call: SymbolicCall) -> SymbolicTensor:
    return call.reduced(lambda entry, over: call.total(entry, over) / call.num_reduced())


def _var(call: SymbolicCall) -> SymbolicTensor:
    correction = call.args.get("correction", 1)
    if "unbiased" in call.args and call.args["unbiased"] is not None:
        correction = int(call.args["unbiased"])
    count = call.num_reduced()

    def variance(entry: Expr, over: list[Symbol]) -> Expr:
        mean = call.total(entry, over) / count
        divisor = count - call.arithmetic.number(1 if correction is None else correction)
        return call.arithmetic.divide(call.total((entry - mean) ** 2, over), divisor)

    return call.reduced(variance)


def _largest(call: SymbolicCall) -> SymbolicTensor:
    def largest(entry: Expr, over: list[Symbol]) -> Expr:
        entry = expanded(entry)
        used = [int(s.name[2:]) for s in entry.free_symbols if s.name.startswith("_k")]
        first = 1 + max(used, default=0)
        names = {i: Symbol(f"_k{first + n}", integer=True, nonnegative=True) for n, i in enumerate(over)}
        ranges = [sympy.Tuple(names[i], call.indices.sizes[i]) for i in over]
        return apply("largest", entry.xreplace(names), *ranges)

    return call.reduced(largest)


def _softmax(call: SymbolicCall) -> Any:
    x, dim = call.first, call.dim()
    if x.shape == ():
        return NotImplemented

    def score(index: Sequence[Expr]) -> Expr:
        return expanded(cast(x.at(index), x.dtype, call.dtype))

    def at(index: Sequence[Expr]) -> Expr:
        other = call.indices.fresh(x.shape[dim])
        whole = call.total(sympy.exp(score([*index[:dim], other, *index[dim + 1 :]])), [other])
        if call.name == "log_softmax":
            return score(index) - apply("log", whole)
        return sympy.exp(score(index)) / whole

    return call.value(at, x.shape)


def _norm(call: SymbolicCall) -> Any:
    """Returns rms_norm or layer_norm over the last dimensions, in the precision of the operand."""
    x = call.args["input"]
    count = len(call.args["normalized_shape"])
    scale, bias, eps = call.args.get("weight"), call.args.get("bias"), call.args["eps"]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if any(y is not None and y.dtype != x.dtype for y in (scale, bias)):
        return NotImplemented
    is_centered = call.name == "layer_norm"
    size = sympy.prod(x.shape[-count:])

    def at(index: Sequence[Expr]) -> Expr:
        over = [call.indices.fresh(n) for n in x.shape[-count:]]
        entry = x.at([*index[:-count], *over])
        mean = call.total(entry, over) / size if is_centered else Integer(0)
        variance = call.total((entry - mean) ** 2, over) / size
        root = call.arithmetic.power(variance + call.arithmetic.number(eps), sympy.Rational(-1, 2))
        found = (x.at(index) - mean) * root
        found = found if scale is None else found * scale.at(index[-count:])
        return found if bias is None else found + bias.at(index[-count:])

    return call.value(at, x.shape)


SUMS: Mapping[str, Meaning] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "amax": _largest,
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("rms_norm", "layer_norm"), _norm),
}
"""Operators on real numbers that read many entries for one."""
