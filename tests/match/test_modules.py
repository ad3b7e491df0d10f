"""Modules in patterns and replacements, and inputs that are outputs of a pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from fxrewrite import Match, MatchExpectationError, RuleDefinitionError, RuleSet, op
from fxrewrite.graph import graph_text, nodes_of
from fxrewrite.pattern import parse
from tests.rewriting import apply, made, state, targets

X, Y = torch.linspace(-2, 2, 12).reshape(3, 4), torch.linspace(0, 1, 12).reshape(3, 4)


class Wide(nn.Linear):
    """A linear that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


class Layers(nn.Module):
    """Leaves that a tracer does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.down(self.act(self.up(x)))) + self.up(x)


def modules(function: Any, body: Any, **options: Any) -> Any:
    return made(function, body, numerics="approximate", **options)


def test_any_module_of_a_class_is_found_and_one_comes_along() -> None:
    def functional(match: Match, x: Any) -> Any:
        path = match.root.target
        bias = None if path == "down" else match.read(f"{path}.bias")
        return F.linear(x, match.read(f"{path}.weight"), bias)

    model = Layers().eval()
    gm = fx.symbolic_trace(model)
    wanted = gm(X)
    report = apply(gm, modules(lambda x: op(nn.Linear, x), functional))
    assert report.rewrites == 3
    torch.testing.assert_close(gm(X), wanted)
    assert [t for t in targets(gm) if not t.startswith("<built-in")] == ["act", "drop"]
    one, other = nn.GELU(), nn.GELU()
    apply(
        gm, modules(lambda x: op(nn.ReLU, x), lambda match, x: match.call(one, match.call(other, match.call(one, x))))
    )
    assert {name: type(module).__name__ for name, module in gm.named_children()} == {
        "up": "Linear",
        "down": "Linear",
        "drop": "Dropout",
        "gelu": "GELU",
        "gelu_1": "GELU",
    }
    assert isinstance(model.act, nn.ReLU)
    assert isinstance(model.up, nn.Linear)


def test_what_is_undone_leaves_no_module() -> None:
    gm = fx.symbolic_trace(Layers())
    before, names = state(gm), [name for name, _ in gm.named_modules()]

    def body(match: Match, x: Any) -> Any:
        match.call(nn.GELU(), x)
        raise KeyError("on second thoughts")

    (refusal,) = apply(gm, modules(lambda x: op(nn.ReLU, x), body)).refusals
    assert "on second thoughts" in refusal.reason
    assert (state(gm), [name for name, _ in gm.named_modules()]) == (before, names)


def test_other_classes_and_graphs_with_values_have_none() -> None:
    rule = modules(lambda x: op(nn.Linear, x), lambda match, x: match.call(nn.ReLU(), x))
    gm = fx.symbolic_trace(nn.Sequential(Wide(4, 4)), concrete_args=None)
    assert apply(gm, rule).rewrites == 0
    assert parse(str(rule.pattern)) == rule.pattern
    assert "torch.nn.modules.linear.Linear is a module, of which no samples are made" in str(rule.verify(samples=1))
    exported = torch.export.export(nn.Sequential(nn.ReLU()), (X,)).module()
    assert isinstance(exported, fx.GraphModule)
    with pytest.raises(
        RuleDefinitionError, match="a graph with fake values has calls of functions, and not of modules"
    ):
        apply(exported, modules(lambda x: torch.relu(x), lambda match, x: match.call(nn.GELU(), x)))


def added(x, y):
    return x + y, x


def test_an_input_that_is_an_output_is_read_by_what_follows() -> None:
    rule = modules(added, lambda x, y: (torch.add(y, x), x.clone()), terminates=False)
    assert str(rule.pattern) == "add(x, y), x"
    assert rule.verify(samples=6).ok
    gm = fx.symbolic_trace(lambda x, y: (x.sin() * (x + y)) * x)
    wanted = gm(X, Y)
    assert apply(gm, modules(added, lambda x, y: (torch.sub(x, y, alpha=-1), x.clone()))).rewrites == 1
    (clone,) = gm.graph.find_nodes(op="call_method", target="clone")
    assert [user.target for user in clone.users] == [gm.graph.output_node().args[0].target]  # sin is before the match
    torch.testing.assert_close(gm(X, Y), wanted)
    false = modules(added, lambda x, y: (x + y, y), terminates=False).verify(samples=6)
    assert not false.ok
    assert "output 1" in str(false)


@pytest.mark.parametrize("body", [lambda x, y: x - y, lambda x, y: (x - y, 3)], ids=["one value", "a number"])
def test_an_input_that_is_an_output_needs_a_value(body: Any) -> None:
    with pytest.raises(RuleDefinitionError, match="expected a tuple of 2 values of the graph"):
        apply(fx.symbolic_trace(lambda x, y: (x + y) * x), modules(added, body))


def test_an_input_that_is_an_output_is_not_replaced_across_a_write() -> None:
    def model(x: Any, y: Any) -> Any:
        z = x + y
        x.add_(1)
        return z * x

    refusals = apply(fx.symbolic_trace(model), modules(added, lambda x, y: (x - (-y), x.clone()))).refusals
    assert refusals
    for refusal in refusals:
        assert "%add_ (aten::add_) writes later to memory that the replacement shares differently" in refusal.reason
    with pytest.raises(RuleDefinitionError, match="the output z of a pattern must be captured by another output"):
        RuleSet("no", modules(lambda x, y, z: (x + y, z), lambda x, y, z: (x, z)))


def test_a_match_makes_nodes_only_while_its_replacement_runs() -> None:
    kept: list[Match] = []

    def body(match: Match, x: Any) -> Any:
        kept.append(match)
        return match.call(torch.exp, x)

    gm = fx.symbolic_trace(lambda x: torch.sin(x))
    assert apply(gm, made(lambda x: torch.sin(x), body, numerics="approximate")).rewrites == 1
    with pytest.raises(RuntimeError, match="outside a replacement they have no place"):
        kept[0].call(torch.exp, kept[0]["x"])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return torch.neg(torch.neg(x)) * self.scale


class KeepsGraphModules(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, fx.GraphModule)


def test_graph_modules_that_a_graph_calls_are_rewritten_with_it() -> None:
    twice = fx.symbolic_trace(Scaled())
    model = nn.Sequential(twice, fx.symbolic_trace(nn.Sequential(Scaled())), twice)
    gm = fx.GraphModule(model, KeepsGraphModules().trace(model))
    twice.register_forward_hook(lambda module, args, output: output + 1)
    plan = RuleSet("signs", made(lambda x: torch.neg(torch.neg(x)), lambda x: x.clone())).once()
    x, before = torch.rand(3), graph_text(gm)

    new, report = plan.applied(gm)
    assert report.rewrites == 2
    assert graph_text(gm) == before
    assert [sum(node.target is torch.neg for node in nodes_of(one)) for one in (gm, new)] == [4, 0]
    assert torch.equal(new(x), gm(x))
    assert {id(p) for p in new.parameters()} == {id(p) for p in gm.parameters()}

    found = plan.find(gm)
    assert [match.body for match in found.matches] == ["0", "1"]
    with pytest.raises(MatchExpectationError):
        plan.expect("test.it", at_least=3).apply(gm)
    assert graph_text(gm) == before
    assert plan.commit(gm, found).rewrites == 2
    assert graph_text(gm) == graph_text(new)
