"""Arithmetic that acts entry by entry, over the reals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
from sympy import Integer

from fxrewrite.prove.call import Meaning, SymbolicCall
from fxrewrite.prove.indices import Expr
from fxrewrite.prove.reals import apply, expanded
from fxrewrite.prove.value import SymbolicTensor


def _plus(sign: int) -> Meaning:
    def plus(call: SymbolicCall) -> SymbolicTensor:
        alpha = call.arithmetic.number(call.args.get("alpha", 1))
        return call.entrywise(lambda a, b: a + sign * alpha * b, "self", "other")

    return plus


def _quotient(call: SymbolicCall) -> Any:
    if call.args.get("rounding_mode") is not None:
        return NotImplemented
    return call.entrywise(call.arithmetic.divide, "self", "other")


def _sigmoid(entry: Expr) -> Expr:
    return 1 / (1 + sympy.exp(expanded(-entry)))


def _gelu(call: SymbolicCall) -> SymbolicTensor:
    def exact(x: Expr) -> Expr:
        return x * (1 + apply("erf", expanded(x / sympy.sqrt(2)))) / 2

    def by_tanh(x: Expr) -> Expr:
        inner = sympy.sqrt(2 / sympy.pi) * (x + sympy.Rational(0.044715) * x**3)
        return x * (1 + apply("tanh", expanded(inner))) / 2

    return call.entrywise(by_tanh if call.args["approximate"] == "tanh" else exact, "self")


def _of_one(function: Callable[[Expr], Expr]) -> Meaning:
    return lambda call: call.entrywise(function, "self")


def _power(exponent: Expr) -> Meaning:
    return lambda call: call.entrywise(lambda x: call.arithmetic.power(x, exponent), "self")


def _uninterpreted(name: str) -> Meaning:
    return _of_one(lambda x: apply(name, expanded(x)))


ENTRYWISE: Mapping[str, Meaning] = {
    "add": _plus(1),
    "sub": _plus(-1),
    "rsub": lambda call: call.entrywise(
        lambda a, b: b - call.arithmetic.number(call.args["alpha"]) * a, "self", "other"
    ),
    "mul": lambda call: call.entrywise(lambda a, b: a * b, "self", "other"),
    "div": _quotient,
    "neg": _of_one(lambda x: -x),
    "square": _of_one(lambda x: x**2),
    "reciprocal": _power(Integer(-1)),
    "sqrt": _power(sympy.Rational(1, 2)),
    "rsqrt": _power(sympy.Rational(-1, 2)),
    "exp": _of_one(lambda x: sympy.exp(expanded(x))),
    "pow": lambda call: call.entrywise(call.arithmetic.power, "self", "exponent"),
    "sigmoid": _of_one(_sigmoid),
    "silu": _of_one(lambda x: x * _sigmoid(x)),
    "gelu": _gelu,
    **{name: _uninterpreted(name) for name in ("erf", "tanh", "sin", "cos", "log", "abs", "relu")},
}
"""Operators on real numbers, entry by entry."""
