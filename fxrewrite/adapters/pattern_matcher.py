"""Inductor's pattern matcher by rules: `register_replacement`, `register_graph_pattern` and `PatternMatcherPass`.

    from fxrewrite.adapters.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

A pass that was written for `torch._inductor.pattern_matcher` runs after this change of its import, and its patterns are
rules: `patterns.explain(gm)`, `patterns.report`, `patterns.rules.verify()`, `patterns.plan`.

Differences: a call matches in all of its spellings, and with commuted operands; `apply` is a transaction; what would
change random draws, or cross a write, is refused and in the report.
Source: PyTorch, torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    Arg,
    CallFunction,
    CallFunctionVarArgs,
    CallMethod,
    ExclusiveKeywordArg,
    Ignored,
    KeywordArg,
    ListOf,
    MultiOutputPattern,
    PatternExpr,
    RepeatedExpr,
    stable_topological_sort,
)

from fxrewrite.adapters.expressions import TranslatedPattern
from fxrewrite.adapters.handlers import Check, HandledRule, Handler, Match, inserted, refuse_unless
from fxrewrite.adapters.search import Search, Trace
from fxrewrite.backends.traces import fwd_only, joint_fwd_bwd
from fxrewrite.errors import Reason, RuleDefinitionError, refuse
from fxrewrite.match import Explanation, Match as Found
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.report import Report
from fxrewrite.rule import Rule

__all__ = [
    "MULTIPLE",
    "Arg",
    "CallFunction",
    "CallFunctionVarArgs",
    "CallMethod",
    "ExclusiveKeywordArg",
    "Ignored",
    "KeywordArg",
    "ListOf",
    "Match",
    "MultiOutputPattern",
    "PatternExpr",
    "PatternMatcherPass",
    "RepeatedExpr",
    "fwd_only",
    "joint_fwd_bwd",
    "register_graph_pattern",
    "register_lowering_pattern",
    "register_replacement",
    "stable_topological_sort",
]


def _always(_: Match) -> bool:
    return True


class PatternMatcherPass:
    """Patterns and what replaces them, in the order in which they were registered.

    Attributes:
        pass_name: part of the ids of its rules.
        report: what the last `apply` did and refused; None before.
    """

    def __init__(self, pass_name: str | None = None, subsystem: str | None = None) -> None:
        del subsystem
        self.pass_name = pass_name or "pattern_matcher"
        self.report: Report | None = None
        self._rules: list[Rule] = []

    @property
    def patterns(self) -> list[Rule]:
        """The rules, one for each registered pattern."""
        return self._rules

    @property
    def rules(self) -> RuleSet:
        """The patterns as a rule set."""
        return RuleSet(self.pass_name, *self._rules)

    @property
    def plan(self) -> Plan:
        """The patterns as a plan, for a backend or an inductor slot."""
        return self.rules.once()

    def apply(self, gm: fx.GraphModule | fx.Graph) -> int:
        """Rewrites the graph in one transaction, users first; returns the number of matches that were replaced.

        Raises:
            FxRewriteError: a pattern or a handler is wrong; the graph is as before.
        """
        module = gm.owning_module if isinstance(gm, fx.Graph) else gm
        if not isinstance(module, fx.GraphModule):
            raise RuleDefinitionError(f"apply takes a GraphModule, or the graph of one, not {gm!r}")
        if not self._rules:
            return 0
        self.report = self.plan.apply(module, bodies=False)
        return self.report.rewrites

    def explain(self, gm: fx.GraphModule) -> list[Explanation]:
        """Why each pattern does or does not match, in their order."""
        return [rule.explain(gm) for rule in self._rules]

    def clear(self) -> None:
        """Forgets all patterns."""
        self._rules.clear()

    def add(self, rule: Rule, *, prepend: bool = False) -> None:
        """Adds a rule, which any other engine's pass could not: one that `@rule` made, or an adapter."""
        self._rules.insert(0 if prepend else len(self._rules), rule)

    def _id(self, name: str) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_")
        known = {rule.id for rule in self._rules}
        ids = (f"{self.pass_name}.{name}{f'_{n}' * bool(n)}" for n in itertools.count())
        return next(one for one in ids if one not in known)

    def __str__(self) -> str:
        return str(self.rules)


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: Trace,
    pass_dicts: PatternMatcherPass | Sequence[PatternMatcherPass],
    extra_check: Check = _always,
    scalar_workaround: Mapping[str, float | int] | None = None,
    exclusive_arg_names: Sequence[str] = (),
    search_fn_pattern: PatternExpr | None = None,
    skip_duplicates: bool = False,
    pattern_name: str | None = None,
    get_decomp_fn: Callable[..., Any] | None = None,
    **promises: Any,
) -> bool:
    """Registers a replacement of what `search_fn` computes by what `replace_fn` does; both are traced.

    `search_fn` is traced on the examples, and on others of other sizes, so that numbers that are sizes are known. Where
    it matches, it is traced again for the shapes and dtypes there, and must be what the graph computes.

    Args:
        search_fn, replace_fn: of the same parameters, by position.
        example_inputs: tensors and numbers, also fake ones, for the parameters that `scalar_workaround` does not have.
        trace_fn: `fwd_only`, `joint_fwd_bwd`, or a function of these parameters around one of them.
        pass_dicts: where it is registered.
        extra_check: called with the `Match`; if false, it is not replaced.
        scalar_workaround: a number for each parameter that is no tensor: where it is in the trace, any.
        exclusive_arg_names: parameters no two of which may be one value.
        search_fn_pattern: the pattern, in place of the trace of `search_fn`; then sizes are not compared.
        skip_duplicates: whether a pattern that the pass has already is left out; else it is an error.
        pattern_name: the end of the rule's id; by default the name of `search_fn`.
        get_decomp_fn: returns the table of decompositions, for `trace_fn`.
        promises: `numerics`, `rng`, `domain`, `gradients` and others of `Rule`; by default approximate.

    Returns:
        False if it is a duplicate.

    Raises:
        RuleDefinitionError: a function cannot be traced, a parameter of `search_fn` is not in its graph, or it is there
            already.
    """
    passes = [pass_dicts] if isinstance(pass_dicts, PatternMatcherPass) else list(pass_dicts)
    wrong = [one for one in passes if not isinstance(one, PatternMatcherPass)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong:
        raise RuleDefinitionError(
            f"pass_dicts takes passes of this module, not {wrong[0]!r}; import its PatternMatcherPass"
        )
    options = {} if get_decomp_fn is None else {"get_decomp_fn": get_decomp_fn}
    search = Search(search_fn, example_inputs, trace_fn, dict(scalar_workaround or {}), options)
    pattern = TranslatedPattern(search_fn_pattern).pattern if search_fn_pattern is not None else search.pattern()
    for one in passes:
        if any(rule.pattern == pattern for rule in one.patterns):
            if skip_duplicates:
                return False
            raise RuleDefinitionError(f"{one.pass_name} has the pattern {pattern} already; say skip_duplicates=True")
    exclusive = tuple(exclusive_arg_names)

    def body(match: Found) -> Any:
        kwargs = {name: match.captures[name] for name in match.captures if name != "root"}
        given = [kwargs[name] for name in exclusive]
        if any(a is b for a, b in itertools.combinations(given, 2)):
            refuse(f"two of {', '.join(exclusive)} are one value", kind=Reason.CONSTRAINT)
        if search_fn_pattern is None:
            why = search.differs(match)
            if why:
                refuse(f"for these shapes {search.name} computes something else: {why}", kind=Reason.CONSTRAINT)
        refuse_unless(extra_check, Match(match, [], kwargs))
        gm = search.trace(replace_fn, match)
        args = [kwargs[name] for name in (*search.names, *search.tangents) if name in kwargs]
        return inserted(gm.graph, args, match)

    said: dict[str, Any] = {"numerics": "approximate", **promises}
    for one in passes:
        named = one._id(pattern_name or search.name)  # pyright: ignore[reportPrivateUsage]
        one.add(Rule(named, pattern, body, doc=getattr(replace_fn, "__name__", ""), **said))
    return True


def register_graph_pattern(
    pattern: PatternExpr,
    extra_check: Check = _always,
    *,
    pass_dict: PatternMatcherPass,
    prepend: bool = False,
    **promises: Any,
) -> Callable[[Handler], Handler]:
    """Decorator: where the pattern matches, the function is called with the `Match` and what was captured.

    It may call `match.replace_by_example`, or change the graph through `match.graph` and its nodes; an exception undoes
    what it did.

    Args:
        pattern: an expression.
        extra_check: called with the `Match`; if false, the handler is not called.
        pass_dict: where it is registered.
        prepend: whether it goes before all that are registered.
        promises: `numerics`, `rng`, `domain`, `gradients` and others of `Rule`; by default approximate, and without
            `terminates`: a pass runs a handler once at each node, so it may leave a match as it is, or match again.
    """
    reading = TranslatedPattern(pattern)
    said = {"numerics": "approximate", "shapes": "changes", "terminates": False, **promises}

    def register(handler: Handler) -> Handler:
        name = pass_dict._id(getattr(handler, "__name__", "handler"))  # pyright: ignore[reportPrivateUsage]
        pass_dict.add(HandledRule(name, reading, handler, extra_check, said), prepend=prepend)
        return handler

    return register


def register_lowering_pattern(
    pattern: PatternExpr,
    extra_check: Check = _always,
    *,
    pass_dict: PatternMatcherPass,
    prepend: bool = False,
    **promises: Any,
) -> Callable[[Handler], Handler]:
    """Decorator: where the pattern matches, inductor lowers one call of the function to its own code.

    The function is called while inductor lowers the graph, with the `Match` and what was captured, of which tensors are
    inductor's `TensorBox`; it returns one. So the pass is for the slot after autograd, and cannot run outside inductor,
    nor be verified.

    Args:
        pattern, extra_check, pass_dict, prepend, promises: as of `register_graph_pattern`.
    """

    def register(handler: Handler) -> Handler:
        def lowered(match: Match, *args: Any, **kwargs: Any) -> None:
            node = match.output_node()
            lowering: Any = functools.wraps(handler)(functools.partial(handler, match))
            lowering._inductor_lowering_function = True  # what inductor's lowering asks of a target
            call = match.graph.call_function(lowering, args, kwargs)
            call.meta.update(node.meta)
            node.replace_all_uses_with(call)
            match.erase_nodes()

        functools.update_wrapper(lowered, handler)
        register_graph_pattern(pattern, extra_check, pass_dict=pass_dict, prepend=prepend, **promises)(lowered)
        return handler

    return register
