"""Trl's SFTTrainer over sequence-parallel ranks, packed documents or padding-free: two lines more than without.

torchrun --nproc-per-node 4 docs/examples/trainers/sft.py
"""

import torch
from datasets import Dataset
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from autosp_rules import autosp
from autosp_rules.integrations.accelerate import share_batches


def trainer_of(model, args, mesh, **settings):
    """An SFTTrainer whose ranks along the axis sp share each batch."""
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    trainer = SFTTrainer(model, args, **settings)
    share_batches(trainer, mesh)
    return trainer


if __name__ == "__main__":
    samples = Dataset.from_dict({"input_ids": torch.randint(1, 64, (32, 12)).tolist()})
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    args = SFTConfig("out", max_steps=3, max_length=32, packing=True, use_cpu=True, bf16=False, report_to="none")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))  # after SFTConfig, which starts the job
    trainer = trainer_of(model, args, mesh, train_dataset=samples, processing_class=None)
    trainer.train()
    trainer.end()
