"""Rules of the tests, and how a rule is verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


def execute(snippet: str) -> dict[str, Any]:
    """What the program of a counterexample leaves in its names."""
    namespace: dict[str, Any] = {}
    exec(snippet, namespace)
    return namespace


def same(a: Any, b: Any) -> bool:
    """Whether two outcomes of a program are equal in bits, but for those of NaN, or errors of one class."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        return type(a) is type(b)
    return all(
        x.shape == y.shape
        and x.dtype == y.dtype
        and torch.equal(torch.nan_to_num(x, nan=7.0).signbit(), torch.nan_to_num(y, nan=7.0).signbit())
        and torch.equal(torch.nan_to_num(x, nan=7.0), torch.nan_to_num(y, nan=7.0))
        for x, y in zip(a, b, strict=True)
    )
