"""Tensors that a replacement computes once: what they are computed of, who may, and what is left in the module."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxrewrite import (
    ComputedOnce,
    Match,
    MatchExpectationError,
    Param,
    Reason,
    Rule,
    RuleDefinitionError,
    RuleSet,
    refuse,
)
from fxrewrite.graph import Edit
from fxrewrite.rule_file import RuleFileError, dump_rules, parse_rules
from tests.rewriting import apply, exported, made, state, targets

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def merged(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def joins(function: Callable[..., Any] = merged, name: str = "", **options: Any) -> Any:
    def once(match: Match, x: Any, a: Any, b: Any) -> Any:
        return F.linear(x, match.once(function, a, b, name=name))

    def pattern(x: Any, a: Param, b: Param) -> Any:
        return torch.cat([F.linear(x, a), F.linear(x, b)], -1)

    return made(pattern, once, numerics="reassociates", gradients=False, **options)


class Joined(nn.Module):
    """Two products of one value side by side, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 2, bias=False)})

    def forward(self, x: Any) -> Any:
        return torch.cat([F.linear(x, self.up["a"].weight), F.linear(x, self.up["b"].weight)], -1)


class Twice(Joined):
    """The same, read twice, and `a` a third time."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) + super().forward(x + 1) + F.linear(x, self.up["a"].weight).sum()


@pytest.mark.parametrize(
    "trace", [exported, lambda model, _: fx.symbolic_trace(model.eval())], ids=["exported", "traced"]
)
def test_a_tensor_is_computed_once(trace: Any, fx_snapshot: Any) -> None:
    model = Joined()
    gm = trace(model, X)
    wanted = gm(X)
    report = apply(gm, joins())
    torch.testing.assert_close(gm(X), wanted)
    if trace is exported:
        assert gm == fx_snapshot(name="after")
    assert report.events == [ComputedOnce(rule="test.it", attribute="up_it", sources=("up.a.weight", "up.b.weight"))]
    assert report.lines == ("computed once: self.up_it of up.a.weight, up.b.weight (test.it)",)
    assert {name: tuple(value.shape) for name, value in gm.state_dict().items()} == {"up_it": (5, 4)}
    assert not gm.up_it.requires_grad
    assert list(model.state_dict()) == ["up.a.weight", "up.b.weight"]  # the model itself is as it was
    if trace is not exported:  # torch warns and raises of itself where its exported modules are copied
        assert torch.equal(copy.deepcopy(gm)(X), gm(X))
        for node in gm.graph.nodes:
            node.type = None  # annotations as text, which FX does not pickle
        gm.recompile()
        assert torch.equal(pickle.loads(pickle.dumps(gm))(X), gm(X))
    assert apply(gm, joins()).rewrites == 0


def test_equal_tensors_are_shared_and_what_is_read_stays() -> None:
    gm = exported(Twice(), X)
    wanted = gm(X)
    report = apply(gm, joins(name="weight"))
    assert report.rewrites == 2
    assert [event.attribute for event in report.events_of(ComputedOnce)] == ["up_weight"]
    assert sorted(gm.state_dict()) == ["up.a.weight", "up_weight"]
    torch.testing.assert_close(gm(X), wanted)


class Held(nn.Module):
    """A product with a weight that is not trained, and attributes whose names are taken."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w, self.scaled = w, torch.ones(1)

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.w) + self.scaled


def product(body: Callable[..., Any], **options: Any) -> Any:
    def pattern(x: Any, w: Param) -> Any:
        return F.linear(x, w)

    return made(pattern, body, terminates=False, numerics="reassociates", **options)


def test_what_is_computed_of_is_computed_once() -> None:
    def body(match: Match, x: Any, w: Any) -> Any:
        for _ in range(1100):
            w = w * w
        return F.linear(x, match.once(torch.clone, w))

    gm = fx.symbolic_trace(Held(torch.ones(4, 4)))
    wanted = gm(X)
    assert apply(gm, product(body)).rewrites == 1
    torch.testing.assert_close(gm(X), wanted)


def test_results_are_tensors_of_their_own() -> None:
    def body(match: Match, x: Any, w: Any) -> Any:
        same, turned = match.once(lambda w: (w, w.t()), w, name="scaled")
        (ones,) = match.once(lambda: [nn.Parameter(torch.ones(4))])
        match.once(torch.neg, w, name="unused")
        return torch.matmul(x, turned) + F.linear(x, same) * 0 * ones

    gm = fx.symbolic_trace(Held(torch.rand(4, 4)))
    wanted = gm(X)
    apply(gm, product(body))
    torch.testing.assert_close(gm(X), wanted)
    held = {str(node.target): getattr(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")}
    assert sorted(held) == ["it", "scaled", "scaled_1", "scaled_2"]
    assert len({value.untyped_storage().data_ptr() for value in held.values()}) == len(held)
    assert not any(hasattr(gm, name) for name in ("w", "unused"))


def test_nothing_is_left_by_what_is_undone() -> None:
    gm = fx.symbolic_trace(Joined().requires_grad_(requires_grad=False))
    before, held = state(gm), list(gm.state_dict())
    with pytest.raises(KeyError), Edit(gm) as edit:  # noqa: PT012
        assert edit.attach(nn.Parameter(torch.ones(2)), "new").target == "new"
        raise KeyError

    def cut(match: Match, x: Any, a: Any, b: Any) -> Any:
        match.once(merged, a, b)
        refuse("on second thoughts")

    rule = joins()
    (refusal,) = apply(gm, Rule("test.cut", rule.pattern, cut)).refusals
    assert refusal.reason == "on second thoughts"
    with pytest.raises(MatchExpectationError):
        RuleSet("test", rule).once().expect("test.it", at_least=2).apply(gm)
    assert (state(gm), list(gm.state_dict())) == (before, held)


def writes(w: torch.Tensor) -> torch.Tensor:
    return w.mul_(2)


class Writing(Held):
    """The weight is written to after it is read."""

    def forward(self, x: Any) -> Any:
        result = super().forward(x)
        self.w.add_(1)
        return result


def of_w(function: Callable[..., Any] = torch.neg) -> Callable[..., Any]:
    return lambda match, x, w: F.linear(x, match.once(function, w))


def traced(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model.eval())


W = torch.rand(4, 4)
REFUSED: dict[str, tuple[Callable[[], fx.GraphModule], Any, Reason, str]] = {
    "on meta": (lambda: traced(Held(W.to("meta"))), of_w(), Reason.ONCE, "self.w has no entries (on device meta)"),
    "fake": (
        lambda: traced(Held(FakeTensorMode().from_tensor(W))),
        *(of_w(), Reason.ONCE, "self.w has no entries (a fake tensor) at %w; load the weights"),
    ),
    "an input": (
        lambda: traced(Held(W)),
        lambda match, x, w: match.once(F.linear, x, w),
        *(Reason.ONCE, "%x is an input of the graph, and is known only when the graph runs"),
    ),
    "written": (
        lambda: traced(Writing(nn.Parameter(W.clone(), requires_grad=False))),
        *(of_w(), Reason.EFFECT, "%add_ (aten::add_) may write to self.w, of which a tensor is computed once"),
    ),
    "trained": (
        lambda: traced(Held(nn.Parameter(W))),
        *(of_w(), Reason.ONCE, "self.w requires gradients, and what is computed of it once has none"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_once_is_refused(case: str) -> None:
    make, body, kind, reason = REFUSED[case]
    gm = make()
    before = gm.code
    (refusal,) = apply(gm, product(body)).refusals
    assert refusal.kind is kind
    assert reason in str(refusal)
    assert gm.code == before


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (writes, "writes, which is computed once, wrote to self.w; the module is changed"),
        (torch.Tensor.tolist, "gave list; expected a tensor, or a tuple of tensors"),
        (lambda w: 3, "gave int; expected a tensor"),
    ],
)
def test_a_function_that_gives_no_new_tensor_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(RuleDefinitionError, match=re.escape(message)):
        apply(traced(Held(W.clone())), product(of_w(function)))


def test_training_and_lifted_weights_are_refused_and_computed_constants_are_not() -> None:
    inference = product(of_w(), gradients=False)
    model = Held(nn.Parameter(W))
    (refusal,) = apply(fx.symbolic_trace(model.train()), inference).refusals
    assert "the module is in training mode and self.w requires gradients" in refusal.reason
    lifted = fx.symbolic_trace(lambda x, w: F.linear(x, w))
    lifted.graph.find_nodes(op="placeholder")[1].meta["is_parameter"] = True  # as torch.compile has them
    (refusal,) = apply(lifted, inference).refusals
    assert "torch.compile passes them as inputs" in refusal.hint

    def pattern(x: Any, w: Any) -> Any:
        return torch.matmul(x, w)

    gm = traced(Held(W))
    (node,) = gm.graph.find_nodes(op="call_function", target=F.linear)
    x, w = node.args
    with gm.graph.inserting_before(node):
        node.replace_all_uses_with(gm.graph.call_function(torch.matmul, (x, gm.graph.call_method("t", (w,)))))
    gm.graph.erase_node(node)
    gm.recompile()
    wanted = gm(X)
    report = apply(
        gm, made(pattern, lambda match, x, w: x @ match.once(torch.mul, w, 1, name="turned"), terminates=False)
    )
    assert report.events_of(ComputedOnce)[0].sources == ("w",)
    assert targets(gm) == ["t", "<built-in function matmul>", "<built-in function add>"]
    torch.testing.assert_close(gm(X), wanted)


def test_verification_runs_rules_on_modules_that_hold_their_parameters() -> None:
    where = ["rank(a) == 2", "rank(b) == 2", "same_dtype(a, b)", "size(x, -1) > 0"]
    verdict = joins(where=where).verify(samples=8)
    assert verdict.ok, str(verdict)
    assert verdict.samples == 8
    swapped = joins(lambda a, b: torch.cat([b, a]), where=where).verify(samples=8)
    found: dict[str, Any] = {}
    assert swapped.counterexample is not None
    exec(swapped.counterexample.snippet, found)
    assert not torch.equal(found["expected"][0], found["found"][0])


def test_rule_files_say_once() -> None:
    text = """
[[rule]]
id        = "linears.join"
pattern   = "cat([linear(x, param(a)), linear(x, param(b))], -1)"
replace   = "linear(x, once(mul(cat([a, b]), 1)))"
numerics  = "reassociates"
gradients = false
where     = ["rank(a) == 2", "rank(b) == 2", "same_dtype(a, b)", "size(x, -1) > 0"]
"""
    rules = parse_rules(text, "once.toml")
    gm = exported(Twice(), X)
    wanted = gm(X)
    report = rules.apply(gm)
    assert [event.attribute for event in report.events_of(ComputedOnce)] == ["up_join"]  # one for both
    torch.testing.assert_close(gm(X), wanted)
    assert "once(mul(cat([a, b]), 1))" in str(rules)
    assert parse_rules(dump_rules(rules), "once.toml").once().digest() == rules.once().digest()
    for rule in rules.rules():
        assert rule.verify(samples=4).ok
    with pytest.raises(RuleFileError, match=r"once\(\) is for replacements"):
        parse_rules(text.replace('"cat([linear(x, param(a))', '"cat([once(linear(x, param(a)))'), "once.toml")
