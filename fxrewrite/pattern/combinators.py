"""Combinators: terms for what a traced function cannot say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.terms import (
    Capture,
    CaptureKind,
    Either,
    Ignore,
    ListOf,
    LiteralValue,
    Maybe,
    Op,
    Term,
    as_term,
    call,
)

__all__ = ["Literal", "any_", "cap", "either", "loose", "maybe", "op", "shared"]


class Literal:
    """Annotation of a pattern parameter that captures a Python value: `def pattern(x, scale: Literal)`."""


any_ = Ignore()
"""Anything, not captured; the same as `...`."""


def cap(name: str, kind: type[Literal | Maybe] | CaptureKind = "node") -> Capture:
    """A capture; `kind` is "node", "optional", "literal" or "any", or the annotation that means it."""
    if isinstance(kind, type):
        return Capture(name, "literal" if kind is Literal else "optional")
    return Capture(name, kind)


def op(target: Any, *args: Any, **kwargs: Any) -> Op:
    """A node that calls `target`, in any spelling.

    Args:
        target: a torch function or overload, any callable that nodes call, or a key: "aten::mul", "mul".
        args: arguments in the order of the target's signature: terms, `...`, or literals that must be equal.
        kwargs: arguments by name.

    Raises:
        RuleDefinitionError: there is no such operator, or the arguments do not fit it.
    """
    if isinstance(target, str):
        namespace, separator, name = target.rpartition("::")
        packet = getattr(getattr(torch.ops, namespace if separator else "aten"), name, None)
        if packet is None:
            raise RuleDefinitionError(
                f"there is no operator {target!r}; pass the callable itself, or import its library"
            )
        target = packet
    return call(target, args, kwargs)


def maybe(step: Term, without: Any = None) -> Maybe:
    """An optional step: `maybe(scores + mask)` matches the sum, or `scores` alone with `mask` None.

    Args:
        step: the step, an operator.
        without: what stands there when the step is left out; by default the step's first operand.

    Raises:
        RuleDefinitionError: the step is no operator, or has no operand to stand for it.
    """
    if not isinstance(step, Op):
        raise RuleDefinitionError(f"maybe() takes an operator, not {step!r}")
    if without is None:
        without = first_operand(step)
        if without is None:
            raise RuleDefinitionError(f"maybe({step!r}): say with without= what stands there when the step is left out")
    return Maybe(step, as_term(without))


def first_operand(step: Op) -> Term | None:
    """The first argument of an operator that is a value of the graph."""
    return next((term for _, term in step.args if not isinstance(term, (LiteralValue, ListOf, Ignore))), None)


def either(*options: Any) -> Either:
    """The first of the options that matches: `either(x * c, x / c)`."""
    if len(options) < 2:
        raise RuleDefinitionError("either() takes two options or more")
    return Either(tuple(as_term(option) for option in options))


def shared(term: Term) -> Op:
    """The same operator, allowed to have users outside the match; the node stays for them."""
    if not isinstance(term, Op):
        raise RuleDefinitionError(f"shared() takes an operator, not {term!r}")
    return replace(term, shared=True)


def loose(term: Term) -> Op:
    """The same operator, with any further arguments: `loose(op("slice", cap("x")))` matches every slice."""
    if not isinstance(term, Op):
        raise RuleDefinitionError(f"loose() takes an operator, not {term!r}")
    return replace(term, loose=True)
