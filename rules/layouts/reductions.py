"""Reductions, norms and scans: the dimensions that they run over.

A sum over a sharded dimension is a partial sum. A mean is a sum over a global count (`rules.collectives` writes it so).
Softmax, norms, maxima, sorts and scans need their dimension whole.
"""

from fxrewrite.spmd import Call, IndexMap, LayoutRule
from rules.layouts.pointwise import broadcast

__all__ = ["LAYOUTS"]


def _dims(call: Call, rank: int) -> list[int]:
    dims = call.args.get("dim", call.args.get("dims"))
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank if rank else 0 for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def reduction(call: Call) -> IndexMap:
    """sums over `dim`; a sharded one gives partial sums"""
    return _reduced(call, whole=False)


def whole_reduction(call: Call) -> IndexMap | None:
    """reduces over `dim`, which must be whole; max and min of two tensors are pointwise"""
    if len(call.operands) > 1:
        return broadcast(call)
    return _reduced(call, whole=True)


def _reduced(call: Call, *, whole: bool) -> IndexMap:
    shape = call.shape()
    dims = set(_dims(call, len(shape)))
    sizes = {f"r{dim}": size for dim, size in enumerate(shape)}
    operand = tuple((f"r{dim}",) for dim in range(len(shape)))
    keep = bool(call.args.get("keepdim", False))
    result = tuple(() if dim in dims else (f"r{dim}",) for dim in range(len(shape)) if keep or dim not in dims)
    blocked = frozenset(f"r{dim}" for dim in dims) if whole else frozenset[str]()
    return IndexMap((operand,), (result,) * len(call.result_shapes()), sizes, blocked)


def along(call: Call) -> IndexMap:
    """same shape as its input; `dim` must be whole"""
    shape = call.shape()
    blocked = frozenset(f"r{dim}" for dim in _dims(call, len(shape)))
    terms = tuple((f"r{dim}",) for dim in range(len(shape)))
    sizes = {f"r{dim}": size for dim, size in enumerate(shape)}
    return IndexMap((terms,), (terms,) * len(call.result_shapes()), sizes, blocked)


def norm(call: Call) -> IndexMap:
    """normalizes over the last dimensions, which must be whole; weight and bias run over them"""
    shape = call.shape()
    count = len(call.args["normalized_shape"])
    sizes = {f"r{dim}": size for dim, size in enumerate(shape)}
    terms = tuple((f"r{dim}",) for dim in range(len(shape)))
    operands = (terms,) + (terms[len(shape) - count :],) * (len(call.operands) - 1)
    blocked = frozenset(f"r{dim}" for dim in range(len(shape) - count, len(shape)))
    return IndexMap(operands, (terms,), sizes, blocked)


_WHOLE = "amax amin prod any all argmax argmin var std logsumexp norm linalg_vector_norm max min"
_ALONG = "softmax log_softmax _softmax _log_softmax cumsum cumprod sort argsort flip"

LAYOUTS = (
    LayoutRule("layout.sum", ("aten::sum", "aten::mean"), reduction),
    LayoutRule(
        "layout.reduce_whole",
        tuple(f"aten::{name}" for name in _WHOLE.split()),
        whole_reduction,
    ),
    LayoutRule(
        "layout.along",
        tuple(f"aten::{name}" for name in _ALONG.split()),
        along,
    ),
    LayoutRule("layout.norm", ("aten::layer_norm", "aten::rms_norm"), norm),
)
