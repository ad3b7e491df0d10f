"""A rank of `test_processes`: trains a decoder by parallelisms of rules.parallel, and compares it with one device.

python -m torch.distributed.run --nproc-per-node=4 parallel_worker.py "" FOLDER
"""

import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import AutoSPConfig
from autosp_rules.parallelism import AUTOSP, AUTOSP_ZERO3, CONTEXT_ZIGZAG, autosp_parallelism
from fxrewrite import FxRewriteError
from fxrewrite.spmd import (
    AtBorder,
    DeferredGather,
    Parallelism,
    Parallelisms,
    RegionsCompiled,
    Shard,
    Stored,
    inputs,
    no_sync,
    param,
    shard_parameters,
    spmd,
    whole_parameters,
)
from fxrewrite.spmd.parallelism.accumulate import is_unreduced
from rules.parallel import DATA, EXPERT_ZERO3, MEGATRON, ZERO2, ZERO3
from tests.rules.parallel.models import GROUPED, build
from tests.versions import TORCH

IDS = torch.arange(96).reshape(8, 12) * 7 % 61


def decoder(*, tied: bool = False, layers: int = 1, vocabulary: int = 62) -> nn.Module:
    """In float64; two ranks divide its vocabulary, and four do not; its key and value heads are shared."""
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=tied,
        attention_dropout=0.0,
        **widths,
    )
    return LlamaForCausalLM(config).double()


def hooked(**how: Any) -> nn.Module:
    """The decoder, each layer of which Dynamo captures by itself, because it does not trace a hook of the first."""
    model = decoder(**how)
    model.model.layers[0].register_forward_hook(torch._dynamo.disable(lambda *_: None))
    return model


def mixture(**_: Any) -> nn.Module:
    """Four experts, two of them for each token."""
    model = build("Mixtral", num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation(GROUPED)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).detach().clone() for name, value in model.named_parameters()}


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of an entry."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients of the parameters that have one."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of an entry, over the largest entry that is expected."""
    return largest(found, expected) / largest(expected, dict.fromkeys(expected, torch.zeros(())))


def memory(values: Iterable[torch.Tensor]) -> int:
    """Bytes that the allocator holds for these, of DTensors their shards; what two of them share is counted once."""
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum({s.data_ptr(): s.nbytes() for s in (value.untyped_storage() for value in local)}.values())


def train(model: nn.Module, step: Any, ids: torch.Tensor, *, steps: int, clip: float = 0.0) -> dict[str, int]:
    """Steps of SGD with momentum, over two micro-batches each where gradients are clipped; what is held after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = dict[str, int]()
    for _ in range(steps):
        *first, last = ids.chunk(2) if clip else [ids]
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            for part in first:
                step(input_ids=part, labels=part).loss.backward()
        step(input_ids=last, labels=last).loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        held = {
            "parameters": memory(model.parameters()),
            "gradients": memory(p.grad for p in model.parameters() if p.grad is not None),
            "momentum": memory(state["momentum_buffer"] for state in optimizer.state.values()),
        }
        optimizer.zero_grad()
    return held


def compared(
    plan: Parallelism | Parallelisms,
    mesh: DeviceMesh,
    *,
    inner: str = "aot_eager",
    model_of: Callable[..., nn.Module] = decoder,
    regions: Literal["whole", "once"] = "whole",
    **how: Any,
) -> dict[str, Any]:
    """Trains the same model on one device and over the mesh."""
    torch._dynamo.reset()
    one = model_of(**{name: how.pop(name) for name in ("tied", "layers", "vocabulary") if name in how})
    if how.pop("frozen", False):
        one.model.embed_tokens.requires_grad_(requires_grad=False)
    if how.pop("checkpointed", False):
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = shard_parameters(copy.deepcopy(one), plan, mesh)
    start = parameters_of(one)
    parts = IDS.chunk(2) if how.get("clip") else [IDS]
    for member in plan.members:
        if member.data == "own":
            parts = [part.chunk(mesh[member.axis].size())[mesh.get_local_rank(member.axis)] for part in parts]
    mine = torch.cat(list(parts))
    if CONTEXT_ZIGZAG in plan.members:  # this rank's two blocks of each sequence
        blocks, rank = mine.chunk(2 * mesh["sp"].size(), 1), mesh.get_local_rank("sp")
        mine = torch.cat([blocks[rank], blocks[-1 - rank]], 1)
    backend = spmd(plan, mesh=mesh, inner=inner, regions=regions)
    step = torch.compile(model, backend=backend, fullgraph=model_of is not hooked)
    held = train(model, step, mine, steps=3, **how)
    of_one = train(one, one, IDS, steps=3, **how)
    expected = parameters_of(one)
    with whole_parameters():
        evaluated = model(input_ids=IDS).logits - one(input_ids=IDS).logits
    return {
        "parameters": largest(parameters_of(model), expected) / largest(expected, start),
        "evaluated": evaluated.abs().max().item(),
        "held": max(held[kind] / of_one[kind] for kind in held),
        "regions": [str(event) for report in backend.reports for event in report.events_of(RegionsCompiled)],
    }


class Broken(nn.Module):
    """Two blocks of matrix products, with code between them that is not compiled."""

    breaks = True

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, scale = torch.relu(self.up_proj(x)), self.scale
        if self.breaks:
            torch._dynamo.graph_break()  # the scale leaves the first graph as it is
            h = h * scale * (1 + float(h.detach().sum() > 0))
        return (self.down_proj(h) - x).square().mean()


def in_parts(mesh: DeviceMesh, breaks: Any = "gather") -> dict[str, Any]:
    """The same for a model that breaks, whose gradients cross the break; its inputs are in chunks."""
    place = {param("up_proj.{weight,bias}"): Shard(0), param("down_proj.weight"): Shard(1), inputs("x"): Shard(1)}
    sharded = {param("*", but="scale"): Stored(Shard(0), or_whole=True)}
    plan = replace(ZERO3, place=sharded) | Parallelism("tensor", axis="tp", place=place)
    torch.manual_seed(0)
    one = Broken().double()
    model = shard_parameters(copy.deepcopy(one), plan, mesh)
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()
    backend = spmd(plan, mesh=mesh, inner="aot_eager", breaks=breaks)
    torch._dynamo.reset()
    chunk = x.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")]
    torch.compile(model, backend=backend)(chunk).backward()
    one(x).backward()
    assert len(backend.reports) > 1
    off = relative(gradients_of(model), gradients_of(one))
    return {"parameters": off, "borders": [str(e) for r in backend.reports for e in r.events_of(AtBorder)]}


class Halves(nn.Module):
    """Rows that ranks do not divide, tied weights, a frozen one, and one that some micro-batches do not use."""

    dtype = torch.float64
    """Of the products with the first weight of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(7, 8), "down": nn.Linear(8, 7)}) for _ in range(2))
        self.layers[1].down.weight = self.layers[0].down.weight
        self.layers[1].down.bias.requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, *, is_short: bool = False) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != 1 or not is_short:
                half = nn.functional.linear(x.to(self.dtype), layer.up.weight.to(self.dtype)).to(x.dtype)
                x = x + layer.down(torch.relu(half + layer.up.bias)) * self.scale
        return x.square().mean()


def penalty(model: nn.Module) -> torch.Tensor:
    """Of parameters, which eager code computes."""
    return whole(torch.stack([p.square().sum() for p in model.parameters() if p.requires_grad]).sum())


def accumulated(plan: Parallelism | Parallelisms, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, float]:
    """Gradients of micro-batches that are reduced once, and of one device; or, in bfloat16, reduced each time."""
    torch.manual_seed(0)
    one = Halves().double()
    one.dtype = dtype
    whole_batches = torch.randn(3, 8, 7).double()
    batches = whole_batches
    for member in plan.members:
        if member.data == "own":
            batches = batches.chunk(mesh[member.axis].size(), 1)[mesh.get_local_rank(member.axis)]

    def gradients(*, once: bool) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        model = shard_parameters(copy.deepcopy(one), plan, mesh)
        backend = spmd(plan, mesh=mesh, inner="aot_eager")
        step = torch.compile(model, backend=backend, fullgraph=True)
        for i, x in [*enumerate(batches)] * 2:  # the second time there are gradients that are reduced
            with no_sync(model) if once and i < 2 else nullcontext():
                step(x, is_short=i > 0).backward()
                penalty(model).backward()
            assert any(map(is_unreduced, model.parameters())) == (once and i < 2)
        assert len(backend.reports) == 2, "a program for each branch"
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.placements == parameter.placements
        return gradients_of(model)

    found = gradients(once=True)
    if dtype == torch.bfloat16:
        expected = gradients(once=False)
    else:
        for i, x in [*enumerate(whole_batches)] * 2:
            one(x, is_short=i > 0).backward()
            penalty(one).backward()
        expected = gradients_of(one)
    assert len(expected) == sum(p.requires_grad for p in one.parameters())
    return {"parameters": relative(found, expected)}


def of_other_sizes(plan: Parallelism, mesh: DeviceMesh) -> dict[str, float]:
    """Gradients where each rank has batches of sizes of its own, so that ranks compile at different calls."""
    torch.manual_seed(0)
    one = Halves().double()
    model = shard_parameters(copy.deepcopy(one), plan, mesh)
    step = torch.compile(model, backend=spmd(plan, mesh=mesh, inner="aot_eager", timeout=60), fullgraph=True)
    for sizes in ((4, 4, 4, 4), (4, 2, 4, 4), (3, 5, 4, 2)):
        batches = [torch.randn(size, 7).double() for size in sizes]
        step(batches[mesh.get_local_rank()]).backward()
        if plan is DATA and dist.get_rank() == 0:  # nothing is sent, so it may evaluate alone
            with torch.no_grad():
                step(batches[0])
        torch.stack([one(x) for x in batches]).mean().backward()
    torch._dynamo.reset()
    return {"parameters": relative(gradients_of(model), gradients_of(one))}


def of_other_parameters(mesh: DeviceMesh) -> list[str]:
    """What is said where a rank's batch uses other parameters: in a program of its own, and in one that all have."""
    said: list[str] = []
    for before in ((), (False, True)):
        model = shard_parameters(Halves(), ZERO3, mesh)
        backend = spmd(ZERO3, mesh=mesh, inner="eager")
        step = torch.compile(model, backend=backend, fullgraph=True)
        try:
            for is_short in (*before, dist.get_rank() == 1):
                step(torch.ones(4, 7), is_short=is_short)
            backend.check_ranks()
        except (FxRewriteError, BackendCompilerFailed) as error:
            said.append(str(error))
        dist.barrier()
        torch._dynamo.reset()
    return said


def own_statistics(mesh: DeviceMesh) -> dict[str, float]:
    """Of a batch norm, on ranks with parts of a batch of their own, which differ; trained and evaluated."""
    torch.manual_seed(0)
    expected = nn.BatchNorm1d(6).double()
    model = shard_parameters(copy.deepcopy(expected), DATA, mesh)
    backend = spmd(DATA, mesh=mesh, inner="aot_eager")
    step = torch.compile(model, backend=backend, fullgraph=True)
    for rows in torch.randn(2, 8, 6).double():
        for norm, is_trained in itertools.product((step, expected), (True, False)):
            norm.train(is_trained)
            norm(rows.chunk(mesh.size())[mesh.get_local_rank()]).sum().backward()
    backend.check_ranks()
    return {"parameters": (model.running_var - expected.running_var).abs().max().item()}


def statistics_of_all(mesh: DeviceMesh) -> dict[str, float]:
    """Of a batch norm, on ranks that share a batch of which each is called with its part: buffers and parameters."""
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    plan = Parallelism("batch", axis="dp", place={inputs("input"): Shard(0)})
    model = shard_parameters(copy.deepcopy(expected), plan, mesh)
    backend = spmd(plan, mesh=mesh, inner="aot_eager")
    step = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(of.parameters(), 0.1) for of in (model, expected)]
    for rows in torch.randn(3, 8, 6).double():
        step(rows.chunk(mesh.size())[mesh.get_local_rank()].clone()).square().sum().backward()
        expected(rows).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    backend.check_ranks()
    found, states = model.state_dict(), expected.state_dict()
    return {"parameters": max((whole(found[name]) - of_one).abs().max().item() for name, of_one in states.items())}


def not_compiled(mesh: DeviceMesh) -> dict[str, Any]:
    """What is said where one rank cannot compile; nor do those wait that share no axis with it."""

    def inner(gm: fx.GraphModule, example_inputs: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no room for kernels")
        return gm

    plan = DATA | Parallelism("tensor", axis="tp", place={param("up_proj.{weight,bias}"): Shard(0)})
    model = Broken()
    model.breaks = False
    backend = spmd(plan, mesh=mesh, inner=inner, timeout=60.0)
    step = torch.compile(shard_parameters(model, plan, mesh), backend=backend, fullgraph=True)
    started, said = time.perf_counter(), ""
    try:
        step(torch.ones(4, 6))
    except Exception as error:  # noqa: BLE001  # Dynamo wraps it
        said = str(error)
    seconds = time.perf_counter() - started
    torch._dynamo.reset()
    dist.barrier()
    return {"said": [said], "seconds": seconds}


def differing(mesh: DeviceMesh) -> dict[str, list[str]]:
    """What is said where ranks start with different weights, and where they are called with different values, with the
    same values in place of chunks, or with chunks of different sizes."""
    said: list[str] = []
    plan = Parallelism("tensor", axis="tp", place={param("up_proj.{weight,bias}"): Shard(0)})
    x = torch.arange(24.0).reshape(4, 6)
    chunks, rows = {inputs("x"): Shard(0)}, 4 - mesh.get_local_rank("tp")
    for seed, held, size in ((dist.get_rank(), {}, 4), (0, {}, 4), (0, chunks, 4), (0, chunks, rows)):
        torch._dynamo.reset()
        plan = replace(plan, place=plan.place | held)
        torch.manual_seed(seed)
        model = Broken()
        model.breaks = False
        backend = spmd(plan, mesh=mesh, inner="eager")
        step = torch.compile(shard_parameters(model, plan, mesh), backend=backend, fullgraph=True)
        try:
            step(x[:size])
            step(x[:size] + dist.get_rank())
            backend.check_ranks()
        except (FxRewriteError, BackendCompilerFailed) as error:
            said.append(str(error))
        dist.barrier()
    torch._dynamo.reset()  # it has seen other sizes on other ranks
    return {"said": said}


def resumed(plan: Parallelisms, first: DeviceMesh, second: DeviceMesh, folder: Path) -> float:
    """Saves a model from one mesh, and loads it on another, from the meta device; and that one into FSDP2's shards.

    It is saved as transformers does, too, and loaded whole.
    """
    model = shard_parameters(decoder(), plan, first)
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    hub = folder.with_name("hub")
    if dist.get_rank() == 0:
        model.save_pretrained(hub, state_dict=whole_state)
    dist.barrier()
    published = LlamaForCausalLM.from_pretrained(hub, dtype=torch.float64)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.device("meta"):
        other = decoder()
    shard_parameters(other, ZERO3, second)
    other.to_empty(device="cpu")
    other.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder)
    dcp.save({"model": other.state_dict()}, checkpoint_id=folder / "again")
    of_torch = fully_shard(decoder(), mesh=second)
    for parameter in of_torch.parameters():
        nn.init.zeros_(parameter)
    dcp.load({"model": of_torch.state_dict()}, checkpoint_id=folder / "again")
    expected = parameters_of(decoder())
    return max(largest(parameters_of(found), expected) for found in (other, of_torch, published))


class Extrema(nn.Module):
    """A matrix with a NaN in the rows of one rank of four."""

    def __init__(self, row: int) -> None:
        super().__init__()
        matrix = torch.arange(32.0).reshape(8, 4)
        matrix[row, 0] = torch.nan
        self.matrix = nn.Parameter(matrix)

    def forward(self) -> tuple[torch.Tensor, ...]:
        matrix = self.matrix.detach()
        return matrix.amax(), matrix.amax(0), matrix.amin(0), -matrix[:, 1:].amin()


def not_a_number(mesh: DeviceMesh) -> int:
    """How many extrema over rows in shards differ from one device's, wherever the NaN is."""
    plan = Parallelism("rows", axis="dp", place={param("matrix"): Shard(0)})
    differ = 0
    for row in range(8):
        torch._dynamo.reset()
        found = torch.compile(
            shard_parameters(Extrema(row), plan, mesh), backend=spmd(plan, mesh=mesh, inner="aot_eager")
        )()
        differ += sum(
            not torch.equal(a.nan_to_num(99), b.nan_to_num(99)) for a, b in zip(found, Extrema(row)(), strict=True)
        )
    return differ


class Ordered(nn.Module):
    """Reads its buffers in an order that each process has its own, as that of a set of texts is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("scale", torch.arange(6.0).cos())
        self.register_buffer("shift", torch.arange(6.0).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = ("scale", "shift") if dist.get_rank() % 2 else ("shift", "scale")
        read = {name: getattr(self, name) * 2 for name in names}
        return (self.down(self.up(x).relu()) * read["scale"] + read["shift"]).square().mean()


def in_other_orders(mesh: DeviceMesh) -> dict[str, float]:
    """Gradients where programs of ranks differ in the order of independent operators, and of inputs."""
    torch._dynamo.reset()
    plan = Parallelism("tensor", axis="tp", place={param("up.{weight,bias}"): Shard(0), param("down.weight"): Shard(1)})
    one, x = Ordered().double(), torch.arange(24.0).double().sin().reshape(4, 6)
    model = shard_parameters(copy.deepcopy(one), plan, mesh)
    backend = spmd(plan, mesh=mesh, inner="aot_eager", timeout=60)
    torch.compile(model, backend=backend)(x).backward()
    backend.check_ranks()
    one(x).backward()
    return {"parameters": largest(gradients_of(model), gradients_of(one))}


class Summed(nn.Module):
    """Adds up what it makes of four parameters, two before a layer and two after it, in an order of the rank's own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.layers = order, nn.ModuleList([nn.Linear(6, 6)])
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.randn(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = [getattr(self, name) for name in "abcd"]
        assert all(parameter.dim() == 1 for parameter in read), "inputs of the program are in one order"
        made = torch.tanh(x)
        before = sum((made * read["abcd".index(name)]).sin() for name in self.order[:2])
        y = self.layers[0](x).relu() + before
        return (y + sum((made * read["abcd".index(name)]).sin() for name in self.order[2:])).square().mean()


def of_own_data_in_other_orders(mesh: DeviceMesh) -> dict[str, float]:
    """Gradients where ranks with data of their own read parameters of one shape in other orders.

    What shares a collective is joined by name. Where other parameters share one, ranks say so: 1 where they do not.
    """
    rank, x = mesh.get_local_rank("dp"), torch.arange(24.0).double().sin().reshape(4, 6)
    one = Summed("abcd").double()
    one(x).backward()
    expected, found = gradients_of(one), dict[str, float]()
    for name, plan in (("ZeRO-3", ZERO3), ("data", DATA)):
        for order in ("badc", "acbd"):
            torch._dynamo.reset()
            model = shard_parameters(Summed(order if rank else "abcd").double(), plan, mesh)
            step = torch.compile(model, backend=spmd(plan, mesh=mesh, inner="aot_eager", timeout=60))
            try:
                step(x[2 * rank : 2 * rank + 2]).backward()
            except BackendCompilerFailed as error:
                found[f"{name}, {order}"] = float("and in the same order" not in str(error) or order == "badc")
                continue
            found[f"{name}, {order}"] = float(order == "acbd") + largest(gradients_of(model), expected)
    assert max(found.values()) < 1e-12, found
    return {"parameters": max(found.values())}


def with_logits(mesh: DeviceMesh) -> dict[str, float]:
    """Gradients of a loss to which eager code adds what it makes of logits that ranks of two axes hold in chunks.

    The vocabulary is so large that the gradient of logits goes another way than through the program.
    """
    plan, one, ids = AUTOSP | MEGATRON, decoder(vocabulary=512), IDS[:, :11].contiguous()
    model = shard_parameters(copy.deepcopy(one), plan, mesh)
    step = torch.compile(model, backend=spmd(plan, mesh=mesh, inner="aot_eager", timeout=60), fullgraph=True)
    for run in (step, one):
        found = run(input_ids=ids, labels=ids)
        assert isinstance(found.logits, DeferredGather) == (run is step)
        penalties = found.logits.logsumexp(-1).square().mean() + found.logits[:, -1].tanh().sum()
        (found.loss + 0.3 * penalties).backward()
    torch._dynamo.reset()
    return {"parameters": relative(gradients_of(model), gradients_of(one))}


def of_eight(folder: Path) -> dict[str, Any]:
    """Three axes of two processes each, all of which hold parameters in shards."""
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "sp", "tp"))
    line = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    plan = ZERO3 | AUTOSP_ZERO3 | MEGATRON
    return {
        "ZeRO-3, AutoSP, Megatron": compared(plan, cube, vocabulary=64),
        "resumed": {"parameters": resumed(plan, cube, line, folder / "saved")},
    }


def of_four(folder: Path) -> dict[str, Any]:
    """Two axes of two processes each, and one of four."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sequence = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    tensor = Parallelism(
        "tensor", axis="tp", place={param("*.up.{weight,bias}"): Shard(0), param("*.down.weight"): Shard(1)}
    )
    some = {param("*.{bias,down.weight,scale}"): Stored(Shard(0), or_whole=True, kept=True)}
    up = Shard(0, outer=2) if TORCH >= (2, 12) else Shard(0)  # torch 2.11 cannot gather chunks of runs
    of_runs = {param("*.up.weight"): Stored(up), param("*.bias"): Stored(Shard(0), or_whole=True)}
    runs = replace(ZERO3, axis="shard", place=of_runs)
    return {
        "accumulated, ZeRO-3, tensor, bfloat16": accumulated(ZERO3 | tensor, square, torch.bfloat16),
        "accumulated, twice in shards": accumulated(
            replace(ZERO2, axis="rep", place=some) | runs, hybrid, torch.float64
        ),
        "ZeRO-3, Megatron": compared(ZERO3 | MEGATRON, square, clip=0.1, tied=True),
        "ZeRO-3, Megatron, layer by layer": compared(ZERO3 | MEGATRON, square, model_of=hooked, layers=2),
        "ZeRO-3, context": compared(ZERO3 | CONTEXT_ZIGZAG, sequence, clip=0.1),
        "replicas, ZeRO-3": compared(
            replace(DATA, axis="rep") | replace(ZERO3, axis="shard"),
            hybrid,
            checkpointed=True,
            clip=0.1,
            layers=4,
            regions="once",
        ),
        # inductor of torch 2.11 and 2.12 cannot run the backward of attention in float64
        "ZeRO-3, inductor": compared(
            ZERO3, line, inner="inductor" if TORCH >= (2, 13) else "aot_eager", clip=0.1, frozen=True
        ),
        "experts": compared(EXPERT_ZERO3, line, model_of=mixture),
        "experts, sequence": compared(EXPERT_ZERO3 | AUTOSP, sequence, model_of=mixture),
        "a ring, Megatron": compared(autosp_parallelism(AutoSPConfig(attention="ring")) | MEGATRON, both),
        "own statistics": own_statistics(line),
        "statistics of all": statistics_of_all(line),
        "other sizes": of_other_sizes(ZERO3, line),
        "other sizes, replicas": of_other_sizes(DATA, line),
        "other parameters": {"said": of_other_parameters(line)},
        "ranks that differ": differing(square),
        "one that cannot compile": not_compiled(square),
        "logits in chunks of two axes": with_logits(both),
        "other orders": in_other_orders(square),
        "own data, other orders": of_own_data_in_other_orders(square),
        "not a number": {"parameters": not_a_number(line)},
        "ZeRO-3, Megatron, in three graphs": in_parts(square),
        **({"ZeRO-3, Megatron, in three graphs, DTensors": in_parts(square, "dtensor")} if TORCH >= (2, 12) else {}),
        "resumed": {"parameters": resumed(ZERO3 | MEGATRON, square, line, folder / "saved")},
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cells = of_eight(folder) if dist.get_world_size() == 8 else of_four(folder)
    (folder / f"rank{dist.get_rank()}").write_text(json.dumps(cells))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[2]))
