"""Blocks that are compiled one by one, between which hidden states stay in chunks, for `gloo_ranks.py`.

The sequence is over all ranks. What eager code and blocks compute of DTensors is compared with one device.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from autosp_rules import AutoSPBackend, autosp
from fxrewrite.spmd import chunked
from tests.autosp.gloo_wrappers import VOCABULARY, WIDTH, Layer

KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce")


class Model(nn.Module):
    """Blocks with eager code between them: norms with weights, residual additions, views, and a loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.plain = False
        self.seen: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
            if not self.plain:
                hidden = hidden + F.gelu(self.norm(hidden)) * 0.5
                hidden = hidden.transpose(0, 1).transpose(0, 1)
            self.seen.append(hidden)
            hidden.retain_grad()
        logits = self.head(self.norm(hidden))
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)  # the last rank has fewer labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()


def build(layers: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(layers).double()


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def error(found: Any, expected: Tensor) -> float:
    return ((whole(found) - expected).abs().max() / expected.abs().max()).item()


def gradient_errors(model: nn.Module, alone: nn.Module) -> dict[str, float]:
    """Of the mean over ranks of each parameter's gradient, which is no DTensor."""
    errors: dict[str, float] = {}
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert not isinstance(parameter.grad, DTensor), name
        dist.all_reduce(parameter.grad)
        errors[name] = error(parameter.grad / dist.get_world_size(), other.grad)
    return errors


def compiled(model: Model, mesh: DeviceMesh, **options: Any) -> AutoSPBackend:
    backend = autosp("aot_eager", mesh=mesh, **options)
    for layer in model.layers:
        layer.compile(backend=backend)
    return backend


def sent(function: Callable[[], object]) -> dict[str, int]:
    """How many collectives of each kind run in the function, also those of DTensors."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    counts = Counter({event.key: event.count for event in profile.key_averages()})
    return {kind: counts[f"_c10d_functional::{kind}"] for kind in KINDS}


def trained(mesh: DeviceMesh) -> dict[str, Any]:
    """The loss, gradients of parameters and of hidden states, and what is sent; by eager code on DTensors."""
    ids = torch.arange(32).reshape(2, 16) * 7 % VOCABULARY
    alone, model = build(), build()
    backend = compiled(model, mesh, breaks="dtensor")
    expected, found = alone(ids), model(ids)
    expected.backward()
    found.backward()
    errors = {"loss": error(found, expected), **gradient_errors(model, alone)}
    for position, (hidden, other) in enumerate(zip(model.seen, alone.seen, strict=True)):
        assert isinstance(hidden, DTensor)
        assert hidden.placements == (Shard(1),), hidden.placements
        assert hidden.to_local().shape[1] == 16 // dist.get_world_size()
        errors[f"hidden {position}"] = error(hidden.grad, other.grad)
    lines = [line for report in backend.reports for line in report.lines if line.startswith("border")]
    return {"errors": errors, "lines": lines, "graphs": len(backend.reports)}


def collectives(mesh: DeviceMesh) -> dict[str, Any]:
    """What a step of blocks sends, up to a sum of the last one's hidden states, with values gathered and in chunks."""
    ids, found = torch.arange(32).reshape(2, 16) * 7 % VOCABULARY, {}
    for breaks in ("gather", "dtensor"):
        torch._dynamo.reset()
        model = build()
        model.plain = True
        compiled(model, mesh, breaks=breaks)
        hidden = model.embed(ids).detach().requires_grad_()

        def step(hidden: Tensor = hidden, model: Model = model) -> None:
            for layer in model.layers:
                hidden = layer(hidden)
            hidden.square().sum().backward()

        step()
        found[breaks] = sent(step)
    return found


def entered(mesh: DeviceMesh) -> dict[str, Any]:
    """DTensors of one's own in other placements: the result of a block, the gradient of its input, and the report."""
    found: dict[str, Any] = {}
    ranks = dist.get_world_size()
    backwards = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("other",))
    cases: dict[str, tuple[int, Any, DeviceMesh]] = {
        "sequence": (16, Shard(1), mesh),
        "batch": (16, Shard(0), mesh),
        "features": (16, Shard(2), mesh),
        "uneven": (15, Shard(1), mesh),
        "whole": (16, Replicate(), mesh),
        "sums": (16, Partial(), mesh),
        "other mesh": (16, Shard(1), backwards),
    }
    for name, (length, placement, own) in cases.items():
        torch._dynamo.reset()
        alone, model = build(1), build(1)
        backend = compiled(model, mesh, breaks="dtensor")
        x = torch.arange(4.0 * length * WIDTH, dtype=torch.float64).reshape(4, length, WIDTH).sin()
        expected_x = x.clone().requires_grad_()
        expected = alone.layers[0](expected_x)
        expected.square().sum().backward()
        if isinstance(placement, Partial):
            given = DTensor.from_local(x / ranks, own, [placement], run_check=False)
        else:
            given = distribute_tensor(x, own, [placement])
        given = given.detach().requires_grad_()
        result = model.layers[0](chunked(given))
        result.square().sum().backward()
        found[name] = {
            "errors": {"result": error(result, expected), "gradient": error(given.grad, expected_x.grad)},
            "lines": [line for line in backend.reports[0].lines if line.startswith("border")],
            "placements": str(given.grad.placements) if given.grad is not None else "",
        }
    return found


def evaluated(mesh: DeviceMesh) -> dict[str, Any]:
    """A block that runs whole reads a DTensor; one that is not prepared for a trace is torch's error."""
    alone, model = build(1), build(1)
    compiled(model, mesh, breaks="dtensor", disable_in_eval=True)
    x = torch.arange(2.0 * 16 * WIDTH, dtype=torch.float64).reshape(2, 16, WIDTH).sin()
    given = distribute_tensor(x, mesh, [Shard(1)])
    with torch.no_grad():
        result = error(model.layers[0](chunked(given)), alone.layers[0](x))
    try:
        model.layers[0](given)
    except Exception as raised:  # noqa: BLE001  # the test reads it
        said = str(raised)
    else:
        said = ""
    return {"errors": {"result": result}, "said": said}


LOSSES: list[Callable[..., Tensor]] = [
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
    F.poisson_nll_loss,
]


def losses(mesh: DeviceMesh) -> dict[str, Any]:
    """Losses of each element of a value in chunks, and their gradients, by every reduction."""
    x, target = (torch.arange(2.0 * 16, dtype=torch.float64).reshape(2, 16).add(n).sin() / 3 + 0.5 for n in range(2))
    errors: dict[str, float] = {}
    for loss in LOSSES:
        for reduction in ("mean", "sum", "none"):
            alone, given = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            expected, found = (loss(value, target, reduction=reduction) for value in (alone, chunked(given)))
            expected.sum().backward()
            found.sum().backward()
            name = f"{loss.__name__}, {reduction}"
            errors[name] = max(error(found, expected), error(given.grad, torch.as_tensor(alone.grad)))
    return {"errors": errors}


class PerToken(Model):
    """One sequence, whose losses of tokens cross a break of the graph: the part after it has no sequence."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        each = F.cross_entropy(self.head(self.norm(hidden))[0], ids[0].roll(-1), reduction="none")
        torch._dynamo.graph_break()
        return (each.square() * 0.5).mean()


def without_sequence(mesh: DeviceMesh) -> dict[str, Any]:
    """A part that has no sequence, and gets a value in chunks: gathered, since every rank runs it whole."""
    ids = torch.arange(16).reshape(1, 16) * 7 % VOCABULARY
    torch.manual_seed(0)
    alone = PerToken(1).double()
    model = copy.deepcopy(alone)
    backend = autosp("aot_eager", mesh=mesh, breaks="dtensor")
    expected, found = alone(ids), torch.compile(model, backend=backend)(ids)
    expected.backward()
    found.backward()
    errors = {"loss": error(found, expected), **gradient_errors(model, alone)}
    lines = [line for report in backend.reports for line in report.lines if line.startswith("border")]
    return {"errors": errors, "lines": lines}


CASES = {case.__name__: case for case in (trained, collectives, entered, evaluated, losses, without_sequence)}


def run(cases: list[str]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    found: dict[str, Any] = {}
    for case in cases:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[case] = CASES[case](mesh)
    return found
