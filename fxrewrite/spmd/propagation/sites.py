"""What placements are stated of (`place`), and whether a parameter or an input of some shape can be held so.

A glob is matched against qualified names as in `named_parameters`; `{a,b}` is one of several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal, TypeAlias, TypeVar

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.modules import alternatives, matches_glob
from fxrewrite.graph.sizes import Size, divide_exactly, require_divisible, size_hint
from fxrewrite.spmd.placement import (
    AnyPlacement,
    Axis,
    MisstatedError,
    Partial,
    Placement,
    Replicate,
    Shard,
    Zigzag,
    as_placement,
    check_placement,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter that ranks hold in shards and gather before any use; its gradient is reduced and scattered.

    Where the ranks do not divide the dimension, shards are uneven: of `ceil(S / P)` entries, and of fewer on the last
    ranks, as those of a DTensor. With `or_whole`, a parameter that cannot be held so is held whole: it has no such
    dimension, or the ranks divide neither it nor an inner axis's shards of it. With `kept`, what was gathered stays
    until the backward pass has read it; otherwise it is gathered again.

    Raises:
        MisstatedError: `held` is not a Shard.
    """

    held: AnyPlacement
    or_whole: bool = False
    kept: bool = False

    def __post_init__(self) -> None:
        if not isinstance(as_placement(self.held), Shard):
            raise MisstatedError(f"Stored({self.held!r}): what is stored in shards is stated as Stored(Shard(dim))")

    def __str__(self) -> str:
        gathered = f"gathered before use{' and kept for the backward pass' * self.kept}"
        return f"{as_placement(self.held)}, {gathered}{' (whole where it does not fit)' * self.or_whole}"


Placed: TypeAlias = "AnyPlacement | Stored | Zigzag"
"""What can be stated of a site."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a placement is stated of; made by `param`, `inputs`, `outputs`, `module_input` and `module_output`."""

    kind: Literal["param", "inputs", "outputs", "module_input", "module_output"]
    glob: str
    optional: bool = False
    but: str = ""

    def __post_init__(self) -> None:
        for glob in (self.glob, self.but):
            if not isinstance(glob, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise FxRewriteError(f"{self.kind}({glob!r}): a glob is a text, as in param('*.up.weight')")

    def matches(self, name: str) -> bool:
        """Whether the placement is stated of what has this qualified name."""
        return matches_glob(name, self.glob) and not (self.but and matches_glob(name, self.but))

    def without(self, names: Iterable[str], kept: Collection[str]) -> Site:
        """The site that does not match these names, by their last parts where no name that is kept has one of those."""
        globs = list(alternatives(self.but)) if self.but else []
        for name in names:
            glob = f"*.{name.rpartition('.')[2]}"
            fits = matches_glob(name, glob) and not any(matches_glob(other, glob) for other in kept)
            globs.append(glob if fits else name)
        globs = list(dict.fromkeys(globs))
        return replace(self, but=globs[0] if len(globs) == 1 else f"{{{','.join(globs)}}}")

    def __str__(self) -> str:
        but = f", but={self.but!r}" if self.but else ""
        return f"{self.kind}({self.glob!r}{but}{', optional=True' * self.optional})"


def param(glob: str, *, but: str = "", optional: bool = False) -> Site:
    """Parameters and buffers by qualified name, without those that the glob `but` matches.

    A glob that matches nothing is an error, unless it is `optional`: what not every model has, or what a tied one has
    under another name.
    """
    return Site("param", glob, optional, but)


def inputs(glob: str, *, optional: bool = False) -> Site:
    """Tensors that the model is called with, by the name of the argument; with `optional` the glob may match none.

    Where ranks hold them in chunks, each rank calls the model with its own: see `shard_parameters`.
    """
    return Site("inputs", glob, optional)


def outputs(position: int) -> Site:
    """The output at this position, outputs flattened, counted from the front."""
    if type(position) is not int or position < 0:
        raise MisstatedError(f"outputs({position!r}): a position is an int, counted from the front, from 0")
    return Site("outputs", str(position))


def module_input(glob: str, *, optional: bool = False) -> Site:
    """The activations that modules read, by the modules' qualified name; with `optional` the glob may match nothing."""
    return Site("module_input", glob, optional)


def module_output(glob: str, *, optional: bool = False) -> Site:
    """The values that modules compute and that others read, by the modules' qualified name; with `optional` the glob
    may match nothing."""
    return Site("module_output", glob, optional)


class NothingMatchesError(MisstatedError):
    """A glob that matches nothing of the graph."""


def matching(site: Site, known: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    found = [name for name in known if site.matches(name)]
    if not found and not site.optional:
        near = get_close_matches(site.glob, known, n=3, cutoff=0.3) or list(known)[:3]
        said = f"{site} matches nothing; the graph has {', '.join(map(repr, near)) or 'none'}"
        if site.kind == "inputs":
            said += " (a tensor that is passed twice has its first name: pass labels=ids.clone(), for example)"
        elif site.kind == "param":
            said += " (tied parameters have one name, as a tied head that of the embedding)"
        raise NothingMatchesError(said)
    yield from ((name, known[name]) for name in found)


def check_matches(name: str, sites: Iterable[Site], known: Iterable[str], where: str) -> None:
    """Raise FxRewriteError if every site is optional and none matches: what is stated is of another model."""
    sites, known = list(sites), list(known)
    named = [site for site in sites if site.kind != "outputs"]
    if named and named == sites and not any(site.matches(one) for site in named for one in known):
        raise MisstatedError(
            f"{name}: nothing of the {where} matches what is stated, {named[0]} for example; it has "
            f"{', '.join(map(repr, known[:3]))} ...: state the parallelism of the module that is compiled"
        )


def held_placement(
    shape: Sequence[Size], placed: Placed, axis: Axis, of: str, *, inner: Iterable[AnyPlacement] = ()
) -> Placement:
    """How ranks hold a parameter of this shape, of which that is stated.

    Args:
        shape: what the ranks of inner axes have left of it.
        placed: what is stated.
        axis: whose ranks they are.
        of: whose placement it is, for errors.
        inner: how ranks of inner axes hold the parameter.

    Raises:
        FxRewriteError: the placement does not fit the shape.
    """
    if isinstance(placed, Zigzag):
        raise MisstatedError(f"{of}: only inputs can be held as {placed}; state Shard({placed.dim})")
    placement: Placement = as_placement(placed.held if isinstance(placed, Stored) else placed)
    if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.uneven):
        raise MisstatedError(f"{of}: an input cannot be held as {placement}; Shard(dim) and Replicate() can be")
    if isinstance(placement, Shard):
        cut = [held for held in map(as_placement, inner) if isinstance(held, Shard) and held.dim == placement.dim]
        is_ragged = any(held.uneven for held in cut)  # `shape` has its padding, and the last ranks hold less
        if isinstance(placed, Stored) and (is_ragged or not _fits(shape, placement, axis)):
            if not cut and placement.dim in range(len(shape)) and placement == Shard(placement.dim):
                return replace(placement, uneven=True)
            if placed.or_whole:
                return Replicate()
        if is_ragged:
            raise MisstatedError(f"{of}: ranks of an inner axis hold uneven shards of dimension {placement.dim}")
    check_fits(shape, placement, axis, of)
    return placement


def check_fits(shape: Sequence[Size], placement: Placement, axis: Axis, of: str) -> None:
    check_placement(placement, shape, of)
    if not _fits(shape, placement, axis):
        entries = _entries(shape, placement)
        do = [n for n in range(2, _MOST_RANKS + 1) if isinstance(entries, int) and n <= entries and entries % n == 0]
        said = f"; {', '.join(map(str, do))} do" if do else ""
        raise FxRewriteError(f"{of} {[size_hint(n) for n in shape]}: {axis} ranks do not divide {placement}{said}")


def _fits(shape: Sequence[Size], placement: Placement, axis: Axis) -> bool:
    if not isinstance(placement, Shard):
        return True
    entries = _entries(shape, placement)
    return entries is not None and (placement.uneven or require_divisible(entries, axis.size))


def _entries(shape: Sequence[Size], placement: Placement) -> Size | None:
    """What ranks cut of each run of a dimension; None where there is none, or where its runs are not of one length."""
    if not isinstance(placement, Shard) or placement.dim not in range(len(shape)):
        return None
    return divide_exactly(shape[placement.dim], placement.outer * placement.inner)


_MOST_RANKS = 64
"""Up to which numbers of ranks are said to fit."""
