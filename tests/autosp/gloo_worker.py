"""What a rank computes of models of each kind, for `gloo_ranks.py`.

A cell is {model, kind, inner, dynamic, checkpointing, lengths, dropout, options}. Each rank computes the
single-device loss and gradients itself, then runs the compiled model on the whole batch, averages its gradients over
the ranks and compares.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist

from autosp_rules import autosp, prepare_autosp_inputs
from tests.autosp.gloo_ranks import StoppedError
from tests.autosp.models import batch, build, with_dropout


def relative(a: torch.Tensor, b: torch.Tensor, floor: float = 1e-300) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp_min(floor)).item()


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    dropout = cell.get("dropout", 0.0)
    backend = autosp(inner=cell["inner"], strict=True, rng="global" if dropout else "local", **cell.get("options", {}))
    model = build(cell["model"], checkpointing=cell.get("checkpointing", False), layers=cell.get("layers", 2))
    if dropout:
        with_dropout(model, dropout)
    step = torch.compile(model, backend=backend, fullgraph=True)
    worst = {"loss": 0.0, "grad": 0.0}
    for length in cell.get("lengths", [16]):
        inputs = batch(cell["model"], cell["kind"], length=length)
        model.zero_grad()
        torch.manual_seed(0)
        expected_loss = model(**inputs).loss
        expected_loss.backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        if cell.get("dynamic"):
            prepare_autosp_inputs(
                inputs["input_ids"], inputs["labels"], inputs.get("position_ids"), inputs.get("attention_mask")
            )
        torch.manual_seed(0)
        loss = step(**inputs).loss
        loss.backward()
        worst["loss"] = max(worst["loss"], relative(loss.detach(), expected_loss.detach()))
        floor = 1e-6 * max(g.abs().max().item() for g in expected)  # a key bias has no gradient but rounding
        for p, want in zip(model.parameters(), expected, strict=True):
            dist.all_reduce(p.grad)
            worst["grad"] = max(worst["grad"], relative(p.grad / dist.get_world_size(), want, floor))
    return {**worst, "graphs": len(backend.reports), "report": str(backend.reports[0])}


def run(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for cell in cells:
        try:
            results.append(run_cell(cell))
        except Exception as error:
            raise StoppedError([*results, {"error": traceback.format_exc()}]) from error
    return results
