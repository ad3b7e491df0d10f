"""Handlers that change the graph themselves are part of the transaction; what is wrong is said at registration."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Rule, RuleSet, ops
from fxrewrite.adapters.pattern_matcher import (
    MULTIPLE,
    Arg,
    CallFunction,
    CallFunctionVarArgs,
    KeywordArg,
    PatternMatcherPass,
    RepeatedExpr,
    fwd_only,
    register_graph_pattern,
    register_lowering_pattern,
    register_replacement,
)
from fxrewrite.adapters.subgraph_rewriter import pattern_rule, replace_pattern
from fxrewrite.backends import installed
from fxrewrite.errors import FxRewriteError, InvariantError, Reason, RuleDefinitionError, refuse
from fxrewrite.graph import Edit
from fxrewrite.match.program import Program
from fxrewrite.match.safety import Effects
from fxrewrite.pattern import parse
from tests.rewriting import state, targets, traced

aten = torch.ops.aten
X = torch.rand(2, 3)


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.sin()) + torch.relu(x.cos())


def to_clamp(match: Any, x: fx.Node) -> None:
    old = match.output_node()
    with match.graph.inserting_before(old):
        new = match.graph.call_function(aten.clamp.default, (x, 0))
    old.replace_all_uses_with(new)
    match.erase_nodes()


def test_a_handler_that_edits_nodes() -> None:
    one = PatternMatcherPass("raw")
    register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one)(to_clamp)
    gm = traced(model, X)
    assert one.apply(gm.graph) == 2
    gm.graph.lint()
    assert targets(gm).count("aten.clamp.default") == 2
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in gm.graph.nodes if node.op == "call_function")
    assert torch.equal(gm(X), model(X))


def test_a_handler_that_raises_at_its_second_match_leaves_it_as_it_was() -> None:
    one, called = PatternMatcherPass("raw"), []

    @register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one)
    def handler(match: Any, x: fx.Node) -> None:
        called.append(x)
        to_clamp(match, x)
        if len(called) == 2:
            raise KeyError("second")

    gm = traced(model, X)
    assert one.apply(gm) == 1
    gm.graph.lint()
    assert one.report is not None
    assert [refusal.kind for refusal in one.report.refusals] == [Reason.RAISED]
    assert (targets(gm).count("aten.clamp.default"), targets(gm).count("aten.relu.default")) == (1, 1)
    assert torch.equal(gm(X), model(X))


def test_a_match_that_a_check_refuses_changes_nothing() -> None:
    one = PatternMatcherPass("none")
    register_graph_pattern(CallFunction(aten.relu.default, Arg()), lambda match: False, pass_dict=one)(to_clamp)
    gm = traced(model, X)
    before = state(gm)
    assert one.apply(gm) == 0
    assert state(gm) == before


def test_a_check_that_raises_is_named() -> None:
    def has_bias(match: Any) -> bool:
        return match.kwargs["bias"] is not None

    one = PatternMatcherPass("none")
    register_graph_pattern(CallFunction(aten.relu.default, Arg()), has_bias, pass_dict=one)(to_clamp)
    gm = traced(model, X)
    before = state(gm)
    with pytest.raises(FxRewriteError, match=r"extra_check \S+has_bias raised KeyError at %\w+: 'bias'"):
        one.apply(gm)
    assert state(gm) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor imports it
def test_a_function_that_inductor_lowers() -> None:
    one, boxes = PatternMatcherPass("lowered"), list[Any]()
    summed = CallFunction(aten.add.Tensor, CallFunction(aten.relu.default, Arg()), KeywordArg("y"))

    @register_lowering_pattern(summed, pass_dict=one)
    def relu_and_add(match: Any, x: Any, *, y: Any) -> Any:
        from torch._inductor.lowering import lowerings

        boxes.append((match.output_node(), x))
        return lowerings[aten.add.Tensor](lowerings[aten.relu.default](x), y)

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with installed("post_grad_pre", lambda gm, _: one.apply(gm), None), torch.no_grad():
        compiled = torch.compile(lambda x, y: torch.tanh(torch.relu(x) + y), backend="inductor")
        torch.testing.assert_close(compiled(x, y), torch.tanh(torch.relu(x) + y))
    ((node, box),) = boxes
    assert node.target is aten.add.Tensor
    assert type(box).__name__ == "TensorBox"


def test_a_node_that_is_erased_behind_the_transaction_is_an_error() -> None:
    one = PatternMatcherPass("raw")

    @register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one)
    def handler(match: Any, x: fx.Node) -> None:
        match.output_node().replace_all_uses_with(x)
        x.graph.erase_node(match.output_node())

    with pytest.raises(InvariantError, match="was erased without the transaction"):
        one.apply(traced(model, X))


def test_a_handler_may_leave_a_match_as_it_is() -> None:
    """`pointless_view` of inductor's joint_graph.py: a pass runs it once at each node: it need not come to an end."""

    def pointless_view(match: Any, arg: fx.Node, size: list[int]) -> None:
        if list(arg.meta["val"].shape) == list(size):
            match.output_node().replace_all_uses_with(arg)
            match.erase_nodes()

    one = PatternMatcherPass("views")
    view = CallFunction(aten.view.default, KeywordArg("arg"), KeywordArg("size"))
    register_graph_pattern(view, pass_dict=one)(pointless_view)
    register_graph_pattern(view, pass_dict=one, terminates=True)(pointless_view)
    once, ends = (rule.verify(samples=8, grad=False) for rule in one.patterns)
    assert once.ok, once
    assert "endless" in str(ends)


def test_what_repeats_for_each_part_is_one_match() -> None:
    """`merge_split_squeeze` of inductor's split_cat.py: squeezed parts of size 1 are an unbind."""
    one = PatternMatcherPass("repeated")
    split = CallFunction(aten.split.Tensor, KeywordArg("x"), 1, KeywordArg("dim"), _users=MULTIPLE)
    part = CallFunction(operator.getitem, split, Arg())

    @register_graph_pattern(RepeatedExpr(CallFunction(aten.squeeze.dim, part, KeywordArg("dim"))), pass_dict=one)
    def handler(match: Any, *places: int, x: fx.Node, dim: int) -> None:
        squeezed = [node for node in match.nodes if ops.key(node) == "aten::squeeze"]
        with match.graph.inserting_before(match.output_node()):
            unbound = match.graph.call_function(aten.unbind.int, (x, dim))
            for node in squeezed:
                item = match.graph.call_function(operator.getitem, (unbound, node.args[0].args[1]))
                node.replace_all_uses_with(item)
        match.erase_nodes()
        assert sorted(places) == [0, 1, 2]

    def model(x: torch.Tensor) -> torch.Tensor:
        first, second, third = (part.squeeze(1) for part in torch.split(x, 1, 1))
        return first * second + third

    gm = traced(model, X)
    assert one.apply(gm) == 1
    gm.graph.lint()
    assert {"aten.split.Tensor", "aten.squeeze.dim"}.isdisjoint(targets(gm))
    assert torch.equal(gm(X), model(X))


def test_repeated_calls_are_replaced_together() -> None:
    one, called = PatternMatcherPass("repeated"), list[Any]()

    @register_graph_pattern(RepeatedExpr(CallFunction(aten.sum.dim_IntList, Arg(), KeywordArg("dim"))), pass_dict=one)
    def handler(match: Any, *args: Any, dim: Any) -> None:
        called.append(dim)
        old = [node for node in match.nodes if ops.key(node) == "aten::sum"]
        with match.graph.inserting_before(old[0]):
            new = match.graph.call_function(aten.sum.dim_IntList, (args[0], dim, False))
        for node in old:
            node.replace_all_uses_with(new)
        match.erase_nodes()

    gm = traced(lambda x: x.sum([0]) * x.sum([0]) + x.sum([0]).exp(), X)
    assert one.apply(gm) == 1
    assert called == [[0]]  # equal lists, each of its own call
    assert targets(gm).count("aten.sum.dim_IntList") == 1
    assert torch.equal(gm(X), X.sum([0]) * X.sum([0]) + X.sum([0]).exp())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda x: x.sum([0]).sum() + x.sum([1]).sum(), "differ in dim"),
        (lambda x: x.sum([0]).sum() + x.sum([0], keepdim=True).sum(), "which reads an operand of"),
    ],
)
def test_a_repeated_call_that_does_not_match_refuses_all(model: Any, said: str) -> None:
    one = PatternMatcherPass("repeated")
    columns = CallFunction(aten.sum.dim_IntList, KeywordArg("x"), KeywordArg("dim"))
    register_graph_pattern(RepeatedExpr(columns), pass_dict=one)(to_clamp)
    gm = traced(model, X)
    before = state(gm)
    assert one.apply(gm) == 0
    assert state(gm) == before
    assert one.report is not None
    assert said in str(one.report)


def test_what_repeats_is_a_call() -> None:
    with pytest.raises(RuleDefinitionError, match="must hold CallFunction or CallMethod"):
        register_graph_pattern(RepeatedExpr(CallFunctionVarArgs(aten.relu.default)), pass_dict=PatternMatcherPass())


@pytest.mark.parametrize(
    ("search", "examples", "said"),
    [
        (lambda x, y: x + 1, [X, X], "y are not in its graph"),
        (lambda x, y: x + y, [X], "has the parameters x, y; example_inputs has 1 values"),
        (lambda x: x, [X], "must be an operator"),
    ],
)
def test_what_cannot_be_registered(search: Any, examples: Any, said: str) -> None:
    with pytest.raises(RuleDefinitionError, match=said):
        register_replacement(search, search, examples, fwd_only, PatternMatcherPass())
    one = PatternMatcherPass()
    register_replacement(lambda x: x + 1, lambda x: x - 1, [X], fwd_only, one)
    with pytest.raises(RuleDefinitionError, match="skip_duplicates=True"):
        register_replacement(lambda x: x + 1, lambda x: x - 2, [X], fwd_only, one)


def test_subgraph_rewriter_gives_as_many_values_and_none_that_the_graph_does_not_say() -> None:
    gm = fx.symbolic_trace(lambda x, w: F.linear(torch.sin(x), w) + 1)
    for made in (lambda x: (x, x), lambda x: [x, x]):
        with pytest.raises(RuleDefinitionError, match="returns 2 values, the pattern 1"):
            replace_pattern(gm, lambda x: torch.sin(x), made)
        with pytest.raises(RuleDefinitionError, match="returned"):  # a sine of a number is a number, and no list
            RuleSet("adapters", Rule("a.sin", parse("sin(x)"), made, shapes="changes")).apply(gm)
    assert not replace_pattern(gm, lambda x, w, b: F.linear(x, w, b), lambda x, w, b: x @ w.t() + b)


def test_the_digest_of_a_pass_follows_its_extra_checks() -> None:
    def checked(check: Any) -> PatternMatcherPass:
        patterns = PatternMatcherPass("checked")

        @register_graph_pattern(CallFunction(aten.sin.default, KeywordArg("x")), extra_check=check, pass_dict=patterns)
        def cosine(match: Any, x: Any) -> None:
            match.replace_by_example(lambda x: torch.cos(x), [x])

        return patterns

    assert checked(lambda match: True).plan.digest() != checked(lambda match: False).plan.digest()
    assert checked(lambda match: True).plan.digest() == checked(lambda match: True).plan.digest() is not None


def test_a_handler_that_keeps_no_gradients_is_refused_where_they_are_needed() -> None:
    one = PatternMatcherPass("forward")
    register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one, gradients=False)(to_clamp)
    gm = traced(model, X.clone().requires_grad_())
    for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
        node.meta["val"] = node.meta["val"].detach().requires_grad_()
    assert one.apply(gm.graph) == 0


def test_a_target_that_a_handler_sets_before_it_raises_is_undone() -> None:
    passes = PatternMatcherPass("targets")

    @register_graph_pattern(CallFunction(aten.neg.default, KeywordArg("x")), pass_dict=passes)
    def _(match: Any, x: fx.Node) -> None:
        match.output_node().target = aten.sin.default
        x.target = aten.cos.default
        raise ValueError("late")

    gm = traced(lambda x: torch.neg(torch.exp(x)), X)
    before = state(gm)
    assert passes.apply(gm.graph) == 0
    assert state(gm) == before


def test_nodes_of_both_kinds_that_read_each_other_are_undone() -> None:
    one = PatternMatcherPass("mixed")

    @register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one)
    def mixed(match: Any, x: fx.Node) -> None:
        raw = match.graph.call_function(aten.neg.default, (x,))
        match.replace_by_example(lambda x, y: torch.maximum(-x, -y), [raw, raw])
        (made,) = (user for user in raw.users if user.target is aten.neg.default)
        match.graph.call_function(aten.exp.default, (made,))
        refuse("not today")

    gm = traced(model, X)
    before = state(gm)
    assert one.apply(gm.graph) == 0
    assert state(gm) == before


@pytest.mark.parametrize("what", ["kept", "read too early", "raised"])
def test_a_handler_that_changes_nodes_far_from_its_match(what: str) -> None:
    """They are found when the pass ends; if a handler raises, all is undone, as its part cannot be told apart."""
    one = PatternMatcherPass("far")

    @register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one)
    def far(match: Any, x: fx.Node) -> None:
        first = next(node for node in match.graph.nodes if node.target is aten.exp.default)
        first.meta["mark"] = 1
        if what == "read too early":
            first.update_arg(0, x)
        if what == "raised":
            refuse("not today")
        to_clamp(match, x)

    gm = traced(lambda x: torch.relu(x.exp().sin().cos().tan().cos()), X)
    before = state(gm)
    if what == "kept":
        assert one.apply(gm.graph) == 1
        assert [node.meta["mark"] for node in gm.graph.nodes if "mark" in node.meta] == [1]
        return
    said = "not today; %exp was changed, which is not near the match" if what == "raised" else "%exp reads %cos_1"
    with pytest.raises(InvariantError, match=said):
        one.apply(gm.graph)
    assert state(gm) == before


def test_later_checks_know_what_a_handler_draws_and_writes() -> None:
    one = PatternMatcherPass("noise")

    @register_graph_pattern(CallFunction(aten.relu.default, Arg()), pass_dict=one, rng="changes")
    def noisy(match: Any, x: fx.Node) -> None:
        old = match.output_node()
        with match.graph.inserting_before(old):
            drawn = match.graph.call_function(aten.bernoulli.default, (x,))
            match.graph.call_function(aten.add_.Scalar, (drawn, 1))
        old.replace_all_uses_with(drawn)
        match.erase_nodes()

    gm = traced(lambda x: torch.relu(x.cos()), X)
    (rule,) = one.patterns
    program = Program([(rule, rule.pattern)])
    with Edit(gm) as edit:
        effects = Effects(edit)
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
        ((_, match),) = program.find(node, ops.key(node))
        rule.rewrite(edit, match, effects)
        assert [node.target for node in effects.draws] == [aten.bernoulli.default]
        assert [node.target for node in effects.writers] == [aten.add_.Scalar]


def test_a_rule_of_torchs_subgraph_rewriter_runs_again() -> None:
    it = pattern_rule(lambda x: torch.relu(x), lambda x: torch.clamp(torch.sin(x), 0))
    gm = traced(model, X)
    plan = RuleSet("again", it)
    assert plan.apply(gm).rewrites == 2
    back = pattern_rule(lambda x: torch.clamp(x, 0), lambda x: torch.relu(x), id="back.to_relu")
    assert RuleSet("back", back).apply(gm).rewrites == 2
    assert plan.apply(gm).rewrites == 2
