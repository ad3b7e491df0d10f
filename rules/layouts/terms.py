"""Index maps from terms: sizes are read off the call, and what a rule does not allow to be sharded is whole.

A rule names the dimensions of each tensor argument and of the results. An index may be sharded where every result has
it; one that a result lacks must be whole unless the rule says that it is summed, and one that no operand has must be
whole, for no rank could make its own chunk of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import fx

from fxrewrite.spmd import Call, IndexMap, Size, Terms, is_broadcast, is_same_size

__all__ = [
    "Operands",
    "aligned",
    "broadcast_shape",
    "dim_of",
    "dims_of",
    "index_map",
    "indices",
    "insert",
    "names_of",
    "unread",
]

Operands: TypeAlias = "Mapping[str, Terms | Sequence[Terms]]"
"""Terms by argument name; for a list of tensors, the terms of each."""


def index_map(
    call: Call,
    operands: Operands,
    *results: Terms,
    whole: Iterable[str] = (),
    summed: Collection[str] = (),
    made: Collection[str] = (),
    sizes: Mapping[str, Size] | None = None,
) -> IndexMap | None:
    """The indices of `call`; a single result stands for all of them. None where ranks are not those of the terms.

    Args:
        operands: absent arguments may be named, and are skipped.
        whole: indices that must be whole although every result has them.
        summed: indices of operands that results lack because they are sums over them.
        made: indices that no operand has and of which a rank makes its own part, because sizes are stated.
        sizes: of indices that share a dimension; the others are read off the call.
    """
    of_operands = tuple(_in_schema_order(call, operands))
    of_results = results * len(call.result_shapes()) if len(results) == 1 else results
    shapes = [*map(call.shape, range(len(of_operands))), *call.result_shapes()]
    if any(len(terms) != len(shape) for terms, shape in zip((*of_operands, *of_results), shapes, strict=True)):
        return None
    found = dict(sizes or {})
    for terms, shape in zip((*of_operands, *of_results), shapes, strict=True):
        for dim, size in zip(terms, shape, strict=True):
            if len(dim) == 1:
                found.setdefault(dim[0], size)
    read = set[str]().union(*map(names_of, of_operands))
    given = [names_of(terms) for terms in of_results]
    lost = read.difference(set[str].intersection(*given)) if given else read
    new = set[str]().union(*given) - read
    return IndexMap(of_operands, of_results, found, frozenset({*whole, *(lost - set(summed)), *(new - set(made))}))


def _in_schema_order(call: Call, operands: Operands) -> Iterator[Terms]:
    for name, value in call.args.items():
        if isinstance(value, (list, tuple)):
            tensors = [item for item in value if _is_operand(call, item)]
            yield from operands[name] if tensors else ()  # pyright: ignore[reportReturnType]  # a list argument's
        elif _is_operand(call, value):
            yield operands[name]  # pyright: ignore[reportReturnType]  # a tensor argument's


def _is_operand(call: Call, value: object) -> bool:
    return isinstance(value, fx.Node) and value in call.operands


def indices(rank: int, name: str = "d") -> Terms:
    """d0 d1 d2 ..., an index for each dimension."""
    return tuple((f"{name}{dim}",) for dim in range(rank))


def unread(shape: Sequence[Size]) -> Terms:
    """The terms of an operand of which every rank needs all or nothing."""
    return ((),) * len(shape)


def insert(terms: Terms, at: int, *new: tuple[str, ...]) -> Terms:
    """`terms` with the dimensions `new` in front of dimension `at`."""
    return (*terms[:at], *new, *terms[at:])


def aligned(shape: Sequence[Size], full: Sequence[Size], terms: Terms) -> Terms:
    """The part of `terms`, which are of `full`, that an operand of `shape` has when it broadcasts from the right."""
    offset = len(full) - len(shape)
    return tuple(() if is_broadcast(size, full[offset + i]) else terms[offset + i] for i, size in enumerate(shape))


def broadcast_shape(*shapes: Sequence[Size]) -> list[Size]:
    """What shapes that broadcast from the right broadcast to."""
    full: list[Size] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for back, size in enumerate(reversed(shape), 1):
            if is_same_size(full[-back], 1):
                full[-back] = size
    return full


def names_of(terms: Iterable[tuple[str, ...]]) -> set[str]:
    """The indices that dimensions are made of."""
    return {index for dim in terms for index in dim}


def dim_of(call: Call, rank: int, name: str = "dim") -> int:
    """The argument `name` as a dimension counted from the front; a scalar takes 0 and -1, as if it had rank 1."""
    return call.args[name] % max(rank, 1)


def dims_of(call: Call, rank: int, name: str = "dim") -> list[int]:
    """The dimensions that the argument `name` lists; all where it is absent or empty."""
    dims = call.args.get(name)
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % max(rank, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
