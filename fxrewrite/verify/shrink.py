"""Shrinks a counterexample: smaller sizes and plainer values, as long as the rule is wrong in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxrewrite.verify.sample import Sample
from fxrewrite.verify.tensors import PLAINER, Contents, InputSpec

_MOST_ENTRIES, _MOST_READ = 12, 64
"""Largest tensor, in entries, whose entries are simplified one by one; and in blocks."""


def shrink(sample: Sample, is_wrong: Callable[[Sample], bool], plainer: tuple[Contents, ...], *, steps: int) -> int:
    """Asks whether smaller samples are wrong, then of the last that is; returns the number of trials, at most `steps`.

    Inputs keep their contents, or get `plainer` ones.
    """
    tried = skipped = 0
    while True:
        candidates = list(_smaller(sample, plainer))
        for index in range(len(candidates)):
            place = (skipped + index) % len(candidates)  # candidates that failed for the previous sample come last
            if tried == steps:
                return tried
            tried += 1
            if is_wrong(candidates[place]):
                sample, skipped = candidates[place], place
                break
        else:
            return tried


def _smaller(sample: Sample, plainer: tuple[Contents, ...]) -> Iterator[Sample]:
    """Yields samples that are one step simpler, the biggest steps first."""
    if sample.twice or sample.exposed:
        yield replace(sample, twice=False, exposed=False)
    for contents in plainer:
        plain = sample.changed(partial(_is_less_plain, contents), contents=contents)
        if list(plain.specs()) != list(sample.specs()):
            yield plain
    yield from _halved(sample)
    yield from _with_sizes(sample)
    for name, spec in _free_specs(sample):
        yield from (sample.with_binding(name, simpler) for simpler in _simpler_spec(spec, plainer))
    for name, value in sample.bindings.items():
        if isinstance(value, list) and len(value) > 1 and isinstance(value[0], InputSpec):
            yield sample.with_binding(name, value[:-1])
        elif not isinstance(value, InputSpec) and value is not ...:
            if "." in name:  # the pattern ignores it: try the operator's default
                yield sample.with_binding(name, ...)
            yield from (sample.with_binding(name, simpler) for simpler in _simpler_literal(value))


def _free_specs(sample: Sample) -> Iterator[tuple[str, InputSpec]]:
    for name, value in sample.bindings.items():
        if isinstance(value, InputSpec) and not value.is_given:
            yield name, value


def _halved(sample: Sample) -> Iterator[Sample]:
    """Yields samples with half of the entries, in one row, where all tensors have as many."""
    free = dict(_free_specs(sample))
    shapes = {spec.shape for spec in free.values()}
    if len(shapes) != 1 or math.prod(*shapes) < 2 or all(spec.contents in ("zeros", "ones") for spec in free.values()):
        return
    (shape,) = shapes
    count, ones = math.prod(shape), (1,) * (len(shape) - 1)
    for part in (slice(count // 2), slice(count // 2, count)):
        rows = {name: spec.tensor().flatten()[part].reshape(*ones, -1) for name, spec in free.items()}
        cut = {name: replace(free[name], shape=tuple(row.shape), data=row) for name, row in rows.items()}
        yield replace(sample, bindings={**sample.bindings, **cut})


def _with_sizes(sample: Sample) -> Iterator[Sample]:
    """Yields samples with one size smaller wherever it occurs; then single dimensions; then without leading ones."""
    sizes = {size for _, spec in sample.specs() if not spec.is_given for size in spec.shape if size > 1}
    for size in sorted(sizes, reverse=True):
        for smaller in sorted({1, 2, size // 2, size - 1} - {0}):
            if smaller < size:
                bindings = {name: _resized(value, size, smaller) for name, value in sample.bindings.items()}
                yield replace(sample, bindings=bindings)
    ranks = {len(spec.shape) for _, spec in _free_specs(sample)}
    if len(ranks) == 1 and min(ranks) > 0:
        free = dict(_free_specs(sample))
        for kept in (slice(1, None), slice(-1)):
            dropped = {name: _reshaped(spec, spec.shape[kept]) for name, spec in free.items()}
            yield replace(sample, bindings={**sample.bindings, **dropped})
    for name, spec in _free_specs(sample):
        if spec.shape:
            yield sample.with_binding(name, _reshaped(spec, spec.shape[1:]))
        for dim, size in enumerate(spec.shape):
            if size > 1:
                shape = (*spec.shape[:dim], 1, *spec.shape[dim + 1 :])
                yield sample.with_binding(name, _reshaped(spec, shape))


def _resized(value: Any, size: int, smaller: int) -> Any:
    if isinstance(value, InputSpec):
        return value if value.is_given else _reshaped(value, tuple(smaller if n == size else n for n in value.shape))
    if isinstance(value, list):
        return [_resized(item, size, smaller) for item in value]
    return smaller if type(value) is int and value == size else value


def _reshaped(spec: InputSpec, shape: tuple[int, ...]) -> InputSpec:
    if spec.data is None:
        return replace(spec, shape=shape)
    entries = spec.data.flatten()
    if not entries.numel():
        return replace(spec, shape=shape, data=None)
    repeats = -(-math.prod(shape) // entries.numel())
    return replace(spec, shape=shape, data=entries.repeat(max(repeats, 1))[: math.prod(shape)].reshape(shape))


def _is_less_plain(contents: Contents, _: str, spec: InputSpec) -> bool:
    return spec.data is None and PLAINER.index(spec.contents) > PLAINER.index(contents)


def _simpler_spec(spec: InputSpec, plainer: tuple[Contents, ...]) -> Iterator[InputSpec]:
    if spec.data is None:
        if spec.layout != "contiguous":
            yield replace(spec, layout="contiguous")
        for contents in plainer:
            if PLAINER.index(contents) < PLAINER.index(spec.contents):
                yield replace(spec, contents=contents)
        if spec.layout == "contiguous" and math.prod(spec.shape) <= _MOST_READ and spec.contents != "zeros":
            yield replace(spec, data=spec.tensor())
        return
    yield from (replace(spec, data=data) for data in _plainer_blocks(spec.data))
    for index in range(spec.data.numel() if spec.data.numel() <= _MOST_ENTRIES else 0):
        entry = spec.data.flatten()[index].item()
        for plainer_entry in _simpler_literal(entry):
            data = spec.data.clone()
            data.view(-1)[index] = plainer_entry
            yield replace(spec, data=data)


def _plainer_blocks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the entries with fewer digits; those of many with a half, a quarter or an eighth of them 0."""
    if data.is_floating_point():
        for decimals in range(3):
            rounded = data.double().round(decimals=decimals).to(data.dtype)
            if not torch.equal(rounded.nan_to_num(), data.nan_to_num()):
                yield rounded
    if data.numel() <= _MOST_ENTRIES:
        return
    for parts in (2, 4, 8):
        for block in range(parts):
            begin, end = (data.numel() * place // parts for place in (block, block + 1))
            if data.flatten()[begin:end].any():
                zeroed = data.flatten().clone()
                zeroed[begin:end] = 0
                yield zeroed.reshape(data.shape)


def _simpler_literal(value: Any) -> Iterator[Any]:
    """Yields simpler values of the same type."""
    if isinstance(value, bool):
        yield from (False,) if value else ()
    elif isinstance(value, int):
        yield from (n for n in (0, 1, 2) if n < abs(value) or (n == -value and n))
    elif isinstance(value, float):
        rounded = [float(round(value))] if math.isfinite(value) else []
        order = dict.fromkeys([0.0, 1.0, *rounded])
        plain = list(order)
        yield from plain[: plain.index(value)] if value in plain else plain
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        positive = [item % len(value) for item in value] if any(item < 0 for item in value) else value
        if positive != value:
            yield positive
        if sorted(value) != value:
            yield sorted(value)
    elif isinstance(value, torch.dtype) and value is not torch.float32 and value.is_floating_point:
        yield torch.float32
