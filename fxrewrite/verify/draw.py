"""Where the chance of a sample comes from, and what a sampler draws with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from fxrewrite.verify.tensors import Contents, Layout, TensorSpec

__all__ = ["Domain", "Draw", "Sampler"]

T = TypeVar("T")
_MOST = 8
_SMALL, _LARGER = (1, 2, 3, 5), (4, 7, _MOST)
_LONG = (41, 48, 64, 130)
"""Longer than the vectors of a CPU kernel and than a block of 32 or 128 entries, one of them odd."""
Domain: TypeAlias = Literal["all", "finite", "moderate"]
"""The values for which a rule holds, as `fxrewrite.Rule.domain` says it."""
_CONTENTS: tuple[Contents, ...] = (
    *("normal", "special", "hundreds", "normal"),
    *("integers", "far_from_zero", "ten_thousands", "zeros"),
)
"""Contents by the number of the sample, 8 and 5 (below) and 3 dtypes in turn: in 120 samples each meets each."""
_SIZES: tuple[Literal["small", "long", "empty"], ...] = ("small", "long", "small", "empty", "small")


def _contents_of(index: int, domain: Domain) -> Contents:
    contents = _CONTENTS[index % len(_CONTENTS)]
    if domain == "all" or (domain == "finite" and contents != "special"):
        return contents
    return contents if contents in ("integers", "zeros") else "normal"


class Draw:
    """What a sampler draws with; the same seed draws the same in every process.

    Attributes:
        dtype: the floating-point dtype of this sample.
        dtypes: all that are tested.
        most: no size is larger, but for one long dimension in every fifth sample; a counterexample is drawn again with
            small ones.
        contents: what most tensors of this sample hold; see `TensorSpec.contents`.
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
    ) -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.dtypes = tuple(dtypes) or (dtype,)
        self.most = most
        self.contents: Contents = _contents_of(index, domain)
        pool = [self._size(sizes) for _ in range(self.rng.choice((1, 1, 2, 3)))]
        self._pool = [size for size in pool if size <= most] or [1]
        """Few sizes in a sample: then those that must be equal often are."""
        kind = _SIZES[index % len(_SIZES)]
        self._rare: int | None = 0 if kind == "empty" else None
        """A size that one dimension has, and then those that are drawn to be equal to it."""
        if kind == "long" and most >= _MOST:
            self._rare = self.rng.choice(_LONG)

    def _size(self, special: Sequence[int]) -> int:
        if special and self.flag(0.4):
            return self.choice(*special)
        return self.choice(*(_SMALL if self.flag(0.85) else _LARGER))

    def size(self, *, least: int = 1) -> int:
        """A size of a dimension, `most` at most: one of the few of this sample. With `least=0` also 0, at times."""
        if self._rare is not None and self._rare >= least and self.flag():
            rare, self._rare = self._rare, None
            return rare
        return self.rng.choice(self._pool)

    def shape(self, rank: int, *, least: int = 1) -> tuple[int, ...]:
        """So many sizes."""
        return tuple(self.size(least=least) for _ in range(rank))

    def integer(self, low: int, high: int) -> int:
        """An integer in low to high, both included."""
        return self.rng.randint(low, high)

    def flag(self, probability: float = 0.5) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def choice(self, *options: T) -> T:
        """One of the options."""
        return self.rng.choice(options)

    def spec(self, shape: Sequence[int], dtype: torch.dtype | None = None, *, is_param: bool = False) -> TensorSpec:
        """A tensor of this shape in any layout, to be made later."""
        layouts: list[Layout] = ["contiguous", "contiguous", "contiguous", "transposed", "expanded"]
        layout, seed = self.rng.choice(layouts), self.rng.getrandbits(32)
        contents: Contents = self.contents if self.flag(0.8) or self.contents == "special" else "normal"
        return TensorSpec(tuple(shape), dtype or self.dtype, layout, contents, seed, is_param=is_param)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of this shape with any entries, in any layout; by default of the sample's dtype."""
        return self.spec(shape, dtype).tensor()

    def indices(self, *shape: int, below: int) -> torch.Tensor:
        """An int64 tensor of this shape with entries in 0 to `below` - 1."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        return torch.randint(0, below, shape, generator=generator)

    def mask(self, *shape: int, probability: float = 0.5) -> torch.Tensor:
        """A bool tensor of this shape whose entries are True with this probability."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        return torch.rand(shape, generator=generator) < probability


Sampler: TypeAlias = Callable[[Draw], Mapping[str, Any]]
"""Draws values for captures by name: a tensor, a list of tensors, None, or a Python value. The others are guessed."""
