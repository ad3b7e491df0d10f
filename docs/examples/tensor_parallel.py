"""Another parallelism: the MLPs of an unmodified Llama, tensor parallel as in Megatron-LM.

One step says where sharding starts: each rank takes its rows of the weights `gate_proj` and `up_proj`. Everything else
follows from the layout rules of the operators. SiLU and the product go by rows; `down_proj` contracts over a sharded
dimension, so each rank has a summand, and one all-reduce a layer makes the sum.

    python docs/examples/tensor_parallel.py

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053, section 3).
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fxrewrite import Edit, Report, RuleSet, normalize
from fxrewrite.ops import key
from fxrewrite.spmd import LocalizeShapes, PropagateLayouts, Replicated, Shard, SpmdContext, axis_of, redistribute
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.collectives import COLLECTIVE_RULES
from rules.layouts import LAYOUTS
from rules.losses import LOSSES
from rules.normal_forms import NORMAL_FORMS
from rules.reductions import REDUCTIONS

RANKS = 4


class ShardWeights:
    """The step that cuts the weights of linear layers by rows, those of modules with the given names."""

    name = "shard_weights"

    def __init__(self, *modules: str) -> None:
        self.modules = modules

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        linears = [node for node in edit.nodes() if key(node) == "aten::linear" and self._is_meant(node)]
        for linear in linears:
            weight = linear.args[1]
            move = (weight, Replicated(), Shard(0), context.axis)
            rows = edit.call(redistribute, move, before=linear, like=linear, rule=self.name, val=weight.meta["val"])
            edit.replace_uses(weight, rows, users=[linear])
        return len(linears)

    def _is_meant(self, node: torch.fx.Node) -> bool:
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        return bool(modules) and modules[-1].endswith(self.modules)

    def text(self) -> str:
        return f"rows of the weights of {', '.join(self.modules)}"


TENSOR_PARALLEL = RuleSet(
    "tensor_parallel",
    NORMAL_FORMS,
    LOSSES,
    ShardWeights("gate_proj", "up_proj"),
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
    weights = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    expected = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None

    with fake_mesh((RANKS,), ("tp",)) as mesh:
        report = TENSOR_PARALLEL.once().apply(program, context=SpmdContext(axis_of(mesh, "tp")))
        run = run_on_ranks(program, inputs, RANKS, backward=0)
    grads = [g for value, g in zip(inputs, run.gradients(), strict=True) if isinstance(value, torch.nn.Parameter)]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(grads, expected, strict=True)]
    print(report)
    print(f"loss {loss.item():.6f}, on {RANKS} ranks {run.outputs[0][0].item():.6f}")
    print(f"gradients differ by {max(errors):.0e}")
    assert max(errors) < 1e-6  # the model computes norms and its loss in float32


if __name__ == "__main__":
    main()
