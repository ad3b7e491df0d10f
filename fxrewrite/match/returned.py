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

__all__ = ["returned_nodes", "with_parts"]


def returned_nodes(returned: Any, pattern: Pattern, match: Match) -> tuple[list[Any], list[tuple[fx.Node, fx.Node]]]:
    """The nodes that a replacement returned, one for each output; for a list that it gives, a list of nodes.

    The second list has a pair (old, new) for each capture that the pattern gives as an output and that becomes another
    node.
    """
    if isinstance(returned, fx.Node) and len(match.outputs) == 1 and not match.missing and not pattern.through:
        return [returned], []
    passed = pattern.through
    number = len(match.outputs) + len(match.missing)
    several = number + len(passed) > 1
    results = list(returned) if several and isinstance(returned, (list, tuple)) else [returned]
    through: list[tuple[fx.Node, fx.Node]] = []
    if passed and len(results) != number + len(passed):
        results = []
    elif passed:
        pairs = [(match.captures[name], results[place]) for place, name in passed]
        through = [(old, new) for old, new in pairs if isinstance(old, fx.Node) and isinstance(new, fx.Node)]
        through = [(old, new) for old, new in through if old is not new]
        results = [result for place, result in enumerate(results) if place not in dict(passed)]
        if not all(old is new or (old, new) in through for old, new in pairs):
            results = []
    if len(results) == number:
        results = [result for place, result in enumerate(results) if place not in match.missing]
        kept = [output for place, output in enumerate(pattern.outputs) if place not in match.missing]
        # siblings are as many outputs as the graph has
        terms = kept if len(kept) == len(results) else [None] * len(results)
        for place, (old, term) in enumerate(zip(match.outputs, terms, strict=True)):
            items = results[place]
            if isinstance(items, (list, tuple)):  # a tuple is no result
                results[place] = list(items) if _is_list(old, term) else tuple(items)
    if len(results) != len(match.outputs) or not all(map(_is_result, results)):
        several_in_one = isinstance(returned, fx.Node) and isinstance(ops.value(returned), (list, tuple))
        hint = "; the call gives them as one value: return result[0], result[1] ..." if several_in_one else ""
        raise RuleDefinitionError(
            f"the replacement returned {returned!r}; expected "
            + (f"a tuple of {number + len(passed)} values of the graph" if several else "one value of the graph")
            + hint
        )
    return results, through


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
