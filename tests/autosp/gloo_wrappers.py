"""Short trainings under what people wrap models in, for `gloo_ranks.py`.

A sequence over two ranks; on four ranks two replicas of it. A case trains three steps of SGD, whose parameters show a
factor in the gradient, and compares them with the same training on one device. The model has more than 1 MiB of
parameters, DDP's first bucket, at which Dynamo would split its graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autosp_rules import AutoSPBackend, autosp
from tests.versions import TORCH

Loss = Callable[[Callable[..., Any], dict[str, Tensor]], Tensor]
STEPS, RATE = 3, 0.05
WIDTH, VOCABULARY = 128, 61
ROOTS: list[Any] = []
"""What the last case made of its model."""


@dataclass
class Run:
    """What a case is given: the model, the mesh and a backend for it."""

    model: Decoder
    mesh: DeviceMesh
    backend: AutoSPBackend

    def compiled(self) -> Any:
        return torch.compile(self.model, backend=self.backend)

    def by_layer(self, wrap: Callable[[nn.Module], object], *, compile_layers: bool = False) -> None:
        for layer in self.model.model.layers:
            if compile_layers:
                layer.compile(backend=self.backend)
            wrap(layer)


def model_loss(step: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    return step(**inputs).loss


def _ddp(run: Run, **options: Any) -> Any:
    return DistributedDataParallel(run.compiled(), **options)


def _add_up(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


_add_up.__annotations__ = {}  # torch compares them with classes, and here they are text


def _ddp_that_adds_up(run: Run) -> Any:
    wrapped = _ddp(run)
    wrapped.register_comm_hook(None, _add_up)
    return wrapped


def _ddp_compiled(run: Run) -> Any:
    return torch.compile(DistributedDataParallel(run.model, bucket_cap_mb=1), backend=run.backend)


def _fsdp(run: Run, mesh: DeviceMesh | None = None) -> Any:
    run.model.compile(backend=run.backend)
    return fully_shard(run.model, mesh=mesh) if mesh is not None else fully_shard(run.model)


def _fsdp_by_layer(run: Run) -> Any:
    run.by_layer(fully_shard)
    return _fsdp(run)


def _torchtitan(run: Run) -> Any:
    run.by_layer(fully_shard, compile_layers=True)
    return fully_shard(run.model)


def _divided_by_one(run: Run) -> Any:
    """As torchtitan does, whose loss is a sum over labels divided by those of all replicas."""
    model = _fsdp(run)
    model.set_gradient_divide_factor(1.0)
    return lambda **inputs: Output(model(**inputs).loss / run.mesh["dp"].size(), torch.empty(0))


def _layers_divided(run: Run, by: float) -> Any:
    """Of all modules that fully_shard wraps, also those of eager code. Replicas are added up."""
    model = _torchtitan(run)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(by)
    return lambda **inputs: Output(model(**inputs).loss / run.mesh["dp"].size(), torch.empty(0))


def _blocks(run: Run) -> Any:
    run.by_layer(lambda layer: None, compile_layers=True)
    return run.model


def _fsdp1(run: Run, group: Any) -> Any:
    run.model.compile(backend=run.backend)
    return FullyShardedDataParallel(run.model, group, device_id=torch.device("cpu"), use_orig_params=True)


def _inner(run: Run) -> Any:
    run.model.model.compile(backend=run.backend)
    return run.model


def _breaks(run: Run) -> Any:
    """A user's hook that Dynamo cannot trace, in the middle of the model."""

    @torch._dynamo.disable
    def look(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        assert hidden.shape[1] == 16

    run.model.model.layers[0].register_forward_hook(look)
    return run.compiled()


def z_loss(step: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    out = step(**inputs)
    return out.loss + 0.01 * out.logits.logsumexp(-1).pow(2).mean()


def last_token(step: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    out = step(**inputs)
    return out.loss + F.cross_entropy(out.logits[:, -1], inputs["labels"][:, 0])


def loss_outside(step: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    logits = step(input_ids=inputs["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def embedded(step: Callable[..., Any], inputs: dict[str, Tensor]) -> Tensor:
    """Hidden states that are passed in, whose gradient eager code clips, as no sum of parts could be."""
    model = getattr(step, "_orig_mod", step)
    hidden = _Clipped.apply(model.model.embed(inputs["input_ids"]))
    return step(inputs_embeds=hidden, labels=inputs["labels"]).loss


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-4, 1e-4)


@dataclass
class Case:
    wrap: Callable[[Run], Any]
    loss: Loss = model_loss
    options: dict[str, Any] | None = None
    averaged: bool = True
    """By the wrapper; else the harness averages over all ranks."""
    accumulate: int = 1
    clip: float | None = None
    length: int = 16
    layers: int = 1
    graphs: int | None = None
    """How many are compiled, where the case is about that."""
    ranks: int = 2
    """4 where the case is about replicas."""
    inner: str = "aot_eager"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    """Of the wrapped model; one device has SGD."""
    hook: Callable[[nn.Module], None] = lambda model: None
    """What is registered on the model, on one device too."""


def _zero1(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns, which the tests take for an error

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=lr)


def _clip_gradients(model: nn.Module) -> None:
    """Hooks that are not linear, so they must read whole gradients; one rank registers another, which only looks."""
    model.get_parameter("lm_head.weight").register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    norm = model.get_parameter("model.norm.weight")
    norm.register_hook(lambda gradient: gradient / gradient.norm())
    if dist.get_rank() == 0:
        model.get_parameter("model.embed.weight").register_hook(lambda gradient: None)


def _hooked_late(run: Run) -> Any:
    """A hook is registered before the third step, when ranks do not look for hooks."""
    step, calls = _ddp(run), iter(range(STEPS))

    def call(**inputs: Tensor) -> Any:
        if next(calls) == 2:
            run.model.get_parameter("lm_head.weight").register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return step(**inputs)

    return call


def _over_dp(run: Run) -> Any:
    return _ddp(run, process_group=run.mesh.get_group("dp"))


def _fsdp_by_layer_over_dp(run: Run) -> Any:
    run.by_layer(lambda layer: fully_shard(layer, mesh=run.mesh["dp"]))
    return _fsdp(run, run.mesh["dp"])


CASES: dict[str, Case] = {
    "compiled in DDP, accumulation, clipping": Case(_ddp, accumulate=2, clip=0.5, graphs=1, ranks=4),
    "DDP, parameters with hooks": Case(_ddp, hook=_clip_gradients),
    "DDP, a hook that comes late": Case(_hooked_late),
    "averaged by hand, parameters with hooks": Case(lambda run: run.compiled(), averaged=False, hook=_clip_gradients),
    "DDP compiled": Case(_ddp_compiled, graphs=1, inner="inductor"),
    "DDP, static graph": Case(lambda run: _ddp(run, static_graph=True), graphs=1),
    "DDP, unused parameters": Case(lambda run: _ddp(run, find_unused_parameters=True), graphs=1),
    "DDP over dp alone, accumulation, clipping": Case(_over_dp, accumulate=2, clip=0.5, graphs=1, ranks=4),
    "DDP over dp alone, gradients='mean'": Case(_over_dp, options={"gradients": "mean"}, ranks=4),
    "DDP that adds up, gradients='sum'": Case(_ddp_that_adds_up, options={"gradients": "sum"}, graphs=1),
    "DDP, optimizer states in shards": Case(_ddp, optimizer=_zero1, clip=0.5, graphs=1),
    "FSDP, accumulation, clipping": Case(_fsdp, accumulate=2, clip=0.5, graphs=1),
    "FSDP over dp alone": Case(lambda run: _fsdp(run, run.mesh["dp"]), graphs=1, ranks=4),
    "HSDP": Case(lambda run: _fsdp(run, run.mesh), graphs=1, ranks=4),
    "FSDP, divided by 1": Case(_divided_by_one, graphs=1, ranks=4),
    "FSDP by layer": Case(_fsdp_by_layer, layers=2),
    "FSDP by layer, over dp alone": Case(_fsdp_by_layer_over_dp, layers=2, ranks=4),
    "FSDP by layer, breaks='refuse'": Case(_fsdp_by_layer, options={"breaks": "refuse"}),
    "FSDP and layers compiled": Case(_torchtitan, layers=2, graphs=1),
    "FSDP 1": Case(lambda run: _fsdp1(run, None), graphs=1),
    "FSDP 1 over dp alone": Case(lambda run: _fsdp1(run, run.mesh.get_group("dp")), graphs=1, ranks=4),
    "layers compiled, breaks='dtensor'": Case(
        _blocks, averaged=False, layers=2, graphs=2, options={"breaks": "dtensor"}
    ),
    "FSDP and layers compiled, breaks='dtensor'": Case(
        _torchtitan, layers=2, graphs=2, ranks=4, options={"breaks": "dtensor"}
    ),
    "FSDP and layers compiled, divided by 1": Case(lambda run: _layers_divided(run, 1.0)),
    "FSDP and layers compiled, divided by the size of the axis": Case(
        lambda run: _layers_divided(run, 2.0), ranks=4, options={"gradients": "mean"}
    ),
    "a break, breaks='dtensor'": Case(_breaks, averaged=False, layers=2, options={"breaks": "dtensor"}),
    "the model without its head compiled, breaks='dtensor'": Case(
        _inner, averaged=False, graphs=1, options={"breaks": "dtensor"}
    ),
    "layers compiled": Case(_blocks, averaged=False, layers=2, graphs=1),
    "the model without its head compiled": Case(_inner, averaged=False, graphs=1),
    "a break": Case(_breaks, averaged=False, layers=2),
    "a break, strict": Case(_breaks, averaged=False, options={"strict": True}),
    "a break, gradients='sum'": Case(_breaks, averaged=False, options={"gradients": "sum"}),
    "z-loss on logits": Case(Run.compiled, z_loss, averaged=False, length=15, graphs=1),
    "the last token's logits": Case(Run.compiled, last_token, averaged=False, length=15, graphs=1),
    "loss outside": Case(Run.compiled, loss_outside, averaged=False, length=15, graphs=1),
    "hidden states passed in": Case(Run.compiled, embedded, averaged=False, length=15, graphs=1),
}


if TORCH < (2, 12):  # does not dispatch to subclasses of DTensor
    CASES = {name: case for name, case in CASES.items() if (case.options or {}).get("breaks") != "dtensor"}


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Layer(nn.Module):
    """Causal attention of four heads, two for keys and values, and a gated MLP, on normalized hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (8, WIDTH // 4)).transpose(1, 2)
        q, k, v = heads.split((4, 2, 2), dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        normal = self.norms[1](hidden)
        return hidden + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Base(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class Decoder(nn.Module):
    """A causal language model that Dynamo traces faster than those of a library, with the names that they give."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model, self.lm_head = Base(layers), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Output:
        logits = self.lm_head(self.model(input_ids, inputs_embeds))
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def build(layers: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers).double().train()


def batches(case: Case) -> list[list[dict[str, Tensor]]]:
    """For each step and micro-batch those of all replicas."""
    generator, replicas = torch.Generator().manual_seed(1), case.ranks // 2
    ids = torch.randint(1, VOCABULARY, (STEPS * case.accumulate, replicas, 2, case.length), generator=generator)
    return [[{"input_ids": one, "labels": one.clone()} for one in micro] for micro in ids]


def train(case: Case, step: Callable[..., Any], optimizer: torch.optim.Optimizer, feed: Any, finish: Any) -> None:
    """`feed` gives the batches of a micro-step that this process computes; `finish` averages gradients, if need be."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    micro = batches(case)
    for at, replicas in enumerate(micro):
        is_last = at % case.accumulate == case.accumulate - 1
        mine = feed(replicas)
        with nullcontext() if is_last or not hasattr(step, "no_sync") else step.no_sync():
            for inputs in mine:
                case.loss(step, inputs).backward()
        if is_last:
            finish()
            for parameter in parameters:
                if parameter.numel():  # FSDP 1 leaves some ranks without a part of a parameter
                    assert parameter.grad is not None
                    parameter.grad /= len(mine) * case.accumulate
            if case.clip is not None:
                nn.utils.clip_grad_norm_(parameters, case.clip)
            optimizer.step()
            optimizer.zero_grad()


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def gathered(model: nn.Module) -> AbstractContextManager[None]:
    """In which FSDP 1 shows its parameters whole."""
    roots = [m for m in ROOTS if isinstance(m, FullyShardedDataParallel) and m.module is model]
    return FullyShardedDataParallel.summon_full_params(roots[0]) if roots else nullcontext()


def compare(case: Case) -> float:
    """The largest difference of a parameter to one device's, over how far the parameter moved."""
    mesh = init_device_mesh("cpu", (case.ranks // 2, 2), mesh_dim_names=("dp", "sp"))
    alone = build(case.layers)
    case.hook(alone)
    start = [whole(p) for p in alone.parameters()]
    train(case, alone, torch.optim.SGD(alone.parameters(), lr=RATE), lambda replicas: replicas, lambda: None)
    model = build(case.layers)
    case.hook(model)
    backend = autosp(case.inner, mesh=mesh, **(case.options or {}))
    step = case.wrap(Run(model, mesh, backend))
    ROOTS[:] = [step]
    parameters = list(model.parameters())

    def average() -> None:
        for p in () if case.averaged else parameters:
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def feed(replicas: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [replicas[mesh.get_local_rank("dp")]]

    train(case, step, case.optimizer(parameters, lr=RATE), feed, average)
    assert any(report.tokens_per_rank for report in backend.reports), str(backend)
    assert case.graphs in (None, len(backend.reports)), str(backend)
    with gathered(model):
        found = [whole(p) for p in model.parameters()]
    moved = [(p - was, want.detach() - was) for p, want, was in zip(found, alone.parameters(), start, strict=True)]
    return max(((found - want).abs().max() / want.abs().max()).item() for found, want in moved)


def run(cases: list[str]) -> dict[str, str]:
    """For each case the difference, or the error."""
    results: dict[str, str] = {}
    for case in cases:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results[case] = f"{compare(CASES[case])}"
            except Exception as error:  # noqa: BLE001  # the test reads it
                results[case] = f"{type(error).__name__}: {error}"
    return results
