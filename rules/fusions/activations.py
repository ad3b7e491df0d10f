"""Decomposed activations become one operator.

    x * sigmoid(x)                                                      ->  silu(x)
    0.5 * x * (1 + erf(x / sqrt(2)))                                    ->  gelu(x)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * pow(x, 3))))     ->  gelu(x, approximate="tanh")
    0.5 * x * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))     ->  gelu(x, approximate="tanh")

Matches factors and summands in any order, the product with erf or a power grouped in any way, `x * 0.7071...` for
`x / sqrt(2)`, and `x * x * x` for the power.
Refuses a constant that differs in the precision in which the operator reads it, which is float64 for float64 and
float32
for all others: "scale is 1.702, not 0.7978845608028654". So the fast gelu of Hugging Face, which writes 0.7978845608,
is not rewritten in float64. The quick gelu `x * sigmoid(1.702 * x)` is not a silu and does not match.
Shapes: any, of a real floating-point dtype ("x has dtype int64").
Numerics: reassociates. In half precision the operator rounds once and the model after each step, so the operator is
nearer to the exact value. The erf rule holds for finite values: torch's gelu of inf is NaN on CPU.
Source: Hugging Face transformers, activations.py (GELUActivation, NewGELUActivation, FastGELUActivation); PyTorch,
aten/src/ATen/native/cpu/Activation.cpp.

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> gm = make_fx(lambda x: x * torch.sigmoid(x), pre_dispatch=True)(torch.rand(3))
>>> ACTIVATIONS.apply(gm)["activations.to_silu"].rewrites
1
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Constraint, Literal, Pattern, Rule, RuleSet, cap, either, rule, where
from fxrewrite.ops import fake_value

_IS_FLOAT = where.dtype("x", torch.float16, torch.bfloat16, torch.float32, torch.float64)


@rule("activations.to_silu", where=[_IS_FLOAT], numerics="reassociates", optional=True)
def to_silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@to_silu.replacement
def _(x: torch.Tensor) -> torch.Tensor:
    """silu(x)"""
    return F.silu(x)


def _is(name: str, number: float) -> Constraint:
    """The literal equals this number in the precision in which an operator on `x` reads it."""

    def check(found: float, x: fx.Node) -> bool | str:
        if fake_value(x).dtype == torch.float64:
            equal = math.isclose(found, number, rel_tol=4e-16)  # sqrt(0.5) and 1 / sqrt(2) differ in the last bit
        else:
            equal = _in_float32(found) == _in_float32(number)
        return equal or f"{name} is {found}, not {number}"

    return where.predicate(name, "x", text=f"is[{number}]")(check)


def _in_float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def _half_of(x: Any, gate: Any) -> tuple[Any, ...]:
    """Returns the three groupings of `0.5 * x * (1 + gate)`."""
    half: Any = cap("half", Literal)
    total = cap("one", Literal) + gate
    return (x * half) * total, (x * total) * half, x * (total * half)


def _gelu(name: str, approximate: str, spellings: tuple[Any, ...], **constants: float) -> Rule:
    checks = (_is(constant, number) for constant, number in {"half": 0.5, "one": 1.0, **constants}.items())
    product: Any = either(*spellings) if len(spellings) > 1 else next(iter(spellings))
    pattern = Pattern((product,), (_IS_FLOAT, *checks))
    domain = "finite" if approximate == "none" else "all"  # torch's vectorized gelu of inf is NaN
    made = Rule(f"activations.{name}", pattern, numerics="reassociates", domain=domain, optional=True)

    @made.replacement
    def _(x: torch.Tensor) -> torch.Tensor:
        """gelu(x)"""
        return F.gelu(x, approximate=approximate)

    return made


_x: Any = cap("x")  # `Any`: torch's stubs do not know that its functions make terms
_scale: Any = cap("scale", Literal)
_c: Any = cap("c", Literal)
_unit: Any = cap("unit", Literal)
_divisor: Any = cap("divisor", Literal)
_factor: Any = cap("factor", Literal)
_power: Any = cap("power", Literal)
_x_by_root: Any = either(_x / _divisor, _x * _factor)
_TANH = {"scale": math.sqrt(2 / math.pi), "c": 0.044715}

to_gelu_erf = _gelu(
    "to_gelu_erf",
    "none",
    _half_of(_x, torch.erf(_x_by_root)),
    divisor=math.sqrt(2),
    factor=math.sqrt(0.5),
)
to_gelu_tanh = _gelu(
    "to_gelu_tanh",
    "tanh",
    _half_of(_x, torch.tanh(_scale * (_x + _c * torch.pow(_x, _power)))),
    **_TANH,
    power=3.0,
)
# Each commutative factor doubles the readings of a pattern, so these three match the usual grouping only.
to_gelu_tanh_cube = _gelu(
    "to_gelu_tanh_cube", "tanh", _half_of(_x, torch.tanh(_scale * (_x + _c * (_x * _x * _x))))[:1], **_TANH
)
to_gelu_tanh_product = _gelu(
    "to_gelu_tanh_product", "tanh", _half_of(_x, torch.tanh(_scale * (_x + _c * _x * _x * _x)))[:1], **_TANH
)
to_gelu_tanh_fast = _gelu(
    "to_gelu_tanh_fast",
    "tanh",
    _half_of(_x, torch.tanh(_x * _scale * (_unit + _c * _x * _x)))[:1],
    **_TANH,
    unit=1.0,
)

ACTIVATIONS = RuleSet(
    "activations", to_silu, to_gelu_erf, to_gelu_tanh, to_gelu_tanh_cube, to_gelu_tanh_product, to_gelu_tanh_fast
)
