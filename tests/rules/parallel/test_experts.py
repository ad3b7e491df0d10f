"""Experts over ranks: exact in float64 for mixtures of several kinds, with one sum a layer and no matrix gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from autosp_rules.parallelism import CONTEXT, CONTEXT_ZIGZAG
from fxrewrite import FxRewriteError
from fxrewrite.spmd import Gathered, Parallelism, Parallelisms, Shard, param
from fxrewrite.testing import simulate
from rules.parallel import EXPERTS, ZERO3, from_transformers
from tests.rules.parallel.models import build

IDS = torch.arange(48).reshape(4, 12) * 5 % 61
LAYERS = 2
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, **ROUTED},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, **ROUTED},
    "DeepseekV3": {  # with a shared expert
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
        **LATENT,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 8, **ROUTED},  # biases, interleaved gates
}


def _experts(self: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Grouped products in the program, whose fallback takes float64; torch's own, on one device, does not."""
    run = grouped_mm_experts_forward if torch.compiler.is_compiling() else batched_mm_experts_forward
    return run(self, *args)


ALL_EXPERTS_FUNCTIONS.register("grouped_in_float64", _experts)


def mixture(family: str, **options: Any) -> Any:
    """Experts that differ, so that tokens are spread unevenly."""
    model = build(family, **{**FAMILIES[family], **options})
    model.set_experts_implementation("grouped_in_float64")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model(input_ids=IDS)  # transformers installs what records the router's logits
    return model


def exact(model: Any, plan: Parallelism | Parallelisms, mesh: dict[str, int], tolerance: float = 1e-12) -> Any:
    found = simulate(model, {"input_ids": IDS, "labels": IDS.clone()}, plan, mesh)
    assert found.loss_error < 1e-6, str(found)  # transformers computes losses in float32
    assert found.grad_error < tolerance, str(found)
    return found


@pytest.mark.parametrize(("family", "ranks"), [("Mixtral", 4), ("Qwen3Moe", 2), ("DeepseekV3", 4), ("GptOss", 2)])
def test_mixtures(family: str, ranks: int) -> None:
    """Load-balancing losses are of all tokens; an expert without tokens, and a rank without pairs, are as any other."""
    model = mixture(family)
    plan = from_transformers(model, "ep")
    assert dict(plan.place).keys() == {
        param(f"model.layers.*.mlp.experts.{name}", optional=True)
        for name in dict(model.model.layers[0].mlp.experts.named_parameters())
    }
    found = exact(model, plan, {"ep": ranks})
    assert found.sent == {"ep": {"all_reduce": LAYERS}}
    assert not found.report.events_of(Gathered)


@pytest.mark.parametrize(
    ("axes", "sent"),
    [(("dp", "ep"), {"all_reduce": LAYERS}), (("sp", "ep"), {"all_reduce": LAYERS}), (("tp", "ep"), None)],
)
def test_composed(axes: tuple[str, str], sent: Any) -> None:
    """With parameters in shards, with chunks of the sequence, with whatever tensor parallelism cuts of an expert."""
    # A loss that balances the load of each replica's tokens is not that of all tokens, under any data parallelism.
    model = mixture("Mixtral", output_router_logits=axes[0] != "dp")
    outer = {"dp": ZERO3, "sp": CONTEXT}.get(axes[0]) or from_transformers(model, "tp")
    tolerance = 1e-6 if axes[0] == "tp" else 1e-12  # a loss over shards of the vocabulary is summed in float32
    found = exact(model, outer | EXPERTS, dict.fromkeys(axes, 2), tolerance)
    assert sent is None or found.sent["ep"] == sent


def test_tokens_in_chunks_over_the_axis_of_experts() -> None:
    """Tokens are gathered before experts, and each rank gets the sums of its own back."""
    plan = replace(CONTEXT_ZIGZAG, place={**CONTEXT_ZIGZAG.place, **EXPERTS.place})
    found = exact(mixture("GptOss"), plan, {"sp": 2})
    assert found.sent["sp"]["reduce_scatter"] == LAYERS


class Numbered(nn.Module):
    """Two experts that are found by a sort, and whose rows know the number of their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(6, 2, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        keys, order = torch.sort(ids)
        rows = x[order] * self.experts.weight[keys] * keys.unsqueeze(-1)
        return rows[torch.argsort(order)].square().mean()


def test_experts_whose_numbers_are_read() -> None:
    """What cannot be spread is gathered, and the report says so."""
    plan = Parallelism(
        "experts", axis="ep", place={param("experts.weight"): Shard(0)}, rules=EXPERTS.rules, lowered=EXPERTS.lowered,
        layouts=EXPERTS.layouts,
    )  # fmt: skip
    given = {"x": torch.arange(48.0).double().sin().reshape(8, 6), "ids": torch.tensor([1, 0, 1, 1, 0, 1, 1, 1])}
    found = simulate(Numbered().double(), given, plan, {"ep": 2})
    assert found.grad_error < 1e-14, str(found)
    assert found.report.events_of(Gathered)
    assert found.sent == {"ep": {"all_gather": 1}}


def test_a_model_without_experts() -> None:
    with pytest.raises(FxRewriteError, match=r"LlamaForCausalLM has no expert-parallel plan \(ep_plan\)"):
        from_transformers(build("Llama"), "ep")
    with pytest.raises(FxRewriteError, match="ep=3 ranks do not divide"):
        simulate(mixture("Mixtral"), {"input_ids": IDS, "labels": IDS}, EXPERTS, {"ep": 3})
