"""Pointwise operators: every dimension is independent; operands broadcast from the right.

`where(c, x, y)` and `x + y` take any dimension of the result. Random ones (dropout) are listed too: each rank draws the
numbers of its own chunk.
"""

from collections.abc import Sequence

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, is_broadcast

__all__ = ["LAYOUTS", "broadcast"]


def broadcast(call: Call) -> IndexMap | None:
    """every dimension is independent, operands broadcast from the right"""
    if call.key == "aten::where" and len(call.operands) == 1:
        return None  # positions, not values
    shape = call.result_shapes()[0]
    result = tuple((f"p{dim}",) for dim in range(len(shape)))
    operands = tuple(_aligned(call.shape(i), shape) for i in range(len(call.operands)))
    sizes = {f"p{dim}": size for dim, size in enumerate(shape)}
    return IndexMap(operands, (result,) * len(call.result_shapes()), sizes)


def like(call: Call) -> IndexMap:
    """the first operand, in the dtype or device of the others, of which nothing else is read"""
    shape = call.shape()
    terms = tuple((f"p{dim}",) for dim in range(len(shape)))
    others = tuple(((),) * len(call.shape(i)) for i in range(1, len(call.operands)))
    return IndexMap((terms, *others), (terms,), {f"p{dim}": size for dim, size in enumerate(shape)})


def _aligned(operand: Sequence[Size], result: Sequence[Size]) -> Terms:
    offset = len(result) - len(operand)
    return tuple(
        () if is_broadcast(size, result[offset + dim]) else (f"p{offset + dim}",) for dim, size in enumerate(operand)
    )


_UNARY = """
abs acos alias asin atan bernoulli bitwise_not ceil celu clamp clamp_max clamp_min clone contiguous cos cosh detach
dropout elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log
log1p log2 log10 logical_not logit log_sigmoid mish nan_to_num neg ones_like positive rand_like randn_like reciprocal
relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh threshold _to_copy
trunc zeros_like full_like empty_like feature_dropout native_dropout float_power masked_fill
"""
_BINARY = """
add sub mul div floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge logical_and
logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__ rsub lerp
addcmul addcdiv where copysign logaddexp xlogy
"""

LAYOUTS = (
    LayoutRule("layout.pointwise", tuple(f"aten::{name}" for name in (_UNARY + _BINARY).split()), broadcast),
    LayoutRule("layout.like", ("aten::to", "aten::type_as"), like),
)
