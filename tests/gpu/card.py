"""The card, and what a step costs on it: seconds, bytes, kernels. On a CPU the same without kernels."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tests.bench.measure import profiled
from tests.gpu.figures import Figures, Setting

T = TypeVar("T")

_TERAFLOPS: tuple[tuple[str, float], ...] = (
    *(("B200", 2250.0), ("GH200", 989.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0)),
    *(("A100", 312.0), ("A10G", 70.0), ("A10", 125.0), ("A40", 149.7), ("A30", 165.0), ("A6000", 154.8)),
    *(("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("RTX 4090", 165.2), ("RTX 3090", 71.0)),
)
"""10^12 operations a second of dense bfloat16 products that sum in float32, by a part of the card's name; the first
that fits. Source: NVIDIA's data sheets."""


def peak_flops(name: str) -> float | None:
    """Operations a second of the card, or None if it is not in the table."""
    words = name.replace("-", " ").split()
    for part, teraflops in _TERAFLOPS:
        if all(word in words for word in part.split()):
            return 1e12 * teraflops
    return None


def describe(setting: Setting) -> dict[str, Any]:
    """Versions, and the card's name, bytes and peak."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    found |= {name: importlib.metadata.version(name) for name in ("transformers", "fxrewrite")}
    found |= {"device": platform.processor(), "memory": None, "capability": None, "peak_flops": None, "nccl": None}
    if setting.is_cuda:
        card = torch.cuda.get_device_properties(0)
        found |= {"device": card.name, "memory": card.total_memory, "peak_flops": peak_flops(card.name)}
        found |= {"capability": [card.major, card.minor], "nccl": list(torch.cuda.nccl.version())}
    return found


def figures(setting: Setting) -> Figures:
    return {"card": lambda: describe(setting), "matrix product": lambda: _product(setting)}


def _product(setting: Setting) -> dict[str, Any]:
    """What a product of square matrices in bfloat16 reaches: the most that a model can."""
    size = 64 if setting.tiny else 8192
    a, b = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    with setting.alone():
        seconds = seconds_of(lambda: a @ b, setting, 5)
    return {"size": size, "seconds": seconds, "flops_per_second": 2 * size**3 / seconds}


def seconds_of(step: Callable[[], Any], setting: Setting, rounds: int, *, warm_up: int = 2) -> float:
    """The median of `rounds` steps, by CUDA's events where there is a card."""
    for _ in range(warm_up):
        step()
    found: list[float] = []
    for _ in range(rounds):
        if setting.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            step()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            step()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def measured(
    forward: Callable[[], T],
    backward: Callable[[T], Any],
    setting: Setting,
    *,
    rounds: int = 3,
    warm_up: int = 2,
) -> dict[str, Any]:
    """Costs of a step, to be measured alone: its seconds; bytes above those that were there before, the most (`peak`),
    behind the forward (`saved`), and allocated at once (`largest`); then the longest kernels, with their milliseconds,
    and how often the host waited.
    """
    found: dict[str, Any] = {}
    found["seconds"] = seconds_of(lambda: backward(forward()), setting, rounds, warm_up=warm_up)
    if setting.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = forward()
        found["saved"] = torch.cuda.memory_allocated() - before
        backward(result)
        del result
        torch.cuda.synchronize()
        found["peak"] = torch.cuda.max_memory_allocated() - before
    seen = profiled(forward, backward, setting.device)
    found = {"peak": seen.peak, "saved": seen.saved, **found, "largest": seen.largest}
    if setting.is_cuda and not (seen.kernels or seen.graph_launches):
        raise RuntimeError("torch's profiler recorded no kernel: is CUPTI there, and allowed to record?")
    longest = list(seen.kernels.items())[:8]
    found["kernels"] = {name[:160]: round(us / 1e3, 4) for name, us in longest} if setting.is_cuda else None
    found["graph_launches"] = seen.graph_launches if setting.is_cuda else None
    found["waits"] = seen.waits if setting.is_cuda else None
    return found
