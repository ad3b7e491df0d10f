"""Order, repetition, all or none, expectations, digest: what a plan promises about its rules."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.errors import (
    FixpointError,
    FxRewriteError,
    MatchExpectationError,
    RefusedError,
    RuleDefinitionError,
    refuse,
)
from fxrewrite.graph.edit import Edit
from fxrewrite.pattern import Literal, Pattern, cap, op, where
from fxrewrite.plan import Plan, RuleSet, Step
from fxrewrite.report import Note, Report
from fxrewrite.rule import Rule, rule
from tests.rewriting import state

aten = torch.ops.aten
X = torch.rand(2, 3)


def traced(function, *inputs) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*(inputs or (X,)))


def tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def names(gm: fx.GraphModule) -> list[str]:
    return [n.target._schema.name.removeprefix("aten::") for n in gm.graph.nodes if n.op == "call_function"]


def swap(of: str, to: str, *, id: str = "", **options) -> Rule:  # noqa: A002
    """A rule from one unary operator to another."""
    it = rule(id or f"swap.{of}_{to}", **options)(lambda x: getattr(torch, of)(x))

    @it.replacement
    def _(x):
        return getattr(torch, to)(x)

    return it


class Tag:
    """A step that counts nodes."""

    def __init__(self, name: str, refuses: bool = False) -> None:
        self.name = name
        self.refuses = refuses

    def run(self, edit: Edit, context: object, report: Report) -> int:
        nodes = [node for node in edit.nodes() if node.target is aten.exp.default]
        if self.refuses:
            refuse("this step cannot", node=nodes[0] if nodes else None)
        for node in nodes:
            edit.set_meta(node, "tag", context)
        report.events.append(Note(text=f"{self.name}: {len(nodes)} nodes"))
        return len(nodes)

    def text(self) -> str:
        return "tags every exp"


def test_after_and_before_order_the_sweeps() -> None:
    first, second = swap("relu", "exp"), swap("exp", "tanh", after=["swap.relu_exp"])
    gm = traced(torch.relu)
    assert RuleSet("s", second, first).apply(gm).rewrites == 2
    assert names(gm) == ["tanh"]
    gm = traced(torch.relu)
    RuleSet("s", swap("exp", "tanh"), swap("relu", "exp", before=["swap.exp_tanh"])).apply(gm)
    assert names(gm) == ["tanh"]


def test_rules_without_order_share_a_sweep_which_does_not_see_its_own_nodes() -> None:
    gm = traced(torch.relu)
    RuleSet("s", swap("relu", "exp"), swap("exp", "tanh")).apply(gm)
    assert names(gm) == ["exp"]


def test_the_earlier_rule_wins_at_a_node() -> None:
    gm = traced(torch.relu)
    report = RuleSet("s", swap("relu", "exp"), swap("relu", "tanh")).apply(gm)
    assert names(gm) == ["exp"]
    assert [entry.rewrites for entry in report.rules] == [1, 0]


def test_a_refused_rule_leaves_the_node_to_the_next_one() -> None:
    no = rule("swap.never")(lambda x: torch.relu(x))
    no.replacement(lambda x: refuse("not today"))
    gm = traced(torch.relu)
    report = RuleSet("s", no, swap("relu", "tanh")).apply(gm)
    assert names(gm) == ["tanh"]
    assert [refusal.reason for refusal in report.refusals] == ["not today"]


def test_a_cycle_in_the_order_is_printed() -> None:
    a, b = swap("relu", "exp", after=["swap.exp_tanh"]), swap("exp", "tanh", after=["swap.relu_exp"])
    with pytest.raises(RuleDefinitionError, match=r"set s: the order has a cycle: swap.* before swap.* before swap"):
        RuleSet("s", a, b)
    with pytest.raises(
        RuleDefinitionError, match=r"the order has a cycle: swap.relu_exp before tag before swap.relu_exp"
    ):
        RuleSet("s", swap("relu", "exp", after=["tag"]), Tag("tag"))


def test_two_providers_of_one_id_are_both_named() -> None:
    with pytest.raises(
        RuleDefinitionError, match=r"swap.x is defined twice, in .*swap.*test_plan.py:\d+.* and in .*swap"
    ):
        RuleSet("s", swap("relu", "exp", id="swap.x"), RuleSet("t", swap("exp", "relu", id="swap.x")))


def test_sets_that_share_a_rule_are_used_together() -> None:
    """As NORMAL_FORMS and ATTENTION: their counts add up. In one set a rule or a step is once."""
    shared, step = swap("relu", "exp"), Tag("tag")
    again = RuleSet("t", swap("tanh", "relu"), RuleSet("u", shared))
    gm = traced(lambda x: torch.tanh(torch.relu(x)))
    report = RuleSet("s", RuleSet("r", shared), again).apply(gm)
    assert names(gm) == ["exp", "exp"]
    assert report[shared.id].rewrites == 2
    RuleSet("s", RuleSet("r", step), RuleSet("t", step))
    for members in ((shared, shared), (again, again), (step, step)):
        with pytest.raises(RuleDefinitionError, match="is listed twice; leave one of them out"):
            RuleSet("s", *members)


def test_fixpoint_runs_until_nothing_changes() -> None:
    gm = traced(lambda x: torch.relu(torch.relu(torch.relu(x))))
    collapse = rule("relu.collapse")(lambda x: torch.relu(torch.relu(x)))
    collapse.replacement(lambda x: torch.relu(x))
    report = RuleSet("s", collapse).fixpoint().apply(gm)
    assert names(gm) == ["relu"]
    assert report["relu.collapse"].rewrites == 2


def test_rules_that_undo_each_other_are_named_and_everything_is_undone() -> None:
    gm = traced(torch.relu)
    before = state(gm)
    either = r"swap.(relu_exp|exp_relu) \(1\)"
    with pytest.raises(FixpointError, match=rf"set s still changes the graph after 3 rounds; .* {either}, {either}"):
        RuleSet("s", swap("relu", "exp"), swap("exp", "relu")).fixpoint(limit=3).apply(gm)
    assert state(gm) == before


def test_a_rule_whose_result_holds_its_pattern_often_ends_before_its_rounds_do() -> None:
    gm = traced(torch.relu)
    before = state(gm)
    grow = rule("relu.grow")(lambda x: torch.relu(x))
    grow.replacement(lambda x: torch.relu(x) + torch.relu(x + 1) + torch.relu(x + 2) + torch.relu(x + 3))
    with pytest.raises(
        FixpointError, match=r"after [2-7] rounds, and made \d,\d+ nodes of 3; .* holds its own pattern"
    ):
        RuleSet("s", grow).fixpoint().apply(gm)
    assert state(gm) == before


@pytest.mark.parametrize("trace", [fx.symbolic_trace, traced])
def test_an_output_that_newly_shares_memory_is_copied(trace: Callable[..., fx.GraphModule]) -> None:
    """Also in a graph without fake values."""
    keep = rule("neg.twice")(lambda x: torch.neg(torch.neg(x)))
    keep.replacement(lambda x: x)
    gm = trace(lambda x: (torch.neg(torch.neg(x)), x))
    assert RuleSet("s", keep).once().apply(gm).rewrites == 1
    x = torch.ones(2)
    gm(x)[0].add_(1)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("trace", [lambda f, x: fx.symbolic_trace(f), traced])
def test_an_output_that_newly_repeats_its_entries_is_copied(trace: Callable[..., fx.GraphModule]) -> None:
    """What the caller writes to a row of `repeat` is in that row alone; rows of `expand` are one place in memory."""

    def pattern(x: Any, n: Literal) -> Any:
        return torch.exp(x).repeat(n, 1)

    expand = rule("repeat.expand", where=["n > 0"])(pattern)
    expand.replacement(lambda x, n: torch.exp(x).expand(n, -1))

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = torch.exp(x).repeat(3, 1), torch.exp(x).repeat(2, 1)
        return y, z[0], torch.exp(x).repeat(4, 1) + 1

    gm = trace(model, torch.zeros(1, 2))
    assert RuleSet("s", expand).once().apply(gm).rewrites == 3
    y, row, _ = gm(torch.zeros(1, 2))
    y[0].add_(1)
    assert (y.tolist(), row.tolist()) == ([[2, 2], [1, 1], [1, 1]], [1, 1])
    copies = [node for node in gm.graph.nodes if node.name.startswith(("clone", "fresh"))]
    assert len(copies) == (1 if trace is traced else 2)  # without values, the row might repeat its entries as well


def test_views_of_an_output_that_newly_repeats_its_entries_stay_views() -> None:
    expand = rule("exp.repeat")(lambda x: torch.exp(x).repeat(3, 1))
    expand.replacement(lambda x: torch.exp(x).expand(3, -1))

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.exp(x).repeat(3, 1)
        return y, y[0], y[1]

    gm = traced(model, torch.zeros(1, 2))
    assert RuleSet("s", expand).once().apply(gm).rewrites == 1
    y, first, second = gm(torch.zeros(1, 2))
    first.add_(1)
    assert (y.tolist(), second.tolist()) == ([[2, 2], [1, 1], [1, 1]], [1, 1])


@pytest.mark.parametrize("capture", [lambda f, x: fx.symbolic_trace(f), traced])
def test_nothing_repeats_the_entries_of_what_is_written_to(capture: Callable[..., fx.GraphModule]) -> None:
    def pattern(x: Any, n: Literal) -> Any:
        return torch.sinh(x).repeat(n, 1)

    expand = rule("repeat.expand", gradients=False)(pattern)
    expand.replacement(lambda x, n: torch.sinh(x).expand(n, -1))

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.sinh(x).repeat(3, 1)
        y[0].add_(1)
        return y

    gm = capture(model, torch.zeros(1, 2))
    report = RuleSet("s", expand).once().apply(gm)
    assert report.rewrites == 0
    assert "shares differently" in str(report.refusals[0])


def test_a_capture_that_is_another_output_is_refused() -> None:
    """mm(x, a), mm(x, b) where b is mm(x, a) itself: no one place has both."""
    both = rule("mm.together", numerics="reassociates")(lambda x, a, b: (torch.mm(x, a), torch.mm(x, b)))

    def together(x: Any, a: Any, b: Any) -> Any:
        return tuple(torch.mm(x, torch.cat([a, b], 1)).chunk(2, 1))

    both.replacement(together)
    gm = fx.symbolic_trace(lambda x, a: ((p := torch.mm(x, a)), torch.mm(x, p)))
    report = RuleSet("s", both).once().apply(gm)
    assert report.rewrites == 0
    assert any("a capture is the output" in str(refusal) for refusal in report.refusals), report.refusals


def test_plans_run_one_after_the_other_in_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(torch.relu)
    compiled: list[int] = []
    original = fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: compiled.append(1) or original(self))
    plan = (
        RuleSet("a", swap("relu", "exp"))
        >> RuleSet("b", swap("exp", "tanh"))
        >> RuleSet("c", swap("tanh", "sin")).once()
    )
    assert isinstance(plan, Plan)
    assert plan.apply(gm).rewrites == 3
    assert names(gm) == ["sin"]
    assert compiled == [1]


def test_an_atomic_set_does_all_or_nothing() -> None:
    seen: list[str] = []
    picky = rule("swap.picky")(lambda x: torch.relu(x))

    @picky.replacement
    def _(match, x):
        seen.append(match.root.name)
        if len(seen) == 2:
            refuse("only one")
        return torch.exp(x)

    gm = traced(lambda x: torch.relu(torch.neg(torch.relu(x))))
    before = state(gm)
    with pytest.raises(RefusedError, match=r"swap.picky: only one at %relu$"):
        RuleSet("s", swap("neg", "abs"), RuleSet("t", picky), atomic=True).apply(gm)
    assert state(gm) == before
    seen.clear()
    report = RuleSet("s", swap("neg", "abs"), picky).apply(gm)
    assert (report.rewrites, len(report.refusals)) == (2, 1)
    assert names(gm) == ["relu", "abs", "exp"]


def test_a_rule_does_not_join_an_atomic_set() -> None:
    """As a set does not: joined, neither would be all or nothing."""
    for other in (swap("exp", "tanh"), RuleSet("t", swap("exp", "tanh"))):
        with pytest.raises(
            RuleDefinitionError, match="an atomic set, or one with an invariant, stays a set of its own"
        ):
            RuleSet("s", swap("relu", "exp"), atomic=True) | other


def test_steps_and_nested_sets_run_where_they_stand() -> None:
    gm = traced(torch.relu)
    rules = RuleSet("s", swap("relu", "exp"), Tag("first"), RuleSet("nested", swap("exp", "tanh")), Tag("second"))
    report = rules.once().apply(gm, context="here")
    assert report.lines == ("first: 1 nodes", "second: 0 nodes")
    assert report["first"].rewrites == 1
    assert names(gm) == ["tanh"]
    assert isinstance(Tag("x"), Step)


def test_the_refusal_of_a_step_names_the_step_and_undoes_everything() -> None:
    gm = traced(torch.relu)
    before = state(gm)
    with pytest.raises(RefusedError, match=r"^last: this step cannot at %exp_default$"):
        RuleSet("s", swap("relu", "exp"), Tag("last", refuses=True)).apply(gm)
    assert state(gm) == before


def test_an_unmet_expectation_carries_the_nearest_miss_and_changes_nothing() -> None:
    gm = traced(lambda x: F.silu(x) + torch.exp(torch.sigmoid(x) * torch.relu(x)))
    before = state(gm)
    fuse = rule("act.silu")(lambda x: x * torch.sigmoid(x))
    fuse.replacement(lambda x: F.silu(x))
    plan = RuleSet("s", fuse, swap("exp", "tanh")).once().expect("act.silu", at_least=24)
    with pytest.raises(MatchExpectationError) as caught:
        plan.apply(gm)
    assert "act.silu: expected at least 24 rewrites, made 0; the graph is as before" in str(caught.value)
    assert "expected the same value at root.self.self as at root.other" in str(caught.value)
    assert state(gm) == before
    with pytest.raises(
        RuleDefinitionError, match=r"the plan has no rule or step 'act.typo'; it has act.silu, swap.exp_tanh"
    ):
        plan.expect("act.typo")
    RuleSet("s", swap("exp", "tanh")).once().expect("swap.exp_tanh").apply(gm)


def test_a_plan_is_a_value() -> None:
    plan = RuleSet("s", swap("exp", "tanh")).once()
    expecting = plan.expect("swap.exp_tanh", at_least=2)
    assert expecting is not plan
    assert (dict(plan.expectations), dict(expecting.expectations)) == ({}, {"swap.exp_tanh": 2})
    plan.apply(traced(torch.relu))
    assert (expecting >> plan).expectations == expecting.expectations
    assert all(copy.deepcopy(held) is held for held in (expecting, *(stage.rules for stage in plan.stages)))


def test_a_plan_can_be_pickled_where_its_functions_have_names() -> None:
    plan = RuleSet("s", Rule("x.exp_tanh", Pattern((op("exp", cap("x")),)), tanh)).once().expect("x.exp_tanh")
    assert plan.apply(traced(torch.exp)).rewrites == 1
    again = pickle.loads(pickle.dumps(plan))
    assert again.apply(traced(torch.exp)).rewrites == 1
    assert (again.digest(), again.expectations) == (plan.digest(), plan.expectations)


def test_explain_by_id() -> None:
    plan = RuleSet("s", swap("relu", "exp")).once()
    assert plan.explain(traced(torch.relu), "swap.relu_exp").num_matches == 1
    with pytest.raises(RuleDefinitionError, match="the plan has no rule 'x'"):
        plan.explain(traced(torch.relu), "x")


def test_a_set_prints_every_rule_on_a_line() -> None:
    documented = rule("act.silu", where=[where.rank("x", 2)])(lambda x: x * torch.sigmoid(x))

    @documented.replacement
    def _(x):
        """One kernel."""
        return F.silu(x)

    rules = RuleSet("s", documented, Tag("tag"), RuleSet("t", swap("relu", "exp")), atomic=True)
    assert str(rules).splitlines() == [
        "s (atomic)",
        "  act.silu   mul(x, sigmoid(x)) where rank(x) == 2 -> (One kernel.)",
        "  tag        tags every exp",
        "  t",
        "    swap.relu_exp   relu(x) -> (undocumented)",
    ]


def closing_over(value, name: str = "tanh") -> Plan:
    it = rule("test.closure")(lambda x: torch.relu(x))
    it.replacement(lambda x: getattr(torch, name)(x) * value)
    return RuleSet("s", it).once()


def test_the_digest_tells_values_of_closures_apart() -> None:
    digests = [closing_over(value).digest() for value in (1.0, 2.0, 1, (1, 2), [1, 2], {"a": 1}, torch.float32)]
    assert len(set(digests)) == len(digests)
    assert closing_over(1.0).digest() == closing_over(1.0).digest()
    assert closing_over(1.0, "exp").digest() != closing_over(1.0).digest()
    assert closing_over(1.0).expect("test.closure", at_least=2).digest() != closing_over(1.0).digest()


def test_a_plan_after_another_keeps_what_both_expect() -> None:
    many, one = (
        RuleSet(f"s{count}", swap("relu", "exp")).once().expect("swap.relu_exp", at_least=count) for count in (3, 1)
    )
    assert (many >> one).expectations == (one >> many).expectations == {"swap.relu_exp": 3}


def test_matches_are_not_committed_where_nodes_have_other_names() -> None:
    def graph(first: str, last: str) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        inner = graph.create_node("call_function", torch.relu, (x,), name=first)
        outer = graph.create_node("call_function", torch.relu, (graph.call_function(torch.sin, (inner,)),), name=last)
        graph.output((outer,))
        return fx.GraphModule({}, graph)

    plan = RuleSet("s", swap("relu", "exp")).once()
    found = plan.find(graph("a", "b"))
    some = found.model_copy(update={"matches": found.matches[:1]})
    assert plan.commit(graph("a", "b"), some).rewrites == 1
    with pytest.raises(FxRewriteError, match="not the graph in which the matches were found"):
        plan.commit(graph("b", "a"), some)


def test_the_digest_tells_options_and_stages_apart() -> None:
    rules = RuleSet("s", swap("relu", "exp"))
    declared = RuleSet("s", swap("relu", "exp", rng="changes"))
    plans = [rules.once(), rules.fixpoint(), rules.fixpoint(limit=3), declared.once(), rules >> rules]
    assert len({plan.digest() for plan in plans}) == len(plans)


def test_the_digest_sees_helpers_and_predicates() -> None:
    def plan(factor: int, bound: int) -> Plan:
        namespace: dict = {"torch": torch, "__name__": __name__}
        exec(f"def helper(x): return x * {factor}\ndef replacement(x): return helper(torch.exp(x))", namespace)
        it = rule("test.it", where=[where.predicate("x", text="small")(lambda x: x.meta["val"].ndim < bound)])(
            lambda x: torch.relu(x)
        )
        it.replacement(namespace["replacement"])
        return RuleSet("s", it).once()

    assert len({plan(factor, bound).digest() for factor in (1, 2) for bound in (3, 4)}) == 4
    assert plan(1, 3).digest() == plan(1, 3).digest()


def test_a_closure_without_identity_gives_no_digest_and_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"this plan cannot be cached: .*has no identity but its address"):
        assert closing_over(object()).digest() is None


@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "import torch\n"
        "from fxrewrite.rule import rule\n"
        "from fxrewrite.plan import RuleSet\n"
        "scale = 2.0\n"
        "it = rule('test.it')(lambda x: torch.relu(x))\n"
        "@it.replacement\n"
        "def _(x):\n"
        "    return torch.exp(x) * scale if {1, 2} and 'a' in {'a', 'b', 'c'} else x\n"
        "digest = RuleSet('s', it).once().digest()\n"
    )
    here: dict = {"__name__": "__main__"}
    exec(code, here)
    there = subprocess.run(
        [sys.executable, "-c", code + "print(digest)"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1"},  # another order of sets than here
    )
    assert there.stdout.strip() == here["digest"]


_HELPER = """
from deeper import number
def scale(): return number()
class Scale:
    value = number()
"""
_HELPED = """
import functools, torch
import helper
from helper import scale
from fxrewrite import Rule, RuleSet
from fxrewrite.pattern import Pattern, cap, op

@functools.cache
def remembered(): return scale()

def by_name(x): return x * scale()
def of_a_module(x): return x * helper.scale()
def of_a_cache(x): return x * remembered()
def imported_inside(x):
    from helper import scale as inner
    return x * inner()
def of_a_class(x): return x * helper.Scale().value

for function in (by_name, of_a_module, of_a_cache, imported_inside, of_a_class):
    print(RuleSet("s", Rule("t.it", Pattern((op("relu", cap("x")),)), function)).once().digest())
"""


@pytest.mark.slow
def test_the_digest_follows_the_modules_of_the_user(tmp_path: Path) -> None:
    def digests(scale: int) -> list[str]:
        (tmp_path / "helper.py").write_text(_HELPER)
        (tmp_path / "deeper.py").write_text(f"def number(): return {scale}\n")
        (tmp_path / "main.py").write_text(_HELPED)
        run = subprocess.run([sys.executable, "-B", tmp_path / "main.py"], capture_output=True, text=True, check=True)
        return run.stdout.split()

    first, again, other = digests(2), digests(2), digests(3)
    assert first == again
    assert len({*first, *other}) == 10


def test_the_digest_follows_what_steps_hold() -> None:
    class Marks:
        name = "marks"

        def __init__(self, how: Any) -> None:
            self.how = how

        def run(self, edit: Edit, context: Any, report: Report) -> int:
            return 0

        def text(self) -> str:
            return "marks"

    plans = [
        RuleSet("s", Marks(how)).once()
        for how in (1, 2, lambda x: x, lambda x: -x, swap("relu", "exp"), swap("relu", "sin"))
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)
    assert RuleSet("s", Marks(1)).once().digest() == plans[0].digest()
    with pytest.warns(UserWarning, match="Tensor object .* has no identity but its address"):
        assert RuleSet("s", Marks(torch.ones(1))).once().digest() is None


def test_a_digest_follows_globals_and_not_attributes_of_their_name() -> None:
    """`relu` below is a rule in this module, and what the replacement calls is `F.relu`."""
    namespace = {"F": F, "relu": object()}
    exec("def replacement(x):\n    return F.relu(x)", namespace)
    plan = RuleSet("s", Rule("t.relu", Pattern((op("tanh", cap("x")),)), namespace["replacement"])).once()
    assert plan.digest() is not None


@pytest.mark.parametrize(
    "call",
    [lambda x: F.silu(x), lambda x: F.relu(x, False), lambda x: F.relu(x, inplace=False)],
    ids=["default", "position", "keyword"],
)
def test_what_a_function_takes_beside_its_operator_is_not_emitted_on_aten(call: Any) -> None:
    again = Rule("again", Pattern((op("sigmoid", cap("x")),)))

    @again.replacement
    def _(x: Any) -> Any:
        return call(x)

    x = torch.randn(3)
    gm = make_fx(lambda x: torch.sigmoid(x), tracing_mode="fake")(x)
    assert RuleSet("again", again).apply(gm).rewrites == 1
    torch.testing.assert_close(gm(x), call(x))


def test_a_copy_leaves_the_modes_of_shared_modules() -> None:
    """A frozen norm in a model that trains."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.ReLU()).train()
    model[0].eval()
    gm = fx.symbolic_trace(model).train()
    gm.get_submodule("0").eval()
    new, _ = RuleSet("s", swap("relu", "exp")).once().applied(gm)
    assert (gm.training, model[0].training, new.training, new.get_submodule("0").training) == (True, False, True, False)
