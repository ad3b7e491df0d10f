"""Order, overlap, unions, invariants, bodies of higher-order operators; matches found now and committed later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from fxrewrite import (
    FxRewriteError,
    InvariantError,
    MatchExpectationError,
    Pattern,
    Reason,
    Rule,
    RuleDefinitionError,
    RuleSet,
    cap,
    graph_text,
    op,
)
from fxrewrite.backends.dynamo import capture
from fxrewrite.plan.found import Found


def graph_of(function: Any) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


def pair(name: str, outer: str, inner: str, becomes: Any, **options: Any) -> Rule:
    """outer(inner(x)) -> becomes(x)"""
    return Rule(name, Pattern((op(outer, op(inner, cap("x"))),)), lambda x: becomes(x), **options)


TANH_NEG = pair("t.tanh_neg", "tanh", "neg", torch.sin)
NEG_RELU = pair("t.neg_relu", "neg", "relu", torch.cos)
RELU_EXP = pair("t.relu_exp", "relu", "exp", torch.abs)
CHAIN = RuleSet("chain", TANH_NEG, NEG_RELU, RELU_EXP)


def chain_model(x):
    return torch.tanh(torch.neg(torch.relu(torch.exp(x))))


@pytest.mark.parametrize(
    ("order", "expected"), [("top_down", ["abs", "sin"]), ("bottom_up", ["abs", "sin"])], ids=["down", "up"]
)
def test_an_even_chain_pairs_up_from_either_end(order: Any, expected: list[str]) -> None:
    gm = graph_of(chain_model)
    CHAIN.once(order=order).apply(gm)
    assert targets(gm) == expected


@pytest.mark.parametrize(
    ("order", "expected"), [("top_down", ["relu", "sin"]), ("bottom_up", ["cos", "tanh"])], ids=["down", "up"]
)
def test_the_order_decides_who_is_first(order: Any, expected: list[str]) -> None:
    gm = graph_of(lambda x: torch.tanh(torch.neg(torch.relu(x))))
    CHAIN.once(order=order).apply(gm)
    assert targets(gm) == expected


def three(name: str, becomes: Any) -> Rule:
    pattern = Pattern((op("neg", op("relu", op("exp", cap("x")))),))
    return Rule(name, pattern, lambda x: becomes(x))


def test_largest_takes_the_one_that_consumes_most() -> None:
    rules = RuleSet("s", TANH_NEG, three("t.three", torch.cos))
    for overlap, expected in (("first", ["exp", "relu", "sin"]), ("largest", ["cos", "tanh"])):
        gm = graph_of(chain_model)
        report = rules.once(overlap=overlap).apply(gm)  # type: ignore[arg-type]
        assert targets(gm) == expected
    (refusal,) = report.refusals
    assert (refusal.kind, refusal.rule, refusal.node) == (Reason.OVERLAP, "t.tanh_neg", "tanh")


def test_best_cover_beats_the_largest() -> None:
    """Five in a row: one match of three in the middle, or two pairs around it that consume four."""

    def model(x):
        return torch.sigmoid(torch.tanh(torch.neg(torch.relu(torch.exp(x)))))

    inner = Rule("t.inner", Pattern((op("tanh", op("neg", op("relu", cap("x")))),)), lambda x: torch.cos(x))
    upper = pair("t.upper", "sigmoid", "tanh", torch.sin)
    rules = RuleSet("s", inner, upper, RELU_EXP)
    for overlap, expected in (("largest", ["exp", "cos", "sigmoid"]), ("best_cover", ["abs", "neg", "sin"])):
        gm = graph_of(model)
        rules.once(overlap=overlap).apply(gm)  # type: ignore[arg-type]
        assert targets(gm) == expected


def test_overlap_in_an_atomic_set_is_no_refusal() -> None:
    rules = RuleSet("s", TANH_NEG, three("t.three", torch.cos), atomic=True)
    assert rules.once(overlap="largest").apply(graph_of(chain_model)).rewrites == 1


def test_chosen_matches_whose_inputs_are_rewritten_first_still_rewrite() -> None:
    gm = graph_of(lambda x: torch.tanh(torch.neg(torch.relu(torch.exp(x)))))
    report = RuleSet("s", TANH_NEG, RELU_EXP).once(overlap="best_cover", order="bottom_up").apply(gm)
    assert targets(gm) == ["abs", "sin"]
    assert report.rewrites == 2


@pytest.mark.parametrize("wrong", [{"order": "sideways"}, {"overlap": "smallest"}], ids=str)
def test_there_is_no_such_strategy(wrong: dict[str, Any]) -> None:
    with pytest.raises(RuleDefinitionError, match="is not one of"):
        CHAIN.once(**wrong)


def test_strategies_are_in_the_text_and_the_digest() -> None:
    plans = [CHAIN.once(), CHAIN.once(order="bottom_up"), CHAIN.once(overlap="largest"), CHAIN.fixpoint(3)]
    assert len({plan.digest() for plan in plans}) == 4
    assert str(plans[1]).startswith("once, bottom_up: chain")


def test_a_union_shares_a_sweep_and_the_left_wins() -> None:
    left = RuleSet("left", pair("a.sin", "tanh", "neg", torch.sin))
    right = RuleSet("right", pair("b.cos", "tanh", "neg", torch.cos))
    for rules, expected in ((left | right, "sin"), (right | left, "cos"), (left | NEG_RELU, "sin")):
        gm = graph_of(lambda x: torch.tanh(torch.neg(x)))
        rules.apply(gm)
        assert targets(gm) == [expected]
    assert (left | right).name == "left | right"
    with pytest.raises(RuleDefinitionError, match="nest them"):
        left | RuleSet("all", NEG_RELU, atomic=True)


def test_an_invariant_undoes_the_plan() -> None:
    def no_sin(nodes: Any) -> str:
        wrong = [node.name for node in nodes if node.target is torch.sin]
        return f"there is a sine at %{wrong[0]}" if wrong else ""

    gm = graph_of(chain_model)
    before = graph_text(gm)
    with pytest.raises(InvariantError, match="set s: after it, there is a sine at %sin; the graph is as before"):
        (CHAIN >> RuleSet("s", TANH_NEG, invariant=no_sin)).apply(gm)
    assert graph_text(gm) == before
    plain, guarded = RuleSet("s", TANH_NEG), RuleSet("s", TANH_NEG, invariant=no_sin)
    assert plain.once().digest() != guarded.once().digest()


def test_applied_leaves_the_original_alone() -> None:
    gm = graph_of(chain_model)
    before = graph_text(gm)
    new, report = CHAIN.once().applied(gm)
    assert graph_text(gm) == before
    assert targets(new) == ["abs", "sin"]
    assert report.rewrites == 2
    x = torch.randn(3)
    torch.testing.assert_close(new(x), torch.sin(torch.abs(x)))


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(x):
            return torch.tanh(torch.neg(self.linear(x)))

        return torch.tanh(torch.neg(checkpoint(body, x, use_reentrant=False)))  # type: ignore[arg-type]


def test_bodies_of_higher_order_operators_are_rewritten() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(2, 3)
    gm = capture(model, {"x": x})
    rules = RuleSet("s", TANH_NEG)
    found = rules.once().find(gm)
    assert [match.body for match in found] == ["", "wrap_body_0"]
    assert rules.rules().__next__().explain(gm).num_matches == 2
    new, report = rules.once().applied(gm)
    assert report.rewrites == 2
    body = new.get_submodule("wrap_body_0")
    assert targets(body)[-1] == "sin"  # type: ignore[arg-type]
    assert targets(gm.get_submodule("wrap_body_0"))[-1] == "tanh"  # type: ignore[arg-type]
    made = next(node for node in body.graph.nodes if node.target is torch.sin)  # type: ignore[union-attr]
    assert made.meta["example_value"].shape == (2, 3)


def test_a_failure_in_a_body_undoes_the_graph_around_it() -> None:
    gm = capture(Checkpointed(), {"x": torch.randn(2, 3)})
    before = graph_text(gm), graph_text(gm.get_submodule("wrap_body_0"))  # type: ignore[arg-type]
    calls: list[int] = []

    def fails_second(x):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return torch.sin(x)

    with pytest.raises(FxRewriteError, match="ZeroDivisionError"):
        RuleSet("s", pair("t.fails", "tanh", "neg", fails_second), atomic=True).apply(gm)
    assert (graph_text(gm), graph_text(gm.get_submodule("wrap_body_0"))) == before  # type: ignore[arg-type]


def test_found_matches_are_data() -> None:
    gm = graph_of(chain_model)
    before = graph_text(gm)
    plan = CHAIN.once()
    found = plan.find(gm)
    assert graph_text(gm) == before
    assert [match.rule for match in found] == ["t.tanh_neg", "t.neg_relu", "t.relu_exp"]
    assert str(found).splitlines()[0] == "3 matches"
    assert "t.tanh_neg at %tanh: x=%relu" in str(found)
    stored = Found.model_validate_json(found.model_dump_json())
    assert stored == found
    stored.matches = [match for match in stored if match.rule == "t.neg_relu"]
    report = plan.commit(gm, stored)
    assert targets(gm) == ["exp", "cos", "tanh"]
    assert (report["t.neg_relu"].matches, report["t.neg_relu"].rewrites) == (1, 1)
    with pytest.raises(FxRewriteError, match="not the graph in which"):
        plan.commit(gm, stored)


def test_a_match_that_another_took_apart_is_refused() -> None:
    gm = graph_of(chain_model)
    plan = CHAIN.once()
    report = plan.commit(gm, plan.find(gm))
    assert targets(gm) == ["abs", "sin"]
    (refusal,) = report.refusals
    assert (refusal.kind, refusal.rule) == (Reason.STALE, "t.neg_relu")


def test_commit_is_a_transaction() -> None:
    gm = graph_of(chain_model)
    before = graph_text(gm)
    plan = RuleSet("s", TANH_NEG, NEG_RELU, atomic=True).once()
    with pytest.raises(FxRewriteError, match="not there any more"):
        plan.commit(gm, plan.find(gm))
    assert graph_text(gm) == before
    plan = CHAIN.once().expect("t.relu_exp", at_least=2)
    with pytest.raises(MatchExpectationError, match="expected at least 2"):
        plan.commit(gm, plan.find(gm))
    assert graph_text(gm) == before


def test_matches_of_another_graph_or_plan() -> None:
    gm = graph_of(chain_model)
    found = CHAIN.once().find(gm).matches
    with pytest.raises(FxRewriteError, match="names tanh, neg, which the graph does not have"):
        CHAIN.once().commit(graph_of(lambda x: x + 1), found[:1])
    with pytest.raises(RuleDefinitionError, match=r"no rule 't\.tanh_neg'"):
        RuleSet("s", NEG_RELU).once().commit(gm, found)


def test_find_needs_no_steps() -> None:
    class Nothing:
        name = "nothing"

        def run(self, edit: Any, context: Any, report: Any) -> int:
            return 0

        def text(self) -> str:
            return "nothing"

    with pytest.raises(RuleDefinitionError, match="has the steps nothing"):
        RuleSet("s", Nothing(), TANH_NEG).once().find(graph_of(chain_model))
