"""Another parallelism: an unmodified Llama, tensor parallel as in Megatron-LM.

What is stated is how each rank holds the weights: the rows of q, k, v, gate and up, the columns of o and down. All else
follows from the layout rules of the operators: heads and features are sharded in between, o and down contract a sharded
dimension, so that each rank has a summand, and two all-reduces a layer make the sums.

    python docs/examples/tensor_parallel.py

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053, section 3).
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fxrewrite.spmd import Parallelism, Shard, param, sends
from fxrewrite.testing import simulate

TENSOR_PARALLEL = Parallelism(
    "tensor_parallel",
    axis="tp",
    place={
        param("*.{q,k,v,gate,up}_proj.weight"): Shard(0),
        param("*.{o,down}_proj.weight"): Shard(1),
    },
    expect=[sends(within="*.layers.*", all_reduce=2)],
)


def main() -> None:
    """Train one step of a tiny Llama on one device and on four simulated ranks; compare the loss and every gradient."""
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **widths)).double()
    ids = torch.randint(64, (2, 12))
    found = simulate(model, {"input_ids": ids, "labels": ids}, TENSOR_PARALLEL, {"tp": 4})
    print(found.report)
    print(found)
    assert max(found.grad_errors.values()) < 1e-6  # the model computes norms and its loss in float32


if __name__ == "__main__":
    main()
