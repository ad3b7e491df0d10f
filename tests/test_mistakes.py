"""What an author of rules does wrong is an error that says what, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from fxrewrite import FxRewriteError, Pattern, Plan, Rule, RuleSet, cap, op, rule
from fxrewrite.backends import capture
from fxrewrite.ops import communicates
from fxrewrite.spmd import LayoutRule, Parallelism, Partial, Shard, Stored, param, sends
from fxrewrite.testing import simulate

NEG = Pattern((op("neg", cap("x")),))
SCHEMA = "(Tensor x, str group) -> Tensor"
DROP = Rule("signs.drop_two", Pattern((op("neg", op("neg", cap("x"))),)), lambda x: x)
SIGNS = RuleSet("signs", DROP)
PLAN = SIGNS.once()


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: torch.neg(torch.neg(x)))


def branches(x: Any) -> Any:
    return torch.neg(x) if x.sum() > 0 else x


def picky(x: Any) -> Any:
    if x.shape[1] != 3:
        raise ValueError("three columns")
    return torch.neg(x)


def negate(replacement: Callable[..., Any], **options: Any) -> RuleSet:
    """A set of a rule that replaces each `neg`."""
    return RuleSet("signs", Rule("signs.negate", NEG, replacement, **options))


class Reads:
    """A step that reads an attribute of the context."""

    name = "reads"

    def run(self, edit: Any, context: Any, report: Any) -> int:
        return context.axis

    def text(self) -> str:
        return "reads the axis"


def layout_rule(op: str, notation: str, **options: Any) -> LayoutRule:
    return LayoutRule("mine.rule", (op,), notation, **options)


MINE = Parallelism("mine", axis="tp")


NORMS = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
LATER, OF_NORM = param("*", but="0.*"), param("1.running_mean")


def simulated(plan: Any, mesh: Any) -> object:
    return simulate(torch.nn.Linear(2, 2), {"input": torch.rand(2, 2)}, plan, mesh)


def under_no_grad(x: Any) -> Any:
    with torch.no_grad():
        y = torch.tanh(x)
    return x + y


def under_autocast(x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.matmul(x, x).float()


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "join a plan": (lambda: SIGNS | PLAN, "a | b puts the rules of two sets into one sweep.* write a >> b"),
    "join to a plan": (lambda: PLAN | SIGNS, "a | b puts the rules of two sets into one sweep.* write a >> b"),
    "join a number": (lambda: SIGNS | 3, r"signs \| 3: a set is joined with a RuleSet or a Rule"),
    "then a number": (lambda: PLAN >> 3, "after a plan comes a RuleSet, a Rule or a Plan, not 3"),
    "export a graph": (lambda: PLAN.apply_export(graph()), r"takes an ExportedProgram.* there are plan.apply\(gm\)"),
    "commit numbers": (lambda: PLAN.commit(graph(), [1, 2]), r"commit takes what plan.find\(gm\) gave.*, not 1"),
    "commit a number": (lambda: PLAN.commit(graph(), 3), r"commit takes what plan.find\(gm\) gave.*, not 3"),
    "find in a model": (lambda: PLAN.find(torch.nn.ReLU()), "find takes an fx.GraphModule, not ReLU"),
    "explain a model": (lambda: DROP.explain(torch.nn.ReLU()), "explain takes an fx.GraphModule, not ReLU"),
    "explain a model in a plan": (
        lambda: PLAN.explain(torch.nn.ReLU(), DROP),
        r"explain takes an fx.GraphModule, not ReLU; .* for a model torch.compile",
    ),
    "explain a rule misspelt": (
        lambda: PLAN.explain(graph(), "signs.drop_to"),
        "no rule 'signs.drop_to'; did you mean signs.drop_two",
    ),
    "a rule twice in a list": (
        lambda: RuleSet("s", DROP, DROP),
        r"set s: signs.drop_two is listed twice; leave one of them out",
    ),
    "expect a rule misspelt of a set": (lambda: SIGNS.expect("signs.drop_to"), "did you mean signs.drop_two"),
    "copy a model": (lambda: PLAN.applied(torch.nn.ReLU()), "applied takes an fx.GraphModule, not ReLU"),
    "no such report": (
        lambda: PLAN.apply(graph())["zzz"],
        "the report has no rule or step 'zzz'; there are signs.drop",
    ),
    "a report misspelt": (lambda: PLAN.apply(graph())["signs.drop_to"], "; did you mean signs.drop_two"),
    "after nothing": (
        lambda: RuleSet("s", DROP, Rule("signs.c", NEG, lambda x: x, after=["signs.drop_to"])),
        "set s: rule signs.c is to run after 'signs.drop_to', which the set lacks; did you mean signs.drop_two",
    ),
    "a plan of rules": (lambda: Plan((DROP,)), "a plan is made of rule sets: write RuleSet"),
    "expect a word": (lambda: PLAN.expect("signs.drop_two", at_least="x"), "at_least='x'.: a number of changes, at"),
    "expect nothing": (
        lambda: PLAN.expect("signs.drop_two", at_least=0),
        "at_least=0.: a number of changes, at least 1",
    ),
    "expect a rule misspelt": (lambda: PLAN.expect("signs.drop_to"), "no rule or step 'signs.drop_to'; did you mean"),
    "a constant": (
        lambda: negate(lambda x: x * torch.ones(2)).apply(graph()),
        r"signs.negate: a replacement used a tensor that is not a value of the graph \(float32\[2\]\).*, at %neg_1",
    ),
    "inputs without names": (
        lambda: simulate(torch.nn.Linear(2, 2), [torch.rand(2, 2)], MINE, {"tp": 2}),  # pyright: ignore[reportArgumentType]
        "inputs are arguments by name, {'x': tensor}, not a list",
    ),
    "a mode in a replacement": (
        lambda: negate(under_no_grad).apply(graph()),
        r"signs.negate: a replacement calls .*tanh.* as under torch.no_grad\(\).*; write x.detach\(\) .*, at %neg_1",
    ),
    "stored as a sum": (lambda: Stored(Partial()), r"Stored\(Partial\(.*\)\): what is stored in shards is stated as"),
    "a mode in a pattern": (
        lambda: rule("signs.none")(under_no_grad),
        r"rule signs.none: pattern under_no_grad: a pattern calls .*tanh in a mode of its own, .*; match detach",
    ),
    "a cast that autocast makes": (
        lambda: negate(under_autocast).apply(graph()),
        r"signs.negate: a replacement calls .*matmul in a mode of its own.* and casts as x.to\(dtype\), at %neg_1",
    ),
    "two values for one": (
        lambda: RuleSet(
            "signs", Rule("signs.double", Pattern((op("mul", cap("x"), 2),)), lambda x: (x, x), shapes="changes")
        ).apply(fx.symbolic_trace(lambda x: x * 2)),
        r"signs.double: the replacement returned \(x, x\); expected one value of the graph, at %mul",
    ),
    "no such capture": (
        lambda: negate(lambda match: match["y"]).apply(graph()),
        r"signs.negate: match\['y'\]: the pattern captures nothing of that name; it captures x",
    ),
    "a pattern that branches": (
        lambda: rule("signs.branch")(branches),
        "rule signs.branch: pattern branches: a pattern cannot branch on a value; write a rule for each case",
    ),
    "no such operator": (lambda: op("sigmod", cap("x")), "there is no operator 'sigmod'; did you mean sigmoid"),
    "no such library": (lambda: op("vlm::norm", cap("x")), "nothing .* imported so far defines operators of 'vlm', so"),
    "another library": (
        lambda: op("all_reduce"),
        "no operator 'all_reduce'; did you mean _c10d_functional::all_reduce",
    ),
    "a rule that grows": (
        lambda: negate(lambda x: torch.neg(torch.relu(x))).fixpoint(limit=2).apply(graph()),
        r"fired signs.negate \(2\): its result holds its own pattern \(run the set .once\(\), or bound the rule",
    ),
    "a context of a step": (
        lambda: RuleSet("s", Reads()).apply(graph(), context={"axis": 1}),
        r"reads: it reads context.axis, which the dict in apply\(gm, context=...\) does not have; the graph is as b",
    ),
    "no context of a step": (
        lambda: RuleSet("s", Reads()).apply(graph()),
        r"reads: 'NoneType' object has no attribute 'axis'; no context was given, as in apply\(gm, context=...\)",
    ),
    "a context of a replacement": (
        lambda: negate(lambda match: match.context.axis).apply(graph(), context={"axis": 1}),
        "signs.negate: the replacement raised AttributeError at %neg_1: it reads context.axis, which the dict in apply",
    ),
    "an operator's tuple for two outputs": (
        lambda: Rule(
            "signs.both", Pattern((torch.sin(cap("x")), torch.cos(cap("x")))), lambda x: torch.max(x, 0)
        ).verify(samples=4),
        r"signs.both: the replacement returned .*; the call gives them as one value: return result\[0\], result\[1\]",
    ),
    "a layout rule of nothing": (
        lambda: layout_rule("aten::reluu", "b... -> b..."),
        "layout rule mine.rule: there is no operator 'aten::reluu'; did you mean aten::relu",
    ),
    "a layout rule with too many operands": (
        lambda: layout_rule("aten::relu", "b..., c -> b..."),
        "layout rule mine.rule: 'b..., c -> b...' has 2 operands, and aten::relu takes 1 tensors; write one operand",
    ),
    "a layout rule with too few operands": (
        lambda: layout_rule("aten::linear", "b... i -> b... i"),
        "layout rule mine.rule: 'b... i -> b... i' has 1 operands, and aten::linear takes 3 tensors; write one operand",
    ),
    "a layout rule that is not one": (
        lambda: layout_rule("aten::relu", "b..."),
        "layout rule mine.rule: index notation",
    ),
    "a layout rule of no argument": (
        lambda: layout_rule("aten::view", "b... -> b...", shape_arg="shape"),
        "layout rule mine.rule: aten::view has no argument 'shape'; it has self, size",
    ),
    "a layout rule of no length": (
        lambda: layout_rule("aten::split", "b... -> b...", length_args=("split_sizess",)),
        "layout rule mine.rule: aten::split has no argument 'split_sizess'; did you mean split_sizes",
    ),
    "a layout rule with a mark in front": (
        lambda: layout_rule("aten::relu", "?b... -> b..."),
        r"layout rule mine.rule: index notation '\?b... -> b...': '\?b...' is not an index",
    ),
    "a default of a capture": (
        lambda: rule("signs.scaled")(lambda x, k=2: torch.neg(x) * k),
        "parameter k is a capture, and its default 2 is not read; write that value in the pattern, or k: Literal",
    ),
    "a layout rule of an overload": (
        lambda: LayoutRule("mine.rule", (torch.ops.aten.relu.default,), "b... -> b..."),
        r'layout rule mine.rule: ops has <OpOverload\(.*; an operator is named, "aten::relu"',
    ),
    "a layout rule that says nothing": (
        lambda: LayoutRule("mine.rule", ("aten::relu",), None),
        "layout rule mine.rule: None is neither a notation nor a function of a call",
    ),
    "a layout rule without a name": (
        lambda: LayoutRule("", ("aten::relu",), "b... -> b..."),
        "a layout rule has a name, as in layout.relu, not ''",
    ),
    "padding that is not zeros": (
        lambda: layout_rule("aten::relu", "b... -> b...", neutral="zero"),
        "layout rule mine.rule: neutral='zero' is neither 'zeros' nor a function",
    ),
    "a move to an index that is not there": (
        lambda: layout_rule("aten::relu", "b !s -> b s", move_to=("h",)),
        "layout rule mine.rule: move_to names 'h', and no operand of 'b !s -> b s' has it",
    ),
    "a move to an index that must be whole": (
        lambda: layout_rule("aten::relu", "b !s -> b s", move_to=("s",)),
        "layout rule mine.rule: move_to names 's', which must be whole by 'b !s -> b s'; name an index",
    ),
    "a layout rule with too many results": (
        lambda: layout_rule("aten::relu", "b... -> b..., b..."),
        "layout rule mine.rule: 'b... -> b..., b...' has 2 results, and aten::relu gives 1",
    ),
    "parts without their operator": (
        lambda: layout_rule("aten::relu", "b... -> b...", parts=lambda args: args["self"]),
        "layout rule mine.rule: parts has a function for each operator, {'aten::relu': function}, and is <function",
    ),
    "a parallelism over no axis": (
        lambda: Parallelism("mine", axis=None),
        "a parallelism has a name and the name of its axis, not axis=None",
    ),
    "a place that is a list": (
        lambda: Parallelism("mine", axis="tp", place=[(param("weight"), Shard(0))]),  # pyright: ignore[reportArgumentType]
        r"mine: place maps sites to placements, \{param\(...\): Shard\(0\)\}, not \[",
    ),
    "a frozen model": (
        lambda: simulate(torch.nn.Linear(2, 2).requires_grad_(False), {"input": torch.rand(2, 2)}, MINE, {"tp": 2}),
        r"nothing requires a gradient, so there is no step to train; call model.requires_grad_\(\)",
    ),
    "a function for a model": (
        lambda: simulate(torch.neg, {"input": torch.rand(2, 2)}, MINE, {"tp": 2}),  # pyright: ignore[reportArgumentType]
        "the model is a .*, and a plan places parameters by name: pass an nn.Module",
    ),
    "inputs that the model does not take": (
        lambda: simulate(torch.nn.Linear(2, 2), {"x": torch.rand(2, 2)}, MINE, {"tp": 2}),
        r"the inputs are not those of Linear.forward\(input: .*: missing a required argument: 'input'",
    ),
    "a layout rule for an operator of ATen": (
        lambda: simulated(Parallelism("mine", axis="tp", layouts=[layout_rule("aten::relu", "a -> a")]), {"tp": 2}),
        "layout rule mine.rule: aten::relu has one already, .* of 'aten'; leave out yours",
    ),
    "a buffer in shards": (
        lambda: simulate(
            torch.nn.BatchNorm1d(2), {"input": torch.rand(2, 2)}, replace(MINE, place={param("*"): Shard(0)}), {"tp": 2}
        ),
        r"param\('\*'\): S\(0\) matches running_mean, a buffer, which every rank holds whole; leave buffers out, as "
        r"param\('\*', but='\{running_mean,running_var,num_batches_tracked\}'\), or make it a parameter",
    ),
    "buffers of layers in shards": (
        lambda: simulate(NORMS, {"input": torch.rand(2, 2)}, replace(MINE, place={LATER: Shard(0)}), {"tp": 2}),
        r"leave buffers out, as param\('\*', but='\{0.\*,\*.running_mean,\*.running_var,\*.num_batches_tracked\}'\)",
    ),
    "only a buffer in shards": (
        lambda: simulate(NORMS, {"input": torch.rand(2, 2)}, replace(MINE, place={OF_NORM: Shard(0)}), {"tp": 2}),
        "matches 1.running_mean, a buffer, .* whole; remove this entry of place, or make it a parameter",
    ),
    "an operator that communicates over a group of another name": (
        lambda: communicates(torch.library.custom_op("mine::send", lambda x: x, mutates_args=(), schema=SCHEMA), print),
        "mine::send.* communicates; name the argument of its process group group_name",
    ),
    "a plan that is a list": (lambda: simulated([MINE], {"tp": 2}), "the plan is a list; pass a Parallelism, or sev"),
    "a mesh that is a number": (lambda: simulated(MINE, 2), "the mesh is a int; pass a DeviceMesh, or for simulated"),
    "a mesh without numbers": (lambda: simulated(MINE, {"tp": "2"}), "'2' is not a number of ranks; pass an int"),
    "a glob that is None": (lambda: param(None), r"param\(None\): a glob is a text, as in param\('"),
    "a dimension that is a text": (
        lambda: simulated(Parallelism("mine", axis="tp", place={param("weight"): Shard("0")}), {"tp": 2}),
        r"weight: Shard\('0'\): a dimension is an int",
    ),
    "a number of collectives that is a bool": (
        lambda: sends(all_reduce=True),
        "sends: all_reduce=True is not a number of collectives",
    ),
    "a number of collectives that is a text": (
        lambda: sends(all_reduce="1"),
        "sends: all_reduce='1' is not a number of collectives",
    ),
    "capture of a number": (lambda: capture(3, {}), "the model is a int; pass a module or a function"),
    "capture of a model that raises": (
        lambda: capture(torch.nn.Linear(3, 3), {"input": torch.rand(2, 4)}),
        r"the model raises on these inputs: RuntimeError\('a and b must have same reduction dim.*'\)",
    ),
    "capture of a model that raises an error of its own": (
        lambda: capture(picky, {"x": torch.rand(2, 4)}),
        r"the model raises on these inputs: ValueError\(.*'three columns'.*\) at test_mistakes.py:\d+",
    ),
    "an id that is a function": (lambda: rule(lambda x: x), "write @rule"),  # pyright: ignore[reportArgumentType]
    "an id of two words": (lambda: rule("a b")(lambda x: torch.relu(x)), "not the id of a rule"),
    "constraints that are a text": (
        lambda: rule("a.b", where="rank(x) == 4")(lambda x: torch.relu(x)),  # pyright: ignore[reportArgumentType]
        "takes a list of constraints",
    ),
    "a pattern that is a text": (lambda: Pattern("relu(x)"), "takes tuples"),  # pyright: ignore[reportArgumentType]
    "rules in a list": (lambda: RuleSet("s", [DROP]), "one by one"),
    "a set without a name": (lambda: RuleSet(DROP, DROP), "takes a name"),  # pyright: ignore[reportArgumentType]
    "no rounds": (lambda: SIGNS.fixpoint(0), "at least one"),
    "rounds that are a text": (lambda: SIGNS.fixpoint("a"), r"fixpoint\(limit='a'\): a number of rounds"),
    "nothing to apply to": (lambda: PLAN.apply(None), "takes an fx.GraphModule, not NoneType"),
    "an invariant that does not hold": (
        lambda: RuleSet("s", DROP, invariant=lambda nodes: False).apply(graph()),
        "the invariant gave False",
    ),
    "an invariant that raises": (
        lambda: RuleSet("s", DROP, invariant=lambda nodes: 1 / 0).apply(graph()),
        "set s: the invariant raised ZeroDivisionError: division by zero; the graph is as before",
    ),
    "a layout rule of a text": (
        lambda: LayoutRule("mine.rule", "aten::relu", "b... -> b..."),  # pyright: ignore[reportArgumentType]
        "layout rule mine.rule: ops is a tuple of keys",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_do(name: str) -> None:
    do, message = MISTAKES[name]
    with pytest.raises(FxRewriteError, match=message):
        do()


def test_a_rule_alone_in_its_set_may_name_others() -> None:
    """So it can be tested, verified and reused by itself."""
    alone = Rule("signs.alone", NEG, lambda x: x, after=["signs.drop_two"])
    assert RuleSet("one", alone).apply(graph()).rewrites == 2


def test_a_layout_rule_may_leave_out_what_may_be_absent() -> None:
    layout_rule("aten::linear", "b... i, o i, +o? -> b... o")
    layout_rule("aten::add", "b... -> b...")  # add.Scalar, with one tensor
    layout_rule("aten::cat", "a b, a c -> a d")  # a list of tensors
