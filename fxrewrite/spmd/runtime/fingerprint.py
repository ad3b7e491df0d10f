"""Numbers that tell whether ranks hold the same tensors: computed where the tensors are, compared in the background.

    fingerprint(tensor)           two float64 numbers for a batch: exact for integers, to a tolerance for floating ones
    parameter_checksum(tensors)   one, of all bits of all parameters
    BackgroundComparison          the least and the greatest of each number over the axis, read later without waiting

Nothing here copies a tensor to the host, so a GPU's queue is never waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fxrewrite.ops import bits_of
from fxrewrite.spmd.group import process_group
from fxrewrite.spmd.placement import Axis

TOLERANCE = 2e-3
"""Of the mean magnitude of sampled entries: activations that two GPUs compute in bfloat16 differ by less; two batches
by about 1 / sqrt(sample), 3e-2."""
_SAMPLE = 1024
"""Entries of a floating tensor that are looked at."""
_LARGEST = 1e300
"""Larger entries count as this: their sum, as of a mask that is filled with the least float64, would be infinite."""
_MOST_INTEGERS, _MOST_FLAGS = 2**24, 2**20
"""Entries of a tensor of integers and of bools that are looked at: all of a batch of ids, a part of a mask of S x S."""
_ROW = 1024
"""Entries of a row of a parameter of one dimension."""
_EXACT = 2**52 - 1
"""The bits that a float64 number holds exactly."""


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two float64 numbers on the tensor's device: a value, and a scale that is 0 where the value must be equal.

    Of a floating tensor the value is a sum with pseudo-random signs over a sample, the scale that of magnitudes. Two
    tensors are taken for different where values differ by more than `TOLERANCE` times the scale.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        sample = _sampled(tensor.detach(), _SAMPLE).to(torch.float64).nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
        sample = sample.clamp(-_LARGEST, _LARGEST)
        return torch.stack([(sample * _signs(sample.numel(), tensor.device)).sum(), sample.abs().sum()])
    most = _MOST_FLAGS if tensor.dtype == torch.bool else _MOST_INTEGERS
    total = _mixed(_sampled(tensor.detach(), most).to(torch.int64))
    return torch.stack([_exact(total), torch.zeros((), dtype=torch.float64, device=tensor.device)])


def parameter_checksum(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A float64 number for each parameter, of its bits: equal where every entry is bitwise equal.

    It is made of sums along each dimension, which take no memory, with the positions in them: rows in another order, or
    a transposed weight, give another number.
    """
    return [_exact(_mixed_sums(bits_of(p.detach()))) for p in parameters]


def _mixed_sums(bits: torch.Tensor) -> torch.Tensor:
    if bits.dim() < 2:
        rows = bits.numel() // _ROW
        main = [bits[: rows * _ROW].reshape(rows, _ROW)] if rows else []
        left = _mixed(bits.reshape(-1)[rows * _ROW :].to(torch.int64))
        return sum((_mixed_sums(part) for part in main), left)
    dims = range(bits.dim())
    sums = [bits.sum([other for other in dims if other != dim], dtype=torch.int64) for dim in dims]
    return _mixed(torch.cat(sums))


def _mixed(entries: torch.Tensor) -> torch.Tensor:
    """One number of whole numbers in their order."""
    mixed = entries * 0x2545F4914F6CDD1D + torch.arange(entries.numel(), device=entries.device) * 0x61C8864680B583EB
    return ((mixed ^ (mixed >> 29)) * 0x1B873593CC9E2D51).sum()


def _exact(total: torch.Tensor) -> torch.Tensor:
    """A float64 number of all 64 bits: the upper ones, where small floats differ, are folded into those it can hold."""
    return ((total ^ (total >> 12)) & _EXACT).to(torch.float64)


def _sampled(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many entries, evenly over the long dimensions, without a copy of the rest."""
    if tensor.numel() > most:
        steps = [1] * tensor.dim()
        left = most
        for count, dim in enumerate(sorted(range(tensor.dim()), key=lambda dim: tensor.shape[dim])):
            share = max(
                1, int(left ** (1 / (tensor.dim() - count)))
            )  # what short dimensions leave is for the long ones
            steps[dim] = -(-tensor.shape[dim] // share)
            left //= -(-tensor.shape[dim] // steps[dim])
        tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    return tensor.reshape(-1)


@cache
def _signs(count: int, device: torch.device) -> torch.Tensor:
    """1 or -1 for each entry, the same on every rank."""
    index = torch.arange(count, device=device, dtype=torch.int64) * 2654435761
    return (1 - 2 * ((index >> 16) & 1)).to(torch.float64)


class BackgroundComparison:
    """Numbers on their way around the axis; `differing()` reads what came of it."""

    def __init__(self, axis: Axis, values: torch.Tensor) -> None:
        self._sent = torch.cat([values, -values])
        self._work: Any = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, group=process_group(axis), async_op=True)
        self._host, self._copied = self._sent, None
        if values.device.type != "cpu":
            self._copy_to_host(torch.get_device_module(values.device))

    def _copy_to_host(self, device: Any) -> None:
        """On a stream of its own, so that reading waits for the reduction alone and not for the model."""
        at = self._sent.device  # a process need not have made it its current one
        stream = device.Stream(at)
        stream.wait_stream(device.current_stream(at))  # `wait` of a fake process group does not wait for the numbers
        with device.stream(stream) if hasattr(device, "stream") else nullcontext():
            self._work.wait()
            self._host = torch.empty_like(self._sent, device="cpu", pin_memory=True)
            self._host.copy_(self._sent, non_blocking=True)
            self._copied = device.Event()
            self._copied.record(stream)
        self._sent.record_stream(stream)

    def differing(self, scales: Sequence[int]) -> list[int]:
        """Positions of the numbers that are not the same on every rank.

        Args:
            scales: for each number the position of its scale, or -1 where it must be equal.
        """
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
        found = self._host.tolist()
        count = len(found) // 2
        greatest, least = found[:count], [-x for x in found[count:]]
        allowed = [0.0 if scale < 0 else TOLERANCE * greatest[scale] for scale in scales]
        return [i for i in range(count) if not greatest[i] - least[i] <= allowed[i]]
