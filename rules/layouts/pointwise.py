"""Pointwise operators: every dimension is independent; operands broadcast from the right.

`where(c, x, y)` and `x + y` take any dimension of the result. Random operators (dropout) are listed too: each rank
draws the numbers of its own chunk.
"""

from fxrewrite.spmd import Call, IndexMap, LayoutRule
from rules.layouts.terms import aligned, aten, index_map, indices, unread


def broadcast(call: Call) -> IndexMap | None:
    """every dimension is independent, operands broadcast from the right"""
    if call.key == "aten::where" and "self" not in call.args:
        return None  # positions, not values
    shape = call.result_shapes()[0]
    result = indices(len(shape), "p")
    operands = tuple(aligned(call.shape(i), shape, result) for i in range(len(call.operands)))
    sizes = {f"p{dim}": size for dim, size in enumerate(shape)}
    return IndexMap(operands, (result,) * len(call.result_shapes()), sizes)


def like(call: Call) -> IndexMap | None:
    """the first operand, with the dtype or device of the others, of which nothing else is read"""
    terms = indices(len(call.shape()))
    return index_map(call, {"self": terms, "other": unread(call.shape(-1))}, terms)


def of_channels(call: Call) -> IndexMap | None:
    """n c d..., c -> n c d...; a weight with one entry applies to all channels"""
    shape, weight = call.shape(), call.shape(1)
    terms = indices(len(shape))
    channels = terms[1:2] if len(shape) > 1 else unread(weight)
    return index_map(call, {"self": terms, "weight": aligned(weight, shape[1:2], channels) if weight else ()}, terms)


def among(call: Call) -> IndexMap | None:
    """e..., !t... -> e...: each element is compared with all test elements"""
    elements = call.args["elements"]
    terms = indices(len(call.shape()) if elements in call.operands else 0, "e")
    return index_map(call, {"elements": terms, "test_elements": indices(len(call.shape(-1)), "t")}, terms)


_UNARY = """
abs acos acosh alias alias_copy alpha_dropout angle asin asinh atan atanh bernoulli bitwise_not cauchy ceil celu clamp
clamp_max clamp_min clone conj conj_physical _conj _conj_physical contiguous cos cosh deg2rad detach detach_copy digamma
dropout elu empty_like erf erfc erfinv exp exp2 expm1 exponential fill float_power floor frac frexp full_like gelu
geometric hardshrink hardsigmoid hardswish hardtanh i0 imag isfinite isinf isnan isneginf isposinf isreal leaky_relu
lgamma lift_fresh lift_fresh_copy log log10 log1p log2 log_normal log_sigmoid logical_not logit masked_fill mish
mvlgamma nan_to_num native_dropout neg normal_functional ones_like polygamma positive rad2deg rand_like randint_like
randn_like random real reciprocal relu relu6 resolve_conj resolve_neg round rrelu rsqrt selu sgn sigmoid sign signbit
silu sin sinc sinh softplus softshrink special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
special_ndtr special_ndtri sqrt square tan tanh threshold _to_copy trunc uniform zero zeros_like
"""
_BINARY = """
add addcdiv addcmul atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor complex copy
copysign div eq expand_as float_power floor_divide fmax fmin fmod gcd ge gt heaviside hypot igamma igammac isclose lcm
ldexp le lerp logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul ne nextafter polar pow
_prelu_kernel remainder rsub special_xlog1py special_zeta sub where xlogy
"""

LAYOUTS = (
    LayoutRule("layout.pointwise", tuple(sorted({*aten(_UNARY), *aten(_BINARY)})), broadcast),
    LayoutRule("layout.broadcast_tensors", aten("broadcast_tensors"), broadcast),
    LayoutRule("layout.like", aten("to type_as"), like),
    LayoutRule("layout.of_channels", aten("prelu"), of_channels),
    # one number is drawn for each entry of the first two dimensions
    LayoutRule("layout.by_feature", aten("feature_dropout feature_alpha_dropout"), "n c !d... -> n c d..."),
    LayoutRule("layout.among", aten("isin"), among),
)
