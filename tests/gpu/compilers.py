"""CUDA graphs, symbolic lengths, caches of compiled programs, and equal layers compiled once, on one card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters
from torch._inductor import config

from autosp_rules import AutoSPConfig, AutoSPReport, autosp
from fxrewrite.testing import fake_mesh
from tests.autosp.one_rank import differences, one_rank_backend, one_rank_group
from tests.bench.ways import llama
from tests.gpu.card import measured
from tests.gpu.figures import Figures, Setting

_ROOT = Path(__file__).parents[2]


def figures(setting: Setting) -> Figures:
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "CUDA graphs": lambda: _cuda_graphs(setting),
        "symbolic length": lambda: _symbolic_length(setting),
        "second start": lambda: _second_start(setting),
    }
    for regions in ("whole", "once"):
        found[f"regions={regions}"] = lambda regions=regions: _regions(regions, setting)
    return found


def _model(setting: Setting, layers: int = 2) -> tuple[Any, dict[str, torch.Tensor]]:
    """A Llama of small layers, for which launching kernels takes longer than running them, and its batch."""
    sizes = llama(1 if setting.tiny else layers, 64 if setting.tiny else 512, 256)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = transformers.LlamaForCausalLM(sizes).train()
    return model, _batch(setting, 64 if setting.tiny else 512)


def _batch(setting: Setting, length: int) -> dict[str, torch.Tensor]:
    ids = (torch.arange(length, device=setting.device) * 7 % 251)[None]
    return {"input_ids": ids, "labels": ids.clone()}


def _cuda_graphs(setting: Setting) -> dict[str, Any]:
    """`mode="reduce-overhead"` of a program with collectives: equal to one device, and faster than without."""
    model, inputs = _model(setting)
    found: dict[str, Any] = {"launches": {}, "step": {}}
    with one_rank_group(setting.backend):
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            counters.clear()
            reports: list[AutoSPReport] = []
            how = AutoSPConfig(attention="ulysses", outputs="gather")
            compiled = torch.compile(model, backend=one_rank_backend(how, reports, mode=mode), fullgraph=True)

            def step(compiled: Any = compiled, **given: torch.Tensor) -> Any:
                torch.compiler.cudagraph_mark_step_begin()
                return compiled(**given)

            for _ in range(3):  # CUDA graphs are recorded at the second call
                off = differences(step, model, inputs)
            found[mode] = off
            with setting.alone():
                costs = measured(lambda step=step: step(**inputs)[0], torch.Tensor.backward, setting)
            found["step"][mode], found["launches"][mode] = costs["seconds"], costs["graph_launches"]
            found["skipped"] = counters["inductor"]["cudagraph_skips"]
        # a group whose collectives are in a graph waits for ever to be destroyed while the graph is there
        del compiled, step
        torch._dynamo.reset()
    equal = all(found[mode]["loss"] <= 1e-4 and found[mode]["gradient"] <= 1e-2 for mode in found["step"])  # TF32
    found["holds"] = equal and (not setting.is_cuda or bool(found["launches"]["reduce-overhead"]))
    return found


def _symbolic_length(setting: Setting) -> dict[str, Any]:
    """Three lengths by one program."""
    model, _ = _model(setting)
    backend = autosp(logits="drop")
    with fake_mesh((8,), ("sp",)):
        step = torch.compile(model, backend=backend, fullgraph=True)
        seconds: list[float] = []
        for length in (128, 256, 192):
            inputs = _batch(setting, length)
            for value in inputs.values():
                torch._dynamo.mark_dynamic(value, 1)
            started = time.perf_counter()
            step(**inputs).loss.backward()
            seconds.append(time.perf_counter() - started)
    return {"seconds_of_calls": seconds, "programs": len(backend.reports), "holds": len(backend.reports) == 1}


def _second_start(setting: Setting) -> dict[str, Any]:
    """The first step from an empty folder of caches and, in another process, from the one that was filled."""
    with TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-m", "tests.gpu.compilers", setting.device, str(int(setting.tiny))]
        runs: list[dict[str, Any]] = []
        for _ in range(2):
            done = subprocess.run(command, check=False, cwd=_ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the start exited with status {done.returncode}\n{done.stderr[-1500:]}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    found = {"cold": cold, "warm": warm, "ratio": warm["seconds"] / cold["seconds"]}
    return found | {"holds": warm["hits"] > 0}


def _start(setting: Setting) -> None:
    model, inputs = _model(setting)
    with fake_mesh((8,), ("sp",)):
        backend = autosp(logits="drop")
        started = time.perf_counter()
        torch.compile(model, backend=backend, fullgraph=True)(**inputs).loss.backward()
        seconds = time.perf_counter() - started
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    misses = counters["aot_autograd"]["autograd_cache_miss"]
    print(json.dumps({"seconds": seconds, "own": backend.reports[0].seconds, "hits": hits, "misses": misses}))


def _regions(regions: Any, setting: Setting) -> dict[str, Any]:
    """A rank of 8 of a model of 16 layers."""
    model, inputs = _model(setting, layers=16)
    backend = autosp(logits="drop", regions=regions)
    with fake_mesh((8,), ("sp",)), config.patch(force_disable_caches=True):
        step = torch.compile(model, backend=backend, fullgraph=True)
        with setting.using():
            started = time.perf_counter()
            step(**inputs).loss.backward()
            compile_seconds = time.perf_counter() - started
        with setting.alone():
            costs = measured(lambda: step(**inputs).loss, torch.Tensor.backward, setting)
    lines = [line for line in backend.reports[0].lines if "region" in line]
    return {**costs, "compile": compile_seconds, "layers": model.config.num_hidden_layers, "report": lines}


if __name__ == "__main__":
    _start(Setting(sys.argv[1], bool(int(sys.argv[2])), 0))
