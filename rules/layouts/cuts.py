"""Slices and concatenations: operators that take parts of a dimension or join parts; that dimension must be whole."""

from typing import Any

from fxrewrite.spmd import Call, IndexMap, LayoutRule, is_same_size
from rules.layouts.terms import aten, dim_of, index_map, indices, insert, replaced


def select(call: Call) -> IndexMap | None:
    """`dim` must be whole, and is removed; `unbind` gives one result for each of its entries"""
    terms = indices(len(call.shape()))
    at = dim_of(call, len(terms))
    return index_map(call, {"self": terms}, replaced(terms, at))


def split(call: Call) -> IndexMap | None:
    """(!run part) -> part, ...: equal parts of `dim`, each of which may be sharded; unequal parts as slices"""
    shape, parts = call.shape(), call.result_shapes()
    at = dim_of(call, len(shape))
    is_even = len(parts) > 1 and all(is_same_size(part[at], parts[0][at]) for part in parts)
    if not is_even or not is_same_size(parts[0][at] * len(parts), shape[at]):
        return cut(call)
    terms = indices(len(shape))
    sizes = {"run": len(parts), "part": parts[0][at]}
    results = [replaced(terms, at, ("part",)) for _ in parts]
    return index_map(call, {"self": replaced(terms, at, ("run", "part"))}, *results, sizes=sizes)


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
