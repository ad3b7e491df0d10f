"""Builds index maps from terms: sizes come from the call, and every index that may not be sharded becomes whole.

A rule names the dimensions of each tensor argument and of the results. An index may be sharded if every result has it.
An index that a result lacks must be whole, unless the rule says that it is summed. An index that no operand has must be
whole, because no rank could make its own chunk of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import fx

from fxrewrite.spmd import Call, IndexMap, Lookup, Size, Terms, is_broadcast, is_same_size

Operands: TypeAlias = "Mapping[str, Terms | Sequence[Terms]]"
"""Terms by argument name; for a list of tensors, the terms of each tensor."""


def index_map(
    call: Call,
    operands: Operands,
    *results: Terms,
    whole: Iterable[str] = (),
    summed: Collection[str] = (),
    made: Collection[str] = (),
    added: Sequence[Any] = (),
    sizes: Mapping[str, Size] | None = None,
) -> IndexMap | None:
    """Builds the index map of `call`; a single result applies to all results. None if terms and ranks do not match.

    Args:
        operands: terms by argument name; absent arguments may be named, and are skipped.
        whole: indices that must be whole although every result has them.
        summed: indices that results lack because they are sums over them.
        made: indices that no operand has, but of which a rank makes its own part, because their sizes are stated.
        added: arguments that are added once, where the result is a sum.
        sizes: sizes of indices that share a dimension; the others come from the call.
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
    must = frozenset({*whole, *(lost - set(summed)), *(new - set(made))})
    once = frozenset(at for at, operand in enumerate(call.operands) if any(operand is value for value in added))
    return IndexMap(of_operands, of_results, found, must, once)


def with_lookups(found: IndexMap | None, lookups: Mapping[int, Lookup]) -> IndexMap | None:
    """Returns the map of a call that looks up entries of these dimensions: a rank can look up what its chunk has.

    A number that no rank has then gives 0; torch fails on it.
    """
    return None if found is None else replace(found, lookups=lookups)


def _in_schema_order(call: Call, operands: Operands) -> Iterator[Terms]:
    for name, value in call.args.items():
        if isinstance(value, (list, tuple)):
            tensors = [item for item in value if _is_operand(call, item)]
            yield from operands[name] if tensors else ()  # pyright: ignore[reportReturnType]  # a list argument's
        elif _is_operand(call, value):
            yield operands[name]  # pyright: ignore[reportReturnType]  # a tensor argument's


def _is_operand(call: Call, value: object) -> bool:
    return isinstance(value, fx.Node) and value in call.operands


def aten(names: str) -> tuple[str, ...]:
    """Returns the keys of ATen operators, of their names."""
    return tuple(f"aten::{name}" for name in names.split())


def indices(rank: int, name: str = "d") -> Terms:
    """Returns d0 d1 d2 ..., one index per dimension."""
    return tuple((f"{name}{dim}",) for dim in range(rank))


def unread(shape: Sequence[Size]) -> Terms:
    """Returns terms without indices, for an operand that every rank needs in full, or does not read."""
    return ((),) * len(shape)


def insert(terms: Terms, at: int, *new: tuple[str, ...]) -> Terms:
    """Returns `terms` with the dimensions `new` inserted before dimension `at`."""
    return (*terms[:at], *new, *terms[at:])


def replaced(terms: Terms, at: int, *new: tuple[str, ...]) -> Terms:
    """Returns `terms` with the dimensions `new`, or none, in the place of dimension `at`."""
    return (*terms[:at], *new, *terms[at + 1 :])


def aligned(shape: Sequence[Size], full: Sequence[Size], terms: Terms) -> Terms:
    """Returns the terms of an operand of `shape` that broadcasts from the right to `full`, whose terms are `terms`."""
    offset = len(full) - len(shape)
    return tuple(() if is_broadcast(size, full[offset + i]) else terms[offset + i] for i, size in enumerate(shape))


def broadcast_shape(*shapes: Sequence[Size]) -> list[Size]:
    """Returns the shape that these shapes broadcast to, aligned from the right."""
    full: list[Size] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for back, size in enumerate(reversed(shape), 1):
            if is_same_size(full[-back], 1):
                full[-back] = size
    return full


def names_of(terms: Iterable[tuple[str, ...]]) -> set[str]:
    """Returns the indices in the terms."""
    return {index for dim in terms for index in dim}


def dim_of(call: Call, rank: int, name: str = "dim") -> int:
    """Returns the argument `name` as a non-negative dimension; a 0-dim tensor accepts 0 and -1, as if it had rank 1."""
    return call.args[name] % max(rank, 1)


def dims_of(call: Call, rank: int, name: str = "dim") -> list[int]:
    """Returns the dimensions that the argument `name` lists; all if it is absent or empty."""
    dims = call.args.get(name)
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % max(rank, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
