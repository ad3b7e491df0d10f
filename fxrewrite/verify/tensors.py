"""A specification of an input tensor, from which it can be made repeatedly: shape, dtype, memory layout, contents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Contents", "InputSpec", "MemoryLayout", "stride_of"]

MemoryLayout = Literal["contiguous", "transposed", "expanded"]
Contents = Literal["normal", "special", "integers", "ones", "zeros", "hundreds", "ten_thousands", "far_from_zero"]
_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)
_LARGE: dict[Contents, tuple[float, float]] = {
    "hundreds": (1e2, 0.0),
    "ten_thousands": (1e4, 0.0),
    "far_from_zero": (1.0, 1e6),
}
"""Scale and mean of normal entries. exp overflows from 89 on in float32 and from 710 on in float64; a mean of squares
minus a squared mean cancels in float32 if the mean is large.
"""


@dataclass(frozen=True, slots=True, eq=False)
class InputSpec:
    """One tensor that can be made repeatedly, with the same entries in every process.

    Attributes:
        shape: sizes.
        dtype: of the entries.
        layout: "contiguous", "transposed" (the last two dimensions are swapped in memory) or "expanded" (the first
            dimension with a size above 1 has stride 0).
        contents: "normal"; "special" (with NaN, infinities and zeros of both signs); "integers", "ones", "zeros";
            or large: "hundreds" (normal times 1e2), "ten_thousands" (times 1e4), "far_from_zero" (with a mean of 1e6).
        seed: of the entries.
        data: the entries themselves; if set, `layout`, `contents` and `seed` are ignored.
        is_given: whether a sampler made it, so that it must not be changed.
        is_param: whether the graph marks it as a parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: MemoryLayout = "contiguous"
    contents: Contents = "normal"
    seed: int = 0
    data: torch.Tensor | None = None
    is_given: bool = False
    is_param: bool = False

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides in entries."""
        return stride_of(self.shape, self.layout) if self.data is None else tuple(self.data.stride())

    def tensor(self) -> torch.Tensor:
        """Makes the tensor, in fresh memory."""
        if self.data is not None:
            return _in_fresh_memory(self.data)
        generator = torch.Generator().manual_seed(self.seed)
        entries = _entries(self.contents, _span(self.shape, self.stride), self.dtype, generator)
        return entries.as_strided(self.shape, self.stride)

    def blank(self) -> torch.Tensor:
        """Makes a tensor of this shape, dtype and strides with harmless entries: 0.5, or 0 for integers and bools."""
        entry = 0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        entries = torch.full((_span(self.shape, self.stride),), entry, dtype=self.dtype)
        return entries.as_strided(self.shape, self.stride)


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
    if layout == "transposed" and len(sizes) > 1:
        strides[-1], strides[-2] = strides[-2], strides[-1]
    return tuple(strides)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Returns how many entries of memory the tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _in_fresh_memory(data: torch.Tensor) -> torch.Tensor:
    data = data.detach()
    if data.layout is not torch.strided:
        return data.clone()
    entries = data.as_strided((_span(tuple(data.shape), tuple(data.stride())),), (1,)).clone()
    return entries.as_strided(data.shape, data.stride(), 0)


def _entries(contents: Contents, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if contents in ("ones", "zeros"):
        return torch.full((count,), int(contents == "ones"), dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = (0, 2) if contents == "special" or dtype in (torch.bool, torch.uint8) else (-3, 8)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    if contents == "integers":
        return torch.randint(-3, 4, (count,), generator=generator).to(dtype)
    entries = torch.randn(count, generator=generator, dtype=torch.float64)
    if contents in _LARGE:
        scale, mean = _LARGE[contents]
        largest = torch.finfo(dtype).max  # 65504 in float16
        return (entries * scale + mean).clamp(-largest, largest).to(dtype)
    if contents == "special" and count:
        chosen = torch.randint(0, len(_SPECIAL), (count,), generator=generator)
        replaced = torch.rand(count, generator=generator) < 0.4
        replaced[int(torch.randint(0, count, (1,), generator=generator))] = True
        entries = torch.where(replaced, torch.tensor(_SPECIAL, dtype=torch.float64)[chosen], entries)
    return entries.to(dtype)
