"""`torch.fx.subgraph_rewriter` by rules: the same functions and results, in a transaction that checks what it does.

    from fxrewrite.adapters.subgraph_rewriter import replace_pattern

Differences: a call matches in all of its spellings; commuted operands match; a match across a write, and one whose
replacement draws other random numbers, are refused, with a line in the log; new nodes have fake values and sources.
Source: PyTorch, torch/fx/subgraph_rewriter.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import Match, ReplacedPatterns

from fxrewrite.adapters.traced import as_it_is, correspondence, insert, outputs_of, placeholders, terms
from fxrewrite.errors import Reason, RuleDefinitionError, refuse
from fxrewrite.match import Match as Found
from fxrewrite.pattern import Capture, Ignore, Pattern
from fxrewrite.pattern.terms import subterms
from fxrewrite.plan import RuleSet
from fxrewrite.rule import Rule

__all__ = ["Match", "ReplacedPatterns", "pattern_rule", "replace_pattern", "replace_pattern_with_filters"]

_log = logging.getLogger(__name__)
Source = Callable[..., Any] | fx.GraphModule | fx.Graph
Filter = Callable[[InternalMatch, fx.Graph, fx.Graph], bool]
Callback = Callable[[InternalMatch, fx.Graph, fx.Graph], fx.Graph]


def replace_pattern(gm: fx.GraphModule, pattern: Source, replacement: Source) -> list[Match]:
    """Replaces all matches of `pattern` that do not overlap, in one transaction; returns them in graph order.

    Args:
        gm: rewritten in place; on any exception its graph is as before.
        pattern: a function or a traced module; its parameters capture values, and Python values too.
        replacement: of the same parameters, by position.

    Raises:
        RuleDefinitionError: the pattern or the replacement is wrong as written; see `pattern_rule`.
    """
    return [Match(one.anchor, one.nodes_map) for one in replace_pattern_with_filters(gm, pattern, replacement)]


def replace_pattern_with_filters(
    gm: fx.GraphModule,
    pattern: Source,
    replacement: Source | None = None,
    match_filters: list[Filter] | None = None,
    ignore_literals: bool = False,
    replacement_callback: Callback | None = None,
    node_name_match: str = "",
) -> list[ReplacedPatterns]:
    """Replaces the matches of `pattern` that all filters accept, in one transaction; returns them in graph order.

    Args:
        gm: rewritten in place; on any exception its graph is as before.
        pattern: a function, a graph or a traced module.
        replacement: of the same parameters, by position.
        match_filters: called with (match, graph of `gm`, graph of the pattern).
        ignore_literals: whether Python values of the pattern match any others.
        replacement_callback: makes the replacement's graph for each match, called as a filter is.
        node_name_match: if not empty, only matches in which a node's name contains it.

    Raises:
        RuleDefinitionError: the pattern or the replacement is wrong as written; see `pattern_rule`.
    """
    done: list[ReplacedPatterns] = []
    rule = pattern_rule(
        pattern,
        replacement,
        match_filters=match_filters,
        ignore_literals=ignore_literals,
        replacement_callback=replacement_callback,
        node_name_match=node_name_match,
        done=done,
    )
    report = RuleSet("subgraph_rewriter", rule).once(order="bottom_up").apply(gm)
    for refusal in report.refusals:
        if refusal.kind not in (Reason.CONSTRAINT, Reason.OVERLAP):
            _log.warning("%s", refusal)
    left = set(gm.graph.nodes)
    return [one for one in done if one.anchor not in left]  # a check may refuse what a replacement made


def pattern_rule(
    pattern: Source,
    replacement: Source | None = None,
    *,
    id: str = "subgraph_rewriter.replace",  # noqa: A002
    match_filters: list[Filter] | None = None,
    ignore_literals: bool = False,
    replacement_callback: Callback | None = None,
    node_name_match: str = "",
    done: list[ReplacedPatterns] | None = None,
    **promises: Any,
) -> Rule:
    """Returns the rule that `replace_pattern_with_filters` applies, to explain, verify, or put into a plan.

    Args:
        pattern, replacement, match_filters, ignore_literals, replacement_callback, node_name_match: as there.
        id: of the rule.
        done: where the replaced matches are noted.
        promises: `numerics`, `rng`, `domain` and others of `Rule`; by default approximate, with shapes that may change.

    Raises:
        RuleDefinitionError: a function cannot be traced, a parameter of the pattern is unused, the number of parameters
            or of results differs, or neither a replacement nor a callback is given.
    """
    wanted = _graph(pattern)
    inputs = placeholders(wanted)
    made = None if replacement is None else _replacement_graph(replacement, wanted)
    if made is None and replacement_callback is None:
        raise RuleDefinitionError("replace_pattern_with_filters takes a replacement, or a replacement_callback")
    captures = {node: Capture(node.name, "any") for node in inputs}
    found = terms(wanted, captures, _ignored if ignore_literals else as_it_is)
    used = {term for output in found for term in subterms(output)}
    unused = [node.name for node in inputs if captures[node] not in used]
    if unused:
        raise RuleDefinitionError(
            f"the pattern does not use its parameters {', '.join(unused)}; leave them out of both"
        )

    key = object()

    def body(match: Found) -> Any:
        made_here = match.edit.shared(key, set[fx.Node])
        if not made_here.isdisjoint(match.nodes):
            refuse(
                "it holds what a match was replaced by; matches are those of the graph as it was", kind=Reason.OVERLAP
            )
        given = {node: match[node.name] for node in inputs}
        at = _as_internal(match, wanted, given)
        graph = match.edit.graph
        unwritten = [node.name for node, value in given.items() if value is None and not _writes_none(match.nodes)]
        if unwritten:
            refuse(f"the call does not say {', '.join(unwritten)}, whose default is None", kind=Reason.CONSTRAINT)
        if node_name_match and not any(node_name_match in node.name for node in match.nodes):
            refuse(f"no node of the match is named {node_name_match}", kind=Reason.CONSTRAINT)
        for accepts in match_filters or ():
            if not accepts(at, graph, wanted):
                refuse(f"the filter {getattr(accepts, '__name__', accepts)} refused the match", kind=Reason.CONSTRAINT)
        source = replacement_callback(at, graph, wanted) if replacement_callback else made
        assert source is not None
        _check_outputs(source, wanted)
        mark = match.edit.num_changes
        results = insert(source, dict(zip(placeholders(source), given.values(), strict=True)), match)
        new = match.edit.new_since(mark)
        made_here.update(new)
        if done is not None:
            done.append(ReplacedPatterns(match.outputs[0], at.nodes_map, new))
        return tuple(results) if len(results) > 1 else results[0]

    said: dict[str, Any] = {"numerics": "approximate", "shapes": "changes", **promises}
    return Rule(id, Pattern(found), body, **said)


def _replacement_graph(replacement: Source, wanted: fx.Graph) -> fx.Graph:
    """The replacement, with as many parameters and results as the pattern."""
    made = _graph(replacement)
    has, needs = len(placeholders(made)), len(placeholders(wanted))
    if has != needs:
        raise RuleDefinitionError(f"the replacement has {has} parameters, the pattern {needs}; they go by position")
    _check_outputs(made, wanted)
    return made


def _as_internal(match: Found, wanted: fx.Graph, given: dict[fx.Node, Any]) -> InternalMatch:
    """The match as torch's subgraph rewriter gives it to filters and callbacks."""
    nodes = correspondence(wanted, given, match, values=False)
    if isinstance(nodes, str) and wanted.find_nodes(op="call_module"):
        refuse(nodes, kind=Reason.CONSTRAINT)
    at = InternalMatch(anchors=[match.outputs[0]])
    at.nodes_map = given if isinstance(nodes, str) else nodes
    at.placeholder_nodes = list(given.values())
    at.returning_nodes = list(match.outputs)
    at.name_node_map = {}
    return at


def _check_outputs(made: fx.Graph, wanted: fx.Graph) -> None:
    gives, needs = len(outputs_of(made)), len(outputs_of(wanted))
    if gives != needs:
        raise RuleDefinitionError(f"the replacement returns {gives} values, the pattern {needs}; they go by position")


def _writes_none(nodes: Iterable[fx.Node]) -> bool:
    return any(argument is None for node in nodes for argument in (*node.args, *node.kwargs.values()))


def _ignored(*_: Any) -> Any:
    return Ignore()


def _graph(source: Source) -> fx.Graph:
    """The graph of a function, a module, or a graph."""
    if isinstance(source, fx.GraphModule):
        return source.graph
    return source if isinstance(source, fx.Graph) else fx.symbolic_trace(source).graph
