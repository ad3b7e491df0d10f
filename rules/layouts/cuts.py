"""Slices and concatenations: operators that take parts of a dimension or join parts.

That dimension must be whole. But a slice of one dimension without steps may stay where its entries are, as a section
(`Shard.before`, `after`), of which ranks compute what they have: nothing is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxrewrite.spmd import (
    Call,
    IndexMap,
    LayoutRule,
    Lookup,
    Section,
    Size,
    is_of_rank,
    is_read_from_data,
    is_same_size,
    size_hint,
)
from rules.layouts.terms import aten, dim_of, index_map, indices, insert, replaced, with_lookups


def select(call: Call) -> IndexMap | None:
    """`dim` must be whole, and is removed; `unbind` gives one result for each of its entries"""
    terms = indices(len(call.shape()))
    at = dim_of(call, len(terms))
    found = index_map(call, {"self": terms}, replaced(terms, at))
    return with_lookups(found, {at: Lookup("index")} if call.key == "aten::select" else {})


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
    """cuts along `dim`: what is not cut off may stay where it is; else `dim` must be whole"""
    if len(call.operands) > 1:
        return None  # the places to cut at depend on data
    shape = call.shape()
    at = dim_of(call, len(shape)) if "dim" in call.args else min(1, len(shape) - 1) * (call.key == "aten::hsplit")
    terms = indices(len(shape))
    # The other operators state the length that they keep. A slice of everything is only left if it cannot be dropped.
    kept = call.key == "aten::slice" and is_same_size(call.result_shapes()[0][at], shape[at])
    results = [replaced(terms, at, terms[at] if kept else (f"part{i}",)) for i in _results(call)]
    found = index_map(call, {"self": terms}, *results)
    return found if kept or found is None else replace(found, section=section_of(call, at))


_END = 2**63 - 1  # tracing writes this for a slice without an end


def section_of(call: Call, dim: int) -> Section | None:
    """Which entries a slice without steps keeps; None where it keeps none, or its bounds are not known."""
    if call.key not in ("aten::slice", "aten::narrow") or call.args.get("step", 1) != 1:
        return None
    given = [call.args.get(name) for name in ("start", "end")]
    start, end = map(_bound, given)
    is_read = any(bound is not None and is_read_from_data(bound) for bound in (start, end))
    if call.num_read or is_read or any(map(is_of_rank, given)):
        return None
    cut = call.shape()[dim] - call.result_shapes()[0][dim]
    if call.key == "aten::slice" and end in (None, _END):
        before = cut
    elif start is None or size_hint(start) >= 0:
        before = 0 if start is None else start
    elif call.key == "aten::slice" and size_hint(end) < 0:
        before = cut + end
    else:
        return None
    is_within = 0 <= size_hint(before) <= size_hint(cut) < size_hint(call.shape()[dim])
    return Section(dim, before, cut - before) if is_within else None


def _bound(given: Any) -> Any:
    return given.meta["val"] if isinstance(given, fx.Node) else given


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
