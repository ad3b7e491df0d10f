"""Random choices of a sample, and what a sampler draws with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from fxrewrite.verify.tensors import PLAINER, Contents, InputSpec, MemoryLayout

T = TypeVar("T")
_MOST = 8
_SMALL, _LARGER = (1, 2, 3, 5), (4, 6, 7, _MOST)
_LONG = (41, 520, 16, 130, 64, 257, 9, 48, 33, 1030)
"""Long sizes by turns: beyond the vectors of a CPU kernel, and beyond blocks of 32 to 1024 entries."""
_VERY_LONG = 200
"""From this size on, the other dimensions are small, so that a square of it is the largest tensor of a sample."""
Domain: TypeAlias = Literal["all", "finite", "moderate"]
"""The values for which a rule holds, as in `fxrewrite.Rule.domain`."""
_CONTENTS: tuple[Contents, ...] = (
    *("normal", "special", "hundreds", "small", "integers", "far_from_zero", "boundary"),
    *("ten_thousands", "zeros", "tens", "close", "huge", "tiny"),
)
"""Contents by sample number. The cycles of 13 contents, 5 sizes (below) and 3 dtypes meet every combination in 195."""
_MODERATE: dict[Contents, Contents] = {
    "integers": "integers",
    "zeros": "zeros",
    **dict.fromkeys(("boundary", "tens", "huge"), "mixed"),
}
"""Contents of moderate entries; others become normal. All next to one number, they would cancel in a variance."""
_MODERATE_POINTS = (0.1, 8.0)
"""The least and the largest number next to which moderate entries are."""
_SMALL_INTEGER = 3
"""Up to here, integers are drawn of either sign without being named."""
_SIZES: tuple[Literal["small", "long", "empty"], ...] = ("small", "long", "small", "empty", "small")


def contents_within(domain: Domain) -> tuple[Contents, ...]:
    """Returns the contents that a domain admits and any sample may have, whatever its graph; the plainest first."""
    others = {"few_multiples", "multiples"} if domain == "all" else {"few_multiples", "multiples", "special"}
    admitted = {"ones", "normal", *_MODERATE.values()} if domain == "moderate" else set(PLAINER) - others
    return tuple(contents for contents in PLAINER if contents in admitted)


def _contents_of(index: int, domain: Domain) -> Contents:
    contents = _CONTENTS[index % len(_CONTENTS)]
    if domain == "all" or (domain == "finite" and contents != "special"):
        return contents
    return _MODERATE.get(contents, "normal")


class Draw:
    """What a sampler draws with; the same seed draws the same values in every process.

    Attributes:
        index: number of this sample.
        domain: the values that inputs may have.
        dtype: the floating-point dtype of this sample.
        dtypes: all dtypes that are tested.
        most: upper limit of sizes, except for one long dimension in every fifth sample; to shrink a counterexample, it
            is drawn again with a small limit.
        contents: what most tensors of this sample contain; see `InputSpec.contents`.
        points: numbers that the rule compares with, or that its graphs name; see `InputSpec.points`.
        named: numbers that the rule's code names, which literals are at times.
        wide: whether guessed tensors are at times of integers, or of another dtype than the sample.
        plain: whether tensors are contiguous and their entries are small integers; to shrink a counterexample.
        is_beyond: whether the sampler gave what a condition must refuse, so that nothing else is changed.
    """

    def __init__(
        self,
        seed: str,
        dtype: torch.dtype,
        dtypes: Sequence[torch.dtype] = (),
        *,
        most: int = _MOST,
        domain: Domain = "all",
        index: int = 0,
        sizes: Sequence[int] = (),
        often: float = 0.4,
        long_sizes: Sequence[int] = (),
        points: Sequence[float] = (),
        named: Sequence[float] = (),
        wide: bool = False,
        plain: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.index = index
        self.domain: Domain = domain
        self.dtype = dtype
        self.dtypes = tuple(dtypes) or (dtype,)
        self.most = most
        self.wide = wide
        self.plain = plain
        self.is_beyond = False
        self.named = tuple(named)
        self.contents: Contents = "integers" if plain else _contents_of(index, domain)
        low, high = (0.0, math.inf) if domain != "moderate" else _MODERATE_POINTS
        self.points = tuple(point for point in points if low <= point <= high)
        self._integers = tuple(point for point in points if point > _SMALL_INTEGER and point == int(point))
        self._near = self.rng.gauss(0.0, 1.0)
        """What all tensors of this sample are close to, so that differences between them cancel."""
        pool = [self._size(sizes, often) for _ in range(self.rng.choice((1, 1, 2, 3)))]
        self._pool = list(range(1, most + 1)) if plain else [size for size in pool if size <= most] or [1]
        """The few sizes of this sample, so that sizes which must be equal often are."""
        kind = _SIZES[index % len(_SIZES)]
        self._rare: int | None = 0 if kind == "empty" else None
        """A special size (0 or long) for one dimension, and then for those that are drawn to be equal to it."""
        if kind == "long" and most >= _MOST:
            turn, is_odd = divmod(index // len(_SIZES), 2)
            ladder = long_sizes if is_odd and long_sizes else _LONG
            self._rare = ladder[turn % len(ladder)] if long_sizes else ladder[(2 * turn + is_odd) % len(ladder)]
            if self._rare >= _VERY_LONG:
                self._pool = [min(size, 2) for size in self._pool]

    def _size(self, special: Sequence[int], often: float) -> int:
        if special and self.flag(often):
            return self.choice(*special)
        return self.choice(*(_SMALL if self.flag(0.85) else _LARGER))

    def size(self, *, least: int = 1) -> int:
        """Draws a size from `least` to `most`, of the few sizes of this sample; with `least=0`, sometimes 0."""
        if self._rare is not None and self._rare >= least and self.flag():
            rare, self._rare = self._rare, None
            return rare
        return self._common(least)

    def _common(self, least: int) -> int:
        return max(least, self.rng.choice(self._pool))

    def shape(self, rank: int, *, least: int = 1) -> tuple[int, ...]:
        """Draws `rank` sizes; a special one is in any place."""
        sizes = [self._common(least) for _ in range(rank)]
        if self._rare is not None and self._rare >= least and self.flag(1 - 0.5**rank):
            sizes[self.rng.randrange(rank)], self._rare = self._rare, None
        return tuple(sizes)

    def integer(self, low: int, high: int) -> int:
        """Draws an integer from low to high, both included."""
        return self.rng.randint(low, high)

    def flag(self, probability: float = 0.5) -> bool:
        """Draws True with this probability."""
        return self.rng.random() < probability

    def choice(self, *options: T) -> T:
        """Draws one of the options."""
        return self.rng.choice(options)

    def spec(self, shape: Sequence[int], dtype: torch.dtype | None = None, *, is_param: bool = False) -> InputSpec:
        """Draws a tensor of this shape in any memory layout, as a spec."""
        layouts: list[MemoryLayout] = ["contiguous", "contiguous", "contiguous", "transposed", "expanded", "sliced"]
        layout, seed = self.rng.choice(layouts), self.rng.getrandbits(32)
        contents: Contents = self.contents if self.flag(0.8) or self.contents == "special" else "normal"
        if self.plain:
            layout, contents = "contiguous", self.contents
        points = (self._near,) if contents == "close" else self.points
        points = points if dtype is None or dtype.is_floating_point or dtype.is_complex else self._integers
        return InputSpec(tuple(shape), dtype or self.dtype, layout, contents, seed, points, is_param=is_param)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draws a tensor of this shape with any entries and memory layout; by default with the sample's dtype."""
        return self.spec(shape, dtype).tensor()

    def indices(self, *shape: int, below: int) -> torch.Tensor:
        """Draws an int64 tensor of this shape with entries from 0 to `below` - 1."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        return torch.randint(0, below, shape, generator=generator)

    def mask(self, *shape: int, probability: float = 0.5) -> torch.Tensor:
        """Draws a bool tensor of this shape whose entries are True with this probability."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        return torch.rand(shape, generator=generator) < probability

    def beyond(self, *options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draws, in three of four wide samples, captures that a condition must refuse; in others, none.

        Most of these samples do not match, which takes less time than to compare one that does.
        """
        self.is_beyond = self.wide and bool(options) and self.flag(0.75)
        return self.choice(*options) if self.is_beyond else {}


Sampler: TypeAlias = Callable[[Draw], Mapping[str, Any]]
"""Draws values of captures by name: a tensor, a list of tensors, None, or a Python value. Others are guessed."""
