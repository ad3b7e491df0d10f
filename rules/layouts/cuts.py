"""Slices and concatenations: operators that take parts of a dimension or join parts; that dimension must be whole."""

import math
from collections.abc import Sequence
from typing import Any

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, is_same_size
from rules.layouts.terms import aten, dim_of, index_map, indices, insert, replaced


def select(call: Call) -> IndexMap | None:
    """`dim` must be whole, and is removed; `unbind` gives one result for each of its entries"""
    terms = indices(len(call.shape()))
    at = dim_of(call, len(terms))
    return index_map(call, {"self": terms}, replaced(terms, at))


def split(call: Call) -> IndexMap | None:
    """(!run part) -> (!r part), ...: parts of `dim` are runs of one length, each of which may be sharded"""
    shape, parts = call.shape(), call.result_shapes()
    at = dim_of(call, len(shape))
    lengths = [part[at] for part in parts]
    is_even = all(is_same_size(length, lengths[0]) for length in lengths)
    part = lengths[0] if is_even else _common(lengths)
    runs = [1 if is_even else length // part for length in lengths] if part is not None else []
    if len(parts) < 2 or part is None or not is_same_size(part * sum(runs), shape[at]):
        return cut(call)
    terms = indices(len(shape))
    sizes: dict[str, Size] = {"run": sum(runs), "part": part, **{f"r{i}": count for i, count in enumerate(runs)}}
    results = [replaced(terms, at, ("part",) if runs[i] == 1 else (f"r{i}", "part")) for i in range(len(parts))]
    return index_map(call, {"self": replaced(terms, at, ("run", "part"))}, *results, sizes=sizes)


def _common(lengths: Sequence[Size]) -> int | None:
    """The longest length that all are multiples of; None of lengths that are symbols, or where it is no length."""
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    return math.gcd(*known) if len(known) == len(lengths) else None


def cut(call: Call) -> IndexMap | None:
    """cuts along `dim`, which must be whole unless nothing is cut off"""
    if len(call.operands) > 1:
        return None  # the places to cut at depend on data
    shape = call.shape()
    at = dim_of(call, len(shape)) if "dim" in call.args else min(1, len(shape) - 1) * (call.key == "aten::hsplit")
    terms = indices(len(shape))
    # The other operators state the length that they keep. A slice of everything is only left if it cannot be dropped.
    kept = call.key == "aten::slice" and is_same_size(call.result_shapes()[0][at], shape[at])
    results = [replaced(terms, at, terms[at] if kept else (f"part{i}",)) for i in _results(call)]
    return index_map(call, {"self": terms}, *results)


def _results(call: Call) -> range:
    return range(len(call.result_shapes()))


def scatter_slice(call: Call) -> IndexMap | None:
    """overwrites a part along `dim`, which must be whole"""
    terms = indices(len(call.shape()))
    at = dim_of(call, len(terms))
    source = replaced(terms, at, ("part",)) if call.key == "aten::slice_scatter" else replaced(terms, at)
    return index_map(call, {"self": terms, "src": source}, terms, whole=terms[at])


def cat(call: Call) -> IndexMap | None:
    """joins along `dim`, which must be whole"""
    shape = call.shape()
    if any(len(call.shape(i)) != len(shape) for i in range(len(call.operands))):
        return None
    if not shape:
        return None
    at = _JOINED.get(call.key)
    if at is None:
        at = dim_of(call, len(shape))
    elif len(shape) == 1 and call.key != "aten::hstack":
        return _stacked(call, at)  # vectors become rows or columns
    others = replaced(indices(len(shape)), min(at, len(shape) - 1))
    operands = [insert(others, at, (f"part{i}",)) for i in range(len(call.operands))]
    return index_map(call, {"tensors": operands}, insert(others, at, ("joined",)))


_JOINED = {"aten::vstack": 0, "aten::hstack": 1, "aten::column_stack": 1}


def _stacked(call: Call, at: int) -> IndexMap | None:
    terms = indices(len(call.shape()))
    return index_map(call, {"tensors": [terms] * len(call.operands)}, insert(terms, at, ("stacked",)))


def stack(call: Call) -> IndexMap | None:
    """a new dimension over the operands"""
    return _stacked(call, dim_of(call, len(call.shape()) + 1))


def pad(call: Call) -> IndexMap | None:
    """the padded dimensions must be whole; padding by 1 and -1 is a shift, not nothing"""
    terms = indices(len(call.result_shapes()[0]))
    amounts = list(call.args["pad"])
    kept = [not _pads(amounts[2 * place : 2 * place + 2]) for place in reversed(range(len(terms)))]
    return index_map(
        call, {"self": terms}, tuple(terms[dim] if keep else (f"padded{dim}",) for dim, keep in enumerate(kept))
    )


def _pads(pair: list[Any]) -> bool:
    return any(not isinstance(amount, int) or amount for amount in pair)


_SPLITS_WITH_SIZES = "split_with_sizes unsafe_split_with_sizes split_with_sizes_copy"
_CUTS = "slice narrow narrow_copy tensor_split hsplit vsplit slice_copy"

LAYOUTS = (
    LayoutRule("layout.select", aten("select select_copy unbind unbind_copy"), select),
    LayoutRule("layout.cut", aten(_CUTS), cut),
    LayoutRule("layout.split", aten("split unsafe_split split_copy"), split, length_args=("split_size", "split_sizes")),
    LayoutRule("layout.split_with_sizes", aten(_SPLITS_WITH_SIZES), split, length_args=("split_sizes",)),
    LayoutRule("layout.chunk", aten("chunk unsafe_chunk"), split),
    LayoutRule("layout.scatter_slice", aten("slice_scatter select_scatter"), scatter_slice),
    LayoutRule("layout.cat", aten("cat vstack hstack column_stack"), cat),
    LayoutRule("layout.stack", aten("stack"), stack),
    LayoutRule("layout.pad", aten("pad constant_pad_nd"), pad),
)
