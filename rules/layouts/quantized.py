"""Products of quantized values: rows are independent, scales follow the rows and columns that they scale.

m (k !16), (k !16) n, scales of m or of all, of n or of all, +n? -> m n      _scaled_mm, of float8
b... !k, a packed weight -> b... n                                           gemm_4bit of bitsandbytes
"""

from collections.abc import Sequence

import torch

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, is_same_size
from rules.layouts.terms import aten, index_map, indices, unread

_RUN = 16
"""How many entries of the dimension that is summed over a kernel takes at once: chunks are whole runs."""


def scaled_mm(call: Call) -> IndexMap | None:
    """m (k !16), (k !16) n, scales -> m n; a result in float8 is no sum of results"""
    entries = call.shape()[1]
    is_in_runs = isinstance(entries, int) and entries % _RUN == 0
    k, sizes = (("k", "run"), {"k": entries // _RUN, "run": _RUN}) if is_in_runs else (("k",), {})
    rows, columns = _scale(call, "scale_a", (("m",), ())), _scale(call, "scale_b", ((), ("n",)))
    if rows is None or columns is None:
        return None
    operands: dict[str, Terms] = {
        "self": (("m",), k),
        "mat2": (k, ("n",)),
        "scale_a": rows,
        "scale_b": columns,
        "bias": (("n",),),
        "scale_result": unread(call.args["scale_result"].meta["val"].shape) if call.args.get("scale_result") else (),
    }
    is_sum = call.node.meta["val"].dtype in (torch.float32, torch.bfloat16, torch.float16)
    summed = {"k"} if is_sum and is_in_runs and not call.args.get("scale_result") else ()
    added = (call.args.get("bias"),)
    return index_map(call, operands, (("m",), ("n",)), whole={"run"}, summed=summed, added=added, sizes=sizes)


def _scale(call: Call, name: str, terms: Terms) -> Terms | None:
    """The terms of a scale: of one that is for all entries none, else those given; None of scales of blocks."""
    shape: Sequence[Size] = call.args[name].meta["val"].shape
    if all(is_same_size(size, 1) for size in shape):
        return unread(shape)
    is_by_row = len(shape) == 2 and all(term or is_same_size(size, 1) for term, size in zip(terms, shape, strict=True))
    product: Sequence[Size] = call.result_shapes()[0]
    fits = is_by_row and all(
        not term or is_same_size(size, of) for term, size, of in zip(terms, shape, product, strict=True)
    )
    return terms if fits else None


def gemm_4bit(call: Call) -> IndexMap | None:
    """b... !k, a packed weight and its scales -> b... n"""
    shape = call.shape()
    rows = indices(len(shape) - 1, "b")
    packed = ("B", "absmax", "bias", "absmax_8bit", "absmax_code", "absmax_offset")
    given = {name: call.args[name] for name in packed if call.args.get(name) is not None}
    operands: dict[str, Terms] = {name: unread(value.meta["val"].shape) for name, value in given.items()}
    return index_map(call, {"A": (*rows, ("k",)), **operands}, (*rows, ("n",)))


LAYOUTS = (
    LayoutRule("layout.scaled_mm", aten("_scaled_mm"), scaled_mm),
    LayoutRule("layout.gemm_4bit", ("bitsandbytes::gemm_4bit",), gemm_4bit, library="bitsandbytes"),
)
