"""Operators that move entries: views, permutations, slices, parts, concatenations and repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from sympy import Integer

from fxrewrite.prove.arithmetic import cast
from fxrewrite.prove.call import Meaning, SymbolicCall
from fxrewrite.prove.indices import Expr
from fxrewrite.prove.reals import apply, where
from fxrewrite.prove.value import At, SymbolicTensor, UnknownError


def reshape(call: SymbolicCall) -> SymbolicTensor:
    """Returns the entries of the first operand in another shape, in the same order."""
    x, shape = call.first, call.shape
    return call.value(lambda i: x.at(call.indices.reshaped(i, shape, x.shape)), shape)


# Permutations


def _permuted(call: SymbolicCall, order: Sequence[int]) -> SymbolicTensor:
    x = call.first
    return call.value(lambda i: x.at([i[order.index(dim)] for dim in range(len(order))]), call.shape)


def _permute(call: SymbolicCall) -> SymbolicTensor:
    rank = len(call.first.shape)
    return _permuted(call, [dim % max(rank, 1) for dim in call.args["dims"]])


def _transpose(call: SymbolicCall) -> SymbolicTensor:
    order = list(range(len(call.first.shape)))
    if order:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _transpose_matrices(call: SymbolicCall) -> SymbolicTensor:
    order = list(range(len(call.first.shape)))
    return _permuted(call, [*order[:-2], *order[:-3:-1]])


def _flip(call: SymbolicCall) -> SymbolicTensor:
    x = call.first
    flipped = {dim % max(len(x.shape), 1) for dim in call.args["dims"]}
    return call.value(
        lambda i: x.at([x.shape[n] - 1 - own if n in flipped else own for n, own in enumerate(i)]), x.shape
    )


# Slices and parts


def _select(call: SymbolicCall) -> SymbolicTensor:
    x, dim = call.first, call.dim()
    at = call.arithmetic.size(call.args["index"])
    at = at if call.indices.is_nonnegative(at) else at + x.shape[dim]
    if call.indices.is_below(at, x.shape[dim]) is not True or not call.indices.is_nonnegative(at):
        raise UnknownError(f"it is not known whether entry {at} is one of {x.shape[dim]}")
    return call.value(lambda i: x.at([*i[:dim], at, *i[dim:]]))


def _slice(call: SymbolicCall) -> SymbolicTensor:
    """Returns the entries of `slice` or `narrow`."""
    x, dim, step = call.first, call.dim(), call.args.get("step", 1)
    if not isinstance(step, int) or isinstance(call.args["start"], SymbolicTensor):
        raise UnknownError("data, or a size, decide which entries a slice has")
    return call.value(_shifted(x, dim, _start(call, x.shape[dim]), step))


def _start(call: SymbolicCall, size: Expr) -> Expr:
    """The first entry of a slice of a dimension, counted from 0."""
    given, indices = call.args["start"], call.indices
    start = Integer(0) if given is None else call.arithmetic.size(given)
    if indices.is_nonnegative(start):
        return start
    if not indices.is_nonnegative(-start - 1):
        raise UnknownError(f"it is not known whether {start} counts from the end")
    start = start + size
    if indices.is_nonnegative(start):
        return start
    if indices.is_nonnegative(-start):
        return Integer(0)
    raise UnknownError(f"it is not known whether {start} is negative")


def _shifted(x: SymbolicTensor, dim: int, start: Expr, step: int = 1) -> At:
    """Entries from `start` on, every `step`-th one."""
    return lambda i: x.at([*i[:dim], start + i[dim] * step, *i[dim + 1 :]])


def _split(call: SymbolicCall) -> list[SymbolicTensor]:
    x, dim = call.first, call.dim()
    parts: list[SymbolicTensor] = []
    start: Expr = Integer(0)
    for number, part in enumerate(call.result):
        shape = call.arithmetic.shape(part)
        parts.append(SymbolicTensor(shape, part.dtype, _shifted(x, dim, start), f"{call.text()}[{number}]"))
        start = start + shape[dim]
    return parts


def _unbind(call: SymbolicCall) -> list[SymbolicTensor]:
    x, dim = call.first, call.dim()

    def part(number: int) -> SymbolicTensor:
        shape = call.arithmetic.shape(call.result[number])
        return SymbolicTensor(
            shape, x.dtype, lambda i: x.at([*i[:dim], Integer(number), *i[dim:]]), f"{call.text()}[{number}]"
        )

    return [part(number) for number in range(len(call.result))]


# Concatenations and repetitions


def _cat(call: SymbolicCall) -> SymbolicTensor:
    tensors, rank = call.args["tensors"], len(call.shape)
    kept = [x for x in tensors if len(x.shape) == rank]  # torch skips empty tensors of one dimension
    if any(x.shape != (Integer(0),) for x in tensors if x not in kept):
        raise UnknownError("cat of different ranks")
    dim = call.args["dim"] % max(rank, 1)
    return call.value(lambda i: _entry_of_cat(call, kept, dim, i, Integer(0)))


def _entry_of_cat(
    call: SymbolicCall, tensors: Sequence[SymbolicTensor], dim: int, index: Sequence[Expr], start: Expr
) -> Expr:
    """The entry at an index of tensors of which the first one starts at `start`."""
    first, rest = tensors[0], tensors[1:]
    inner = [*index[:dim], index[dim] - start, *index[dim + 1 :]]

    def own() -> Expr:
        return cast(first.at(inner), first.dtype, call.dtype)

    def other() -> Expr:
        return _entry_of_cat(call, rest, dim, index, start + first.shape[dim])

    if not rest:
        return own()
    is_own = call.indices.is_below(index[dim] - start, first.shape[dim])
    if is_own is None:
        outside = other()
        return where(apply("is_below", sympy.expand(index[dim] - start), first.shape[dim]), own(), outside)
    return own() if is_own else other()


def _stack(call: SymbolicCall) -> SymbolicTensor:
    dim = call.args["dim"] % len(call.shape)

    def as_part(x: SymbolicTensor) -> SymbolicTensor:
        shape = (*x.shape[:dim], Integer(1), *x.shape[dim:])
        return SymbolicTensor(shape, x.dtype, lambda i: x.at([*i[:dim], *i[dim + 1 :]]), x.name)

    parts = list(map(as_part, call.args["tensors"]))
    return call.value(lambda i: _entry_of_cat(call, parts, dim, i, Integer(0)))


def _repeat_interleave(call: SymbolicCall) -> Any:
    x, repeats = call.args.get("self"), call.args["repeats"]
    if not isinstance(x, SymbolicTensor) or isinstance(repeats, SymbolicTensor):
        return NotImplemented
    count = call.arithmetic.size(repeats)
    if call.args["dim"] is None:
        flat = sympy.prod(x.shape)
        return call.value(
            lambda i: x.at(call.indices.reshaped([call.indices.divided(i[0], count)[0]], [flat], x.shape))
        )
    dim = call.dim()
    return call.value(lambda i: x.at([*i[:dim], call.indices.divided(i[dim], count)[0], *i[dim + 1 :]]))


def _repeat(call: SymbolicCall) -> SymbolicTensor:
    x = call.first

    def at(index: Sequence[Expr]) -> Expr:
        own = index[len(index) - len(x.shape) :]
        return x.at([call.indices.divided(i, size)[1] for i, size in zip(own, x.shape, strict=True)])

    return call.value(at)


VIEWS: Mapping[str, Meaning] = {
    **dict.fromkeys(
        ("expand", "expand_as", "broadcast_to"), lambda call: call.value(lambda i: call.read(call.first, i))
    ),
    "permute": _permute,
    "transpose": _transpose,
    **dict.fromkeys(("t", "mT"), _transpose_matrices),
    "flip": _flip,
    "select": _select,
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "repeat_interleave": _repeat_interleave,
    "repeat": _repeat,
}
"""Operators that move entries, besides those that `ops.traits` knows to be reshapes."""
