"""One model on a mesh against one device: `ZERO3 | AUTOSP | from_transformers(model, "tp")` on simulated ranks.

The tensor axis is left out where the model ships no plan. All casts to float32 are to float64, on both sides.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autosp_rules.parallelism import AUTOSP
from fxrewrite import FxRewriteError
from fxrewrite.backends import normalized
from fxrewrite.spmd import Gathered, Parallelism, Parallelisms, Replicate, Shard, contexts, input_placements
from fxrewrite.spmd.parallelism.expect import KINDS
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.parallel import ZERO3, from_transformers
from tests.zoo.measure import ATTENTIONS, Cell, NotApplicable, OneDevice, line_of, on_one_device
from tests.zoo.models import inputs_of

TOLERANCE = 1e-9


def mesh_of(text: str) -> dict[str, int]:
    """Axes and their numbers of ranks, of `dp=2,sp=2,tp=2`."""
    return {axis: int(size) for axis, size in (item.split("=") for item in text.split(","))}


def plan_of(model: torch.nn.Module, axes: Mapping[str, int]) -> Parallelism | Parallelisms | None:
    """ZeRO-3 over dp, AutoSP over sp, and the model's own plan over tp if it ships one; None where nothing is left."""
    tensor = [from_transformers(model, "tp")] if "tp" in axes and getattr(model, "tp_plan", None) else []
    members = [*([ZERO3] if "dp" in axes else []), *([AUTOSP] if "sp" in axes else []), *tensor]
    return None if not members else members[0] if len(members) == 1 else Parallelisms(tuple(members))


def measure_on_mesh(name: str, text: str) -> Cell:
    """The cell of a model on a mesh, with the first attention implementation that the model has on one device."""
    axes = mesh_of(text)
    made: dict[str, Any] = {"model": name, "num_ranks": 0, "mesh": text, "attention": ""}
    why = ""
    for attention in ATTENTIONS:
        started = time.perf_counter()
        made["attention"] = attention
        try:
            one_device, _ = on_one_device(name, attention)
        except NotApplicable as error:
            why = why or str(error)
            continue
        found: dict[str, Any]
        try:
            found = compare_on_mesh(name, one_device.in_float64(), axes)
        except FxRewriteError as error:
            found = {"status": "refused", "why": " ".join(str(error).split())}
        except Exception as error:  # noqa: BLE001  # a cell for every model, whatever it brings to light
            found = {"status": "failed", "why": line_of(error)}
        return Cell(**made | found, seconds=time.perf_counter() - started)
    return Cell(**made, status="not applicable", why=why)


def compare_on_mesh(name: str, one_device: OneDevice, axes: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a cell that say how far the ranks of the mesh are from one device.

    Along "dp" each rank has its own part of a batch; on one device the loss is the mean of those of the parts.
    Raises FxRewriteError where the plan refuses the model.
    """
    assert one_device.model is not None
    plan = plan_of(one_device.model, axes)
    if plan is None:
        return {"status": "not applicable", "why": "the model ships no plan"}
    mesh = {member.axis: axes[member.axis] for member in plan.members}
    over = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    num_parts = mesh.get("dp", 1)
    parts = [one_device.inputs, *(_part(name, one_device, seed) for seed in range(3, 2 + num_parts))]
    expected = _of_parts(one_device, parts)
    is_cut = [num_parts > 1 and any(part[i] is not parts[0][i] for part in parts) for i in range(len(parts[0]))]
    given = [torch.cat([p[i] for p in parts]) if cut else parts[0][i] for i, cut in enumerate(is_cut)]
    program = normalized(one_device.gm)
    with fake_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
        report = plan.plan().apply(program, context=contexts(device_mesh))
        placements = [
            {**held, **({"dp": Shard(0)} if cut else {})}
            for held, cut in zip(input_placements(program), is_cut, strict=True)
        ]
        torch.manual_seed(0)
        run = run_on_ranks(
            program, given, device_mesh, placements=dict(enumerate(placements)), backward=one_device.loss_at
        )
    losses = [outputs[one_device.loss_at] for outputs in run.outputs]
    losses = [torch.stack(losses).mean()] if num_parts > 1 else losses
    found = [
        [of_rank[i] for of_rank in run.grads] if all(p == Replicate() for p in placements[i].values()) else [joined]
        for i, joined in enumerate(run.gradients())
    ]
    return {
        **expected.errors(losses, found, TOLERANCE),
        "num_ranks": len(run.outputs),
        "over": over,
        "held": _held(one_device, placements, mesh),
        "sent": dict(Counter(node.meta["axis"] for node in program.graph.nodes if node.target in KINDS)),
        "lines": [str(event) for event in report.events_of(Gathered)],
    }


def _held(one_device: OneDevice, placements: list[dict[str, Any]], mesh: Mapping[str, int]) -> dict[str, float]:
    """Of the entries of parameters that the graph reads, the share that is in shards at rest, by axis."""
    entries = dict.fromkeys(mesh, 0)
    total = 0
    for value, placed in zip(one_device.inputs, placements, strict=True):
        if id(value) in one_device.grads:
            total += value.numel()
            for axis, placement in placed.items():
                entries[axis] += isinstance(placement, Shard) * value.numel()
    return {axis: count / total for axis, count in entries.items()}


def _part(name: str, one_device: OneDevice, seed: int) -> list[Any]:
    """The graph's inputs with another part of a batch as arguments of the call."""
    others = inputs_of(name, seed)
    of = {id(value): others[argument] for argument, value in one_device.called_with.items()}
    return [of[id(value)].to(value.dtype) if id(value) in of else value for value in one_device.inputs]


def _of_parts(one_device: OneDevice, parts: list[list[Any]]) -> OneDevice:
    """The same with the mean of the losses of the parts, and its gradients."""
    leaves = [value for value in parts[0] if id(value) in one_device.grads and value.requires_grad]
    torch.manual_seed(0)
    losses = [fx.Interpreter(one_device.gm).run(*part)[one_device.loss_at] for part in parts]
    loss = torch.stack(losses).mean()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    of = {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True)}
    return replace(one_device, loss=loss.detach(), grads={key: of.get(key) for key in one_device.grads})
