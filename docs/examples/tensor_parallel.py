"""Another parallelism: an unmodified Llama, tensor parallel as in Megatron-LM.

What is stated is how each rank holds the weights: the rows of q, k, v, gate and up, the columns of o and down. All else
follows from the layout rules of the operators: heads and features are sharded in between, o and down contract a sharded
dimension, so that each rank has a summand, and two all-reduces a layer make the sums.

    python docs/examples/tensor_parallel.py

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053, section 3).
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fxrewrite import RuleSet, normalize
from fxrewrite.graph import input_name
from fxrewrite.spmd import COLLECTIVE_RULES, REDUCTIONS, LocalizeShapes, Place, PropagateLayouts, Shard, contexts, param
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.canonical.losses import LOSSES
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.fusions.biases import BIASES
from rules.layouts import LAYOUTS

RANKS = 4
HELD = {param("*.{q,k,v,gate,up}_proj.weight"): Shard(0), param("*.{o,down}_proj.weight"): Shard(1)}
TENSOR_PARALLEL = RuleSet(
    "tensor_parallel",
    NORMAL_FORMS,
    LOSSES,
    Place("hold_weights", HELD),
    BIASES,
    PropagateLayouts("propagate", LAYOUTS),
    REDUCTIONS,
    LocalizeShapes("localize", LAYOUTS),
    COLLECTIVE_RULES,
    atomic=True,
)


def main() -> None:
    """Train one step of a tiny Llama on one device and on simulated ranks, and compare the loss and every gradient."""
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **widths)).double()
    ids = torch.randint(64, (2, 12))
    captured = []

    def keep(graph, inputs):
        captured.append((normalize(graph), inputs))
        return graph

    loss = torch.compile(model, backend=keep, fullgraph=True)(input_ids=ids, labels=ids).loss
    loss.backward()
    (program, inputs), *_ = captured
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()

    placeholders = program.graph.find_nodes(op="placeholder")
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        report = TENSOR_PARALLEL.on("tp").apply(program, context=contexts(mesh))
        run = run_on_ranks(program, inputs, mesh, backward=0)
    found = dict(zip(map(input_name, placeholders), run.gradients(), strict=True))
    errors = [((found[name] - grad).abs().max() / grad.abs().max()).item() for name, grad in expected.items()]
    print(report)
    print(f"loss {loss.item():.6f}, on {RANKS} ranks {run.outputs[0][0].item():.6f}")
    print(f"gradients differ by {max(errors):.0e}")
    assert max(errors) < 1e-6  # the model computes norms and its loss in float32


if __name__ == "__main__":
    main()
