"""The longest sequence whose step fits into the memory that a process may take, for rank 0 of 8 of the largest model.

The peaks of two steps say, by a line, how many tokens would fit. That length, less a little, is run, then shorter ones
until one fits, or one that is a little too long: the longest lies between `longest` and `too_long`.

    limit        bytes that the process may take, parameters and gradients included
    seconds      of the longest step, forward and backward, and its `mfu`
    on_the_card  tokens that would fit into the whole memory of the card, by a line through the two longest
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from fxrewrite.testing import fake_mesh
from tests.bench.ways import WAYS, Step, ours
from tests.gpu.card import peak_flops
from tests.gpu.figures import Figures, Setting
from tests.gpu.models import RANKS, SHAPES, SHORTEST, Model, first_step

__all__ = ["figures"]

_TILE = 1 << 28
"""Bytes of a tile of logits or of an MLP: the widest, so that each is a product large enough for a card."""
_CLOSE = 0.04
"""Share of the estimated length between what should fit and what should not."""
_STEP = 1024
"""Lengths are multiples of it."""
_OURS = ours(checkpoint="full", logits="drop", loss_tile=_TILE, mlp_tile=_TILE)


def figures(setting: Setting) -> Figures:
    model = list(SHAPES)[-1]
    ways = {way: WAYS[way] for way in ("Ulysses by hand", "Ulysses by hand, tuned")} | {"autosp, all in tiles": _OURS}
    return {f"{model}, {way}": partial(_longest, model, prepare, setting) for way, prepare in ways.items()}


def _longest(name: str, prepare: Callable[[transformers.LlamaConfig], Step], setting: Setting) -> dict[str, Any]:
    if setting.memory is not None:
        torch.cuda.set_per_process_memory_fraction(setting.memory / _memory_of_card())
    model = Model.of(name, setting)
    with fake_mesh((RANKS,), ("sp",)):
        with torch.device(setting.device):
            run = prepare(model.config).run
        lengths = (64, 256) if setting.tiny else (SHORTEST // 2, SHORTEST)
        found: dict[str, Any] = {**model.described, "limit": setting.memory}
        found |= first_step(run, model, lengths[0], setting)
        steps = [{"length": length, **_step(run, model, length, setting)} for length in lengths]
        if setting.memory is not None:
            steps += _search(partial(_step, run, model, setting=setting), steps, setting.memory)
            known = [step for step in steps if step["fits"]]
            found["on_the_card"] = _would_fit(known, _memory_of_card())
    fitting = [step for step in steps if step["fits"]]
    last = max(fitting, key=lambda step: step["length"])
    too_long = [step["length"] for step in steps if not step["fits"]]
    found |= {"steps": steps, "longest": last["length"], "too_long": min(too_long, default=None)}
    return {**found, **{name: last[name] for name in ("seconds", "peak", "mfu")}}


def _search(step: Callable[[int], dict[str, Any]], known: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """A step of half of the length that should fit, to know that better, then steps down to one that fits, then one
    that should not."""
    estimate = _would_fit(known, limit)
    found: list[dict[str, Any]] = []

    def run(length: float) -> bool:
        length = int(length) // _STEP * _STEP
        found.append({"length": length, **step(length)})
        return found[-1]["fits"]

    if estimate / 2 > known[-1]["length"]:
        estimate = _would_fit([known[-1], found[-1]], limit) if run(estimate / 2) else estimate / 2
    length = (1 - _CLOSE / 2) * estimate
    if run(length):
        run((1 + _CLOSE / 2) * estimate)
        return found
    while length > SHORTEST and not run(length := (1 - _CLOSE) * length):
        pass
    return found


def _step(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], model: Model, length: int, setting: Setting
) -> dict[str, Any]:
    """Whether a step fits, its seconds, and the most bytes that were allocated."""
    ids = model.ids(length, setting)
    with setting.alone():
        try:
            _forget(setting)
            began = time.perf_counter()
            run(ids, ids.clone()).backward()
            if setting.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        except torch.OutOfMemoryError:
            gc.collect()  # what the traceback held
            return {"fits": False, "seconds": None, "peak": None, "mfu": None}
    if not setting.is_cuda:
        return {"fits": True, "seconds": seconds, "peak": None, "mfu": None}
    could = peak_flops(torch.cuda.get_device_name(0))
    mfu = None if could is None else model.operations(length) / seconds / could
    return {"fits": True, "seconds": seconds, "peak": torch.cuda.max_memory_allocated(), "mfu": mfu}


def _forget(setting: Setting) -> None:
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory_of_card() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def _would_fit(steps: list[dict[str, Any]], limit: int) -> int:
    """Tokens with which a step would take `limit` bytes, as each further token takes the same."""
    short, long = sorted(steps, key=lambda step: step["length"])[-2:]
    per_token = (long["peak"] - short["peak"]) / (long["length"] - short["length"])
    return long["length"] + int((limit - long["peak"]) / per_token)
