"""The longest sequence whose step fits into the memory that a process may take, for rank 0 of 8 of the largest model.

Sequences become twice as long until one does not fit; then a line through the peaks of the two longest that fit says
what to try, until `too_long` is little more than `longest`. A step runs once before it is measured, so that nothing is
compiled meanwhile. Reductions of different order are not fused: for that inductor guards on lengths, and would compile
a way anew at some of them.

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
from torch._inductor import config as inductor_config

from fxrewrite.testing import fake_mesh
from tests.bench.ways import WAYS, Step, ours
from tests.gpu.card import peak_flops
from tests.gpu.figures import Figures, Setting
from tests.gpu.models import RANKS, SHAPES, SHORTEST, Model, first_step, would_fit

_TILE = 1 << 28
"""Bytes of a tile of logits or of an MLP: the widest, so that each is a product large enough for a card."""
_CLOSE = 0.04
"""Share of the estimated length between what should fit and what should not."""
_STEP = 1024
"""Lengths that are tried are multiples of it."""
_MOST = 1 << 22
"""Positions that the models have."""
_OURS = ours(checkpoint="full", logits="drop", loss_tile=_TILE, mlp_tile=_TILE)


def figures(setting: Setting) -> Figures:
    model = list(SHAPES)[-1]
    ways = {way: WAYS[way] for way in ("Ulysses by hand", "Ulysses by hand, tuned")} | {"autosp, all in tiles": _OURS}
    return {f"{model}, {way}": partial(_longest, model, prepare, setting) for way, prepare in ways.items()}


def _longest(name: str, prepare: Callable[[transformers.LlamaConfig], Step], setting: Setting) -> dict[str, Any]:
    if setting.memory is not None:
        torch.cuda.set_per_process_memory_fraction(setting.memory / _memory_of_card())
    model = Model.of(name, setting)
    with fake_mesh((RANKS,), ("sp",)), inductor_config.patch({"triton.mix_order_reduction": False}):
        with torch.device(setting.device):
            run = prepare(model.config).run
        shortest = 64 if setting.tiny else SHORTEST // 2
        found: dict[str, Any] = {**model.described, "limit": setting.memory}
        found |= first_step(run, model, shortest, setting)
        steps = search(partial(_step, run, model, setting=setting), shortest, setting.memory)
        if setting.memory is not None:
            found["on_the_card"] = _would_fit([step for step in steps if step["fits"]], _memory_of_card())
    fitting = [step for step in steps if step["fits"]]
    last = max(fitting, key=lambda step: step["length"])
    too_long = [step["length"] for step in steps if not step["fits"]]
    found |= {"steps": steps, "longest": last["length"], "too_long": min(too_long, default=None)}
    return {**found, **{name: last[name] for name in ("seconds", "peak", "mfu")}}


def search(step: Callable[[int], dict[str, Any]], shortest: int, limit: int | None) -> list[dict[str, Any]]:
    """Steps of which the longest that fits is at most `_CLOSE` shorter than one that does not; without a limit, two."""
    found: list[dict[str, Any]] = []

    def fits(length: int) -> bool:
        found.append({"length": length, **step(length)})
        return found[-1]["fits"]

    length = shortest
    while fits(length) and length < _MOST and (limit is not None or len(found) < 2):
        length *= 2
    while limit is not None and not all(one["fits"] for one in found):
        fitting = [one for one in found if one["fits"]]
        longest = max(one["length"] for one in fitting)
        too_long = min(one["length"] for one in found if not one["fits"])
        if too_long - longest <= max(_STEP, _CLOSE * longest):
            break
        apart = max(_STEP, int(_CLOSE / 2 * longest))
        between = _would_fit(fitting, limit) if len(fitting) > 1 else too_long
        if between >= too_long:  # peaks are no line yet
            between = (longest + too_long) // 2
        fits(_rounded(min(max(between, longest + apart), too_long - apart)))
    return found


def _rounded(length: int) -> int:
    return length // _STEP * _STEP


def _step(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], model: Model, length: int, setting: Setting
) -> dict[str, Any]:
    """Whether a step fits, its seconds, and the most bytes that were allocated."""
    ids = model.ids(length, setting)
    try:
        with setting.using():  # a length may be compiled anew
            run(ids, ids.clone()).backward()
        with setting.alone():
            _forget(setting)
            began = time.perf_counter()
            run(ids, ids.clone()).backward()
            if setting.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            peak = torch.cuda.max_memory_allocated() if setting.is_cuda else None
    except torch.OutOfMemoryError:
        gc.collect()  # what the traceback held
        return {"fits": False, "seconds": None, "peak": None, "mfu": None}
    if not setting.is_cuda:
        return {"fits": True, "seconds": seconds, "peak": None, "mfu": None}
    could = peak_flops(torch.cuda.get_device_name(0))
    mfu = None if could is None else model.operations(length) / seconds / could
    return {"fits": True, "seconds": seconds, "peak": peak, "mfu": mfu}


def _forget(setting: Setting) -> None:
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory_of_card() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def _would_fit(steps: list[dict[str, Any]], limit: int) -> int:
    """Tokens with which a step would take `limit` bytes, by the two longest."""
    shorter, longer = sorted((step["length"], step["peak"]) for step in steps)[-2:]
    return would_fit(shorter, longer, limit)
