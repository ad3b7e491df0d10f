"""Mixtures of experts: each implementation that captures, and their losses over all tokens, equal one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from fxrewrite.ops import key
from tests.autosp.one_device import OneDevice, captured, on_ranks

VOCAB, BATCH, LENGTH, PER_TOKEN = 61, 2, 16, 2
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": PER_TOKEN,
    "router_aux_loss_coef": 0.5,
    "use_cache": False,
}


def softmax_then_topk(**options: Any) -> torch.nn.Module:
    config = transformers.MixtralConfig(**_SMALL, num_local_experts=6, head_dim=8, **options)
    return transformers.MixtralForCausalLM(config)


def biases_and_interleaved_gates(**options: Any) -> torch.nn.Module:
    config = transformers.GptOssConfig(
        **_SMALL, num_local_experts=4, head_dim=8, sliding_window=6, attn_implementation="eager", **options
    )
    return transformers.GptOssForCausalLM(config)


def weights_instead_of_slots(**options: Any) -> torch.nn.Module:
    """Every expert sees every token, those that were not chosen with weight 0."""
    config = transformers.Llama4TextConfig(
        **{**_SMALL, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "head_dim": 8},
        num_local_experts=4,
        interleave_moe_layer_step=1,
        pad_token_id=0,
        **options,
    )
    return transformers.Llama4ForCausalLM(config)


def build(make: Any, dtype: torch.dtype = torch.float64, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = make(**options).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)  # experts that differ, and tokens that choose them
    return model


def batch(*, masked: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 2:11] = -100
    if not masked:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


STRICT = AutoSPConfig(strict=True)


def equals_one_device(model: torch.nn.Module, inputs: dict[str, torch.Tensor], implementation: str) -> list[Any]:
    """The programs of 2 and 4 ranks, after their losses and gradients were compared."""
    programs: list[Any] = []
    one_device = OneDevice(model, inputs)  # by a loop over the experts
    model.set_experts_implementation(implementation)
    for num_ranks in (2, 4):
        # logits are cast to float32
        program, report, _ = one_device.check(num_ranks, STRICT, loss=1e-6, rtol=0, grads=1e-9, floor=1e-6)
        programs.append(program)
        assert not report.refusals
        assert not [line for line in report.lines if line.startswith("gathered") or "run whole" in line]
    return programs


def operators(program: Any, name: str) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and key(node) == name]


@pytest.mark.parametrize(
    ("make", "implementation", "masked"),
    [
        (softmax_then_topk, "grouped_mm", True),
        (softmax_then_topk, "batched_mm", False),
        (biases_and_interleaved_gates, "grouped_mm", False),
        (biases_and_interleaved_gates, "batched_mm", True),
    ],
)
@pytest.mark.some(2)
def test_experts_and_load_balancing_losses_equal_one_device(make: Any, implementation: str, masked: bool) -> None:
    inputs = batch(masked=masked)
    options = {"experts_implementation": "eager", "output_router_logits": True}
    model, without = build(make, **options), build(make, **{**options, "output_router_logits": False})
    assert (model(**inputs).loss - without(**inputs).loss).abs() > 0.1, "load balancing is not part of the loss"
    for program, num_ranks in zip(equals_one_device(model, inputs, implementation), (2, 4), strict=True):
        sorts = operators(program, "aten::sort")
        assert len(sorts) == (implementation == "grouped_mm")
        for sort in sorts:
            assert sort.meta["val"][0].shape == (BATCH * LENGTH // num_ranks * PER_TOKEN,)


def test_experts_without_slots_equal_one_device() -> None:
    equals_one_device(build(weights_instead_of_slots), batch(), "batched_mm")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers is renaming `gradient_checkpointing_enable`
def test_a_symbolic_length_and_checkpointed_layers() -> None:
    model, inputs = build(softmax_then_topk, experts_implementation="eager"), batch()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for value in inputs.values():
        torch._dynamo.mark_dynamic(value, 1)
    for program in equals_one_device(model, inputs, "grouped_mm"):
        (sort,) = operators(program, "aten::sort")
        (size,) = sort.meta["val"][0].shape
        assert isinstance(size, torch.SymInt)
        assert "recompute" in sort.meta


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
def test_half_precision_runs_the_grouped_product_of_torch() -> None:
    model, inputs = build(softmax_then_topk, torch.bfloat16, experts_implementation="grouped_mm"), batch()
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("batched_mm")
    loss = exact(**inputs).loss
    loss.backward()
    gm, example_inputs = captured(model, inputs)
    program, report, run = on_ranks(gm, example_inputs, 2, STRICT, backward=0)
    assert not [line for line in report.lines if line.startswith("gathered")]
    assert len(operators(program, "aten::_grouped_mm")) == 2
    gm(*example_inputs)[0].backward()
    wanted = dict(zip(map(id, model.parameters()), (p.grad for p in exact.parameters()), strict=True))
    for value, grad in zip(example_inputs, run.gradients(), strict=True):
        if id(value) in wanted:
            want = wanted[id(value)]
            own = (value.grad.double() - want).norm() / want.norm()  # what bfloat16 costs on one device
            assert (grad.double() - want).norm() / want.norm() <= 1.5 * own + 1e-2


def test_a_model_that_records_outputs_is_called_once_before_it_is_compiled() -> None:
    """transformers installs its hooks at the first call, and breaks the graph there."""
    model = build(softmax_then_topk, experts_implementation="batched_mm", output_router_logits=True)
    config = AutoSPConfig(memory="1 GiB")
    with pytest.raises(
        AutoSPError, match=r"Unsupported context manager at \w+.py:\d+; call the model once before it is compiled"
    ):
        dry_run(model, batch(), num_ranks=2, config=config)
    with torch.no_grad():
        model(**batch())
    _, report = dry_run(model, batch(), num_ranks=2, config=config)
    assert not report.graph_break
