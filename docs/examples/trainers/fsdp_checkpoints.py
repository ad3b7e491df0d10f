"""A loop of your own: a mesh, FSDP2, distributed checkpoints that another number of ranks resumes from.

torchrun --nproc-per-node 2 docs/examples/trainers/fsdp_checkpoints.py
torchrun --nproc-per-node 3 docs/examples/trainers/fsdp_checkpoints.py saved
"""

import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import autosp


def train(model, optimizer_of, mesh, batches, *, resume=None, save=None):
    """The sharded model after a pass over the batches of this replica; it starts from `resume` and leaves `save`."""
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    fully_shard(model, mesh=mesh["dp", "sp"]._flatten())  # or for each layer, then for the whole
    optimizer = optimizer_of(model.parameters())
    if resume:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    if save:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=save)
    return model


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, int(os.environ["WORLD_SIZE"])), mesh_dim_names=("dp", "sp"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    batches = torch.randint(64, (3, 1, 32), generator=torch.Generator().manual_seed(0))
    train(model, torch.optim.AdamW, mesh, batches, resume=sys.argv[1] if sys.argv[1:] else None, save="saved")
    torch.distributed.destroy_process_group()
