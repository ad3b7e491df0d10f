"""Tensor parallelism with and without norms on chunks of the sequence: exact, with the collectives of the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosp_rules.parallelism import AUTOSP
from fxrewrite import FxRewriteError, RefusedError
from fxrewrite.spmd import Gathered, Parallelism, Parallelisms
from rules.parallel import DATA, MEGATRON, MEGATRON_LAYERS, MEGATRON_SP, ZERO3
from tests.rules.parallel.models import adapt, build
from tests.rules.parallel.on_ranks import IDS, compared, loss_of, sent_backward

LAYERS = 2
REDUCE, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"
WITH_WHOLE_NORMS = {REDUCE: 2 * LAYERS + 1 + 3}
"""Sent forward: the embedding's, and three of the loss."""
ON_CHUNKS = {SCATTER: 2 * LAYERS + 1, GATHER: 2 * LAYERS + 1, REDUCE: 3}


def test_megatron() -> None:
    model = build("Llama", tie_word_embeddings=True)
    found = compared(loss_of(model), MEGATRON)
    assert found.sent["tp"] == WITH_WHOLE_NORMS
    assert sent_backward(found) == {REDUCE: 2 * LAYERS + 1}  # what the head gives back


def test_on_chunks_of_the_sequence() -> None:
    model = build("Llama")
    found = compared(loss_of(model), MEGATRON_SP)
    assert found.sent["tp"] == ON_CHUNKS
    norms = LAYERS + 1  # both of a layer together
    assert sent_backward(found) == {SCATTER: 2 * LAYERS + 1, GATHER: 2 * LAYERS + 1, REDUCE: norms}


def test_four_ranks() -> None:
    model = build("Qwen3", num_key_value_heads=4, head_dim=8)
    compared(loss_of(model), MEGATRON_SP, ranks=4)


PLANS = {
    "data_megatron": (DATA | MEGATRON, WITH_WHOLE_NORMS),
    "zero3_megatron_sp": (ZERO3 | MEGATRON_SP, ON_CHUNKS),
    "autosp_megatron": (AUTOSP | MEGATRON, WITH_WHOLE_NORMS),
}


@pytest.mark.parametrize(("plan", "alone"), PLANS.values(), ids=PLANS)
@pytest.mark.some(1)
def test_over_another_axis(plan: Parallelisms, alone: dict[str, int]) -> None:
    """Over tp a plan sends what it sends alone; ranks of the data axis have a part of the batch each."""
    model = build("Llama", num_key_value_heads=4)
    found = compared(loss_of(model), plan)
    assert found.sent["tp"] == alone
    assert not found.report.events_of(Gathered)


def test_a_vocabulary_that_does_not_divide() -> None:
    model = loss_of(build("Llama", vocab_size=65))
    with pytest.raises(FxRewriteError, match=r"\[65, 32\]: tp=2 ranks do not divide S\(0\)"):
        compared(model, MEGATRON)
    assert compared(model, MEGATRON_LAYERS).sent == {"tp": {REDUCE: 2 * LAYERS}}


def test_a_model_without_head() -> None:
    model = loss_of(build("Llama").model, lambda output, **_: output[0].square().mean())
    found = compared(model, MEGATRON, {"input_ids": IDS})
    assert found.sent == {"tp": {REDUCE: 2 * LAYERS + 1}}


def test_heads_that_do_not_divide() -> None:
    model = build("Llama", num_key_value_heads=1)
    message = r"self_attn views 8 features as 1 heads, and 2 ranks of axis tp do not divide 1 heads"
    with pytest.raises(RefusedError, match=message):
        compared(loss_of(model), MEGATRON)


def test_norms_with_biases_and_linears_with_biases() -> None:
    model = build("Llama", attention_bias=True, mlp_bias=True)
    for weight in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(weight)
    loss_of(model)
    for plan in (MEGATRON, MEGATRON_SP):
        compared(model, plan)


def test_lengths_that_do_not_divide() -> None:
    model = build("Llama")
    ids = torch.arange(22).reshape(2, 11)
    with pytest.raises(FxRewriteError, match="tp=2 ranks do not divide S"):
        compared(loss_of(model), MEGATRON_SP, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("plan", "sent"), [(MEGATRON, 2 * LAYERS + 1 + 3), (MEGATRON_LAYERS, 2 * LAYERS)], ids=("vocabulary", "layers")
)
def test_a_loss_of_log_probabilities(plan: Parallelism, sent: int) -> None:
    """Such as of preferences and policies: it sends no logits, and layers compute as with any loss."""

    def loss(output: Any, input_ids: torch.Tensor) -> torch.Tensor:
        return -output.logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).mean()

    assert compared(loss_of(build("Llama"), loss), plan, {"input_ids": IDS}).sent == {"tp": {REDUCE: sent}}


def test_a_loss_of_all_log_probabilities() -> None:
    """Such as a divergence from a teacher: it needs all classes of a token, and the head is fewer bytes than logits."""
    model = loss_of(build("Llama"), lambda output, **_: output.logits.log_softmax(-1).square().mean())
    found = compared(model, MEGATRON, {"input_ids": IDS.repeat(8, 1)})
    assert SCATTER not in found.sent["tp"]
    assert found.sent["tp"][REDUCE] >= 2 * LAYERS


@pytest.mark.parametrize("plan", [MEGATRON, MEGATRON_SP], ids=lambda plan: plan.name)
def test_adapters_of_low_rank_are_cut_as_what_they_adapt(plan: Parallelism) -> None:
    """The ranks sum 3 features for each adapter of columns, and send what they send without adapters."""
    model = build("Llama")
    adapt(model, "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    found = compared(loss_of(model), plan)
    alone = WITH_WHOLE_NORMS if plan is MEGATRON else ON_CHUNKS
    assert found.sent["tp"] == {**alone, REDUCE: alone[REDUCE] + 2 * LAYERS}
    assert not found.report.events_of(Gathered)
