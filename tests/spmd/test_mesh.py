"""Plans over several axes of a mesh, one after the other: the loss and every gradient of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import fx, nn

from autosp_rules import AutoSPConfig
from autosp_rules.rule_set import rule_set
from fxrewrite import RuleSet
from fxrewrite.backends import normalized
from fxrewrite.graph import input_name
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    REDUCTIONS,
    LocalizeShapes,
    Place,
    Placement,
    PropagatePlacements,
    Shard,
    contexts,
    inputs,
    param,
)
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.attention.composite import ATTENTION_UNBIASED
from rules.canonical.losses import LOSSES
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.layouts import LAYOUTS
from tests.autosp.models import build
from tests.autosp.one_device import captured

pytestmark = pytest.mark.slow

IDS = torch.arange(48).reshape(4, 12) % 61
LAYERS = 2
MESHES = [("dp",), ("tp",), ("sp",), ("dp", "sp"), ("tp", "sp"), ("dp", "tp"), ("dp", "tp", "sp")]
"""Axes of two ranks each."""


def parallel(name: str, place: Mapping[Any, Placement]) -> RuleSet:
    return RuleSet(
        name,
        RuleSet(f"canonicalize_{name}", NORMAL_FORMS, LOSSES, ATTENTION_UNBIASED),
        Place(f"place_{name}", place),
        PropagatePlacements(f"propagate_{name}", LAYOUTS),
        REDUCTIONS,
        LocalizeShapes(f"localize_{name}", LAYOUTS),
        COLLECTIVE_RULES,
        atomic=True,
    )


DP = parallel("data", {inputs("{input_ids,labels}"): Shard(0)})
SP = rule_set(AutoSPConfig(attention="ulysses", checkpoint="none", mlp_tile=None))
HEADS = {param("*.{q,k,v}_proj.weight"): Shard(0), param("*.o_proj.weight"): Shard(1)}
MLP = {param("*.{gate,up}_proj.weight"): Shard(0), param("*.down_proj.weight"): Shard(1)}
CONV1D = {
    param("*.c_attn.weight"): Shard(1, outer=3),
    param("*.c_attn.bias"): Shard(0, outer=3),
    param("*.c_fc.weight"): Shard(1),
    param("*.c_fc.bias"): Shard(0),
    param("*.{attn,mlp}.c_proj.weight"): Shard(0),
}


_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "use_cache": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def _moe() -> nn.Module:
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SMALL, **experts)).double()


def _hybrid() -> nn.Module:
    torch.manual_seed(0)
    mamba = {"n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 4}
    layers = {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": True}
    return transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**_SMALL, **mamba, **layers)).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Mapping[Any, Placement]]] = {
    "llama": (lambda: build("llama_mha"), HEADS | MLP),
    "qwen3_moe": (_moe, HEADS),
    "gpt2": (lambda: build("gpt2"), CONV1D),
    "hybrid": (_hybrid, HEADS),
}


@cache
def one_device(name: str) -> tuple[fx.GraphModule, list[Any], torch.Tensor, dict[str, torch.Tensor]]:
    """Graph, inputs, loss, and gradients by parameter."""
    model = MODELS[name][0]()
    if name == "qwen3_moe":
        model.set_experts_implementation("batched_mm")
    gm, given = captured(model, {"input_ids": IDS, "labels": IDS})
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return gm, given, loss.detach(), grads


@cache
def collectives(name: str, axes: tuple[str, ...]) -> Counter[tuple[str, str]]:
    """What each axis of the program sends, which is exact."""
    gm, given, loss, grads = one_device(name)
    program = normalized(gm)
    plans = {"dp": DP, "tp": parallel("tensor", MODELS[name][1]), "sp": SP}
    plan = plans[axes[0]].on(axes[0])
    for axis in axes[1:]:
        plan = plan >> plans[axis].on(axis)
    with fake_mesh((2,) * len(axes), axes) as mesh:
        plan.apply(program, context=contexts(mesh))
        run = run_on_ranks(program, given, mesh, backward=0)
    for outputs in run.outputs:
        torch.testing.assert_close(outputs[0], loss, rtol=1e-6, atol=0)  # norms and losses are in float32
    names = map(input_name, gm.graph.find_nodes(op="placeholder"))
    found = dict(zip(names, run.gradients(), strict=True))
    largest = max(grad.abs().max().item() for grad in grads.values())
    for parameter, grad in grads.items():
        if parameter in found:  # tied ones have one name in the graph
            torch.testing.assert_close(found[parameter], grad, rtol=1e-5, atol=1e-6 * largest)
    sent = (node for node in program.graph.nodes if "c10d" in key(node) and "wait" not in key(node))
    return Counter((node.meta["axis"], key(node).partition("::")[2]) for node in sent)


@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name in MODELS for axes in (MESHES if name == "llama" else MESHES[-1:])]
)
@pytest.mark.some(3)
def test_on_a_mesh(name: str, axes: tuple[str, ...]) -> None:
    """Composed with others, an axis sends what it sends alone."""
    sent = collectives(name, axes)
    for axis in axes:
        alone = {kind: count for (of, kind), count in collectives(name, (axis,)).items() if of == axis}
        assert {kind: count for (of, kind), count in sent.items() if of == axis} == alone


def test_megatron_sends_two_sums_a_layer() -> None:
    for name in ("llama", "gpt2"):
        assert collectives(name, ("tp",)) == {("tp", "all_reduce"): 2 * LAYERS}
