"""DeepSpeed's engine over sequence-parallel ranks, any stage of ZeRO.

torchrun --nproc-per-node 2 docs/examples/trainers/deepspeed_engine.py
"""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import autosp

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def train(model, config, batches, mesh=None):
    """The engine after a pass over the batches, which are whole on every rank; and their losses."""
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.compile(backend=autosp("aot_eager", mesh=mesh))
    losses = []
    for batch in batches:
        losses.append(engine(input_ids=batch, labels=batch).loss)
        engine.backward(losses[-1])
        engine.step()
    return engine, losses


if __name__ == "__main__":
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    batches = torch.randint(64, (6, 1, 32), generator=torch.Generator().manual_seed(0))
    _, losses = train(model, CONFIG, batches)
    print([loss.item() for loss in losses])
