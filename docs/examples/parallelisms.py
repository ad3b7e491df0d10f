"""The parallelisms that ship, on four processes: each trains a small model, and ends where one device ends.

    torchrun --nproc-per-node 4 docs/examples/parallelisms.py                # each of PLANS
    torchrun --nproc-per-node 4 docs/examples/parallelisms.py hsdp context   # some

The model is not changed, and neither is the loop: `shard_parameters` holds what a plan states in shards, and the
backend `spmd` sends what follows. On GPUs, take "cuda" for "cpu" and leave out `inner`, which is inductor then.
"""

import copy
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from autosp_rules.parallelism import AUTOSP, AUTOSP_ZERO3, CONTEXT
from fxrewrite.spmd import shard_parameters, spmd
from rules.parallel import DATA, EXPERT_ZERO3, EXPERTS, MEGATRON, MEGATRON_SP, ZERO2, ZERO3, from_transformers

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"vocab_size": 64, "use_cache": False, **WIDTHS}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def mixtral():  # grouped products of experts take float32 or bfloat16
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_key_value_heads=4, **SIZES))


PLANS = {  # the plan; the sizes of its axes, outermost first; the model
    "replicas": (DATA, {"dp": 4}, llama),
    "zero2": (ZERO2, {"dp": 4}, llama),
    "zero3": (ZERO3, {"dp": 4}, llama),
    "hsdp": (replace(DATA, axis="rep") | replace(ZERO3, axis="shard"), {"rep": 2, "shard": 2}, llama),
    "tensor": (DATA | MEGATRON, {"dp": 2, "tp": 2}, llama),
    "tensor_sequence": (ZERO3 | MEGATRON_SP, {"dp": 2, "tp": 2}, llama),
    "transformers": (DATA | from_transformers(llama(), "tp"), {"dp": 2, "tp": 2}, llama),
    "sequence": (ZERO3 | AUTOSP, {"dp": 2, "sp": 2}, llama),
    "sequence_zero3": (ZERO3 | AUTOSP_ZERO3, {"dp": 2, "sp": 2}, llama),
    "sequence_tensor": (AUTOSP | MEGATRON, {"sp": 2, "tp": 2}, llama),
    "context": (ZERO3 | CONTEXT, {"dp": 2, "sp": 2}, llama),
    "experts": (EXPERT_ZERO3, {"dp": 4}, mixtral),
    "experts_alone": (DATA | EXPERTS, {"dp": 2, "ep": 2}, mixtral),
}


def batch_of(mesh, plan, ids):
    """What this rank's loader gives it: its samples, and its chunk of each of them where the plan says so."""
    for member in plan.members:
        place, size = mesh.get_local_rank(member.axis), mesh[member.axis].size()
        if member.data == "own":
            ids = ids.chunk(size)[place]
        elif member is CONTEXT:
            ids = ids.chunk(size, 1)[place]
    return ids


def train(model, step, ids):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def main(names):
    dist.init_process_group("gloo")
    for name in names or PLANS:
        plan, axes, make = PLANS[name]
        torch.compiler.reset()  # Dynamo compiles one function for eight models at most
        torch.manual_seed(0)
        one, ids = make(), torch.randint(64, (8, 16))
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = shard_parameters(copy.deepcopy(one), plan, mesh)
        step = torch.compile(model, backend=spmd(plan, mesh=mesh, inner="aot_eager"))
        ours, expected = train(model, step, batch_of(mesh, plan, ids)), train(one, one, ids)
        error = max((ours[key] - expected[key]).abs().max().item() for key in expected)
        assert error < 1e-6, f"{name}: {error}"  # norms and losses are in float32, so what is summed elsewhere rounds
        if dist.get_rank() == 0:
            held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
            share = held / sum(p.numel() for p in one.parameters())
            print(f"{name:16} {axes}: {share:.2f} of the parameters a rank, largest difference {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
