"""Transformers' Trainer on a mesh of data and sequence: two lines more than without.

torchrun --nproc-per-node 4 docs/examples/trainers/hf_trainer.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autosp_rules import autosp
from autosp_rules.integrations.accelerate import share_batches


def trainer_of(model, args, mesh, **settings):
    """A Trainer whose ranks along the axis sp share each batch; everything that it can do, it can do so."""
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    trainer = Trainer(model, args, **settings)
    share_batches(trainer, mesh)
    return trainer


if __name__ == "__main__":
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 32))]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    args = TrainingArguments("out", max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to="none")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))  # after TrainingArguments, which starts the job
    trainer = trainer_of(model, args, mesh, train_dataset=samples, eval_dataset=samples)
    trainer.train()
    print(trainer.evaluate())
    trainer.end()
