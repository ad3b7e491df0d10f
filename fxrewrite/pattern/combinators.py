"""Combinators: terms that a traced function cannot express."""

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
"""Matches anything without capturing it; the same as `...`."""


_KINDS: dict[type, CaptureKind] = {Literal: "literal", Maybe: "optional", Param: "param"}


def cap(name: str, kind: type[Literal | Maybe | Param] | CaptureKind = "node") -> Capture:
    """Returns a capture; `kind` is "node", "optional", "param", "literal" or "any", or the equivalent annotation."""
    return Capture(name, _KINDS[kind] if isinstance(kind, type) else kind)


def op(target: Any, *args: Any, **kwargs: Any) -> Op:
    """Returns a term for a node that calls `target`, in any spelling of the call.

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
    """Returns an optional step: `maybe(scores + mask)` matches the sum, or `scores` alone with `mask` None.

    Args:
        step: an operator.
        without: the term that matches when the step is absent; by default the step's first operand.

    Raises:
        RuleDefinitionError: the step is not an operator, or has no operand to use as `without`.
    """
    if not isinstance(step, Op):
        raise RuleDefinitionError(f"maybe() takes an operator, not {step!r}")
    if without is None:
        without = first_operand(step)
        if without is None:
            raise RuleDefinitionError(f"maybe({step!r}): state with without= what matches when the step is absent")
    return Maybe(step, as_term(without))


def first_operand(step: Op) -> Term | None:
    """Returns the first argument of an operator that is a value of the graph, or None."""
    return next((term for _, term in step.args if not isinstance(term, (LiteralValue, ListOf, Ignore))), None)


def either(*options: Any) -> Either:
    """Returns a term that matches as the first of the options that does: `either(x * c, x / c)`."""
    if len(options) < 2:
        raise RuleDefinitionError("either() takes two options or more")
    return Either(tuple(as_term(option) for option in options))


def shared(term: Term) -> Op:
    """Returns the operator, allowed to have users outside the match; then the node stays in the graph for them."""
    if not isinstance(term, Op):
        raise RuleDefinitionError(f"shared() takes an operator, not {term!r}")
    return replace(term, shared=True)


def loose(term: Term) -> Op:
    """Returns the operator with any further arguments allowed: `loose(op("slice", cap("x")))` matches every slice."""
    if not isinstance(term, Op):
        raise RuleDefinitionError(f"loose() takes an operator, not {term!r}")
    return replace(term, loose=True)


def chain(base: Any, *targets: Any, least: int = 0, most: int = 8) -> Chain:
    """Returns a run of `least` to `most` operators among `targets`, starting at `base`: `chain(x, "view", most=3)`.

    Each reads the previous one as its first operand; its other arguments may be anything. The longest run that fits
    matches; `match.nodes` contains its nodes.

    Raises:
        RuleDefinitionError: there is no target, or not 0 <= least <= most.
    """
    if not targets or not 0 <= least <= most or most < 1:
        raise RuleDefinitionError(f"chain() takes operators and 0 <= least <= most, not {targets}, {least}, {most}")
    return Chain(as_term(base), tuple(dict.fromkeys(map(_key, targets))), least, most)


def _key(target: Any) -> str:
    if isinstance(target, str) and "." in target:  # the key of a Python callable, as the text form has it
        return target
    return ops.key(_named(target) if isinstance(target, str) else target)


def siblings(each: Term, *, on: str, least: int = 2) -> Siblings:
    """Returns all values like `each` that read the capture `on`: `siblings(op("linear", cap("x"), ...), on="x")`.

    It must be the only output of a pattern. In the match `on` is one value, and every other capture is a list with one
    item per sibling, in graph order; the replacement returns as many values. Constraints must hold for each sibling.

    Raises:
        RuleDefinitionError: `each` is not an operator.
    """
    if not isinstance(each, (Op, Maybe, Either)):
        raise RuleDefinitionError(f"siblings() takes an operator, not {each!r}")
    return Siblings(each, on, least)
