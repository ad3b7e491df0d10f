"""AutoSP on the card against one device, in float64 and bfloat16, whole models forward and backward.

    simulated     4 ranks in one process, whose collectives exchange data; run as it is, without a compiler
    one rank      a program with all its collectives over a real process group of one rank: NCCL on a card

In bfloat16 both are compared with the model in float64: AutoSP may be at most twice as far from it as one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config

from autosp_rules import AutoSPConfig, AutoSPReport
from tests.autosp.models import batch, build, with_dropout
from tests.autosp.one_device import captured, on_ranks
from tests.autosp.one_rank import (
    Found,
    differences,
    distance,
    loss_and_gradients,
    one_rank_backend,
    one_rank_group,
)
from tests.gpu.figures import Figures, Setting

CASES: dict[str, tuple[str, str, float]] = {
    "Llama": ("llama_gqa", "plain", 0.0),
    "GPT-2, dropout": ("gpt2", "plain", 0.1),
    "Llama, padding": ("llama_gqa", "right_padding", 0.0),
}
"""A model of `tests.autosp.models`, its batch, and the probability of its dropouts."""
INNERS = ("eager", "aot_eager", "inductor")
_BOUND = 1e-6
"""Of relative differences in float64: these models cast their logits to float32 for the loss."""


def figures(setting: Setting) -> Figures:
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in CASES:
        for inner in INNERS:
            found[f"one rank, {case}, {inner}"] = partial(_one_rank, case, inner, setting)
    for case in CASES:
        for attention in ("ulysses", "gather_kv", "ring"):
            if not (attention == "ring" and CASES[case][2]):  # a ring has no dropout in the scores
                found[f"simulated, {case}, {attention}"] = partial(_simulated, case, attention, setting)
    found["simulated, Llama, bfloat16"] = partial(_in_bfloat16, setting)
    if setting.tiny:
        kept = ("one rank, Llama, aot_eager", "simulated, Llama, ulysses", "simulated, Llama, bfloat16")
        return {name: found[name] for name in kept}
    return found


def _made(case: str, setting: Setting) -> tuple[nn.Module, dict[str, Any]]:
    name, kind, dropout = CASES[case]
    model = build(name, layers=1 if setting.tiny else 2)
    if dropout:
        with_dropout(model, dropout)
    return model.to(setting.device), _on(setting.device, batch(name, kind))


def _on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in inputs.items()}


def _config(case: str, **how: Any) -> AutoSPConfig:
    return AutoSPConfig(rng="global" if CASES[case][2] else "local", outputs="gather", **how)


def _one_rank(case: str, inner: str, setting: Setting) -> dict[str, Any]:
    model, inputs = _made(case, setting)
    reports: list[AutoSPReport] = []
    config = _config(case, inner=inner, attention="ulysses")
    # inductor's own random numbers are not those of a model that is not compiled
    with one_rank_group(setting.backend), inductor_config.patch(fallback_random=True):
        step = torch.compile(model, backend=one_rank_backend(config, reports), fullgraph=True)
        found: dict[str, Any] = dict(differences(step, model, inputs))
    found |= {"backend": setting.backend, "collectives": len(reports[0].collectives)}
    has_collectives = bool(reports[0].collectives) or bool(
        CASES[case][2]
    )  # dropout in the scores takes none on one rank
    return found | {"holds": has_collectives and _is_equal(found)}


def _is_equal(found: dict[str, Any]) -> bool:
    return max(found["loss"], found["gradient"]) <= _BOUND


def _simulated(case: str, attention: Any, setting: Setting) -> dict[str, Any]:
    model, inputs = _made(case, setting)
    expected = loss_and_gradients(model, model, inputs)
    found: dict[str, Any] = dict(distance(_of_ranks(model, inputs, _config(case, attention=attention)), expected))
    return found | {"ranks": 4, "holds": _is_equal(found)}


def _of_ranks(model: nn.Module, inputs: dict[str, Any], config: AutoSPConfig) -> Found:
    gm, examples = captured(model, inputs)
    run = on_ranks(gm, examples, 4, config, backward=0).run
    by_input = {id(value): grad for value, grad in zip(examples, run.gradients(), strict=True)}
    gradients = [by_input[id(parameter)] for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients), "a parameter has no gradient"
    return run.outputs[0][0].detach(), [gradient for gradient in gradients if gradient is not None]


def _in_bfloat16(setting: Setting) -> dict[str, Any]:
    wide, inputs = _made("Llama", setting)
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())  # the same weights
    exact = loss_and_gradients(wide, wide, inputs)
    one_device = distance(loss_and_gradients(narrow, narrow, inputs), exact)
    ours = distance(_of_ranks(narrow, inputs, _config("Llama", attention="ulysses")), exact)
    holds = all(ours[what] <= 2 * one_device[what] + 1e-3 for what in ours)
    return {**ours, "one_device": one_device, "holds": holds}
