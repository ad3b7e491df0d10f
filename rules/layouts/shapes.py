"""Operators that only move data: views, permutes, joins and cuts."""

from typing import Any

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, is_broadcast, is_same_size, view_map

__all__ = ["LAYOUTS"]


def _terms(rank: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"d{dim}",) for dim in range(rank))


def _sizes(call: Call) -> dict[str, Size]:
    return {f"d{dim}": size for dim, size in enumerate(call.shape())}


def view(call: Call) -> IndexMap:
    """a view keeps the factors that both shapes are made of: (b s) d -> b s d"""
    return view_map(call.shape(), call.result_shapes()[0])


def expand(call: Call) -> IndexMap:
    """new and size-1 dimensions are repeated, the others stay"""
    before, after = call.shape(), call.result_shapes()[0]
    offset = len(after) - len(before)
    operand = tuple(
        () if is_broadcast(size, after[offset + dim]) else (f"d{offset + dim}",) for dim, size in enumerate(before)
    )
    sizes = {f"d{dim}": size for dim, size in enumerate(after)}
    return IndexMap((operand,), (_terms(len(after)),), sizes)


def transpose(call: Call) -> IndexMap:
    """two dimensions change places"""
    rank = len(call.shape())
    order = list(range(rank))
    i, j = (rank - 2, rank - 1) if "dim0" not in call.args else (call.dim("dim0", rank), call.dim("dim1", rank))
    if rank > 1:
        order[i], order[j] = order[j], order[i]
    terms = _terms(rank)
    return IndexMap((terms,), (tuple(terms[dim] for dim in order),), _sizes(call))


def permute(call: Call) -> IndexMap:
    """dimensions in a new order"""
    terms = _terms(len(call.shape()))
    return IndexMap((terms,), (tuple(terms[dim] for dim in call.args["dims"]),), _sizes(call))


def unsqueeze(call: Call) -> IndexMap:
    """a dimension of size 1 is put in"""
    terms = _terms(len(call.shape()))
    at = call.dim("dim", len(terms) + 1)
    return IndexMap((terms,), ((*terms[:at], (), *terms[at:]),), _sizes(call))


def select(call: Call) -> IndexMap:
    """`dim` must be whole and goes away"""
    terms = _terms(len(call.shape()))
    at = call.dim("dim", len(terms))
    return IndexMap((terms,), ((*terms[:at], *terms[at + 1 :]),), _sizes(call), frozenset(terms[at]))


def cut(call: Call) -> IndexMap:
    """cuts along `dim`, which must be whole unless nothing is cut off"""
    shape = call.shape()
    at = call.dim("dim", len(shape))
    terms = _terms(len(shape))
    # other operators state the length that they keep, and a whole slice is only left where it cannot be dropped
    kept = call.key == "aten::slice" and is_same_size(call.result_shapes()[0][at], shape[at])
    result = (*terms[:at], terms[at] if kept else (f"cut{at}",), *terms[at + 1 :])
    sizes = {**_sizes(call), f"cut{at}": call.result_shapes()[0][at]}
    blocked = frozenset[str]() if kept else frozenset({f"d{at}", f"cut{at}"})
    return IndexMap((terms,), (result,) * len(call.result_shapes()), sizes, blocked)


def unbind(call: Call) -> IndexMap:
    """`dim` must be whole and goes away, one result for each of its entries"""
    terms = _terms(len(call.shape()))
    at = call.dim("dim", len(terms))
    result = (*terms[:at], *terms[at + 1 :])
    return IndexMap((terms,), (result,) * len(call.result_shapes()), _sizes(call), frozenset(terms[at]))


def cat(call: Call) -> IndexMap | None:
    """joins along `dim`, which must be whole"""
    shape = call.shape()
    if any(len(call.shape(i)) != len(shape) for i in range(len(call.operands))):
        return None
    at = call.dim("dim", len(shape))
    terms = _terms(len(shape))
    operands = tuple((*terms[:at], (f"j{i}",), *terms[at + 1 :]) for i in range(len(call.operands)))
    joined = (*terms[:at], ("joined",), *terms[at + 1 :])
    sizes = {**_sizes(call), "joined": call.result_shapes()[0][at]}
    sizes |= {f"j{i}": call.shape(i)[at] for i in range(len(call.operands))}
    blocked = frozenset({"joined", *(f"j{i}" for i in range(len(call.operands)))})
    return IndexMap(operands, (joined,), sizes, blocked)


def stack(call: Call) -> IndexMap:
    """a new dimension over the operands"""
    terms = _terms(len(call.shape()))
    at = call.dim("dim", len(terms) + 1)
    sizes = {**_sizes(call), "stacked": len(call.operands)}
    result = (*terms[:at], ("stacked",), *terms[at:])
    return IndexMap((terms,) * len(call.operands), (result,), sizes, frozenset({"stacked"}))


def pad(call: Call) -> IndexMap:
    """the padded dimensions must be whole; padding by 1 and -1 is a shift, not nothing"""
    after = call.result_shapes()[0]
    terms = _terms(len(after))
    amounts = list(call.args["pad"])
    kept = [not _pads(amounts[2 * place : 2 * place + 2]) for place in reversed(range(len(after)))]
    result = tuple(terms[dim] if keep else (f"padded{dim}",) for dim, keep in enumerate(kept))
    sizes = {**_sizes(call), **{f"padded{dim}": size for dim, size in enumerate(after)}}
    blocked = {name for dim, keep in enumerate(kept) if not keep for name in (f"d{dim}", f"padded{dim}")}
    return IndexMap((terms,), (result,), sizes, frozenset(blocked))


def _pads(pair: list[Any]) -> bool:
    return any(not isinstance(amount, int) or amount for amount in pair)


LAYOUTS = (
    LayoutRule("layout.reshape", ("aten::reshape",), view, shape_arg="shape"),
    LayoutRule("layout.unflatten", ("aten::unflatten",), view, shape_arg="sizes"),
    LayoutRule("layout.flatten", ("aten::flatten",), view),
    LayoutRule("layout.expand", ("aten::expand",), expand, shape_arg="size"),
    LayoutRule("layout.transpose", ("aten::transpose", "aten::t", "aten::mT"), transpose),
    LayoutRule("layout.permute", ("aten::permute",), permute),
    LayoutRule("layout.unsqueeze", ("aten::unsqueeze",), unsqueeze),
    LayoutRule("layout.select", ("aten::select",), select),
    LayoutRule(
        "layout.cut", ("aten::slice", "aten::narrow", "aten::split", "aten::split_with_sizes", "aten::chunk"), cut
    ),
    LayoutRule("layout.unbind", ("aten::unbind",), unbind),
    LayoutRule("layout.cat", ("aten::cat",), cat),
    LayoutRule("layout.stack", ("aten::stack",), stack),
    LayoutRule("layout.pad", ("aten::pad", "aten::constant_pad_nd"), pad),
)
