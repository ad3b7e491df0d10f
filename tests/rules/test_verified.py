"""Every rule that an installed package registers is true, or is verified elsewhere, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autosp_rules.attention.gather_kv import GATHER_KV, causal_to_mask, gather_keys
from autosp_rules.attention.ring import RING, ring_of_ranks
from autosp_rules.attention.strategy import CHOICE, AttentionCall, Choice, write_choice
from autosp_rules.attention.ulysses import ULYSSES, repeat_kv_heads
from fxrewrite import Edit, Pattern, Report, Rule, RuleSet
from fxrewrite.registry import registered
from fxrewrite.spmd import Axis, SpmdContext
from fxrewrite.verify import verify_rewrite
from rules.attention.groups import repeat_heads
from rules.attention.operator import attentions

ON_RANKS = "it lowers to what ranks tell each other"
WITH_LAYOUT = "it reads a placement that propagation found"
ON_DEVICE = "it matches on devices whose kernels take no groups of heads"
WHERE_CHOSEN = "it reads which strategy was chosen for an attention"
OF_A_BODY = "what it writes out is no literal that could be guessed"
IN_A_GRAPH = "it reads what computes an operand, or who uses the result, which its own pattern does not hold"
HERE = Path(__file__).name
BESIDE = ("it reads what is beside its pattern: whether that is attention", HERE)
ELSEWHERE: dict[str, tuple[str, str]] = {
    "collectives.stays": (ON_RANKS, "../verify/test_ranks.py"),
    "collectives.slice": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "collectives.all_gather": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "collectives.all_to_all": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "collectives.all_reduce": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "collectives.reduce_scatter": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "collectives.own_summand": (ON_RANKS, "../spmd/propagation/test_legal.py"),
    "collectives.own_chunk": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "collectives.clear_padding": (ON_RANKS, "../autosp/test_lengths.py"),
    "collectives.all_to_all_together": (ON_RANKS, "../spmd/lower/test_bundles.py"),
    "collectives.all_gather_together": (ON_RANKS, "../spmd/lower/test_bundles.py"),
    "autosp.lower_ring": (WITH_LAYOUT, "../autosp/test_attention_strategies.py"),
    "autosp.shard_label_ids": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "autosp.shard_position_ids": (ON_RANKS, "../spmd/lower/test_collectives.py"),
    "reductions.mean_over_shards": (WITH_LAYOUT, "test_layouts.py"),
    "experts.spread_tokens": (WITH_LAYOUT, "parallel/test_experts.py"),
    "experts.spread_pairs": (WITH_LAYOUT, "parallel/test_experts.py"),
    "experts.write_out": (OF_A_BODY, "parallel/test_experts.py"),
    "attention.repeat_heads": (ON_DEVICE, HERE),
    "masks.attend_by_flex": (ON_DEVICE, "attention/test_flex.py"),
    "autosp.causal_to_mask": (WHERE_CHOSEN, HERE),
    "autosp.repeat_kv_heads": (WHERE_CHOSEN, HERE),
    "autosp.gather_keys": (WHERE_CHOSEN, HERE),
    "autosp.ring_of_ranks": (WHERE_CHOSEN, HERE),
    "autosp.ring_in_groups": (WHERE_CHOSEN, "../autosp/test_attention_strategies.py"),
    "slots.write_out": (OF_A_BODY, "experts/test_fuse.py"),
    "attention.untranspose_key": BESIDE,
    "attention.scale_before_transpose": BESIDE,
    "attention.split_scores": BESIDE,
    "attention.merge_result": BESIDE,
    "attention.bmm_to_matmul": BESIDE,
    "attention.write_out_baddbmm": BESIDE,
    "attention.fuse_causal_bias": (IN_A_GRAPH, "attention/test_composite.py"),
    "attention.raise_flash": (OF_A_BODY, "../autosp/test_attention_flash.py"),
    "attention.raise_flex": (OF_A_BODY, "../autosp/test_attention_flex.py"),
    "attention.raise_flex_sinks": (OF_A_BODY, "../autosp/test_attention_flex.py"),
    "attention.raise_flex_sinks_by_rows": (OF_A_BODY, "../autosp/test_attention_flex.py"),
    **{f"halos.lower_conv{n}d": (WITH_LAYOUT, "test_halos.py") for n in (1, 2, 3)},
    "masks.causal": (IN_A_GRAPH, "masks/test_dense.py"),
    "masks.nothing_hidden": (IN_A_GRAPH, "masks/test_dense.py"),
    "shifted_losses.pad_labels_of_cross_entropy_loss": (IN_A_GRAPH, "canonical/test_shifted_losses.py"),
    "shifted_losses.pad_labels_of_nll_loss_nd": (IN_A_GRAPH, "canonical/test_shifted_losses.py"),
    "early_cuts.cut_before_product": (IN_A_GRAPH, "canonical/test_early_cuts.py"),
    "joined_parts.compute_whole": (IN_A_GRAPH, "canonical/test_joined_parts.py"),
    "tiled_loss.tile": (IN_A_GRAPH, "tiling/test_loss.py"),
    "tiled_mlp.tile": (IN_A_GRAPH, "tiling/test_mlp.py"),
}
"""Why a rule cannot be verified from its pattern alone, and the file that does it."""
SAMPLES, SEED = 24, 0
AXIS = Axis("sp", 2)


def test_a_registered_rule_is_true(registered_rule: Rule) -> None:
    if registered_rule.id in ELSEWHERE:
        pytest.skip("{}: see {}".format(*ELSEWHERE[registered_rule.id]))
    verdict = registered_rule.verify(samples=SAMPLES, seed=SEED)
    verdict.raise_if_false()
    assert verdict.samples >= SAMPLES, str(verdict)
    assert not verdict.uncovered, str(verdict)


def test_what_is_verified_elsewhere_is_registered_and_cannot_be_verified_here() -> None:
    rules = {rule.id: rule for rule_set in registered().values() for rule in rule_set.rules()}
    assert ELSEWHERE.keys() <= rules.keys()
    for rule_id, (_, file) in ELSEWHERE.items():
        assert not rules[rule_id].verify(samples=1, seed=SEED).ok, f"{rule_id} can be verified: take it off the list"
        assert (Path(__file__).parent / file).is_file()


def interpreted(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Placements are no literals of Python: a graph that holds them is not run as code."""
    return pytree.tree_leaves(fx.Interpreter(gm).run(*inputs))


STRATEGIES = (GATHER_KV, RING, ULYSSES)
OF_STRATEGIES = (causal_to_mask, gather_keys, repeat_kv_heads, ring_of_ranks)


@pytest.mark.parametrize("rule", OF_STRATEGIES, ids=lambda rule: rule.id)
def test_a_rule_of_an_attention_strategy_is_true(rule: Rule) -> None:
    def rewrite(gm: fx.GraphModule) -> int:
        return RuleSet("one", ChooseEverywhere(rule.id), rule).apply(gm, context=SpmdContext(AXIS)).rewrites

    anywhere = Pattern(rule.pattern.outputs)
    options: dict[str, Any] = {"numerics": rule.numerics, "domain": rule.domain, "run": interpreted}
    options |= {"sampler": rule._sampler}  # pyright: ignore[reportPrivateUsage]
    verdict = verify_rewrite(rule.id, anywhere, rewrite, samples=SAMPLES, seed=SEED, **options)
    verdict.raise_if_false()
    assert verdict.samples >= SAMPLES, str(verdict)
    assert verdict.gradients, str(verdict)


class ChooseEverywhere:
    """Leaves every call of attention that its strategy serves to one rule, but for those that it made.

    Choices end with their transaction.
    """

    name = "choose"

    def __init__(self, rule_id: str) -> None:
        self._rule_id = rule_id
        self._strategy = next(s for s in STRATEGIES if any(rule.id == rule_id for rule in s.rules))

    def run(self, edit: Edit, context: object, report: Report) -> int:
        for node in attentions(edit.nodes()):
            is_open = CHOICE.of(node) is None and self._rule_id not in node.meta.get("fxrewrite", ())
            if is_open and not self._strategy.why_not(AttentionCall.of(node), AXIS):
                write_choice(edit, node, Choice("any", "", self._rule_id))
        return 0

    def text(self) -> str:
        return f"every attention by {self._rule_id}"


BESIDE_ATTENTION = {"is_key", "is_beside_softmax", "is_a_softmax"}
"""Conditions that attention is near: they say where a rule pays, not where it is true."""


@pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated on 0-D tensors:UserWarning")  # drawn, and then given up
@pytest.mark.parametrize(
    "name",
    ["untranspose_key", "scale_before_transpose", "split_scores", "merge_result", "bmm_to_matmul", "write_out_baddbmm"],
)
def test_a_step_of_attention_is_true_anywhere(name: str) -> None:
    (rule,) = (r for r in registered()["attention"].rules() if r.id == f"attention.{name}")
    where = tuple(
        condition for condition in rule.pattern.where if str(condition).partition("(")[0] not in BESIDE_ATTENTION
    )
    assert len(where) == len(rule.pattern.where) - 1
    anywhere = Rule(rule.id, Pattern(rule.pattern.outputs, where), rule.body, numerics=rule.numerics)
    if rule._sampler is not None:  # pyright: ignore[reportPrivateUsage]
        anywhere.sampler(rule._sampler)  # pyright: ignore[reportPrivateUsage]
    verdict = anywhere.verify(samples=SAMPLES, seed=SEED)
    verdict.raise_if_false()
    assert not verdict.uncovered, str(verdict)


def test_heads_are_repeated_on_any_device() -> None:
    """Without the condition that no kernel of the device takes groups: it says where the rule pays."""
    rule = repeat_heads
    anywhere = Rule(rule.id, Pattern(rule.pattern.outputs), rule.body, numerics=rule.numerics, domain=rule.domain)
    anywhere._sampler = rule._sampler  # pyright: ignore[reportPrivateUsage]
    anywhere.verify(samples=SAMPLES, seed=SEED).raise_if_false()
