"""Rank 0 of 8 of models of Llama's shapes in bfloat16, alone over torch's fake process group: steps, bytes, MFU.

Collectives return at once, so times are those of what a rank computes; it is random weights that train. Each way starts
at the shortest sequence and makes it four times as long until the card's memory, or the figure's time, is over.

    seconds, peak, saved, largest    of one step, forward and backward, without an optimizer (`card.measured`)
    of_peak                          of a budget of memory: the estimate of `autosp(memory=...)`, by the peak measured
    mfu                              operations of the rank's share over those that the card could do in that time
    would_fit                        tokens that fill the card, by a line through the peaks of the two longest
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch._dynamo.exc import BackendCompilerFailed

from autosp_rules import autosp
from autosp_rules.events import MemoryFitted
from autosp_rules.parallelism import AUTOSP
from fxrewrite.spmd import shard_parameters, spmd
from fxrewrite.testing import fake_mesh
from rules.parallel import ZERO3
from tests.bench.ways import WAYS, Step, is_installed, ours
from tests.gpu.card import measured, peak_flops
from tests.gpu.figures import Figures, Setting
from tests.gpu.models import RANKS, SHAPES, SHORTEST, Model, first_step, would_fit

_SECONDS = 12.0
"""Of one way of one model: no longer sequence is begun after them, compiling not counted."""
_CHECKPOINTED: dict[str, Any] = {"checkpoint": "attention", "logits": "drop"}
_FIRST: dict[str, Callable[[transformers.LlamaConfig], Step]] = {
    "autosp, layers checkpointed": ours(**_CHECKPOINTED),
    "Ulysses by hand": WAYS["Ulysses by hand"],
    "Ulysses by hand, tuned": WAYS["Ulysses by hand, tuned"],
    "autosp, logits dropped": ours(checkpoint="none", logits="drop"),
    "autosp": WAYS["autosp"],
    **({"DeepSpeed AutoSP": WAYS["DeepSpeed AutoSP"]} if is_installed("DeepSpeed AutoSP") else {}),
}
_MORE: dict[str, Callable[[transformers.LlamaConfig], Step]] = {
    "autosp, offloaded": ours(**_CHECKPOINTED, offload=True),
    "autosp, overlapped": ours(**_CHECKPOINTED, overlap=True),
    "autosp, all checkpointed": ours(**{**_CHECKPOINTED, "checkpoint": "full"}),
    "autosp, ring": ours(**_CHECKPOINTED, attention="ring"),
}


def figures(setting: Setting) -> Figures:
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    models = list(SHAPES)
    for model in (models[0], models[2], models[1]):
        for way, prepare in _FIRST.items():
            found[f"{model}, {way}"] = partial(_alone, model, prepare, setting)
        if model == models[0]:
            for way, prepare in _MORE.items():
                found[f"{model}, {way}"] = partial(_alone, model, prepare, setting)
            found[f"{model}, ZeRO-3 over 8 and autosp over 8"] = partial(_alone_in_shards, model, setting)
            found[f"{model}, a budget of memory"] = partial(_in_a_budget, model, setting)
    return dict(list(found.items())[: 3 + len(_FIRST) + len(_MORE)]) if setting.tiny else found


def _alone(name: str, prepare: Callable[[transformers.LlamaConfig], Step], setting: Setting) -> dict[str, Any]:
    model = Model.of(name, setting)
    with fake_mesh((RANKS,), ("sp",)):
        with torch.device(setting.device):
            step = prepare(model.config)
        return _by_length(model, setting, step.run)


def _alone_in_shards(name: str, setting: Setting) -> dict[str, Any]:
    """Parameters in shards over 8 replicas, too: rank 0 of 64."""
    model, plan = Model.of(name, setting), ZERO3 | AUTOSP
    with fake_mesh((RANKS, RANKS), ("dp", "sp"), device=setting.device) as mesh:
        with torch.device(setting.device):
            whole = transformers.LlamaForCausalLM._from_config(model.config).train()
        held = shard_parameters(whole, plan, mesh)
        compiled = torch.compile(held, backend=spmd(plan, mesh=mesh))

        def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            torch._dynamo.mark_dynamic(ids, 1)
            torch._dynamo.mark_dynamic(labels, 1)
            return compiled(input_ids=ids, labels=labels).loss

        return _by_length(model, setting, run)


def _in_a_budget(name: str, setting: Setting) -> dict[str, Any]:
    """Settings that a budget chose, first of all that fits, then of 0.6 of that, less what is always there."""
    sizes = Model.of(name, setting).config
    ids = torch.randint(sizes.vocab_size, (1, 128 if setting.tiny else 8 * SHORTEST), device=setting.device)
    tries: list[dict[str, Any]] = []
    budget = 64 * 2**30
    for _ in range(2):
        torch._dynamo.reset()
        with fake_mesh((RANKS,), ("sp",)):
            with torch.device(setting.device):
                model = transformers.LlamaForCausalLM._from_config(sizes).train()
            backend = autosp(memory=budget, logits="drop")
            step = torch.compile(model, backend=backend, fullgraph=True)
            try:
                step(input_ids=ids, labels=ids).loss.backward()
            except BackendCompilerFailed as error:
                tries.append({"budget": budget, "refused": str(error.inner_exception)})
                break
            model.zero_grad()
            with setting.alone():
                costs = measured(lambda step=step: step(input_ids=ids, labels=ids).loss, _fresh(model), setting)
        (event,) = backend.reports[0].events_of(MemoryFitted)
        peak = event.given + costs["peak"]
        chosen = {"budget": budget, "settings": event.settings, "estimate": event.peak, "peak": peak, "at": event.at}
        chosen |= {"is_guess": event.is_guess, "search_seconds": event.seconds, "seconds": costs["seconds"]}
        tries.append({**chosen, "of_peak": event.peak / peak})
        budget = event.given + event.gradients + int(0.6 * (event.peak - event.given - event.gradients))
        del model, step
    return {
        "tries": tries,
        "length": ids.shape[1],
        "holds": all(0.95 <= one.get("of_peak", 1) <= 1.05 for one in tries),
    }


def _fresh(model: torch.nn.Module) -> Callable[[torch.Tensor], None]:
    """A backward pass that finds no gradients, and leaves none to the next one."""

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        model.zero_grad()

    return backward


def _by_length(
    model: Model, setting: Setting, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The figures of a step at each length; `compile` is the first step, in seconds, `longest` the last that fits."""
    peak = peak_flops(torch.cuda.get_device_name(0)) if setting.is_cuda else None
    steps: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {**model.described, "steps": steps, "longest": None}
    found["ended_by"] = "the last length that is measured"
    length = 64 if setting.tiny else SHORTEST
    lengths = [length * 4**i for i in range(2 if setting.tiny else 6)]
    found |= first_step(run, model, lengths[0], setting)
    spent = 0.0
    for length in lengths:
        ids = model.ids(length, setting)
        try:
            if steps:
                with setting.using():  # a length may be compiled anew
                    run(ids, ids.clone()).backward()
            with setting.alone():
                began = time.monotonic()
                step = measured(lambda x=ids: run(x, x.clone()), torch.Tensor.backward, setting, rounds=7, warm_up=1)
                last_spent = time.monotonic() - began
        except torch.OutOfMemoryError:
            if not steps:
                raise
            found["ended_by"] = f"{length:,} tokens do not fit into the card's memory"
            break
        operations = model.operations(length)
        step |= {"operations": operations, "mfu": None if peak is None else operations / step["seconds"] / peak}
        steps[length] = step
        found["longest"] = length
        spent += last_spent
        if spent + 6 * last_spent > _SECONDS and length != lengths[-1]:
            found["ended_by"] = "the figure's time"
            break
    if setting.is_cuda and len(steps) > 1:
        found["would_fit"] = _would_fit(steps)
    last = steps[found["longest"]]
    return {**found, **{name: last[name] for name in ("seconds", "peak", "saved", "mfu")}}


def _would_fit(steps: dict[int, dict[str, Any]]) -> int | None:
    """Tokens with which a step would fill the card, as its peak grows by the same bytes for each token, if it grows."""
    (short, first), (long, second) = list(steps.items())[-2:]
    if second["peak"] < 1.5 * first["peak"]:
        return None  # parameters and gradients are what it holds
    limit = torch.cuda.get_device_properties(0).total_memory - torch.cuda.memory_allocated()
    return would_fit((short, first["peak"]), (long, second["peak"]), limit)
