"""A specification of an input tensor, from which it can be made repeatedly: shape, dtype, memory layout, contents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

MemoryLayout = Literal["contiguous", "transposed", "expanded", "sliced"]
# fmt: off
Contents = Literal[
    "zeros", "ones", "integers", "normal", "small", "tens", "close", "hundreds",
    "few_multiples", "multiples", "ten_thousands", "far_from_zero", "tiny", "huge", "mixed", "boundary", "special",
]
# fmt: on
PLAINER: tuple[Contents, ...] = get_args(Contents)
"""All contents, the plainest first."""
_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)
_SCALED: dict[Contents, tuple[float, float]] = {
    "small": (1e-4, 0.0),
    "tens": (4.0, 16.0),
    "hundreds": (1e2, 0.0),
    "ten_thousands": (1e4, 0.0),
    "far_from_zero": (1.0, 1e6),
    "tiny": (1e-25, 0.0),
    "huge": (1e25, 0.0),
}
"""Scale and mean of normal entries; tens have one sign. exp overflows from 89 on in float32 and from 710 on in float64;
exp(x) - 1 cancels if x is small; 1 - sigmoid(x) cancels in tens, and is 0 where x is larger; a mean of squares minus a
squared mean cancels in float32 if the mean is large; a square underflows, or overflows, in float32 if x is tiny, or
huge.
"""
_TRUE = (0.5, 0.5, 0.05, 0.95, 1.0)
"""Probabilities of True, of which a tensor of bools has one: a count of them overflows a byte only if most are."""
_INTEGERS: dict[Contents, tuple[int, int]] = {
    "special": (0, 2),
    "ten_thousands": (-(10**4), 10**4),
    "far_from_zero": (2**24, 2**40),
}
"""Range of integers; else -3 to 7. From 2**24 on, not each integer is a float32."""
_MULTIPLES = 9
"""Logarithm of the most half multiples: those of a scale beyond the integers of 8 bits, which clamps to them."""
_CANDIDATES = 8
"""Number of random multiples of which an entry is one."""
_FEW = 8.0
"""Largest entry of few multiples."""
_OFFSET = 3
"""Entries of memory before the first entry of a sliced tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class InputSpec:
    """One tensor that can be made repeatedly, with the same entries in every process.

    Attributes:
        shape: sizes.
        dtype: of the entries.
        layout: "contiguous", "transposed" (the last two dimensions are swapped in memory), "expanded" (the first
            dimension with a size above 1 has stride 0) or "sliced" (every second entry, from the fourth on).
        contents: "normal"; "special" (with NaN, infinities and zeros of both signs); "integers", "ones", "zeros";
            "small" (normal times 1e-4), "tens" (about 16, or about -16), "hundreds" (times 1e2), "ten_thousands" (times
            1e4), "far_from_zero" (with a mean of 1e6), "tiny" (times 1e-25), "huge" (times 1e25); "close" (they differ
            in the last place); "boundary" (`points` of either sign, and what is next to them);
            "mixed" (normal, and some of these); "multiples" (multiples, half multiples or both of one of `points`, and,
            in two of three tensors, what is next to them, see `_multiples`); "few_multiples" (those up to 8).
        seed: of the entries.
        points: numbers that the rule compares with, or that its graphs name; for "close", what entries are close to.
        named: an integer that a third of the entries are, one at least, whatever the bounds; None: there is none.
        bounds: the first integer that the operator takes, and the first after it that it does not; None: it takes any.
        data: the entries themselves; if set, `layout`, `contents` and `seed` are ignored.
        is_given: whether a sampler made it, so that it must not be changed.
        is_param: whether the graph marks it as a parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: MemoryLayout = "contiguous"
    contents: Contents = "normal"
    seed: int = 0
    points: tuple[float, ...] = ()
    named: int | None = None
    bounds: tuple[int, int] | None = None
    data: torch.Tensor | None = None
    is_given: bool = False
    is_param: bool = False

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides in entries."""
        return stride_of(self.shape, self.layout) if self.data is None else tuple(self.data.stride())

    @property
    def offset(self) -> int:
        """Entries of memory before the first."""
        return _OFFSET if self.layout == "sliced" and self.data is None else 0

    @property
    def is_free_integer(self) -> bool:
        """Whether its entries are integers that may be drawn otherwise."""
        return not (self.is_given or self.is_inexact or self.dtype is torch.bool)

    @property
    def is_inexact(self) -> bool:
        """Whether its entries are real or complex numbers, which can be differentiated."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def tensor(self) -> torch.Tensor:
        """Makes the tensor, in fresh memory."""
        if self.data is not None:
            return with_entries(self.data, self._bounded)
        generator = torch.Generator().manual_seed(self.seed)
        count = self.offset + _span(self.shape, self.stride)
        entries = self._bounded(_entries(self.contents, count, self.dtype, generator, self.points))
        if self.named is not None and count > self.offset:
            chosen = torch.rand(count, generator=generator) < 0.3
            chosen[self.offset + int(torch.randint(0, count - self.offset, (1,), generator=generator))] = True
            entries = torch.where(chosen, self.named, entries).to(self.dtype)
        return entries.as_strided(self.shape, self.stride, self.offset)

    def _bounded(self, entries: torch.Tensor) -> torch.Tensor:
        if self.bounds is None:
            return entries
        low, end = self.bounds
        return ((entries.to(torch.int64) - low).remainder(end - low) + low).to(self.dtype)

    def blank(self) -> torch.Tensor:
        """Makes a tensor of this shape, dtype and strides with harmless entries: 0.5, or 0 for integers and bools."""
        entry = 0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        entries = torch.full((self.offset + _span(self.shape, self.stride),), entry, dtype=self.dtype)
        return entries.as_strided(self.shape, self.stride, self.offset)

    def empty(self) -> torch.Tensor:
        """Makes a tensor of this shape, dtype and strides, for a mode that makes it fake."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        entries = torch.empty(self.offset + _span(self.shape, self.stride), dtype=self.dtype)
        return entries.as_strided(self.shape, self.stride, self.offset)


def stride_of(shape: tuple[int, ...], layout: MemoryLayout) -> tuple[int, ...]:
    """Returns the strides of a memory layout."""
    sizes = list(shape)
    if layout == "transposed" and len(sizes) > 1:
        sizes[-1], sizes[-2] = sizes[-2], sizes[-1]
    repeated = next((dim for dim, size in enumerate(sizes) if size > 1), None) if layout == "expanded" else None
    strides: list[int] = []
    step = 1
    for dim in reversed(range(len(sizes))):
        strides.insert(0, 0 if dim == repeated else step)
        step *= 1 if dim == repeated else max(sizes[dim], 1)
    if layout == "sliced":
        return tuple(2 * step for step in strides)
    if layout == "transposed" and len(sizes) > 1:
        strides[-1], strides[-2] = strides[-2], strides[-1]
    return tuple(strides)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Returns how many entries of memory the tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def with_entries(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a tensor in fresh memory with the same strides, whose entries are changed; `change` maps flat entries."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return change(tensor.clone())
    before = tensor.storage_offset() if tensor.numel() else 0  # entries of memory before the first
    entries = tensor.as_strided((before + _span(tuple(tensor.shape), tuple(tensor.stride())),), (1,), 0)
    return change(entries.clone()).as_strided(tensor.shape, tensor.stride(), before)


def _entries(
    contents: Contents, count: int, dtype: torch.dtype, generator: torch.Generator, points: tuple[float, ...]
) -> torch.Tensor:
    if dtype.is_complex:
        parts = (_entries(contents, count, dtype.to_real(), generator, points) for _ in range(2))
        return torch.complex(*parts).to(dtype)
    if contents in ("ones", "zeros"):
        return torch.full((count,), int(contents == "ones"), dtype=dtype)
    if dtype is torch.bool:
        probability = _TRUE[int(torch.randint(0, len(_TRUE), (1,), generator=generator))]
        return torch.rand(count, generator=generator) < probability
    if not dtype.is_floating_point:
        low, high = _INTEGERS.get(contents, (-3, 8))
        range_of = torch.iinfo(dtype)
        low, high = (low, high) if low < range_of.max else (range_of.max // 2, range_of.max)
        low, high = max(low, range_of.min), min(high, range_of.max)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    if contents == "integers":
        return torch.randint(-3, 4, (count,), generator=generator).to(dtype)
    entries = torch.randn(count, generator=generator, dtype=torch.float64)
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps  # the largest float16 is 65504
    if contents in _SCALED:
        scale, mean = _SCALED[contents]
        if contents == "tens" and torch.rand(1, generator=generator) < 0.5:
            mean = -mean
        return (entries * scale + mean).clamp(-largest, largest).to(dtype)
    if contents == "close" and count:
        steps = torch.randint(0, 4, (count,), generator=generator)
        base = torch.tensor(points[0] if points else 1.0, dtype=torch.float64).to(dtype).to(torch.float64)
        return (base * (1 + steps * eps)).to(dtype)
    if contents in ("multiples", "few_multiples") and points:
        return _multiples(contents == "few_multiples", count, dtype, generator, points)
    if contents in ("boundary", "mixed") and points and count:
        chosen = torch.tensor(points, dtype=torch.float64)[torch.randint(0, len(points), (count,), generator=generator)]
        step = 4 * eps if contents == "mixed" else eps  # x + 3 may round to 6 where x is one step from 3
        steps = torch.tensor([0.0, step, -step, 0.01, -0.01], dtype=torch.float64)
        signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        near = chosen * (1 + steps[torch.randint(0, len(steps), (count,), generator=generator)]) * signs
        if contents == "mixed":
            replaced = torch.rand(count, generator=generator) < 0.3
            replaced[int(torch.randint(0, count, (1,), generator=generator))] = True
            near = torch.where(replaced, near, entries)
        return near.clamp(-largest, largest).to(dtype)
    if contents == "special" and count:
        chosen = torch.randint(0, len(_SPECIAL), (count,), generator=generator)
        replaced = torch.rand(count, generator=generator) < 0.4
        replaced[int(torch.randint(0, count, (1,), generator=generator))] = True
        entries = torch.where(replaced, torch.tensor(_SPECIAL, dtype=torch.float64)[chosen], entries)
    return entries.to(dtype)


def _multiples(
    are_few: bool, count: int, dtype: torch.dtype, generator: torch.Generator, points: tuple[float, ...]
) -> torch.Tensor:
    """Returns entries that are multiples, half multiples or both of one point; in a third of the tensors exactly these.

    In the others, some are next to these, and of several candidates one is taken, if there is one, that is on different
    sides of a half if it is divided by the point, and if it is multiplied with its reciprocal.
    """
    limits = torch.finfo(dtype)
    unit = points[int(torch.randint(0, len(points), (1,), generator=generator))]
    kind, plain, exponent = (int(torch.randint(0, n, (1,), generator=generator)) for n in (3, 3, _MULTIPLES))
    is_next = plain > 0
    most = min(2 ** (exponent + 1), int(2 * _FEW / unit)) if are_few else 2 ** (exponent + 1)
    halves = torch.randint(-most, most + 1, (_CANDIDATES, count), generator=generator).to(torch.float64)
    odd = halves // 2 * 2 + 1
    halves = (odd, odd - 1, halves)[kind]
    steps = torch.randint(-1, 2, halves.shape, generator=generator) * limits.eps * is_next
    entries = (halves / 2 * unit).clamp(-limits.max, limits.max).to(dtype) * (1 + steps).to(dtype)
    quotient, product = 2 * (entries / unit), 2 * (entries * (1 / unit))
    is_fragile = ((quotient.floor() != product.floor()) | (quotient.ceil() != product.ceil())) & is_next
    return entries.gather(0, is_fragile.to(torch.uint8).argmax(0, keepdim=True))[0]
