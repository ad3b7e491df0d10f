"""Cases of pointwise operators: any dimension of any operand is free."""

from __future__ import annotations

import torch

from tests.rules.layouts.case import Cases, b, case, f, g, i, many, z

_UNARY = """
abs alias alias_copy asin asinh atan ceil celu clone contiguous cos cosh
deg2rad detach elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh
i0 isfinite isinf isnan isneginf isposinf isreal leaky_relu lift_fresh_copy log_sigmoid logical_not mish
nan_to_num neg ones_like positive rad2deg relu relu6 resolve_neg round selu sgn sigmoid sign signbit
silu sin sinc sinh softplus softshrink special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
special_ndtr square tan tanh trunc zero zeros_like
"""
_POSITIVE = "acos atanh digamma lgamma log log1p log2 log10 logit reciprocal rsqrt special_entr special_ndtri sqrt"
_COMPLEX = "_conj angle conj conj_physical _conj_physical imag real resolve_conj"
_BINARY = """
add sub mul div remainder fmod maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge logical_and logical_or
logical_xor copysign isclose ldexp logaddexp logaddexp2 rsub polar complex
"""
_NO_GRADIENT = "heaviside igamma igammac nextafter special_zeta"
_BITWISE = "bitwise_and bitwise_or bitwise_xor"
_SHIFTS = "bitwise_left_shift bitwise_right_shift"
_DRAWS = """
bernoulli cauchy empty_like exponential geometric log_normal normal_functional rand_like randint_like
randn_like random rrelu uniform
"""

CASES: Cases = {
    **many(_UNARY, case(lambda a, b, c: (f(a, 3),))),
    **many(_POSITIVE, case(lambda a, b, c: (f(a, 3, low=0.1, high=0.9),))),
    **many(_COMPLEX, case(lambda a, b, c: (z(a, 3),))),
    "acosh": [case(lambda a, b, c: (f(a, 3, low=1.1),))],
    "mvlgamma": [case(lambda a, b, c: (f(a, 3, low=3.0, high=4.0), 2))],
    "polygamma": [case(lambda a, b, c: (1, f(a, 3, low=1.0)))],
    **many("detach_copy lift_fresh", case(lambda a, b, c: (g(a, 3),))),
    "frexp": [case(lambda a, b, c: (g(a, c),))],
    **many(_BINARY, case(lambda a, b, c: (f(a, 1, c), f(3, 1))), case(lambda a, b, c: (f(c), f(c)))),
    "mul": [
        case(lambda a, b, c: (f(a, b, c), f(a, b, c))),
        case(lambda a, b, c: (f(a, 1, c), f(b, 1))),
        case(lambda a, b, c: (f(c), f(a, c))),
        case(lambda a, b, c: (f(a), f())),
        case(lambda a, b, c: (z(a, c), z(c))),
    ],
    **many(_NO_GRADIENT, case(lambda a, b, c: (g(a, 1, c, low=1.5), g(3, 1, low=1.5)))),
    **many(_BITWISE, case(lambda a, B, c: (b(a, 3, c), b(a, 3, c))), case(lambda a, B, c: (b(a, 1), b(c)))),
    **many(_SHIFTS, case(lambda a, b, c: (i(50, a, c), i(3, c)))),
    **many("gcd lcm", case(lambda a, b, c: (i(50, a, c), i(9, c)))),
    "bitwise_not": [case(lambda a, B, c: (b(a, c),))],
    "floor_divide": [case(lambda a, b, c: (i(50, a, c), i(5, c) + 1))],
    "pow": [
        case(lambda a, b, c: (f(a, c), 2)),
        case(lambda a, b, c: (f(a, c, low=0.5), f(c))),
        case(lambda a, b, c: (2.0, f(a, c))),
    ],
    "float_power": [case(lambda a, b, c: (f(a, c, low=0.5), 2.0))],
    **many("xlogy special_xlog1py", case(lambda a, b, c: (f(a, c), f(a, c, low=0.1)))),
    "clamp": [case(lambda a, b, c: (f(a, c), -1.0, 1.0)), case(lambda a, b, c: (f(a, c), g(c)))],
    "clamp_min": [case(lambda a, b, c: (f(a, c), -1.0))],
    "clamp_max": [case(lambda a, b, c: (f(a, c), 1.0))],
    "threshold": [case(lambda a, b, c: (f(a, c), 0.1, 0.0))],
    "_to_copy": [case(lambda a, b, c: (f(a, c),))],
    "to": [case(lambda a, b, c: (f(a, c), torch.complex128)), case(lambda a, b, c: (f(a, c), g(2)), "1.0")],
    "type_as": [case(lambda a, b, c: (f(a, c), g(3)))],
    "full_like": [case(lambda a, b, c: (f(a, c), 3.0))],
    "fill": [case(lambda a, b, c: (f(a, c), 3.0)), case(lambda a, b, c: (f(a, c), f()))],
    "copy": [case(lambda a, b, c: (g(a, c), g(a, c))), case(lambda a, b, c: (g(a, 3, c), g(c)))],
    "expand_as": [case(lambda a, b, c: (f(a, 1), g(a, c))), case(lambda a, b, c: (f(c), g(a, c)))],
    "broadcast_tensors": [case(lambda a, b, c: ([f(a, 1, c), f(b, 1)],))],
    "masked_fill": [
        case(lambda a, B, c: (f(a, c), b(a, c), -1.0)),
        case(lambda a, B, c: (f(3, a, c), b(c), f())),
    ],
    "where": [
        case(lambda a, B, c: (b(a, c), f(a, c), f(c))),
        case(lambda a, B, c: (b(a, 1), f(a, c), f(a, c))),
        case(lambda a, B, c: (b(a, 1), f(c), 0.0)),
        case(lambda a, B, c: (b(a, c), 2.0, 0.0)),
    ],
    "lerp": [case(lambda a, b, c: (f(a, c), f(a, c), 0.3)), case(lambda a, b, c: (f(a, c), f(c), f(a, 1)))],
    **many("addcmul addcdiv", case(lambda a, b, c: (f(a, c), f(a, c), f(c, low=1.0)))),
    **many("dropout native_dropout", case(lambda a, b, c: (f(a, c), 0.0, True))),
    **many("feature_dropout feature_alpha_dropout", case(lambda a, b, c: (f(a, b, c), 0.0, True), "0.2")),
    **many("prelu", case(lambda a, b, c: (f(a, b, c), f(b))), case(lambda a, b, c: (f(a, b, c), f(1)))),
    "_prelu_kernel": [case(lambda a, b, c: (f(a, b, c), f(b, 1)))],
    "isin": [case(lambda a, b, c: (i(9, a, b), i(9, c)), "1.0"), case(lambda a, b, c: (i(9, a, b), 3))],
}
DRAWN: Cases = {
    **many(_DRAWS, case(lambda a, b, c: (g(a, c, low=0.1, high=0.9),))),
    "alpha_dropout": [case(lambda a, b, c: (g(a, c), 0.5, True))],
    "new_empty": [case(lambda a, b, c: (g(a, c), [a, c, 3]))],
    "geometric": [case(lambda a, b, c: (g(a, c), 0.5))],
    "randint_like": [case(lambda a, b, c: (g(a, c), 5))],
    "multinomial": [
        case(lambda a, b, c: (g(a, b, low=0.1), 2), "0.1"),
        case(lambda a, b, c: (g(b, low=0.1), 2), "0.0"),
    ],
}
"""Their values differ by rank on purpose; only which dimensions are free is tested."""
