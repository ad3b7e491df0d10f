"""A loop over Lightning Fabric on a mesh of data and sequence.

torchrun --nproc-per-node 4 docs/examples/trainers/fabric_loop.py
"""

import torch
from lightning_fabric import Fabric
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import autosp


def train(fabric, mesh, model, optimizer, samples, batch_size=2):
    """The model after an epoch, and its last loss."""
    sampler = DistributedSampler(samples, num_replicas=mesh["dp"].size(), rank=mesh.get_local_rank("dp"), shuffle=False)
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size, sampler=sampler), use_distributed_sampler=False)
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    model, optimizer = fabric.setup(model, optimizer)
    for batch in loader:
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=5.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, loss


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp")
    fabric.launch()
    mesh = init_device_mesh(fabric.device.type, (2, 2), mesh_dim_names=("dp", "sp"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 32))]
    _, loss = train(fabric, mesh, model, torch.optim.AdamW(model.parameters()), samples)
    fabric.print(loss.item())
