"""Wide samples: what a sampler gave is changed, since it may give only what fits the constraints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxrewrite.pattern.terms import Capture, subterms
from fxrewrite.verify.draw import Draw
from fxrewrite.verify.readings import Reading
from fxrewrite.verify.tensors import InputSpec, with_entries

_OTHER = 0.5
"""Probability that a wide sample is not what its sampler gave."""
_IN_INTEGERS = 0.15
"""Probability that a wide sample has integers of one dtype in place of all numbers of its own dtype."""
_MOST_OF_INTEGERS = 8
"""Largest magnitude of such integers."""


def varied(given: dict[str, Any], reading: Reading, draw: Draw, *, is_complex: bool) -> dict[str, Any]:
    """Returns what a wide sample has: at times other values than the sampler gave, or fewer, which are guessed.

    Where the sampler gave what a condition must refuse, nothing else is changed.
    """
    if draw.is_beyond:
        return given
    given = _with_others(given, reading, draw)
    return given if is_complex or not draw.flag(_IN_INTEGERS) else _in_integers(given, draw)


def _is_real(value: Any) -> bool:
    return not isinstance(value, InputSpec) or value.dtype.is_floating_point


def _with_others(given: dict[str, Any], reading: Reading, draw: Draw) -> dict[str, Any]:
    """Returns, at times, other values than the sampler gave, or fewer, which are guessed: it may give only what fits.

    Entries that are integers or bools have a meaning that a guess does not know; their tensors may only get smaller.
    """
    read_ones = {t.name for output in reading.outputs for t in subterms(output) if isinstance(t, Capture)}
    names = [name for name in given if name in read_ones]
    if not names or not draw.flag(_OTHER):
        return given
    first = draw.choice(*names)
    chosen = {first} if draw.flag(0.7) else {first, *(name for name in names if draw.flag())}
    found = dict(given)
    for name in chosen:
        value = found.pop(name)
        if isinstance(value, str) and value:
            place = draw.integer(0, len(value) - 1)
            found[name] = value[:place] + value[place + 1 :]
        elif isinstance(value, InputSpec) and value.data is not None:
            dims = [dim for dim, size in enumerate(value.shape) if size > 1]
            if dims and (draw.flag() or not _is_real(value)):
                data = value.data.narrow(draw.choice(*dims), 0, 1)
                found[name] = replace(value, data=data, shape=tuple(data.shape))
            elif not _is_real(value):
                found[name] = value
        elif isinstance(value, list) and not all(map(_is_real, value)):
            found[name] = value
    return found


def _in_integers(given: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Returns what the sampler gave with a dtype of integers in place of the sample's; guesses have it as well."""
    old, draw.dtype = draw.dtype, draw.choice(torch.int64, torch.int32)

    def as_integers(entries: torch.Tensor) -> torch.Tensor:
        return entries.nan_to_num(0.0).clamp(-_MOST_OF_INTEGERS, _MOST_OF_INTEGERS).to(draw.dtype)

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if isinstance(value, InputSpec) and value.data is not None and value.dtype == old:
            return replace(value, data=with_entries(value.data, as_integers), dtype=draw.dtype)
        return draw.dtype if value is old else value

    return {name: moved(value) for name, value in given.items()}
