"""Experts over ranks: exact in float64 for mixtures of several kinds, with one sum a layer and no matrix gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from autosp_rules.config import AutoSPConfig
from autosp_rules.parallelism import CONTEXT, CONTEXT_ZIGZAG, autosp_parallelism
from fxrewrite import FxRewriteError
from fxrewrite.spmd import Gathered, Parallelism, Parallelisms, Shard, inputs, param
from fxrewrite.testing import simulate
from rules.experts.exchange import ExchangePairs, TokensToExperts
from rules.parallel import EXPERT_DATA, EXPERT_ZERO3, EXPERTS, ZERO3, from_transformers
from tests.rules.parallel.models import GROUPED, build

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


def mixture(family: str, **options: Any) -> Any:
    """Experts that differ, so that tokens are spread unevenly."""
    model = build(family, **{**FAMILIES[family], **options})
    model.set_experts_implementation(GROUPED)
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
@pytest.mark.some(2)
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
@pytest.mark.some(1)
def test_composed(axes: tuple[str, str], sent: Any) -> None:
    """With parameters in shards, with chunks of the sequence, with whatever tensor parallelism cuts of an expert."""
    # A loss that balances the load of each replica's tokens is not that of all tokens, under any data parallelism.
    model = mixture("Mixtral", output_router_logits=axes[0] != "dp")
    outer = {"dp": ZERO3, "sp": CONTEXT}.get(axes[0]) or from_transformers(model, "tp")
    tolerance = 1e-6 if axes[0] == "tp" else 1e-12  # a loss over shards of the vocabulary is summed in float32
    found = exact(model, outer | EXPERTS, dict.fromkeys(axes, 2), tolerance)
    assert sent is None or found.sent["ep"] == sent


@pytest.mark.parametrize(
    ("family", "ranks", "tokens", "by", "sent"),
    [
        ("GptOss", 2, CONTEXT_ZIGZAG, "gather", {"reduce_scatter": LAYERS}),
        ("DeepseekV3", 4, CONTEXT, "price", {"all_to_all": LAYERS * (3 + 3)}),  # and three around attention
    ],
)
def test_tokens_in_chunks_over_the_axis_of_experts(
    family: str, ranks: int, tokens: Parallelism, by: Any, sent: dict[str, int]
) -> None:
    """Tokens are gathered before experts, and each rank gets the sums of its own back; or pairs are sent."""
    plan = replace(autosp_parallelism(AutoSPConfig(experts=by)), place={**tokens.place, **EXPERTS.place})
    found = exact(mixture(family), plan, {"sp": ranks}, 1e-12 if family == "GptOss" else 1e-8)  # a router in float32
    assert sent.items() <= found.sent["sp"].items()
    assert bool(found.report.events_of(Gathered)) == (by == "gather")
    assert "reduce_scatter" in sent or "reduce_scatter" not in found.sent["sp"]


@pytest.mark.parametrize(
    ("family", "plan", "ranks", "sent"),
    [
        ("Mixtral", EXPERT_DATA, 4, {"all_to_all": 3}),
        ("Qwen3Moe", EXPERT_ZERO3, 2, {"all_to_all": 3, "all_gather": 3}),
        ("DeepseekV3", EXPERT_ZERO3, 4, {"all_to_all": 3, "all_gather": 4}),  # a router is cast
        ("GptOss", EXPERT_DATA, 2, {"all_to_all": 3}),
        ("Mixtral", replace(ZERO3, axis="out") | EXPERT_DATA, 2, {"all_to_all": 3}),
        ("GptOss", EXPERT_ZERO3 | CONTEXT, 2, {"all_to_all": 3, "all_gather": 3}),
    ],
)
@pytest.mark.some(2)
def test_experts_over_the_axis_of_the_batch(family: str, plan: Any, ranks: int, sent: dict[str, int]) -> None:
    """Each rank has its own part of the batch; the objective is the mean of their losses."""
    model = mixture(family, num_hidden_layers=1, output_router_logits=False)
    found = exact(
        model, plan, {member.axis: ranks for member in plan.members}, 1e-8 if family == "DeepseekV3" else 1e-12
    )
    assert found.sent["dp"] == sent
    assert not found.report.events_of(Gathered)


class Adapter(nn.Module):
    """Adds a product of low rank to the matrix of each expert."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        self.a, self.b = (nn.Parameter(torch.randn(experts, *size).double()) for size in ((2, columns), (rows, 2)))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a * 0.1


@pytest.mark.parametrize(("plan", "sent"), [(EXPERTS, {"all_reduce": 1}), (EXPERT_DATA, {"all_to_all": 3})])
@pytest.mark.some(1)
def test_adapters_of_experts_are_held_with_them(plan: Parallelism, sent: dict[str, int]) -> None:
    model = mixture("Mixtral", num_hidden_layers=1, output_router_logits=False).requires_grad_(False)
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        register_parametrization(experts, name, Adapter(getattr(experts, name)))
    found = exact(model, plan, {plan.axis: 2})
    assert found.sent[plan.axis] == sent
    assert not found.report.events_of(Gathered)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, width, width) / 2) for _ in range(2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        keys, order = torch.sort(ids.flatten())
        ends = torch.cumsum(torch.histc(keys.float(), 4, 0, 3), 0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        rows = product(torch.tanh(product(x[order // ids.shape[1]], self.up, ends)), self.down, ends)
        back = (rows * gates.flatten()[order].unsqueeze(-1))[torch.argsort(order)]
        return back.reshape(*ids.shape, -1).sum(1)


class Mixture(nn.Module):
    """The mean over parts of a batch [parts, T, width]: k of four experts a token, a shared one, and a loss that
    balances the load of the part's tokens."""

    def __init__(self, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.mlp = nn.ModuleDict({"router": nn.Linear(6, 4), "shared": nn.Linear(6, 6), "experts": Experts(6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.loss(part) for part in x.unbind(0)]).mean()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(self.mlp["router"](x), -1)
        gates, ids = torch.topk(shares, self.per_token)
        spread = (ids.unsqueeze(-1) == torch.arange(4)).to(x.dtype).mean((0, 1)) * shares.mean(0)
        return (self.mlp["experts"](x, ids, gates) + self.mlp["shared"](x)).square().mean() + spread.sum()


@pytest.mark.parametrize(
    ("per_token", "ranks", "by", "runs", "is_skewed"),
    [
        (1, 2, "own", None, True),
        (4, 4, "own", None, False),
        (2, 4, "price", "all_to_all", True),
        (4, 2, "price", "gather", False),
        (1, 4, "all_to_all", "all_to_all", True),
        (4, 2, "all_to_all", "all_to_all", False),
    ],
)
@pytest.mark.some(2)
def test_how_tokens_come_to_experts(per_token: int, ranks: int, by: Any, runs: str | None, is_skewed: bool) -> None:
    """Whatever the router says, as when one expert gets all tokens and other ranks none: by counts and bytes."""
    torch.manual_seed(0)
    model, tokens = Mixture(per_token).double(), 16
    if is_skewed:
        nn.init.constant_(model.mlp["router"].bias[0], 50.0)
    if by == "own":
        plan, x = EXPERT_DATA, torch.randn(ranks, tokens, 6, dtype=torch.float64)
    else:
        chunks = {**EXPERTS.place, inputs("x"): Shard(1)}
        plan = replace(EXPERTS, place=chunks, placed=[ExchangePairs(by)])
        x = torch.randn(1, tokens, 6, dtype=torch.float64)
    found = simulate(model, {"x": x}, plan, {plan.axis: ranks})
    assert found.loss_error < 1e-14, str(found)
    assert found.grad_error < 1e-13, str(found)
    sent = found.sent[plan.axis]
    assert sent.get("all_to_all", 0) == (0 if runs == "gather" else 3), "counts, rows, and results"
    assert [event.by for event in found.report.events_of(TokensToExperts)] == ([runs] if runs else [])
    for event in found.report.events_of(TokensToExperts):
        row, pairs = 6 * 8, tokens * per_token / ranks  # a rank's pairs; a number of an expert or a gate has 8 bytes
        assert event.gather_bytes == (ranks - 1) * (tokens / ranks * 2 * row + pairs * 2 * 8)
        assert event.all_to_all_bytes == (ranks - 1) / ranks * (pairs * (2 * row + 8) + 4 * 8)


class Numbered(nn.Module):
    """Two experts that are found by a sort, and whose rows know the number of their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(6, 2, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        keys, order = torch.sort(ids)
        rows = x[order] * self.experts.weight[keys] * keys.unsqueeze(-1)
        return rows[torch.argsort(order)].square().mean()


@pytest.mark.parametrize("data", ["shared", "own"])
def test_experts_whose_numbers_are_read(data: Any) -> None:
    """What cannot be spread is gathered, and the report says so."""
    plan = Parallelism(
        "experts", axis="ep", place={param("experts.weight"): Shard(0)}, rules=EXPERTS.rules, lowered=EXPERTS.lowered,
        layouts=EXPERTS.layouts, data=data,
    )  # fmt: skip
    given = {"x": torch.arange(48.0).double().sin().reshape(8, 6), "ids": torch.tensor([1, 0, 1, 1, 0, 1, 1, 1])}
    found = simulate(Numbered().double(), given, plan, {"ep": 2})
    assert found.grad_error < 1e-14, str(found)
    assert found.report.events_of(Gathered)
    assert found.sent == {"ep": {"all_gather": 1}}


def test_a_model_without_experts() -> None:
    with pytest.raises(FxRewriteError, match=r"LlamaForCausalLM has no expert-parallel plan \(ep_plan\)"):
        from_transformers(build("Llama"), "ep")
    with pytest.raises(FxRewriteError, match=r"ep=3 ranks do not divide S\(0\); 2, 4 do"):
        simulate(mixture("Mixtral"), {"input_ids": IDS, "labels": IDS}, EXPERTS, {"ep": 3})
    with pytest.raises(FxRewriteError, match="by='alltoall' is not one of"):
        ExchangePairs("alltoall")  # pyright: ignore[reportArgumentType]
