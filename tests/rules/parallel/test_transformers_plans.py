"""Plans that models of transformers ship: exact, with fewer collectives than transformers runs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fxrewrite import FxRewriteError, RefusedError
from fxrewrite.spmd import Gathered, Replicate, Shard, module_output, param
from rules.parallel import from_transformers
from tests.rules.parallel.models import adapt, build
from tests.rules.parallel.on_ranks import compared, loss_of, sent_backward

LAYERS = 2
REDUCE, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"
ENDS = 1 + 3
"""All-reduces of the embedding and of the loss."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    # options, collectives of the forward pass, and of the backward pass
    "Llama": ({}, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: 2 * LAYERS + 1}),
    "Qwen3": ({"head_dim": 8}, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: 3 * LAYERS + 1}),  # norms of q and k, together
    "GPTNeoX": ({}, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: 2 * LAYERS + 1}),
    "Phi": ({"resid_pdrop": 0.0}, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: LAYERS + 1}),  # one norm a layer
    "Phi3": (
        {"eos_token_id": 1},
        {REDUCE: 2 * LAYERS + ENDS, GATHER: 2 * LAYERS},
        {REDUCE: 2 * LAYERS + 1, SCATTER: 2 * LAYERS},
    ),
    "Glm": ({"head_dim": 8}, {REDUCE: 2 * LAYERS + ENDS, GATHER: LAYERS}, {REDUCE: 2 * LAYERS + 1, SCATTER: LAYERS}),
    "Gemma2": ({"head_dim": 8}, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: 2 * LAYERS + 1}),  # tied, with capped logits
    "Mixtral": ({"num_local_experts": 4}, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: 2 * LAYERS + 1}),
    "Qwen3Moe": (EXPERTS, {REDUCE: 2 * LAYERS + ENDS}, {REDUCE: 3 * LAYERS + 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(3)
def test_the_plan_of_a_family(family: str) -> None:
    options, forward, backward = FAMILIES[family]
    model = build(family, **options)
    if family in ("Mixtral", "Qwen3Moe"):
        model.set_experts_implementation("batched_mm")
    found = compared(loss_of(model), from_transformers(model, "tp"))
    assert found.sent == {"tp": forward}
    assert sent_backward(found) == backward


def test_experts_as_grouped_products() -> None:
    """What transformers runs by default; in float32, since torch has no grouped product of float64."""
    model = build("Qwen3Moe", **EXPERTS).float()
    found = compared(loss_of(model), from_transformers(model), tolerance=1e-4)
    assert not found.report.events_of(Gathered)
    assert found.sent == {"tp": {REDUCE: 2 * LAYERS + ENDS}}


def test_styles_are_placements() -> None:
    model = build("Mixtral", num_local_experts=4, attention_bias=True)
    place = from_transformers(model, "model").place
    assert place[param("model.embed_tokens.weight", optional=True)] == Shard(0)
    assert place[param("model.layers.*.self_attn.o_proj.weight", optional=True)] == Shard(1)
    assert place[param("model.layers.*.mlp.experts.gate_up_proj", optional=True)] == Shard(1, outer=2)
    assert place[param("model.layers.*.mlp.experts.down_proj", optional=True)] == Shard(2)
    place = from_transformers(build("Phi3", eos_token_id=1)).place
    assert place[module_output("model.layers.*.self_attn.qkv_proj", optional=True)] == Replicate()
    assert module_output("lm_head", optional=True) not in place


def test_heads_that_do_not_divide() -> None:
    model = build("Llama", num_key_value_heads=1)
    message = "model.layers.0.self_attn views 8 features as 1 heads, and 2 ranks of axis tp do not divide 1 heads"
    with pytest.raises(RefusedError, match=message):
        compared(loss_of(model), from_transformers(model))
    model = build("Llama", hidden_size=24, num_attention_heads=6, num_key_value_heads=6)
    with pytest.raises(
        RefusedError, match="views 24 features as 6 heads, and 4 ranks of axis tp do not divide 6 heads"
    ):
        compared(loss_of(model), from_transformers(model), ranks=4)


def test_styles_that_mean_nothing_here() -> None:
    model = build("Llama")
    model._tp_plan["model.layers.*.mlp"] = "sequence_parallel"
    with pytest.raises(FxRewriteError, match=r"model.layers.\*.mlp: style 'sequence_parallel' of tp_plan is not supp"):
        from_transformers(model)
    with pytest.raises(FxRewriteError, match="Linear has no tensor-parallel plan"):
        from_transformers(nn.Linear(2, 2))


class Wrapped(nn.Module):
    """A model by the names that peft gives its parameters, which looks up what it lacks in the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, **inputs: Any) -> Any:
        return self.base_model.model(**inputs)


def test_the_plan_of_a_model_with_adapters() -> None:
    """Three features of each adapter of columns are summed, and as many collectives sent as without adapters."""
    model = build("Qwen3", head_dim=8)
    adapt(model, "q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    wrapped = Wrapped(model)
    found = compared(loss_of(wrapped), from_transformers(wrapped))
    assert found.sent == {"tp": {REDUCE: 2 * LAYERS + ENDS + 2 * LAYERS}}
    assert not found.report.events_of(Gathered)


def test_a_plan_that_names_no_parameter() -> None:
    model = nn.Linear(2, 2)
    model.tp_plan = {"layers.*.q_proj": "colwise"}
    with pytest.raises(FxRewriteError, match=r"tp_plan of Linear names no parameter that the model has: layers"):
        from_transformers(model)
