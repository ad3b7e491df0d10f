"""LoRA by peft over sequence-parallel ranks, with dropout, in transformers' Trainer.

torchrun --nproc-per-node 2 docs/examples/trainers/lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autosp_rules import autosp
from autosp_rules.integrations.accelerate import share_batches


def train(model, lora, args, mesh=None, **settings):
    """The model with adapters, trained; rng="global" has dropout draw the numbers of one device."""
    model = get_peft_model(model, lora)
    model.compile(backend=autosp("aot_eager", mesh=mesh, rng="global"))  # mesh=None: all ranks share a sequence
    trainer = Trainer(model, args, **settings)
    share_batches(trainer, mesh)
    trainer.train()
    return model


if __name__ == "__main__":
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 32))]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    args = TrainingArguments("out", max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to="none")
    model = train(model, lora, args, train_dataset=samples)
    model.save_pretrained("adapters")
    model.merge_and_unload().save_pretrained("merged")
    torch.distributed.destroy_process_group()
