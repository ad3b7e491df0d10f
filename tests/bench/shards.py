"""Parameters in shards side by side with torch's own, on gloo processes of one machine: tables of docs/parallel.md.

Every way trains one Llama by AdamW in its own processes, one thread a rank, on equal batches; the ways take turns, a
step each. Ratios are medians and quartiles of those of each round, to the first way of the table.

    data      each rank has its part of a batch. FSDP2 by layer: `fully_shard` on each block, which is compiled, and on
              the model
    tensor    ranks share a batch. DTensor: `parallelize_module`, heads, features, embedding and head cut, compiled
    step      seconds of forward, backward and optimizer
    at rest   bytes of parameters, gradients and optimizer states, of those of one device
    peak      the most bytes that forward and backward allocate at any time, gradients included, above what is at rest
    sent      bytes that collectives carried away from a rank in forward and backward, and how many ran

    python -m tests.bench.shards --table data tensor --rounds 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

from autosp_rules.demo.launch import launch
from fxrewrite.spmd import shard_parameters, spmd
from rules.parallel import DATA, MEGATRON, MEGATRON_LAYERS, ZERO3
from tests.bench.measure import Profiled, profiled, row, with_quartiles
from tests.bench.turns import Turns, run_in_turns
from tests.bench.ways import llama


@dataclass(frozen=True)
class Setting:
    """One model, and a batch [batch, length] of each rank."""

    layers: int = 4
    hidden: int = 256
    vocab: int = 4096
    batch: int = 4
    length: int = 256
    rounds: int = 10


@dataclass(frozen=True)
class Figures:
    """What steps of one way cost on rank 0."""

    seconds: list[float]
    at_rest: int
    profiled: Profiled
    compile: float


Call = Callable[[torch.Tensor], torch.Tensor]


def _compiled(model: Any, **how: Any) -> Call:
    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    return torch.compile(loss_of, fullgraph=True, **how)


def _by(plan: Any, inner: str) -> Callable[[Any, DeviceMesh], Call]:
    def prepare(model: Any, mesh: DeviceMesh) -> Call:
        model = shard_parameters(model, plan, mesh)
        return _compiled(model, backend=spmd(plan, mesh=mesh, inner=inner))

    return prepare


def _fsdp2(model: Any, mesh: DeviceMesh) -> Call:
    for block in model.model.layers:
        block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return lambda ids: model(input_ids=ids, labels=ids).loss


def _ddp(model: Any, mesh: DeviceMesh) -> Call:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    compiled = torch.compile(wrapped)
    return lambda ids: compiled(input_ids=ids, labels=ids).loss


def _dtensor(*, vocabulary: bool) -> Callable[[Any, DeviceMesh], Call]:
    """Tensor parallelism as torch's tutorial has it."""

    def prepare(model: Any, mesh: DeviceMesh) -> Call:
        cut = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        of_block: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in cut}
        of_block |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        for block in model.model.layers:
            parallelize_module(block, mesh, of_block)
        if vocabulary:
            ends: dict[str, ParallelStyle] = {
                "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
                "lm_head": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(model, mesh, ends)
        return _compiled(model)

    return prepare


TABLES: dict[str, tuple[str, dict[str, Callable[[Any, DeviceMesh], Call]]]] = {
    "data": (
        "dp",
        {
            "FSDP2 by layer": _fsdp2,
            "ZERO3, inductor": _by(ZERO3, "inductor"),
            "ZERO3, aot_eager": _by(ZERO3, "aot_eager"),
            "DDP, inductor": _ddp,
            "DATA, inductor": _by(DATA, "inductor"),
        },
    ),
    "tensor": (
        "tp",
        {
            "DTensor": _dtensor(vocabulary=True),
            "MEGATRON, inductor": _by(MEGATRON, "inductor"),
            "MEGATRON, aot_eager": _by(MEGATRON, "aot_eager"),
            "DTensor, whole vocabulary": _dtensor(vocabulary=False),
            "MEGATRON_LAYERS, inductor": _by(MEGATRON_LAYERS, "inductor"),
        },
    ),
}


def _model(setting: Setting) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama(setting.layers, setting.hidden, setting.vocab)).train()


def _bytes(values: Any) -> int:
    """Of the memory that this rank's parts of the tensors live in."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def _train(table: str, way: str, setting: Setting, cache: str, turns: Turns) -> Figures:
    """On one rank."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    axis, ways = TABLES[table]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=(axis,))
    model = _model(setting)
    call = ways[way](model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seed = mesh.get_local_rank() if axis == "dp" else 0
    ids = torch.randint(setting.vocab, (setting.batch, setting.length), generator=torch.Generator().manual_seed(seed))
    seconds: list[float] = []
    at_rest = 0
    for number in range(turns.rounds - 1):
        with turns.take(number):
            torch.distributed.barrier()
            started = time.perf_counter()
            call(ids).backward()
            optimizer.step()
            torch.distributed.barrier()
            seconds.append(time.perf_counter() - started)
            at_rest = _bytes([list(model.parameters()), [p.grad for p in model.parameters()], optimizer.state_dict()])
            optimizer.zero_grad()
    with turns.take(turns.rounds - 1):
        found = profiled(lambda: call(ids), lambda loss: loss.backward())
    first, _, *rest = seconds
    return Figures(rest, at_rest, found, first)


def _launched(ranks: int, table: str, way: str, setting: Setting, turns: Turns) -> Figures:
    with TemporaryDirectory() as cache:
        return launch(_train, table, way, setting, cache, turns, ranks=ranks)


def _print(table: str, setting: Setting, ways: list[str], ranks: int) -> None:
    print(f"\n### {table}: {ranks} ranks, {setting}\n")
    head = ["way", "step, s", "/ first", "at rest, of one device", "peak, MiB", "/ first", "sent, MiB", "collectives"]
    head.append("first step, s")
    print(row(head))
    print(row(["---"] * len(head)))
    whole = 4 * _bytes(list(_model(setting).parameters()))  # AdamW has two states
    runs = [partial(_launched, ranks, table, way, setting) for way in ways]
    outcomes = dict(zip(ways, run_in_turns(runs, ranks, setting.rounds + 3), strict=True))
    base = outcomes[ways[0]]
    for way, found in outcomes.items():
        if isinstance(found, Exception):
            print(row([way, str(found).splitlines()[0], *[""] * (len(head) - 2)]), flush=True)
            continue
        has_base = isinstance(base, Figures)
        ratio = with_quartiles([a / b for a, b in zip(found.seconds, base.seconds, strict=True)]) if has_base else ""
        of_base = f"{found.profiled.peak / base.profiled.peak:.2f}" if has_base else ""
        peak, sent = (f"{n / 2**20:.1f}" for n in (found.profiled.peak, found.profiled.sent))
        cells = [way, f"{statistics.median(found.seconds):.3f}", ratio, f"{found.at_rest / whole:.4f}", peak, of_base]
        print(row([*cells, sent, str(found.profiled.collectives), f"{found.compile:.1f}"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=list(TABLES), nargs="*", default=list(TABLES))
    parser.add_argument("--ways", nargs="*", help="of the tables, all by default")
    parser.add_argument("--ranks", type=int, default=2)
    for field in fields(Setting):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="of the model and batch")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    setting = replace(Setting(), **{name: getattr(options, name) for name in asdict(Setting())})
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}")
    for table in options.table:
        ways = [way for way in TABLES[table][1] if options.ways is None or way in options.ways]
        _print(table, setting, ways, options.ranks)


if __name__ == "__main__":
    main()
