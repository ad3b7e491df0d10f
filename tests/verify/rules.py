"""Rules of the tests, and how a rule is verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxrewrite import Pattern, Rule, RuleSet
from fxrewrite.verify import Verdict, verify_rewrite


def once(rule: Rule) -> Callable[[fx.GraphModule], int]:
    """Applies the rule once to a graph; returns the number of rewrites."""
    plan = RuleSet("once", rule, atomic=True).once()
    return lambda gm: plan.apply(gm).rewrites


def verify(rule: Rule, **options: Any) -> Verdict:
    """The verdict on a rule, as its own promises say."""
    promised = {"numerics": rule.numerics, "rng": rule.rng, "shapes": rule.shapes}
    return verify_rewrite(rule.id, rule.pattern, once(rule), **{**promised, **options})


def rule_of(pattern: Any, replacement: Callable[..., Any], *where: Any, **promises: Any) -> Rule:
    """A rule whose own checks are off: it may change shapes and draws, so that only the verification sees them."""
    outputs = pattern if isinstance(pattern, tuple) else (pattern,)
    unchecked = {"shapes": "changes", "rng": "changes"}
    return Rule("test.rule", Pattern(outputs, where), replacement, **{**unchecked, **promises})
