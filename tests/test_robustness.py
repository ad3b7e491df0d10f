"""Random graphs, random plans, random failures: a plan does all that it says, truly, or leaves no trace at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import ops
from fxrewrite.errors import FixpointError, FxRewriteError, RefusedError, refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.pattern import Constraint, Literal, Maybe, Pattern, cap, loose, maybe, op, shared, trace, where
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.plan.sweep import Order, Overlap
from fxrewrite.report import Report
from fxrewrite.rule import Rule
from tests.random_graphs import inputs, random_module, run

budget = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
chance = st.randoms(use_true_random=False)


# What a graph is: everything that a reader of it can see


@dataclass(frozen=True)
class Frozen:
    """A graph module at one time; two are equal when nobody can tell the graphs apart."""

    rows: tuple[Any, ...]
    metas: tuple[Mapping[str, Any], ...]
    code: str
    forward: Any
    attributes: tuple[str, ...]


def frozen(gm: fx.GraphModule) -> Frozen:
    """Nodes by identity and in order, with names, calls, users, and metadata by identity; code and module.

    The order of a node's users is not compared: FX itself loses it whenever an argument is set.
    """
    rows = [
        (n, n.name, n.op, n.target, n.args, dict(n.kwargs), n.type, set(n.users), tuple(n.all_input_nodes))
        for n in gm.graph.nodes
    ]
    metas = [dict(n.meta) for n in gm.graph.nodes]
    attributes = [*gm.__dict__, *(name for name, _ in gm.named_parameters()), *(name for name, _ in gm.named_modules())]
    return Frozen(tuple(rows), tuple(metas), gm.code, gm.forward.__func__.__code__, tuple(attributes))


def assert_same(before: Frozen, gm: fx.GraphModule) -> None:
    after = frozen(gm)
    fields = ("node", "name", "op", "target", "args", "kwargs", "type", "users", "inputs")
    for old, new in zip(before.rows, after.rows, strict=True):
        assert dict(zip(fields, old, strict=True)) == dict(zip(fields, new, strict=True))
    for old, new in zip(before.metas, after.metas, strict=True):
        assert list(old) == list(new)
        assert all(old[key] is new[key] for key in old)
    assert after.code == before.code
    assert after.forward is before.forward
    assert after.attributes == before.attributes


# Rules that are true


def made(
    name: str, pattern: Callable[..., Any] | Pattern, replacement: Callable[..., Any], *constraints: Constraint
) -> Rule:
    found = pattern if isinstance(pattern, Pattern) else trace(pattern, constraints)
    return Rule(f"true.{name}", found, replacement)


def add_literal(x: Any, c: Literal) -> Any:
    return x - c


def masked(x: Any, m: Maybe) -> Any:
    return maybe(x + m, x) * 2


TRUE: Mapping[str, Callable[[], Rule]] = {
    "neg_neg": lambda: made("neg_neg", lambda x: torch.neg(-x), lambda x: x),
    "relu_relu": lambda: made("relu_relu", lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x)),
    "add_neg": lambda: made("add_neg", lambda x, y: x + torch.neg(y), lambda x, y: x - y),
    "sub": lambda: made("sub", lambda x, y: x - y, lambda x, y: x + torch.neg(y)),
    "add_self": lambda: made("add_self", lambda x: x + x, lambda x: x * 2),
    "sub_literal": lambda: made("sub_literal", add_literal, lambda x, c: x + (-c)),
    "mul_one": lambda: made("mul_one", lambda x: x * 1, lambda x: x),
    "maximum": lambda: made("maximum", lambda x, y: torch.maximum(x, y), lambda x, y: -torch.minimum(-x, -y)),
    "max_relu": lambda: made(
        "max_relu", lambda x: torch.maximum(shared(torch.relu(x)), x), lambda x: torch.relu(torch.relu(x))
    ),
    "masked": lambda: made("masked", masked, lambda x, m: x * 2 if m is None else (x + m) + (x + m)),
    "relu": lambda: made("relu", lambda x: torch.relu(x), lambda x: torch.clamp(x, min=0)),
    "clone": lambda: made("clone", lambda x: torch.clone(x), lambda x: x),
    "alias": lambda: made("alias", lambda x: torch.ops.aten.alias(x), lambda x: x),
    "whole": lambda: made("whole", lambda x: x[:], lambda x: x),
    "transposes": lambda: made("transposes", lambda x: x.transpose(0, 1).transpose(0, 1), lambda x: x),
    "transpose": lambda: made("transpose", lambda x: x.transpose(0, 1), lambda x: x.permute(1, 0)),
    "permute": lambda: made("permute", lambda x: x.permute(1, 0), lambda x: x.mT),
    "reshape": lambda: made("reshape", lambda x: x.reshape(4, 4), lambda x: x),
    "chunk": lambda: made("chunk", lambda x: torch.chunk(x, 2)[0], lambda x: x.narrow(0, 0, x.shape[0] // 2)),
    "chunks": lambda: made(
        "chunks",
        lambda x: (x.chunk(2)[0], x.chunk(2)[1]),
        lambda x: (x[: x.shape[0] // 2], x[x.shape[0] // 2 :]),
    ),
    "sin_cos": lambda: made(
        "sin_cos", lambda x: (torch.sin(x), torch.cos(x)), lambda x: (torch.sin(x) * 1, 1 * torch.cos(x))
    ),
    "cat": lambda: Rule(
        "true.cat",
        Pattern((loose(op("cat", cap("tensors", "any"))),)),
        lambda match: match.call(
            torch.concat, list(map(match.proxy, match["tensors"])), match.root.kwargs.get("dim", 0)
        ),
    ),
    "cat_cat": lambda: made(
        "cat_cat",
        lambda x, y: torch.cat([shared(torch.cat([x, x])), y]),
        lambda x, y: torch.cat([x, x, y]),
    ),
    "dropout": lambda: made("dropout", lambda x: F.dropout(x, 0.5), lambda x: torch.dropout(x, 0.5, True)),
    "linear": lambda: made("linear", lambda x, w: F.linear(x, w), lambda x, w: F.linear(x * 1, w)),
    "topk": lambda: made(
        "topk", lambda x: torch.topk(x, 4, 0)[0], lambda x: torch.topk(x.transpose(0, 1), 4, 1)[0].mT.contiguous()
    ),
    "softmax": lambda: made(
        "softmax", lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x.mT, 0).mT.contiguous()
    ),
    "wrap": lambda: made("wrap", lambda x: torch.sin(x), lambda match: match.call(torch.mul, match.root, 1)),
}


def random_rules(rng: Random) -> list[Rule]:
    rules = [TRUE[name]() for name in rng.sample(list(TRUE), rng.randint(2, 14))]
    for rule in rules[1:]:
        if rng.random() < 0.2:
            rule.after = (rules[0].id,)
    return rules


ORDERS: tuple[Order, ...] = ("top_down", "bottom_up")
OVERLAPS: tuple[Overlap, ...] = ("first", "first", "largest", "best_cover")


def ordered(members: list[Any]) -> list[Any]:
    """The members, whose order speaks of one another only."""
    known = {member.id for member in members if isinstance(member, Rule)}
    for member in members:
        if isinstance(member, Rule):
            member.after = tuple(other for other in member.after if other in known)
    return members


def random_plan(rng: Random, members: list[Any], atomic: bool | None = None) -> Plan:
    cut = rng.randint(0, len(members))
    atomic = rng.random() < 0.3 if atomic is None else atomic
    first, then = members[:cut], members[cut:]
    if rng.random() < 0.3:
        rules = RuleSet("outer", *ordered(first), RuleSet("inner", *ordered(then), atomic=atomic))
    elif rng.random() < 0.3:
        return RuleSet("first", *ordered(first)).once() >> RuleSet("then", *ordered(then), atomic=atomic)
    else:
        rules = RuleSet("all", *ordered(members), atomic=atomic)
    order, overlap = rng.choice(ORDERS), rng.choice(OVERLAPS)
    if rng.random() < 0.3:
        return rules.fixpoint(limit=4, order=order, overlap=overlap)
    return rules.once(order=order, overlap=overlap)


def random_graph(rng: Random, *, writes: bool, values: bool = True) -> fx.GraphModule:
    gm = random_module(rng, values=values, writes=writes)
    for line, node in enumerate(gm.graph.nodes):
        node.meta["stack_trace"] = f'  File "model.py", line {line}, in forward\n'
    return gm


# What must hold after a plan that succeeded


def assert_equal_results(expected: list[torch.Tensor], gm: fx.GraphModule) -> None:
    for old, new in zip(expected, run(gm), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9, equal_nan=True)


def assert_consistent(report: Report, plan: Plan, changed: bool) -> None:
    ids = {rule.id for rule in plan.rules()}
    assert ids <= {entry.rule for entry in report.rules}
    for entry in report.rules:
        if entry.rule in ids:
            assert 0 <= entry.rewrites <= entry.matches
            assert len(entry.refusals) <= entry.matches - entry.rewrites, "equal refusals are counted once"
            assert entry.rewrites <= entry.anchors
            assert all(refusal.rule == entry.rule for refusal in entry.refusals)
            assert all(refusal.node for refusal in entry.refusals)
    assert report.rewrites == sum(entry.rewrites for entry in report.rules)
    assert bool(report.rewrites) == changed
    assert str(report).count("\n") >= len(report.rules) + len(report.refusals)


def assert_new_nodes_are_complete(gm: fx.GraphModule, old: set[fx.Node], plan: Plan, values: bool) -> None:
    ids = {rule.id for rule in plan.rules()}
    for node in gm.graph.nodes:
        if node not in old:
            assert "val" in node.meta or not values
            assert "model.py" in node.meta["stack_trace"]
            assert node.meta["fxrewrite"]
            assert set(node.meta["fxrewrite"]) <= ids | {"plan.fresh_output"}


def check_true_rules(rng: Random) -> int:
    writes, values = rng.random() < 0.5, rng.random() < 0.8
    gm = random_graph(rng, writes=writes, values=values)
    if not values:
        needs_shapes = ("chunk", "chunks")
        rules = [rule for rule in random_rules(rng) if rule.id.removeprefix("true.") not in needs_shapes]
    else:
        rules = random_rules(rng)
    plan = random_plan(rng, rules)
    before, expected = frozen(gm), run(gm)
    try:
        report = plan.apply(gm)
    except (FixpointError, RefusedError):
        assert_same(before, gm)
        return 0
    gm.graph.lint()
    assert_equal_results(expected, gm)
    assert_consistent(report, plan, gm.forward.__func__.__code__ is not before.forward)
    if not report.rewrites:
        assert_same(before, gm)
    assert_new_nodes_are_complete(gm, {row[0] for row in before.rows}, plan, values)
    return report.rewrites


@given(chance)
@budget
def test_plans_of_true_rules_change_no_result(rng: Random) -> None:
    check_true_rules(rng)


# Matches as data: found in a graph that stays as it is, committed later


def check_find_and_commit(rng: Random) -> int:
    gm = random_graph(rng, writes=rng.random() < 0.5)
    rules = random_rules(rng)
    plan = RuleSet("all", *rules).once(order=rng.choice(ORDERS), overlap=rng.choice(OVERLAPS))
    before, expected = frozen(gm), run(gm)
    found = plan.find(gm)
    copy, report = plan.applied(gm)
    assert_same(before, gm)
    assert_equal_results(expected, copy)
    for rule in rules:
        roots = {match.outputs[0] for match in found if match.rule == rule.id}
        assert len(roots) <= rule.explain(gm).num_matches
    assert bool(len(found)) >= bool(report.rewrites)
    again = type(found).model_validate_json(found.model_dump_json())
    committed = plan.commit(gm, again)
    gm.graph.lint()
    assert_equal_results(expected, gm)
    assert len(committed.refusals) + committed.rewrites <= len(found)
    assert_new_nodes_are_complete(gm, {row[0] for row in before.rows}, plan, values=True)
    if not committed.rewrites:
        assert_same(before, gm)
    return committed.rewrites


@given(chance)
@settings(budget, max_examples=100)
def test_matches_that_were_found_are_committed_truly(rng: Random) -> None:
    check_find_and_commit(rng)


# Failures


class InjectedError(Exception):
    """What user code raises."""


class Faults:
    """Raises, refuses or misbehaves at the n-th time that it is asked, and never again."""

    def __init__(self, kind: str, countdown: int) -> None:
        self.kind = kind
        self.countdown = countdown

    def due(self) -> bool:
        self.countdown -= 1
        return self.countdown == -1


def guard(faults: Faults, name: str) -> Constraint:
    def holds(x: Any) -> bool | str:
        if faults.due():
            if faults.kind == "raises":
                raise InjectedError("guard")
            if faults.kind == "refuses":
                refuse("guard")
            return "guard" if faults.kind == "says why" else False
        return True

    return where.predicate(name, text="faulty")(holds)


def fault_before(faults: Faults, match: Any) -> Any:
    """What goes wrong before the replacement creates nodes; what it returns instead, or None."""
    kind, edit = faults.kind, match.edit
    if kind == "raises":
        raise InjectedError("replacement")
    if kind == "refuses":
        refuse("replacement", node=match.root)
    if kind == "interrupts":
        raise KeyboardInterrupt
    if kind == "edits then raises":
        for node in edit.nodes()[1:3]:
            edit.set_meta(node, "mark", 1)
            edit.set_meta(node, "stack_trace", "gone")
            edit.replace_uses(node, edit.nodes()[0])
        raise InjectedError("replacement")
    if kind == "erases then refuses":
        dead = edit.call(torch.neg, (edit.nodes()[0],), after=edit.nodes()[0], val=None)
        edit.erase(dead)
        refuse("replacement")
    if kind == "inner savepoint":
        try:
            with edit.savepoint():
                edit.set_args(match.root, (), {})
                raise InjectedError("inner")
        except InjectedError:
            return None
    return None


WRONG: Mapping[str, Callable[[Any], Any]] = {
    "returns None": lambda match: None,
    "returns 3": lambda match: 3,
    "returns a tuple": lambda match: (match.proxy(match.root),) * 4,
    "returns a foreign node": lambda match: fx.Graph().placeholder("foreign"),
    "returns a later node": lambda match: match.edit.nodes()[-1],
    "returns another shape": lambda match: match.call(torch.sum, match.proxy(match.root)),
    "returns another dtype": lambda match: match.call(torch.gt, match.proxy(match.root), 0),
}
BEFORE = ("raises", "refuses", "interrupts", "edits then raises", "erases then refuses", "inner savepoint")
AFTER = tuple(f"{kind} after" for kind in ("raises", "refuses"))


def with_faults(rule: Rule, faults: Faults) -> Rule:
    """The rule, whose replacement goes wrong when the fault is due."""
    body = rule.body

    def replacement(match: Any) -> Any:
        due = faults.due()
        if due:
            fault_before(faults, match)
            if faults.kind in WRONG:
                return WRONG[faults.kind](match)
        given = {name: captured_as_proxy(match, match[name]) for name in parameters(body) if name != "match"}
        result = body(**given, **({"match": match} if "match" in parameters(body) else {}))
        if due and faults.kind == "raises after":
            raise InjectedError("replacement")
        if due and faults.kind == "refuses after":
            refuse("replacement")
        return result

    return Rule(rule.id, rule.pattern, replacement, optional=rule.optional, after=rule.after)


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def captured_as_proxy(match: Any, captured: Any) -> Any:
    return match.proxy(captured) if isinstance(captured, fx.Node) else captured


class FaultyStep:
    """A step that edits the graph, truly, and then fails, or not."""

    def __init__(self, faults: Faults) -> None:
        self.name = "faulty_step"
        self.faults = faults

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        found = (n for n in edit.nodes() if n.op == "call_function" and ops.key(n) in ("aten::sin", "aten::matmul"))
        node = next(found, None)
        if node is None:
            return 0
        copy = edit.call(torch.mul, (node, 1), after=node, like=node, rule=self.name, val=node.meta["val"])
        edit.replace_uses(node, copy, [user for user in node.users if user is not copy])
        edit.set_meta(node, "seen", True)
        if self.faults.due():
            if self.faults.kind == "refuses":
                refuse("step", node=node)
            raise InjectedError("step")
        return 1

    def text(self) -> str:
        return "multiplies by one"


def faulty_members(rng: Random) -> list[Any]:
    members: list[Any] = random_rules(rng)
    for _ in range(rng.randint(1, len(members))):
        at = rng.randrange(len(members))
        rule = members[at]
        if not isinstance(rule, Rule):
            continue
        where_ = rng.random()
        if where_ < 0.25:
            faults = Faults(rng.choice(("raises", "refuses", "says no", "says why")), rng.randint(0, 1))
            name = next((c.name for c in rule.pattern.captures), "root")
            pattern = Pattern(rule.pattern.outputs, (*rule.pattern.where, guard(faults, name)))
            members[at] = Rule(rule.id, pattern, rule.body, after=rule.after)
        elif where_ < 0.85:
            kind = rng.choice((*BEFORE, *AFTER, *WRONG))
            members[at] = with_faults(rule, Faults(kind, rng.randint(0, 2)))
    if rng.random() < 0.3:
        members.insert(
            rng.randint(0, len(members)), FaultyStep(Faults(rng.choice(("raises", "refuses")), rng.randint(0, 1)))
        )
    return members


EXPECTED = (InjectedError, FxRewriteError, KeyboardInterrupt)


def check_failures(rng: Random) -> str:
    gm = random_graph(rng, writes=rng.random() < 0.3)
    plan = random_plan(rng, faulty_members(rng))
    before, expected = frozen(gm), run(gm)
    try:
        report = plan.apply(gm)
    except EXPECTED as error:
        assert_same(before, gm)
        assert_equal_results(expected, gm)
        return type(error).__name__
    gm.graph.lint()
    assert_equal_results(expected, gm)
    assert_consistent(report, plan, gm.forward.__func__.__code__ is not before.forward)
    return "success"


@given(chance)
@budget
def test_a_failure_anywhere_leaves_the_graph_as_before(rng: Random) -> None:
    check_failures(rng)


def test_the_failures_happen() -> None:
    outcomes = [check_failures(Random(seed)) for seed in range(120)]
    assert {"success", "InjectedError", "FxRewriteError", "RefusedError", "RuleDefinitionError"} <= set(outcomes)
    assert outcomes.count("success") < 100


def check_no_trace(seed: int) -> str:
    """A plan that failed, then one that succeeds: the same graph, down to the names, as without the failure."""

    def build() -> tuple[fx.GraphModule, Plan, Plan]:
        rng = Random(seed)
        gm = random_graph(rng, writes=False)
        clean, faulty = random_rules(rng), faulty_members(rng)
        return gm, random_plan(rng, faulty), RuleSet("clean", *clean).once()

    gm, faulty, clean = build()
    try:
        faulty.apply(gm)
    except EXPECTED:
        clean.apply(gm)
        other, _, clean = build()
        clean.apply(other)
        assert gm.code == other.code
        assert [node.name for node in gm.graph.nodes] == [node.name for node in other.graph.nodes]
        return "failed"
    return "success"


def test_a_failure_leaves_no_trace_in_later_names() -> None:
    assert [check_no_trace(seed) for seed in range(120)].count("failed") >= 10


# Fixpoints that do not end, symbolic sizes, normalized graphs


def symbolic(rng: Random) -> fx.GraphModule:
    """A random graph as tracing gives it: ATen overloads, symbolic sizes."""
    gm = random_module(rng, size=rng.randint(2, 8), draws=False)
    traced = make_fx(gm, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs())
    for line, node in enumerate(traced.graph.nodes):
        node.meta["stack_trace"] = f'  File "model.py", line {line}, in forward\n'
    return traced


def guards(gm: fx.GraphModule) -> tuple[int, int, int, int]:
    shape_env = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
    counts = (shape_env.guards, shape_env.axioms, shape_env.replacements, shape_env.divisible)
    return tuple(map(len, counts))  # pyright: ignore[reportReturnType]


def check_guards(rng: Random) -> int:
    gm = symbolic(rng)
    before, counted = frozen(gm), guards(gm)
    expected = [tensor.clone() for tensor in gm(*inputs())]
    never = where.predicate("root", text="never")(lambda root: False)
    sizes = (where.divisible("root", 0, 2), where.shape_eq("root", "root"), where.divisible("root", -1, 3))
    idle = [Rule(r.id, Pattern(r.pattern.outputs, (*sizes, never)), r.body) for r in random_rules(rng)]
    assert RuleSet("idle", *idle).apply(gm).rewrites == 0
    assert_same(before, gm)
    assert guards(gm) == counted
    plan = RuleSet("active", *random_rules(rng)).once()
    report = plan.apply(gm)
    gm.graph.lint()
    assert guards(gm) == counted
    for old, new in zip(expected, gm(*inputs()), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert_new_nodes_are_complete(gm, {row[0] for row in before.rows}, plan, values=True)
    return report.rewrites


@given(chance)
@settings(budget, max_examples=25)
def test_plans_add_no_guards_to_symbolic_graphs(rng: Random) -> None:
    check_guards(rng)


def test_rewrites_of_symbolic_graphs_happen() -> None:
    assert sum(check_guards(Random(seed)) for seed in range(20)) >= 8
