"""Where the chance of a sample comes from, and what a sampler draws with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from fxrewrite.verify.tensors import Contents, Layout, TensorSpec

__all__ = ["Draw", "Sampler"]

T = TypeVar("T")
_SMALL, _LARGER = (1, 2, 3, 5), (4, 7, 8)


class Draw:
    """What a sampler draws with; the same seed draws the same in every process.

    Attributes:
        dtype: the floating-point dtype of the sample at hand.
        dtypes: all that are tested.
        most: no size is larger; a counterexample is drawn again with small ones.
        non_finite: whether tensors may hold NaN and infinities.
    """

    def __init__(
        self,
        seed: str,
        dtype: torch.dtype,
        dtypes: Sequence[torch.dtype] = (),
        *,
        most: int = 8,
        non_finite: bool = True,
        sizes: Sequence[int] = (),
    ) -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.dtypes = tuple(dtypes) or (dtype,)
        self.most = most
        contents: list[Contents] = ["normal", "normal", "normal", "integers", "zeros"]
        self.contents: Contents = self.rng.choice([*contents, "special"] if non_finite else contents)
        pool = [self._size(sizes) for _ in range(self.rng.choice((1, 1, 2, 3)))]
        self._pool = [size for size in pool if size <= most] or [1]
        """Few sizes in a sample: then those that must be equal often are."""

    def _size(self, special: Sequence[int]) -> int:
        if special and self.flag(0.4):
            return self.choice(*special)
        return self.choice(*(_SMALL if self.flag(0.85) else _LARGER))

    def size(self) -> int:
        """A size of a dimension, in 1 to `most`: one of the few of this sample."""
        return self.rng.choice(self._pool)

    def shape(self, rank: int) -> tuple[int, ...]:
        """So many sizes."""
        return tuple(self.size() for _ in range(rank))

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
