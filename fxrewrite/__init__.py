"""State rewrites of FX graphs as rules, know that each rule is true, run them inside any torch.compile backend."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from fxrewrite.capture import normalize
    from fxrewrite.dead_code import DeadCode
    from fxrewrite.errors import (
        FixpointError,
        FxRewriteError,
        InvariantError,
        MatchExpectationError,
        Reason,
        Refusal,
        RefusedError,
        RuleDefinitionError,
        VerificationError,
        refuse,
    )
    from fxrewrite.graph import Edit, graph_diff, graph_digest, graph_text
    from fxrewrite.match import Match
    from fxrewrite.pattern import (
        Constraint,
        Literal,
        Maybe,
        Param,
        Pattern,
        any_,
        cap,
        chain,
        either,
        loose,
        maybe,
        op,
        shared,
        siblings,
        where,
    )
    from fxrewrite.plan import Plan, RuleSet, Step
    from fxrewrite.report import Report
    from fxrewrite.rule import Rule, rule

__all__ = [
    "Constraint",
    "DeadCode",
    "Edit",
    "FixpointError",
    "FxRewriteError",
    "InvariantError",
    "Literal",
    "Match",
    "MatchExpectationError",
    "Maybe",
    "Param",
    "Pattern",
    "Plan",
    "Reason",
    "Refusal",
    "RefusedError",
    "Report",
    "Rule",
    "RuleDefinitionError",
    "RuleSet",
    "Step",
    "VerificationError",
    "any_",
    "cap",
    "chain",
    "either",
    "graph_diff",
    "graph_digest",
    "graph_text",
    "loose",
    "maybe",
    "normalize",
    "op",
    "refuse",
    "rule",
    "shared",
    "siblings",
    "where",
]

lazy_package(
    __name__,
    {
        "DeadCode": "fxrewrite.dead_code",
        "FixpointError": "fxrewrite.errors",
        "FxRewriteError": "fxrewrite.errors",
        "InvariantError": "fxrewrite.errors",
        "MatchExpectationError": "fxrewrite.errors",
        "Reason": "fxrewrite.errors",
        "RefusedError": "fxrewrite.errors",
        "Refusal": "fxrewrite.errors",
        "RuleDefinitionError": "fxrewrite.errors",
        "VerificationError": "fxrewrite.errors",
        "refuse": "fxrewrite.errors",
        "Edit": "fxrewrite.graph",
        "graph_diff": "fxrewrite.graph",
        "graph_digest": "fxrewrite.graph",
        "graph_text": "fxrewrite.graph",
        "normalize": "fxrewrite.capture",
        "Match": "fxrewrite.match",
        "Constraint": "fxrewrite.pattern",
        "Literal": "fxrewrite.pattern",
        "Maybe": "fxrewrite.pattern",
        "Param": "fxrewrite.pattern",
        "any_": "fxrewrite.pattern",
        "cap": "fxrewrite.pattern",
        "chain": "fxrewrite.pattern",
        "either": "fxrewrite.pattern",
        "loose": "fxrewrite.pattern",
        "maybe": "fxrewrite.pattern",
        "op": "fxrewrite.pattern",
        "shared": "fxrewrite.pattern",
        "siblings": "fxrewrite.pattern",
        "where": "fxrewrite.pattern",
        "Pattern": "fxrewrite.pattern",
        "Plan": "fxrewrite.plan",
        "RuleSet": "fxrewrite.plan",
        "Step": "fxrewrite.plan",
        "Report": "fxrewrite.report",
        "Rule": "fxrewrite.rule",
        "rule": "fxrewrite.rule",
    },
)
