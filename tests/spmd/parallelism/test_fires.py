"""A parallelism can say that a rule must fire; where it does not, the error shows the graph that its list sees."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fxrewrite import FxRewriteError, MatchExpectationError, Pattern, Rule, RuleSet, cap, op
from fxrewrite.spmd import (
    Alternatives,
    Parallelism,
    Partial,
    Replicate,
    Shard,
    fires,
    moves,
    param,
    redistribute,
    redistribution,
)
from fxrewrite.testing import simulate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


X = {"x": torch.randn(4, 8, dtype=torch.float64)}
RELU = Rule("my.relu", Pattern((op("relu", cap("x")),)), lambda x: torch.clamp(x, min=0))
SUM = Rule(
    "my.sum",
    Pattern((redistribution,), (moves(Partial, Replicate),)),
    lambda x, src, dst, axis: redistribute(x * 1.0, src, dst, axis),
    terminates=False,
)
PLACE = {param("up.weight"): Shard(0), param("down.weight"): Shard(1)}


def run(plan, mesh=None):
    return simulate(Model().double(), X, plan, mesh or {"tp": 4})


@pytest.mark.parametrize("slot", ["rules", "placed", "lowered"])
def test_a_rule_that_fires_is_counted_in_each_list(slot: str) -> None:
    plan = Parallelism(
        "tensor", axis="tp", place=PLACE, expect=[fires("my.relu")], **{slot: [RuleSet("in_a_set", RELU)]}
    )
    found = run(plan)
    assert found.report["my.relu"].rewrites == 1
    assert found.grad_error < 1e-12
    assert not [event for event in found.report.events if event.kind == "begun"]


def test_a_rule_in_the_wrong_list_is_an_error_that_says_which_sees_what() -> None:
    plan = Parallelism("tensor", axis="tp", place=PLACE, placed=[SUM], expect=[fires(SUM)])
    assert run(plan).report["my.sum"].rewrites == 1
    for slot in ("rules", "lowered"):
        with pytest.raises(MatchExpectationError) as error:
            run(replace(plan, placed=(), **{slot: [SUM]}))
        assert f"my.sum fired 0 times in {slot}= over tp, and 1 or more are expected" in str(error.value)
        assert "the graph has no node fxrewrite.spmd.redistribute.redistribute" in str(error.value)
        assert "placed= that with redistributions" in str(error.value)


def test_too_few_are_an_error_and_one_rank_has_none() -> None:
    plan = Parallelism("tensor", axis="tp", place=PLACE, rules=[RELU], expect=[fires(RELU, at_least=2)])
    with pytest.raises(MatchExpectationError, match=r"my.relu fired 1 times in rules= over tp, and 2 or more"):
        run(plan)
    assert run(plan, {"tp": 1}).grad_error < 1e-12


def test_each_axis_counts_its_own() -> None:
    inner = Parallelism("inner", axis="tp", place=PLACE, rules=[RELU])
    outer = Parallelism("outer", axis="dp", data="own", rules=[RELU], expect=[fires(RELU)])
    with pytest.raises(MatchExpectationError, match=r"fired 0 times in rules= over dp"):
        run(outer | inner, {"dp": 2, "tp": 2})
    stated = replace(inner, expect=[fires(RELU)])
    assert run(replace(outer, expect=()) | stated, {"dp": 2, "tp": 2}).grad_error < 1e-12


def test_a_method_counts_too() -> None:
    plan = Parallelism("tensor", axis="tp", place=PLACE, rules=[RELU])
    method = Parallelism("whole", axis="tp", method=plan.rule_set, expect=[fires(RELU)])
    assert run(method).report["my.relu"].rewrites == 1


def test_mistakes_are_told_where_they_are_made() -> None:
    with pytest.raises(FxRewriteError, match=r"'my.rellu' is to fire, and none of rules=, .* did you mean my.relu"):
        Parallelism("tensor", axis="tp", rules=[RELU], expect=[fires("my.rellu")])
    with pytest.raises(FxRewriteError, match=r"at_least=0 is not a number of rewrites"):
        fires(RELU, at_least=0)
    with pytest.raises(FxRewriteError, match=r"expect is a list of Sends or Fires, and has 'my.relu'"):
        Parallelism("tensor", axis="tp", rules=[RELU], expect=["my.relu"])  # pyright: ignore[reportArgumentType]


def test_of_a_way_it_is_asked_where_the_way_is_chosen() -> None:
    way = Parallelism("way", axis="tp", place=PLACE, rules=[RELU], expect=[fires(RELU, at_least=2)])
    cheap = Parallelism("cheap", axis="tp", place=PLACE, rules=[RELU], expect=[fires(RELU)])
    whole = {param("up.weight"): Shard(1)}
    plan = Parallelism("tensor", axis="tp", alternatives=[Alternatives("either", {"cut": cheap, "other": whole})])
    assert run(plan).report["my.relu"].rewrites == 1
    with pytest.raises(FxRewriteError, match=r"my.relu fired 1 times"):
        run(Parallelism("tensor", axis="tp", alternatives=[Alternatives("either", {"cut": way, "other": whole})]))
