"""Indexing: the indexed dimension must be whole; the dimensions of the index become dimensions of the result.

    gather(x, k, i)        a !k b, a j b -> a j b        if x and i have the same size in a and b; else a and b are
    whole index(x, [:, i])       a !k b, i... -> a i... b      if another dimension separates the indices, i... comes
    first scatter(x, k, i, y)    a !k b, a !j b, a !j b -> a k b

If the target is zeros (scatter_add, index_add, index_put with accumulate), the result is a sum over `j`: each rank adds
its own part.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fxrewrite.ops import filled_with
from fxrewrite.spmd import Call, IndexMap, LayoutRule, Lookup, Neutral, Size, Terms, is_same_size
from rules.layouts.terms import (
    aligned,
    aten,
    broadcast_shape,
    dim_of,
    index_map,
    indices,
    insert,
    names_of,
    unread,
    with_lookups,
)


def embedding(call: Call) -> IndexMap | None:
    """!v d, i... -> i... d; not supported if gradients are scaled by frequency, which counts all ids"""
    if call.args.get("scale_grad_by_freq"):
        return None
    ids = indices(len(call.shape(1)), "i")
    return index_map(call, {"weight": (("v",), ("d",)), "indices": ids}, (*ids, ("d",)))


def embedding_bag(call: Call) -> IndexMap | None:
    """!v d, !i, !n, !i? -> n d; d is whole, too, if more than the sums is read: offsets, sizes and places in bags"""
    _, *others = call.result_shapes()
    reads_others = any(user.target is not operator.getitem or user.args[1] for user in call.node.users)
    operands = {"weight": (("v",), ("d",)), "indices": (("i",),), "offsets": (("o",),), "per_sample_weights": (("i",),)}
    summed = () if reads_others else ("d",)
    return index_map(call, operands, (("n",), ("d",)), *map(unread, others), summed=summed)


def one_hot(call: Call) -> IndexMap | None:
    """i... -> i... c; the number of classes must be stated, or it depends on the data"""
    if call.args["num_classes"] == -1:
        return None
    ids = indices(len(call.shape()), "i")
    return index_map(call, {"self": ids}, (*ids, ("c",)))


def index_select(call: Call) -> IndexMap | None:
    """a !k b, i -> a i b"""
    terms = indices(len(call.shape()))
    at = dim_of(call, len(terms))
    chosen = indices(len(call.shape(1)), "i")
    result = (*terms[:at], *(chosen or ((),)), *terms[at + 1 :]) if terms else ()
    return with_lookups(
        index_map(call, {"self": terms, "index": chosen}, result), {at: Lookup("index", after=len(terms) - at - 1)}
    )


def gather(call: Call) -> IndexMap | None:
    """a !k b, a j b -> a j b; if x and the index differ in a or b, these are whole"""
    shape, index = call.shape(), call.shape(1)
    if len(shape) != len(index):
        return None
    terms, at = indices(len(shape)), dim_of(call, len(shape))
    result = tuple(
        terms[dim] if dim != at and is_same_size(shape[dim], index[dim]) else (f"j{dim}",) for dim in range(len(shape))
    )
    whole = {f"j{dim}" for dim in range(len(shape)) if dim != at}
    return with_lookups(index_map(call, {"self": terms, "index": result}, result, whole=whole), {at: Lookup("index")})


def take_along_dim(call: Call) -> IndexMap | None:
    """a !k b, a j b -> a j b; a and b broadcast. Without `dim`, positions in the flattened input"""
    if call.args["dim"] is None:
        chosen = indices(len(call.shape(1)), "j")
        return index_map(call, {"self": indices(len(call.shape()), "k"), "indices": chosen}, chosen)
    shape, index, result = call.shape(), call.shape(1), call.result_shapes()[0]
    if len(shape) != len(index):
        return None
    at, terms = dim_of(call, len(shape)), indices(len(result))
    of_self = aligned((*shape[:at], result[at], *shape[at + 1 :]), result, terms)
    of_self = (*of_self[:at], ("k",), *of_self[at + 1 :])
    found = index_map(call, {"self": of_self, "indices": aligned(index, result, terms)}, terms)
    return with_lookups(found, {at: Lookup("indices")})


def scatter(call: Call) -> IndexMap | None:
    """a !k b, a !j b, a !j b -> a k b; a sum over j if the target is zeros; dimensions of different sizes are whole"""
    shape, index = call.shape(), call.shape(1)
    others = [call.shape(position) for position in range(1, len(call.operands))]
    if any(len(other) != len(shape) for other in others):
        return None
    terms, at = indices(len(shape)), dim_of(call, len(shape))

    def shared(dim: int) -> bool:
        return dim != at and all(is_same_size(other[dim], shape[dim]) for other in others)

    kept = {dim for dim in range(len(shape)) if shared(dim)}
    of_index = tuple(terms[dim] if dim in kept else (f"j{dim}",) for dim in range(len(shape)))
    operands: dict[str, Terms] = {"self": terms, "index": of_index}
    summed: set[str] = set()
    if len(others) > 1:
        same = is_same_size(index[at], others[1][at]) if shape else True
        operands["src"] = tuple(
            dim if place in kept or (place == at and same) else (f"s{place}",) for place, dim in enumerate(of_index)
        )
        if call.key == "aten::scatter_add" and same and _is_zero(call.operands[0]):
            summed = {f"j{at}"}
    whole = {f"d{dim}" for dim in range(len(shape)) if dim not in kept}
    return index_map(call, operands, terms, whole=whole, summed=summed)


def index_add(call: Call) -> IndexMap | None:
    """a !k b, !i, a !i b -> a k b; a sum over i if the target is zeros"""
    terms = indices(len(call.shape()))
    if not terms:
        rest = {name: indices(len(call.shape(place)), name) for place, name in ((1, "index"), (-1, "source"))}
        return index_map(call, {"self": (), "value": (), **rest}, ())
    at = dim_of(call, len(terms))
    source = (*terms[:at], ("i",), *terms[at + 1 :])
    index = (("i",),) if call.shape(1) else ()
    operands = {"self": terms, "index": index, "source": source if len(call.shape(-1)) else (), "value": ()}
    adds = call.key == "aten::index_add" and len(index) == 1 and _is_zero(call.operands[0])
    return index_map(call, operands, terms, whole=terms[at], summed={"i"} if adds else ())


def index(call: Call) -> IndexMap | None:
    """indexed dimensions of x are whole, the others free; the index's own dimensions are free too; no boolean masks"""
    places = _indexed(call)
    if places is None:
        return None
    at, terms, chosen = _result_of(call, places)
    others = tuple(term for dim, term in enumerate(terms) if dim not in places)
    operands = {"self": terms, "indices": _of_indices(call, chosen)}
    after = len(others) - at
    found = index_map(call, operands, insert(others, at, *chosen[1]))
    return with_lookups(found, {dim: Lookup("indices", dim, after) for dim in places})


def index_put(call: Call) -> IndexMap | None:
    """indexed dimensions and the index's own are whole, the others free; a mask with one value is a masked fill"""
    masks = [node for node in call.operands[1:-1] if _dtype(node) in (torch.bool, torch.uint8)]
    terms = indices(len(call.shape()))
    values = call.shape(-1)
    if masks:
        if call.args["indices"] != masks or len(masks) > 1 or not all(is_same_size(size, 1) for size in values):
            return None
        mask = terms[: len(call.shape(1))]
        return index_map(call, {"self": terms, "indices": [mask], "values": unread(values)}, terms)
    places = _indexed(call)
    if places is None:
        return None
    at, terms, chosen = _result_of(call, places)
    others = tuple(dim for dim in range(len(terms)) if dim not in places)
    full_terms = insert(tuple(terms[dim] for dim in others), at, *chosen[1])
    full = [call.shape()[dim] for dim in others]
    full[at:at] = chosen[0]
    whole = names_of(terms[dim] for dim in places)
    operands = {"self": terms, "indices": _of_indices(call, chosen), "values": aligned(values, full, full_terms)}
    summed = names_of(chosen[1]) if call.args["accumulate"] and _is_zero(call.operands[0]) else ()
    return index_map(call, operands, terms, whole=whole, summed=summed)


def added(call: Call) -> Neutral:
    """Padding adds zeros: the last operand is filled with 0."""
    return Neutral(len(call.operands) - 1, 0)


_Chosen = tuple[Sequence[Size], Terms]
"""The shape that the indices broadcast to, and its terms."""


def _indexed(call: Call) -> list[int] | None:
    """Returns the dimensions that integer indices point into; None if an index is a mask."""
    places = [dim for dim, item in enumerate(call.args["indices"]) if item is not None]
    nodes = [call.args["indices"][dim] for dim in places]
    if any(_dtype(node) in (torch.bool, torch.uint8) for node in nodes):
        return None
    return places


def _result_of(call: Call, places: list[int]) -> tuple[int, Terms, _Chosen]:
    """Returns where the dimensions of the indices go in the result, the terms of x, and the broadcast indices."""
    terms = indices(len(call.shape()))
    shapes = [tuple(call.args["indices"][dim].meta["val"].shape) for dim in places]
    together = broadcast_shape(*shapes)
    adjacent = places == list(range(places[0], places[-1] + 1)) if places else True
    at = places[0] if places and adjacent else 0
    return at, terms, (together, indices(len(together), "i"))


def _of_indices(call: Call, chosen: _Chosen) -> list[Terms]:
    nodes = [item for item in call.args["indices"] if item is not None]
    return [aligned(node.meta["val"].shape, *chosen) for node in nodes]


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _is_zero(node: fx.Node) -> bool:
    """Whether the value is zeros by its making."""
    filled = filled_with(node)
    return isinstance(filled, (int, float)) and filled == 0


LAYOUTS = (
    LayoutRule("layout.embedding", aten("embedding"), embedding),
    LayoutRule("layout.embedding_bag", aten("embedding_bag"), embedding_bag),
    LayoutRule("layout.one_hot", aten("one_hot"), one_hot),
    LayoutRule("layout.index_select", aten("index_select"), index_select),
    LayoutRule("layout.take", aten("take"), "!k..., i... -> i..."),
    LayoutRule("layout.gather", aten("gather"), gather),
    LayoutRule("layout.take_along_dim", aten("take_along_dim"), take_along_dim),
    LayoutRule("layout.scatter", aten("scatter scatter_add scatter_reduce"), scatter, neutral=added),
    LayoutRule("layout.index_add", aten("index_add index_copy index_reduce index_fill"), index_add, neutral=added),
    LayoutRule("layout.index", aten("index _unsafe_index"), index),
    LayoutRule("layout.index_put", aten("index_put _unsafe_index_put"), index_put, neutral=added),
)
