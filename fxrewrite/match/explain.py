"""Explains why a pattern does not match: the same conditions, evaluated one by one up to the first failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason
from fxrewrite.graph.source import with_source
from fxrewrite.match.finish import Failure, complete, failed
from fxrewrite.match.lower import Variant, lower
from fxrewrite.match.match import Match
from fxrewrite.match.values import Candidate, Path
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import OF_PARTS, LiteralValue, Op, subterms


@dataclass(frozen=True, slots=True)
class Miss:
    """How far a pattern got at one root, in the reading that got furthest."""

    root: fx.Node
    failure: Failure
    num_conditions: int

    def __str__(self) -> str:
        where = with_source(self.root)
        hint = f"; {self.hint}" if self.hint else ""
        return f"at {where}: {self.failure.passed} of {self.num_conditions} conditions hold, then {self.failure}{hint}"

    @property
    def reason(self) -> Reason:
        """The kind of condition that failed."""
        return self.failure.reason

    @property
    def hint(self) -> str:
        """What would make the pattern match, if that is known; else empty."""
        instead = self.failure.instead
        if self.reason is Reason.OPERATOR and instead is not None:
            if ops.is_view(instead) or ops.has_trait(instead, "same", "cast", "detach"):
                return f"allow %{instead.name} with maybe() or chain(), or run rules.canonical.normal_forms first"
            return ""
        if self.reason is Reason.OPERATOR and self.failure.found.startswith("["):
            return OF_PARTS
        is_input = instead is not None and instead.op == "placeholder"
        if self.reason is Reason.CAPTURE and is_input and self.failure.expected.startswith("a parameter"):
            return _INPUT
        if self.reason is Reason.CONSTRAINT and "no value in its metadata" in self.failure.found:
            return "the graph was traced without values; torch.compile, torch.export and make_fx leave them on it"
        return _HINTS.get(self.reason, "")


_INPUT = (
    "graphs behind autograd, and the graph of an exported program alone, do not tell parameters from inputs: run the "
    "plan by plan.backend(...), pre_grad or plan.apply_export"
)
_HINTS = {
    Reason.ARGUMENTS: "mention the argument in the pattern, or allow any with loose()",
    Reason.LITERAL: "capture it with Literal, or ignore it with ...",
    Reason.OUTSIDE_USER: "allow the other user with shared(); the value is then computed for it as before",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the matcher saw of one pattern in one graph.

    Attributes:
        num_matches: roots at which the pattern matches.
        num_anchors: nodes that call the operator of the pattern's first output.
        misses: the roots at which it does not match, closest to a match first.
        root_keys: the operators that the first output may have.
        writing: calls of operators that write, whose functional form the pattern names.
        instead: what the graph has instead of that operator, if it is known; else empty.
    """

    pattern: Pattern
    num_matches: int
    num_anchors: int
    misses: tuple[Miss, ...]
    root_keys: tuple[str, ...]
    writing: tuple[fx.Node, ...] = ()
    instead: str = ""

    @property
    def nearness(self) -> float:
        """The part of the conditions that held where the pattern came nearest to a match; 0 without a root."""
        return max((miss.failure.passed / miss.num_conditions for miss in self.misses), default=0)

    def __str__(self) -> str:
        lines = [
            f"{self.pattern}",
            f"{self.num_matches} of {self.num_anchors} nodes {' or '.join(self.root_keys)} match",
        ]
        if not self.num_anchors:
            lines.append(f"the graph has no node {' or '.join(self.root_keys)}{self.instead}")
        if self.writing:
            first = self.writing[0]
            lines.append(
                f"%{first.name} calls {ops.key(first)}, which writes; functional() matches what it becomes where "
                'graphs are made functional: run the plan there, as by in_inductor("post_grad_pre")'
            )
        lines += [str(miss) for miss in self.misses[:3]]
        if len(self.misses) > 3:
            lines.append(f"and {len(self.misses) - 3} more")
        return "\n".join(lines)


def explain(pattern: Pattern, nodes: Iterable[fx.Node]) -> Explanation:
    """Evaluates the conditions of the pattern at every node that has the operator of its first output."""
    nodes, variants = list(nodes), lower(pattern)
    keys = tuple(dict.fromkeys(variant.root_key for variant in variants))
    functional = _functional(pattern)
    matches = 0
    misses: list[Miss] = []
    writing: list[fx.Node] = []
    for node in nodes:
        key = ops.key(node)
        if key in functional:
            writing.append(node)
        if key not in keys:
            continue
        readings = [
            reading for variant in variants if variant.root_key == key for reading in _readings(pattern, variant, node)
        ]
        if any(isinstance(result, Match) for result, _ in readings):
            matches += 1
        else:
            failures = [Miss(node, result, total) for result, total in readings if isinstance(result, Failure)]
            misses.append(max(failures, key=lambda miss: miss.failure.passed / miss.num_conditions))
    misses.sort(key=lambda miss: -miss.failure.passed / miss.num_conditions)
    instead = "" if matches or misses else _instead(keys, nodes)
    return Explanation(pattern, matches, matches + len(misses), tuple(misses), keys, tuple(writing), instead)


def _instead(keys: Sequence[str], nodes: Sequence[fx.Node]) -> str:
    """Returns what the graph has in place of the operators: the same in place, modules that call them, or parts."""
    called = dict.fromkeys(map(ops.key, nodes))
    writing = next((f"{key}_" for key in keys if f"{key}_" in called), "")
    if writing:
        return (
            f'; it has {writing}, which writes: normalize(gm), plan.backend(..., graph="aten") and the slots of '
            "inductor behind pre_grad have functional graphs"
        )
    modules = [ops.key(node) for node in nodes if node.op == "call_module"]
    if modules:
        is_module = any(key.startswith("torch.nn.modules.") for key in keys)
        return (
            ""
            if is_module
            else (
                f"; it calls modules, as {modules[0]}, and operators in them are not in this graph: trace the model by "
                "torch.export, torch.compile or make_fx, or match op(torch.nn.Linear, x)"
            )
        )
    if any(key.startswith("torch.nn.modules.") for key in keys):
        return "; only graphs of fx.symbolic_trace call modules, others have the functions that modules call"
    function = next((key for key in keys if key.startswith("torch.") and "::" not in key), "")
    if function and any(isinstance(node.target, torch._ops.OpOverload) for node in nodes):
        return (
            f"; it has ATen overloads, and {function} is not an operator but calls some: write these in the pattern, "
            "or run the plan on Dynamo's graph, by plan.backend(...)"
        )
    return ""


def _functional(pattern: Pattern) -> frozenset[str]:
    """Returns the operators that write whose functional form is in the pattern."""
    calls = (term for output in pattern.outputs for term in subterms(output) if isinstance(term, Op))
    parts = (part for call in calls for name, part in call.args if name == "_mutable_op")
    targets = (part.value for part in parts if isinstance(part, LiteralValue))
    return frozenset(ops.key(target) for target in targets)


def _readings(pattern: Pattern, variant: Variant, node: fx.Node) -> Iterator[tuple[Match | Failure, int]]:
    total = sum(map(len, variant.stages)) + sum(map(len, variant.lists)) + 1 + len(pattern.where)
    candidate = Candidate({Path.root(0): node})
    for count, condition in enumerate(variant.stages[0]):
        if not condition.holds(candidate):
            yield failed(condition, candidate, count, node), total
            return
    for result in complete(pattern, variant, candidate, len(variant.stages[0])):
        yield result, total
