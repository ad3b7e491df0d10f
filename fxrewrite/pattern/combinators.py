"""Combinators: terms for what a traced function cannot say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.terms import (
    Capture,
    CaptureKind,
    Chain,
    Either,
    Ignore,
    ListOf,
    LiteralValue,
    Maybe,
    Op,
    Siblings,
    Term,
    as_term,
    call,
)

__all__ = ["Literal", "Param", "any_", "cap", "chain", "either", "loose", "maybe", "op", "shared", "siblings"]


class Literal:
    """Annotation of a pattern parameter that captures a Python value: `def pattern(x, scale: Literal)`."""


class Param:
    """Annotation of a pattern parameter that captures a parameter or buffer: `def pattern(x, weight: Param)`."""


any_ = Ignore()
"""Anything, not captured; the same as `...`."""


_KINDS: dict[type, CaptureKind] = {Literal: "literal", Maybe: "optional", Param: "param"}


def cap(name: str, kind: type[Literal | Maybe | Param] | CaptureKind = "node") -> Capture:
    """A capture; `kind` is "node", "optional", "param", "literal" or "any", or the annotation that means it."""
    return Capture(name, _KINDS[kind] if isinstance(kind, type) else kind)


def op(target: Any, *args: Any, **kwargs: Any) -> Op:
    """A node that calls `target`, in any spelling.

    Args:
        target: a torch function or overload, any callable that nodes call, or a key: "aten::mul", "mul".
        args: arguments in the order of the target's signature: terms, `...`, or literals that must be equal.
        kwargs: arguments by name.

    Raises:
        RuleDefinitionError: there is no such operator, or the arguments do not fit it.
    """
    return call(_named(target) if isinstance(target, str) else target, args, kwargs)


def _named(name: str) -> Any:
    found = ops.named_operator(name)
    if found is None:
        raise RuleDefinitionError(ops.no_operator(name))
    return found


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


def chain(base: Any, *targets: Any, least: int = 0, most: int = 8) -> Chain:
    """A run of `least` to `most` operators among `targets` above `base`: `chain(x, "view", "transpose", most=3)`.

    Each reads the one before as its first operand; its other arguments may be anything. The longest run that fits is
    the match; `match.nodes` has its nodes.

    Raises:
        RuleDefinitionError: there is no target, or the bounds are no bounds.
    """
    if not targets or not 0 <= least <= most or most < 1:
        raise RuleDefinitionError(f"chain() takes operators and 0 <= least <= most, not {targets}, {least}, {most}")
    return Chain(as_term(base), tuple(dict.fromkeys(map(_key, targets))), least, most)


def _key(target: Any) -> str:
    if isinstance(target, str) and "." in target:  # the key of a Python callable, as the text form has it
        return target
    return ops.key(_named(target) if isinstance(target, str) else target)


def siblings(each: Term, *, on: str, least: int = 2) -> Siblings:
    """All values like `each` that read the capture `on`: `siblings(op("linear", cap("x"), cap("w", Param)), on="x")`.

    It is the whole output of a pattern. In the match `on` is one value and every other capture is a list with one item
    for each sibling, in graph order; the replacement gives as many values. Constraints hold for each sibling.

    Raises:
        RuleDefinitionError: `each` is no operator.
    """
    if not isinstance(each, (Op, Maybe, Either)):
        raise RuleDefinitionError(f"siblings() takes an operator, not {each!r}")
    return Siblings(each, on, least)
