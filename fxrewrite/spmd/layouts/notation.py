"""Index notation: which index each dimension of an operator's operands and results runs over.

    b... i, o i, +o? -> b... o              linear: rows of x are independent, the bias is added once
    b h !q d, b h !k d, b h !k v -> b h !q v    attention: q and k must be whole, heads are independent

An index that is in an operand and in a result can be sharded without communication. One that is only in operands is
contracted: sharding it makes the results partial sums. `!x` must be whole on every rank. `x...` is any number of
dimensions; `~x...` is any number in each operand, and they broadcast from the right. `x?` marks an operand that may be
absent. `+` marks an operand that is added once: where the result is a partial sum, one rank adds it. A dimension that
is made of two, as a view makes it and as texts write it, `(b s)`, is not read here: `view_map` and functions of a call
give such maps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

from fxrewrite.graph.sizes import Size, divide_exactly, is_broadcast, is_same_size, product, size_hint
from fxrewrite.spmd.placement import Placement, Replicate, Shard

Dim: TypeAlias = tuple[str, ...]
"""The indices that make up one dimension, outermost first; none for a broadcast dimension."""
Terms: TypeAlias = tuple[Dim, ...]
"""The dimensions of one tensor."""


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The sharded index; each of its `within` outer runs is cut into a chunk for every rank."""

    index: str
    within: Size = 1
    inner: Size = 1
    """Elements of an entry, where chunks are padded to whole entries."""
    uneven: bool = False
    """Whether the ranks need not divide it: the last chunks are padded."""
    before: Size = 0
    after: Size = 0
    """Entries beside those of the index, where chunks are those of a longer dimension, of which it is a section."""


@dataclass(frozen=True, slots=True)
class Section:
    """The result is the entries of one dimension of the first operand, without so many at its start and at its end."""

    dim: int
    before: Size
    after: Size


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result is entries of a dimension of the first operand, `self`, whose numbers an argument has, or one entry of
    the `dim` that a call names."""

    ids: str
    """The argument ..."""
    place: int | None = None
    """... or the place in it, where it is a list."""
    after: int = 0
    """Dimensions of the result after those of the numbers, which broadcast to the others."""


@dataclass(frozen=True, slots=True)
class IndexMap:
    """The indices of one node: of each tensor operand (in schema order) and of each result."""

    operands: tuple[Terms, ...]
    results: tuple[Terms, ...]
    sizes: Mapping[str, Size]
    whole: frozenset[str] = frozenset()
    """Indices that every rank must hold whole."""
    added: frozenset[int] = frozenset()
    """Operands that are added once, by position: where a result is a partial sum, they are one, too."""
    in_one_run: frozenset[str] = frozenset()
    """Indices of which a rank's chunk must be one run of entries, as where ranks count them by their numbers."""
    beside: Mapping[str, int] = field(default_factory=dict[str, int])
    """Indices of which a rank reads so many entries of the first operand beside its chunk, one run of entries, which
    other ranks have."""
    section: Section | None = None
    """What the only result is of the only operand, where it is a section of it. Its index must be whole, unless the
    result stays in the chunks of the operand."""
    lookups: Mapping[int, Lookup] = field(default_factory=dict[int, Lookup])
    """Dimensions of the first operand whose entries are looked up: a rank can look up those of its chunk."""

    def must_join(self, part: IndexPart) -> bool:
        """Whether an operator cannot run on such chunks: their index must be whole, or one run on each rank."""
        return part.index in self.whole or self.is_split(part)

    def is_split(self, part: IndexPart) -> bool:
        """Whether a rank's chunk is in several runs of an index that must be in one, or a section's."""
        is_one_run = is_same_size(part.within, 1) and all(is_same_size(n, 0) for n in (part.before, part.after))
        return (part.index in self.in_one_run or part.index in self.beside) and not is_one_run

    def locate(self, terms: Terms, placement: Placement) -> IndexPart | None:
        """The index of `terms` that `placement` shards, or None where it falls between indices."""
        if not isinstance(placement, Shard):
            return None
        before: Size = 1
        for index in terms[placement.dim]:
            within = divide_exactly(placement.outer, before)
            if within is None:
                return None
            size = self.sizes[index]
            if not is_same_size(within, size) and divide_exactly(within, size) is None:
                below = self._below(terms[placement.dim], index) if placement.uneven else 1
                inner = divide_exactly(placement.inner, below)
                if inner is None or divide_exactly(size, within) is None:
                    return None
                return IndexPart(index, within, inner, placement.uneven, placement.before, placement.after)
            before = product((before, size))
        return None

    def _below(self, dim: Dim, index: str) -> Size:
        return product(self.sizes[other] for other in dim[dim.index(index) + 1 :])

    def placement(self, terms: Terms, part: IndexPart) -> Placement:
        """The placement of a tensor over `terms` when `part` is sharded; replicated where it lacks that index."""
        for dim, indices in enumerate(terms):
            if part.index in indices:
                before = product(self.sizes[index] for index in indices[: indices.index(part.index)])
                inner = product((part.inner, self._below(indices, part.index))) if part.uneven else 1
                outer = product((before, part.within))
                return Shard(dim, outer, inner, part.uneven, part.before, part.after)
        return Replicate()

    def has(self, terms: Terms, index: str) -> bool:
        return any(index in indices for indices in terms)


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed notation; `bind` fills in the sizes and the repeated dimensions of one call."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    optional: frozenset[int]
    added: frozenset[int]
    whole: frozenset[str]
    broadcast: frozenset[str]

    def bind(
        self, shapes: Sequence[Sequence[Size] | None], result_shapes: Sequence[Sequence[Size]] = ()
    ) -> IndexMap | None:
        """The indices of a call whose operands have `shapes` (None: absent); None where the ranks do not fit.

        A dimension of size 1 broadcasts if its index is longer in another operand. An operand that is added may lack
        first dimensions. An index that results alone have must be whole: no rank could compute a chunk of it from
        chunks of operands.
        """
        absent = [None] * (len(self.operands) - len(shapes))
        present = {position: shape for position, shape in enumerate((*shapes, *absent)) if shape is not None}
        required = set(range(len(self.operands))) - self.optional
        if len(shapes) > len(self.operands) or not required <= present.keys():
            return None
        spread, own = dict[str, int](), dict[int, int]()
        for position, shape in present.items():
            names = self.operands[position]
            repeated = [name for name in names if name.endswith("...")]
            missing = len(shape) - (len(names) - len(repeated))
            if repeated and missing >= 0:
                known = spread.get(repeated[0], missing)
                spread[repeated[0]], own[position] = max(known, missing), missing
                fits = known == missing or repeated[0] in self.broadcast
            else:
                fits = missing == 0 or (missing < 0 and position in self.added)
            if not fits:
                return None
        operands = [(_spread(self.operands[i], spread, own.get(i)), shape) for i, shape in present.items()]
        operands = [(names[len(names) - len(shape) :], shape) for names, shape in operands]
        sizes: dict[str, Size] = {}
        for name, size in (pair for names, shape in operands for pair in zip(names, shape, strict=True)):
            if name not in sizes or is_same_size(sizes[name], 1):
                sizes[name] = size
        terms = tuple(
            tuple(() if is_broadcast(size, sizes[name]) else (name,) for name, size in zip(names, shape, strict=True))
            for names, shape in operands
        )
        results = [_spread(names, spread) for names in self.results]
        whole = {name for names in self.whole for name in _spread((names,), spread)}
        for names, shape in zip(results, result_shapes, strict=False):
            for name, size in zip(names, shape, strict=False):  # a result that is no tensor has no shape
                if name not in sizes:
                    sizes[name] = size
                    whole.add(name)
        of_results = tuple(tuple((name,) for name in names) for names in results)
        added = frozenset(at for at, position in enumerate(present) if position in self.added)
        return IndexMap(terms, of_results, sizes, frozenset(whole), added)


def _spread(names: tuple[str, ...], spread: Mapping[str, int], own: int | None = None) -> list[str]:
    """The names, of which one that is repeated is that of as many dimensions as it stands for, or of the last `own`."""
    expanded: list[str] = []
    for name in names:
        if name.endswith("..."):
            count = spread.get(name, 0)
            expanded += [f"{name[:-3]}{i}" for i in range(count - (count if own is None else own), count)]
        else:
            expanded.append(name)
    return expanded


@cache
def parse(text: str) -> Notation:
    """The notation of `text`; ValueError names the part that cannot be read."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"index notation {text!r}: expected operands '->' results")
    operands, optional, added = list[tuple[str, ...]](), set[int](), set[int]()
    marked = defaultdict[str, set[str]](set)
    for position, part in enumerate(map(str.strip, left.split(","))):
        if part.startswith("+"):
            added.add(position)
        if part.endswith("?"):
            optional.add(position)
        operands.append(_names(part.removeprefix("+").removesuffix("?").strip(), marked, text))
    results = tuple(_names(part.strip(), marked, text) for part in right.split(","))
    return Notation(
        text,
        tuple(operands),
        results,
        optional=frozenset(optional),
        added=frozenset(added),
        whole=frozenset(marked["!"]),
        broadcast=frozenset(marked["~"]),
    )


def _names(part: str, marked: dict[str, set[str]], text: str) -> tuple[str, ...]:
    """The names of the dimensions of one tensor; what is before a name, `!` or `~`, says what it is marked as."""
    names: list[str] = []
    for word in part.split():
        if not re.fullmatch(r"!?[A-Za-z]+(\.\.\.)?|~[A-Za-z]+\.\.\.", word):
            raise ValueError(f"index notation {text!r}: {word!r} is not an index such as s, !s, b... or ~b...")
        names.append(word.lstrip("!~"))
        marked[word.removesuffix(names[-1])].add(names[-1])
    return tuple(names)


def view_map(before: Sequence[Size], after: Sequence[Size]) -> IndexMap:
    """The indices of a view from shape `before` to shape `after`: the coarsest factors that both are made of.

    A run of dimensions without common factors (6, 4 -> 4, 6) becomes one index that must be whole.
    """
    sizes: dict[str, Size] = {}
    whole: set[str] = set()
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    queue_l = [(dim, size) for dim, size in enumerate(before) if not is_same_size(size, 1)]
    queue_r = [(dim, size) for dim, size in enumerate(after) if not is_same_size(size, 1)]

    def new_index(size: Size) -> str:
        name = f"v{len(sizes)}"
        sizes[name] = size
        return name

    while queue_l and queue_r:
        (i, a), (j, b) = queue_l[0], queue_r[0]
        if is_same_size(a, b):
            index = new_index(a)
            queue_l.pop(0)
            queue_r.pop(0)
        elif (rest := divide_exactly(a, b)) is not None:
            index = new_index(b)
            queue_l[0] = (i, rest)
            queue_r.pop(0)
        elif (rest := divide_exactly(b, a)) is not None:
            index = new_index(a)
            queue_r[0] = (j, rest)
            queue_l.pop(0)
        else:
            index = new_index(_block(queue_l, queue_r, left, right, f"v{len(sizes)}"))
            whole.add(index)
            continue
        left[i].append(index)
        right[j].append(index)
    return IndexMap((tuple(map(tuple, left)),), (tuple(map(tuple, right)),), sizes, frozenset(whole))


def _block(
    queue_l: list[tuple[int, Size]],
    queue_r: list[tuple[int, Size]],
    left: list[list[str]],
    right: list[list[str]],
    index: str,
) -> Size:
    """Take the dimensions without a common factor off both queues; their size. One index stands for all of them."""
    a: Size = 1
    b: Size = 1
    while queue_l or queue_r:
        if queue_l and (not queue_r or size_hint(a) <= size_hint(b)):
            dim, size = queue_l.pop(0)
            left[dim].append(index)
            a = a * size
        else:
            dim, size = queue_r.pop(0)
            right[dim].append(index)
            b = b * size
        if is_same_size(a, b):
            break
    return a
