"""A loop over accelerate on a mesh of data and sequence: two lines more than without.

torchrun --nproc-per-node 4 docs/examples/trainers/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import autosp
from autosp_rules.integrations.accelerate import share_batches


def train(accelerator, mesh, model, *others):
    """The prepared model after an epoch, and the loss of each sample; others are optimizer, scheduler and loader."""
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    share_batches(accelerator, mesh)
    model, optimizer, scheduler, loader = accelerator.prepare(model, *others)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses += accelerator.gather_for_metrics(loss.detach().repeat(len(batch["labels"]))).tolist()
    return model, losses


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    mesh = init_device_mesh(accelerator.device.type, (2, 2), mesh_dim_names=("dp", "sp"))
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 32))]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    accelerator.print(train(accelerator, mesh, model, optimizer, scheduler, DataLoader(samples, 2, shuffle=True))[1])
    accelerator.end_training()
