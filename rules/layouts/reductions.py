"""Reductions, and operators that run along a dimension.

A sum over a sharded dimension is Partial. A mean becomes a sum divided by a global count (`fxrewrite.spmd.lower`).
`amax` and `amin` give partial maxima and minima where they are not differentiated. Variances, norms and softmax run in
parts (`parts.py`). Sorts and scans need their dimension whole.
"""

import math

import torch

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Neutral, Terms
from rules.layouts.parts import ALONG, REDUCED
from rules.layouts.pointwise import broadcast
from rules.layouts.terms import aten, dim_of, dims_of, index_map, indices, names_of, replaced


def _dims(call: Call, rank: int) -> list[int]:
    return dims_of(call, rank, "dims" if "dims" in call.args else "dim")


def reduction(call: Call) -> IndexMap | None:
    """reduces over `dim`; a sharded one gives partial sums, or maxima and minima where nothing is differentiated"""
    terms, result = _reduced(call)
    is_bool = call.node.meta["val"].dtype == torch.bool  # collectives have no bools
    return index_map(call, {"self": terms}, result, summed=() if is_bool else names_of(terms))


def whole_reduction(call: Call) -> IndexMap | None:
    """reduces over `dim`, which must be whole"""
    terms, result = _reduced(call)
    return index_map(call, {"self": terms}, result)


def extremum(call: Call) -> IndexMap | None:
    """of all entries as `amax`; along `dim`, which must be whole, with indices; of two tensors pointwise"""
    if len(call.operands) > 1:
        return broadcast(call)
    return whole_reduction(call) if "dim" in call.args else reduction(call)


def lowest(call: Call) -> Neutral:
    """Below all others, or equal."""
    dtype = call.node.meta["val"].dtype
    return Neutral(0, -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min)


def highest(call: Call) -> Neutral:
    """Above all others, or equal."""
    dtype = call.node.meta["val"].dtype
    return Neutral(0, math.inf if dtype.is_floating_point else torch.iinfo(dtype).max)


def _reduced(call: Call) -> tuple[Terms, Terms]:
    terms = indices(len(call.shape()), "r")
    dims = set(_dims(call, len(terms)))
    keep = bool(call.args.get("keepdim", False))
    return terms, tuple(() if dim in dims else term for dim, term in enumerate(terms) if keep or dim not in dims)


def along(call: Call) -> IndexMap | None:
    """same shape as its input; `dim` must be whole"""
    terms = indices(len(call.shape()), "r")
    return index_map(call, {"self": terms}, terms, whole=names_of(terms[dim] for dim in _dims(call, len(terms))))


def resized(call: Call) -> IndexMap | None:
    """a !k b -> a j b: `dim` must be whole, and changes its size"""
    shape = call.shape()
    terms = indices(len(shape), "r")
    if not shape:
        return index_map(call, {"self": ()}, ())
    at = dim_of(call, len(shape))

    def sized(name: str) -> Terms:
        return replaced(terms, at, (name,))

    operands = {"self": terms, "prepend": sized("before"), "append": sized("after")}
    return index_map(call, operands, sized("resized"))


def transform(call: Call) -> IndexMap | None:
    """a Fourier transform along `dim`, which must be whole; the other dimensions are independent"""
    shape, after = call.shape(), call.result_shapes()[0]
    terms = indices(len(shape), "r")
    if call.args.get("dim") is None and call.args.get("s") is not None:
        dims = set(range(len(shape) - len(call.args["s"]), len(shape)))
    else:
        dims = set(_dims(call, len(shape)))
    return index_map(
        call, {"self": terms}, tuple((f"t{dim}",) if dim in dims else terms[dim] for dim in range(len(after)))
    )


def searchsorted(call: Call) -> IndexMap | None:
    """b... !n, b... v -> b... v; with a 1-D sequence, values have any shape"""
    names = list(call.args)
    ordered = "boundaries" if "boundaries" in names else "sorted_sequence"
    sequence = call.args[ordered].meta["val"].shape
    values = call.result_shapes()[0]
    terms = indices(len(values), "v")
    of_sequence = (*(terms[:-1] if len(sequence) > 1 else ()), ("n",))
    return index_map(call, {ordered: of_sequence, "sorter": of_sequence, "self": terms}, terms)


def histogram(call: Call) -> IndexMap | None:
    """n... -> partial sum of counts; without stated bounds they depend on the data"""
    low, high = call.args["min"], call.args["max"]
    if low == high:
        return None
    terms = indices(len(call.shape()), "n")
    return index_map(call, {"self": terms}, (("bins",),), summed=names_of(terms))


def beyond(call: Call) -> Neutral:
    """Padding is a number above the highest bin, which is not counted."""
    return Neutral(0, call.args["max"] + 1)


_WHOLE = """
all aminmax any argmax argmin kthvalue linalg_vector_norm logsumexp median mode nanmean nanmedian nanquantile norm prod
quantile std std_mean var var_mean
"""
_ALONG = """
_log_softmax _safe_softmax _softmax argsort cummax cummin cumprod cumsum flip log_softmax logcumsumexp roll softmax sort
"""
_ALONG_LAST_TWO = "inverse linalg_cholesky linalg_inv linalg_matrix_exp matrix_exp tril triu"
_TRANSFORMS = "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn"

LAYOUTS = (
    LayoutRule("layout.sum", aten("sum nansum count_nonzero"), reduction, neutral="zeros"),
    LayoutRule("layout.mean", aten("mean"), reduction, neutral="zeros", rewritten_by="reductions.mean_over_shards"),
    LayoutRule("layout.amax", aten("amax"), reduction, neutral=lowest, reduce_op="max"),
    LayoutRule("layout.amin", aten("amin"), reduction, neutral=highest, reduce_op="min"),
    LayoutRule("layout.max", aten("max"), extremum, neutral=lowest, reduce_op="max"),
    LayoutRule("layout.min", aten("min"), extremum, neutral=highest, reduce_op="min"),
    LayoutRule("layout.reduce_whole", aten(_WHOLE), whole_reduction, parts=REDUCED),
    LayoutRule("layout.along", aten(_ALONG), along, parts=ALONG),
    LayoutRule("layout.along_last_two", aten(_ALONG_LAST_TWO), "d... !m !n -> d... m n"),
    LayoutRule("layout.resized", aten("diff glu topk"), resized),
    LayoutRule("layout.transform", aten(_TRANSFORMS), transform),
    LayoutRule("layout.searchsorted", aten("searchsorted bucketize"), searchsorted),
    LayoutRule("layout.histogram", aten("histc"), histogram, neutral=beyond),
    LayoutRule("layout.draws", aten("multinomial"), "n... !c -> n... k"),
)
