"""What the tables of training steps are made of: bytes and kernels of a step, read from torch's profiler, and rows."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")
_FORWARD_ENDS = "forward ends"
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
_BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "bool": 1}


@dataclass(frozen=True)
class Profiled:
    """Bytes that the allocator handed out above what was there before, and that collectives carried away from a rank.

    Attributes:
        peak: the most at any time.
        saved: what is left behind the forward.
        sent: where all ranks form a ring.
        collectives: how many ran.
        largest: the most that was allocated at once.
        kernels: microseconds on the device by name of kernel, the longest first; empty on a CPU.
        graph_launches: how many CUDA graphs were launched.
        waits: how often the host waited for the device before the step was over.
    """

    peak: int
    saved: int
    sent: int
    collectives: int
    largest: int
    kernels: dict[str, float]
    graph_launches: int
    waits: int


def profiled(forward: Callable[[], T], backward: Callable[[T], Any], device: str = "cpu") -> Profiled:
    """What one step costs on this rank, whose tensors are on `device`: "cpu" or "cuda"."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True, acc_events=True) as profiler:
        found = forward()
        with record_function(_FORWARD_ENDS):
            pass
        backward(found)
        if device == "cuda":
            torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    forward_ends = next(event["ts"] for event in events if event.get("name") == _FORWARD_ENDS)
    of_device = (DeviceType.CUDA if device == "cuda" else DeviceType.CPU).value
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes = [event for event in changes if event["args"]["Device Type"] == of_device]
    allocated = sorted((event["ts"], event["args"]["Bytes"]) for event in changes)
    held = peak = saved = 0
    for at, size in allocated:
        held += size
        peak = max(peak, held)
        saved = held if at <= forward_ends else saved
    collectives = [event for event in events if str(event.get("name")).startswith("gloo:")]
    largest = max((size for _, size in allocated), default=0)
    launches = sum(event.get("name") == "cudaGraphLaunch" for event in events)
    waits = sum(event.get("name") in _WAITS for event in events)
    sent = sum(map(_sent, collectives))
    return Profiled(peak, saved, sent, len(collectives), largest, _kernels(events), launches, waits)


def allocate_in_pages() -> None:
    """From now on, whatever takes 64 KiB or more has pages of its own, which leave the process when it is freed."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _OWN_PAGES)


_MMAP_THRESHOLD = -3
"""The parameter of glibc's mallopt."""
_OWN_PAGES = 2**16
"""Bytes from which an allocation has pages of its own."""


def resident_peak(step: Callable[[], Any]) -> int:
    """Bytes of memory that the process has at most while `step` runs, above what it had before. Linux, CPU.

    It counts pages, so it sees what kernels allocate by themselves. `profiled` also counts as held what is given back
    inside of `torch.func.vjp`, which torch's profiler misses; the gradient of a draw by rank is computed there. Call
    `allocate_in_pages` and then the step itself before, so that what libraries keep is there.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    plugs = _plugs(libc)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts again
    before = _status("VmRSS")
    step()
    peak = _status("VmHWM") - before
    for plug in plugs:
        libc.free(plug)
    return peak


def _plugs(libc: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Takes the free parts of the heap that could hold a tensor, where pages would stay that are freed."""
    libc.malloc.restype = ctypes.c_void_p
    found: list[ctypes.c_void_p] = []
    while not (found and ctypes.c_size_t.from_address(found[-1].value - 8).value & _HAS_OWN_PAGES):
        found.append(ctypes.c_void_p(libc.malloc(_OWN_PAGES)))
    return found


_HAS_OWN_PAGES = 2
"""The bit of the size that glibc writes before an allocation."""


def _status(name: str) -> int:
    """Returns the bytes that the kernel states for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith(f"{name}:"))


def _kernels(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    microseconds: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "kernel":
            microseconds[event["name"]] = microseconds.get(event["name"], 0.0) + event["dur"]
    return dict(sorted(microseconds.items(), key=lambda item: -item[1]))


def _sent(event: dict[str, Any]) -> int:
    """Bytes that leave a rank with one collective, where all ranks form a ring."""
    dims, dtypes = event["args"].get("Input Dims", []), event["args"].get("Input type", [])
    held = sum(math.prod(d) * _BYTES[t] for d, t in zip(dims, dtypes, strict=True) if t in _BYTES)
    ranks = torch.distributed.get_world_size()
    kind = event["name"].removeprefix("gloo:")
    if "gather" in kind:
        return held * (ranks - 1)
    share = held * (ranks - 1) // ranks
    return 2 * share if "all_reduce" in kind else share


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def with_quartiles(ratios: Sequence[float]) -> str:
    """The median, with quartiles where there are several."""
    if len(ratios) == 1:
        return f"{ratios[0]:.3f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
