"""What a replacement returned, as nodes of the graph: one for each output, or for each item of a list."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason, RuleDefinitionError, refuse
from fxrewrite.match.match import Match
from fxrewrite.match.same_value import check_parts
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Term, has_parts


def returned_nodes(returned: Any, pattern: Pattern, match: Match) -> tuple[list[Any], list[tuple[fx.Node, fx.Node]]]:
    """The nodes that a replacement returned, one for each output; for a list that it gives, a list of nodes.

    The second list has a pair (old, new) for each capture that the pattern passes on as an output, and that becomes
    another node.

    Raises:
        RuleDefinitionError: it returned another number of values, or something that is no value of the graph.
    """
    passed_captures = dict(pattern.through)
    if isinstance(returned, fx.Node) and len(match.outputs) == 1 and not match.missing and not passed_captures:
        return [returned], []
    num_outputs = len(match.outputs) + len(match.missing)
    expected = num_outputs + len(passed_captures)
    results = list(returned) if expected > 1 and isinstance(returned, (list, tuple)) else [returned]
    if passed_captures and len(results) != expected:
        raise _wrong_result(returned, expected)
    passed = [(match.captures[name], results[place]) for place, name in passed_captures.items()]
    if not all(old is new or (isinstance(old, fx.Node) and isinstance(new, fx.Node)) for old, new in passed):
        raise _wrong_result(returned, expected)
    results = [result for place, result in enumerate(results) if place not in passed_captures]
    if len(results) == num_outputs:
        results = _with_lists(results, pattern, match)
    if len(results) != len(match.outputs) or not all(map(_is_result, results)):
        raise _wrong_result(returned, expected)
    return results, [(old, new) for old, new in passed if old is not new]


def _with_lists(results: Sequence[Any], pattern: Pattern, match: Match) -> list[Any]:
    """The results for outputs that the match has; of an output that is a list, a list, and else no list is a result."""
    results = [result for place, result in enumerate(results) if place not in match.missing]
    terms: list[Any] = [output for place, output in enumerate(pattern.outputs) if place not in match.missing]
    if len(terms) != len(results):  # siblings are as many outputs as the graph has
        terms = [None] * len(results)
    return [
        (list(result) if _is_list(old, term) else tuple(result)) if isinstance(result, (list, tuple)) else result
        for result, old, term in zip(results, match.outputs, terms, strict=True)
    ]


def _wrong_result(returned: Any, expected: int) -> RuleDefinitionError:
    several_in_one = isinstance(returned, fx.Node) and isinstance(ops.value(returned), (list, tuple))
    hint = "; the call gives them as one value: return result[0], result[1] ..." if several_in_one else ""
    wanted = f"a tuple of {expected} values of the graph" if expected > 1 else "one value of the graph"
    return RuleDefinitionError(f"the replacement returned {returned!r}; expected {wanted}{hint}")


def with_parts(match: Match, results: Sequence[Any]) -> tuple[Match, list[fx.Node]]:
    """Returns the match with the parts of lists that the graph takes as outputs, and what these become.

    Raises:
        RefusedError: the lists have other lengths, or a reader does not say by a number which part it takes.
    """
    outputs: list[fx.Node] = []
    nodes = dict.fromkeys(match.nodes)
    found: list[fx.Node] = []
    for old, new in zip(match.outputs, results, strict=True):
        if not isinstance(new, list):
            outputs.append(old)
            found.append(new)
            continue
        check_parts(old, new)
        for user in old.users:
            why = _not_by_number(user, old, len(new))
            if why:
                refuse(why, hint="the replacement gives a list", node=user, kind=Reason.VALUE)
            if user.target is operator.getitem:
                outputs.append(user)
                nodes[user] = None
                index: Any = user.args[1]
                found.append(new[index])
    return replace(match, outputs=tuple(outputs), nodes=tuple(nodes)), found


def _is_result(found: Any) -> bool:
    return isinstance(found, fx.Node) or (isinstance(found, list) and all(isinstance(item, fx.Node) for item in found))


def _is_list(old: fx.Node, term: Term | None) -> bool:
    """Whether the value that is replaced is a list or a tuple."""
    value = ops.value(old)
    return isinstance(value, (list, tuple)) if value is not ops.MISSING else term is not None and has_parts(term)


def _not_by_number(user: fx.Node, old: fx.Node, count: int) -> str:
    """Returns why a reader of the list `old` cannot read `count` nodes in its place; empty if it can."""
    if user.op == "output":
        return f"the graph returns the list %{old.name} as one value"
    if user.op == "call_method" and user.args[0] is old:
        return f"%{user.name} calls the method {user.target} of the list %{old.name}"
    if user.target is not operator.getitem:
        return ""
    index = user.args[1]
    if type(index) is not int:
        return f"%{user.name} takes {index!r} of the list %{old.name}, which is not a number"
    return "" if -count <= index < count else f"%{user.name} takes number {index} of {count} values"
