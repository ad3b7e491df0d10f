"""A rewrite is correct or does not happen: draws, memory, shapes, and what replacements may do."""

from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import normalize
from fxrewrite.errors import Reason, RefusedError, RuleDefinitionError, refuse
from fxrewrite.pattern import Literal, Pattern, cap, loose, op, shared, trace, where
from fxrewrite.plan import RuleSet
from fxrewrite.rule import Rule, rule
from tests.dynamo import caught
from tests.rewriting import apply, made, silu, state, targets, traced

aten = torch.ops.aten


X = torch.rand(2, 3)


def test_a_write_through_a_view_or_to_nothing_of_the_match() -> None:
    def through_view(x):
        y = x.clone()
        s = torch.sigmoid(y)
        y.view(-1)[0].add_(1)
        return y * s

    def elsewhere(x):
        z = torch.exp(x)
        s = torch.sigmoid(x)
        z.add_(1)
        return x * s + z

    assert apply(fx.symbolic_trace(through_view), silu()).rewrites == 0
    assert apply(fx.symbolic_trace(elsewhere), silu()).rewrites == 1


def test_deleting_a_dropout_must_be_declared() -> None:
    gm = traced(lambda x: F.dropout(x, 0.5) + 1, X)
    before = state(gm)
    report = apply(gm, made(lambda x: F.dropout(x, ...), lambda x: x))
    assert report.rewrites == 0
    assert state(gm) == before
    assert report.refusals[0].kind is Reason.DRAW
    assert "it removes random draws: aten::dropout before, none after" in str(report.refusals[0])
    assert 'rng="removes"' in report.refusals[0].hint
    assert apply(gm, made(lambda x: F.dropout(x, ...), lambda x: x, rng="removes")).rewrites == 1
    assert targets(gm) == ["aten.add.Tensor"]


def test_repeating_and_reordering_draws_must_be_declared() -> None:
    def twice(x):
        return torch.bernoulli(x) + torch.bernoulli(x)

    def again(**options):
        return made(lambda x: torch.bernoulli(x), twice, **options)

    assert "adds random draws" in str(apply(traced(torch.bernoulli, X), again()).refusals[0])
    assert apply(traced(torch.bernoulli, X), again(rng="duplicates")).rewrites == 1

    def moved(x):
        first = torch.bernoulli(x)
        second = torch.bernoulli(x)
        return torch.exp(first) + second

    late = made(lambda x: torch.exp(torch.bernoulli(x)), lambda x: torch.exp2(torch.bernoulli(x)))
    report = apply(traced(moved, X), late)
    assert "draws random numbers before or after %bernoulli_1" in str(report.refusals[0])


def test_outputs_that_no_place_can_compute_are_refused() -> None:
    def model(x, w):
        q = F.linear(x, w)
        return F.linear(x, torch.exp(q))

    gm = traced(model, torch.rand(3, 3), torch.rand(3, 3))
    before = state(gm)
    merged = made(
        lambda x, a, b: (F.linear(x, a), F.linear(x, b)),
        lambda x, a, b: (F.linear(x, torch.cat([a, b]))[:, :3], F.linear(x, torch.cat([a, b]))[:, 3:]),
        shapes="changes",
    )
    report = apply(gm, merged)
    assert state(gm) == before
    assert "%exp uses the output %linear before the capture %exp is computed" in [
        refusal.reason for refusal in report.refusals
    ]


def test_new_nodes_have_a_value_a_source_line_and_the_name_of_the_rule() -> None:
    gm = traced(lambda x: torch.sigmoid(x) * x, X, mode="symbolic")
    next(n for n in gm.graph.nodes if n.name == "mul").meta["stack_trace"] = '  File "/me/model.py", line 41, in f\n'
    apply(gm, silu())
    new = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert new.target is aten.silu.default, "in a graph of ATen overloads, torch functions become overloads"
    assert new.meta["val"].shape == gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    assert new.meta["fxrewrite"] == ("test.it",)
    assert "model.py" in new.meta["stack_trace"]


# Aliases, shapes, kept nodes


def test_a_replacement_that_shares_memory_is_refused_where_something_writes_later() -> None:
    no_clone = made(lambda x: x.clone(), lambda x: x)

    def model(x):
        y = torch.exp(x)
        z = y.clone()
        z.add_(1)
        return y + z

    gm = fx.symbolic_trace(model)
    expected = gm(X)
    report = apply(gm, no_clone)
    assert "writes later to memory that the replacement shares differently" in report.refusals[0].reason
    assert torch.equal(gm(X), expected)
    assert apply(fx.symbolic_trace(lambda x: torch.exp(x).clone() + 1), no_clone).rewrites == 1


def test_an_input_that_is_written_to_may_be_a_view_of_another_where_it_was_when_traced() -> None:
    def model(x, written):
        y = x.clone()
        written.mul_(2)
        return y + 1

    no_clone = made(lambda x: x.clone(), lambda x: x)
    assert apply(traced(model, X, X.clone()), no_clone).rewrites == 1
    for other in (X, X[0]):
        assert apply(traced(model, X, other), no_clone).rewrites == 0
    assert apply(fx.symbolic_trace(model), no_clone).rewrites == 0, "nothing is known of its inputs"


def test_another_shape_or_dtype_is_refused_unless_declared() -> None:
    gm = traced(lambda x: torch.relu(x), X)
    wrong = lambda **options: made(lambda x: torch.relu(x), lambda x: x.sum(-1), **options)  # noqa: E731
    report = apply(gm, wrong())
    assert report.refusals[0].reason == "the replacement gives float32[2] on cpu, the original float32[2, 3] on cpu"
    assert targets(gm) == ["aten.relu.default"]
    assert apply(gm, wrong(shapes="changes")).rewrites == 1


def test_shared_inner_nodes_stay_for_their_other_users() -> None:
    def model(x):
        s = torch.sigmoid(x)
        return x * s, s

    gm = traced(model, X)
    assert apply(gm, silu()).rewrites == 0
    assert apply(gm, made(lambda x: x * shared(torch.sigmoid(x)), lambda x: F.silu(x))).rewrites == 1
    assert targets(gm) == ["aten.sigmoid.default", "aten.silu.default"]


def test_a_replacement_may_wrap_the_original_and_drop_what_it_does_not_use() -> None:
    def wrapped(match, x):
        torch.exp(x)
        return match.call(torch.neg, match.call(torch.relu, match.root))

    gm = traced(lambda x: torch.sigmoid(x) + 1, X)
    apply(gm, made(lambda x: torch.sigmoid(x), wrapped))
    assert targets(gm) == ["aten.sigmoid.default", "aten.relu.default", "aten.neg.default", "aten.add.Tensor"]
    assert torch.allclose(gm(X), 1 - torch.relu(torch.sigmoid(X)))


# Replacements


def test_a_constraint_and_a_replacement_may_read_the_root() -> None:
    halves = where.predicate("x", "root", text="halves")(
        lambda x, root: root.meta["val"].shape[1] * 2 == x.meta["val"].shape[1]
    )
    it = Rule("test.it", Pattern((loose(op("aten::slice", cap("x"))),), (halves,)))
    it.replacement(lambda root, x: torch.neg(root))
    gm = traced(lambda x: (x[:, :2], x[:, :3]), torch.rand(2, 4))
    assert apply(gm, it).rewrites == 1
    assert targets(gm).count("aten.neg.default") == 1
    with pytest.raises(RuleDefinitionError, match="root is the name of the first output"):
        Pattern((op("aten::neg", cap("root")),))


def test_a_replacement_may_use_any_node_and_the_transaction() -> None:
    def with_first_input(match, x):
        first = next(iter(match.edit.graph.nodes))
        result = torch.sub(x, match.proxy(first))
        match.edit.set_meta(result.node, "mark", "here")
        return result

    gm = traced(lambda a, x: torch.relu(x) + a, X, X + 1)
    apply(gm, made(lambda x: torch.relu(x), with_first_input))
    assert torch.allclose(gm(X, X + 1), (X + 1 - X) + X)
    assert [n.meta["mark"] for n in gm.graph.nodes if "mark" in n.meta] == ["here"]


def test_an_optional_rule_may_refuse_in_an_atomic_set() -> None:
    def refuses(x):
        refuse("not today")

    gm = traced(lambda x: torch.relu(x) + torch.exp(x), X)
    careful = made(lambda x: torch.relu(x), refuses, optional=True)
    other = rule("test.other")(lambda x: torch.exp(x))
    other.replacement(lambda x: torch.expm1(x))
    report = apply(gm, careful, other, atomic=True)
    assert [str(r.reason) for r in report.refusals] == ["not today"]
    assert report["test.other"].rewrites == 1
    with pytest.raises(RefusedError, match="not today"):
        apply(traced(lambda x: torch.relu(x), X), made(lambda x: torch.relu(x), refuses), atomic=True)


def test_equal_calls_of_repeated_layers_share_one_fake_value() -> None:
    def replacement(x):
        return torch.exp(x) - 1

    gm = traced(lambda x: torch.expm1(x) + torch.expm1(x), X)
    apply(gm, made(lambda x: torch.expm1(x), replacement))
    first, second = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert first.meta["val"] is second.meta["val"]


def test_replacements_read_shapes_literals_and_context() -> None:
    def pattern(x, scale: Literal):
        return torch.relu(x * scale)

    def replacement(match, x, scale):
        assert match.context == "context"
        assert match["x"].op == "placeholder"
        assert match["scale"] == scale == 2.0
        assert (x.dtype, x.ndim, x.size(-1), len(x.shape)) == (torch.float32, 2, 3, 2)
        return torch.relu(x.view(x.shape[0], x.shape[1])) * scale

    it = made(pattern, replacement)
    gm = traced(lambda x: torch.relu(x * 2.0), X)
    assert RuleSet("s", it).apply(gm, context="context").rewrites == 1
    assert targets(gm) == ["aten.view.default", "aten.relu.default", "aten.mul.Tensor"]


def test_a_symbolic_size_that_is_used_becomes_a_node() -> None:
    gm = traced(lambda x: torch.relu(x), torch.rand(4, 6), mode="symbolic")
    apply(gm, made(lambda x: torch.relu(x), lambda x: torch.relu(x.view(x.shape)).view(x.shape[0], -1)))
    assert targets(gm).count("aten.sym_size.int") == 3
    x = torch.rand(4, 6) - 0.5
    assert torch.equal(gm(x), torch.relu(x))


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        (lambda x: 2 * x, ["aten.mul.Tensor"]),
        (lambda x: 2 - x, ["aten.rsub.Scalar"]),
        (lambda x: 2 / x, ["aten.reciprocal.default", "aten.mul.Tensor"]),
        (lambda x: x.transpose(0, 1).transpose(-2, -1), ["aten.transpose.int", "aten.transpose.int"]),
        (lambda x: F.softmax(x, dim=-1), ["aten.softmax.int"]),
        (lambda x: torch.cat([x[:1], x[1:]]), ["aten.slice.Tensor", "aten.slice.Tensor", "aten.cat.default"]),
        (lambda x: x[None, ..., :][0], ["aten.unsqueeze.default", "aten.select.int"]),
        (lambda x: torch.split(x, 2)[0], ["aten.split.Tensor", "<built-in function getitem>"]),
        (lambda x: F.layer_norm(x, (3,), eps=1e-3), ["aten.layer_norm.default"]),
        (lambda x: x.float(), ["aten.to.dtype"]),
    ],
    ids=count(),
)
def test_new_nodes_are_what_tracing_would_have_made(replacement, expected: list[str]) -> None:
    gm = traced(lambda x: torch.relu(x), X)
    assert apply(gm, made(lambda x: torch.relu(x), replacement)).rewrites == 1
    made_by_the_rule = [t for t in targets(gm) if t != "aten.clone.default"]  # a view of the input is copied
    assert made_by_the_rule == expected
    assert torch.allclose(gm(X), replacement(X))
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    again = traced(replacement, X)
    assert [t for t in targets(again) if "getitem" not in t] == [t for t in expected if "getitem" not in t]


def test_refusing_fills_in_rule_node_and_source() -> None:
    def heads(x):
        refuse("6 heads do not divide over axis sp (size 4)", hint="use sp in {1, 2, 3, 6}", num_heads=6, size=4)

    gm = traced(lambda x: torch.relu(x), X)
    gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0].meta["stack_trace"] = (
        'File "model.py", line 41'
    )
    before = state(gm)
    report = apply(gm, made(lambda x: torch.relu(x), heads))
    (refusal,) = report.refusals
    assert str(refusal) == (
        "test.it: 6 heads do not divide over axis sp (size 4) at %relu (model.py:41); use sp in {1, 2, 3, 6}"
    )
    assert refusal.data == {"num_heads": 6, "size": 4}
    assert state(gm) == before
    with pytest.raises(RefusedError, match=r"test.it: 6 heads") as caught:
        apply(gm, made(lambda x: torch.relu(x), heads), atomic=True)
    assert caught.value.data == {"num_heads": 6, "size": 4}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: None, "returned None; expected one value of the graph"),
        (lambda x: 3, "returned 3; expected one value of the graph"),
        (lambda x: (x, x), "expected one value of the graph"),
    ],
    ids=["nothing", "number", "two"],
)
def test_a_replacement_returns_values_of_the_graph(returned, message: str) -> None:
    gm = traced(lambda x: torch.relu(x), X)
    before = state(gm)
    with pytest.raises(RuleDefinitionError, match=message):
        apply(gm, made(lambda x: torch.relu(x), returned))
    assert state(gm) == before


def test_definition_errors() -> None:
    it = rule("test.it")(lambda x: torch.relu(x))
    with pytest.raises(RuleDefinitionError, match=r"the replacement asks for \['q'\], the pattern captures \['x'\]"):
        it.replacement(lambda q: q)
    with pytest.raises(RuleDefinitionError, match=r"rule test.it has no replacement"):
        RuleSet("s", it).apply(traced(lambda x: torch.relu(x), X))
    it.replacement(lambda x: x)
    with pytest.raises(RuleDefinitionError, match="it has a replacement already"):
        it.replacement(lambda x: x)
    options: dict[str, Any] = {"numerics": "roughly"}
    with pytest.raises(RuleDefinitionError, match="'roughly' is not one of 'exact', 'reassociates', 'approximate'"):
        rule("test.it", **options)(lambda x: torch.relu(x))


def test_a_rule_prints_on_one_line() -> None:
    it = rule("act.fuse_silu", numerics="exact")(lambda x: x * torch.sigmoid(x))

    @it.replacement
    def _(x):
        """x times its own sigmoid is SiLU."""
        return F.silu(x)

    assert str(it) == "act.fuse_silu   mul(x, sigmoid(x)) -> (x times its own sigmoid is SiLU.)"
    assert "test_rule" in it.provider


def test_errors_of_a_replacement_name_rule_and_node() -> None:
    gm = traced(lambda x: torch.relu(x), X)
    (refusal,) = apply(gm, made(lambda x: torch.relu(x), lambda x: torch.matmul(x, x))).refusals
    assert str(refusal).startswith("test.it: the replacement raised RuntimeError: a and b must have same reduction dim")
    assert "at %relu; let the pattern or a constraint exclude the match, or refuse() it" in str(refusal)


def test_a_match_inside_of_a_vmap_is_refused_and_holds_where_vmap_is_written_out() -> None:
    gm, _ = caught(torch.vmap(lambda row: row * torch.sigmoid(row)), X)
    (refusal,) = apply(gm, silu()).refusals
    assert str(refusal).startswith("test.it: it is inside of a torch.vmap, from %_vmap_increment_nesting on")
    assert apply(normalize(gm), silu()).rewrites == 1


def test_a_graph_whose_nodes_have_fake_modes_of_their_own_can_be_rewritten() -> None:
    """make_fx with real inputs leaves such values."""
    gm = make_fx(lambda x: x * 2.0 * 3.0)(torch.rand(4))

    def pattern(x, a: Literal, b: Literal):
        return x * a * b

    rules = RuleSet("s", Rule("t.scale", trace(pattern), lambda x, a, b: torch.neg(torch.neg(x)) * (a * b)))
    assert rules.apply(gm).rewrites == 1
    torch.testing.assert_close(gm(torch.ones(4)), torch.full((4,), 6.0))


def test_an_operator_without_a_tensor_argument_becomes_an_overload() -> None:
    gm = make_fx(torch.relu, tracing_mode="fake")(torch.rand(4))

    def replacement(match, x):
        return torch.maximum(x, match.call(aten.full, [4], 0.0))

    rules = RuleSet("s", Rule("t.relu", trace(lambda x: torch.relu(x)), replacement))
    assert rules.apply(gm).rewrites == 1
    assert [n.target for n in gm.graph.find_nodes(op="call_function", target=aten.full.default)]


def test_a_literal_that_is_none_is_tested() -> None:
    def pattern(x, eps: Literal):
        return torch.rms_norm(x, [4], None, eps)

    gm = make_fx(lambda x: torch.rms_norm(x, [4]), tracing_mode="fake", pre_dispatch=True)(torch.rand(4))
    found = Rule("t.norm", trace(pattern, ["eps > 0"])).explain(gm)
    assert found.num_matches == 0
    assert found.misses[0].reason == "constraint"


@pytest.mark.parametrize("graph", ["torch", "aten"])
@pytest.mark.parametrize("inside", [lambda x: x.neg().neg(), lambda x: x.neg().neg()[:]], ids=["value", "view"])
def test_what_was_made_without_gradients_gets_none(graph: Any, inside: Any) -> None:
    """A replacement that returns what it captured, under no_grad, gives a value that gradients would flow through."""
    twice = rule("test.twice")(lambda x: torch.neg(torch.neg(x)))
    twice.replacement(lambda x: x)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = inside(x)
        return y * x, y

    x = torch.tensor([3.0, -1.0], requires_grad=True)
    torch._dynamo.reset()
    product, y = torch.compile(
        function, backend=RuleSet("s", twice).once().expect("test.twice").backend("eager", graph=graph)
    )(x)
    product.sum().backward()
    assert not y.requires_grad
    assert torch.equal(x.grad, x.detach())
