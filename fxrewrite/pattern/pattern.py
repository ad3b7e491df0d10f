"""A complete pattern: its outputs, its constraints, and how to trace it from a Python function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.combinators import Literal, Param
from fxrewrite.pattern.terms import (
    Capture,
    CaptureKind,
    Either,
    Maybe,
    Op,
    Siblings,
    Term,
    as_term,
    call,
    holds_term,
    subterms,
)
from fxrewrite.pattern.text import parse_term, term_text
from fxrewrite.pattern.where import Constraint, parse as parse_constraint

__all__ = ["ROOT", "Pattern", "parse", "trace"]

ROOT = "root"
"""Name of the first output in constraints and replacements."""

_KINDS: Mapping[Any, CaptureKind] = {
    inspect.Parameter.empty: "node",
    Literal: "literal",
    Maybe: "optional",
    Param: "param",
    Any: "any",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a rule looks for.

    Attributes:
        outputs: the values that the replacement replaces; the rest of the match is removed with them.
        where: constraints on the captures; texts are parsed.
        absent: names that the replacement may ask for, and that are None in every match.
    """

    outputs: tuple[Term, ...]
    where: tuple[Constraint, ...] = ()
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.outputs, tuple) or not all(isinstance(output, Term) for output in self.outputs):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(
                "Pattern((output, ...), (constraint, ...)) takes tuples; for a text form use parse()"
            )
        if not self.outputs:
            raise RuleDefinitionError("a pattern needs an output")
        read = tuple(parse_constraint(c) if isinstance(c, str) else c for c in _listed(self.where))
        object.__setattr__(self, "where", read)
        for output in self.outputs:
            if not _is_anchored(output):
                raise RuleDefinitionError(
                    f"the output {term_text(output)} of a pattern must be an operator: it would match every node"
                )
        self._check_siblings()
        kinds: dict[str, CaptureKind] = {}
        if any(capture.name == ROOT for capture in self.captures):
            raise RuleDefinitionError(f"{ROOT} is the name of the first output; call the capture something else")
        for capture in self.captures:
            if kinds.setdefault(capture.name, capture.kind) != capture.kind:
                raise RuleDefinitionError(f"{capture.name} is captured as {kinds[capture.name]} and as {capture.kind}")
        for constraint in self.where:
            unknown = [name for name in constraint.names if name not in kinds and name != ROOT]
            if unknown:
                raise RuleDefinitionError(
                    f"constraint {constraint} reads {unknown}, the pattern captures {list(kinds)}"
                )

    def _check_siblings(self) -> None:
        found = [term for output in self.outputs for term in subterms(output) if isinstance(term, Siblings)]
        if not found:
            return
        if found != list(self.outputs):
            raise RuleDefinitionError("siblings() must be the only output of a pattern, not a part of it")
        if Capture(found[0].on) not in self.captures:
            raise RuleDefinitionError(f"siblings(on={found[0].on!r}): the pattern captures no node of that name")

    @property
    def captures(self) -> tuple[Capture, ...]:
        """All captures, in the order of the text form."""
        found = (term for output in self.outputs for term in subterms(output) if isinstance(term, Capture))
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        text = ", ".join(map(term_text, self.outputs))
        return text + (f" where {' and '.join(map(str, self.where))}" if self.where else "")

    def __repr__(self) -> str:
        return str(self)


def _listed(where: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the constraints as a tuple; refuses a single string, which would be read letter by letter."""
    items = (where,) if isinstance(where, str) else tuple(where)
    wrong = [item for item in items if not isinstance(item, str) and not hasattr(item, "why_not")]
    if isinstance(where, str) or wrong:
        found = where if isinstance(where, str) else wrong[0]
        raise RuleDefinitionError(f"where takes a list of constraints, or of their texts, not {found!r}")
    return items


def _is_anchored(term: Term) -> bool:
    if isinstance(term, Maybe):
        return _is_anchored(term.base)
    if isinstance(term, Either):
        return all(map(_is_anchored, term.options))
    if isinstance(term, Siblings):
        return _is_anchored(term.each)
    return isinstance(term, Op)


def trace(function: Callable[..., Any], where: Iterable[Constraint | str] = ()) -> Pattern:
    """Returns the pattern that a Python function of its captures returns; a tuple means several outputs.

    Parameters capture nodes, or what their annotation says: `Literal`, `Maybe` (a node or None), `Param`, `Any`.

    Raises:
        RuleDefinitionError: an annotation is not supported, a parameter is unused, or the function cannot be traced.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise RuleDefinitionError(f"pattern {name}: {error}; annotations are read when the rule is defined") from error
    except ValueError as error:
        raise RuleDefinitionError(f"pattern {name}: {error}; write a Python function that calls it") from error
    captures: list[Capture] = []
    for parameter in parameters.values():
        kind = "node" if _is_tensor(parameter.annotation) else _KINDS.get(parameter.annotation)
        if kind is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RuleDefinitionError(
                f"pattern {name}: parameter {parameter} must be plain, or annotated Literal, Maybe, Param or Any"
            )
        captures.append(Capture(parameter.name, kind))
    try:
        calls = {name: _as_call(wrapped) for name, wrapped in ops.wrapped_in(function).items()}
        result = ops.with_globals(function, calls)(**{capture.name: capture for capture in captures})
    except (TypeError, AttributeError, RuleDefinitionError) as error:  # torch or a term rejected the call
        raise RuleDefinitionError(f"pattern {name}: {error}") from error
    outputs = tuple(map(as_term, result)) if isinstance(result, tuple) else (as_term(result),)
    pattern = Pattern(outputs, _listed(where))  # pyright: ignore[reportArgumentType]  # texts are parsed there
    unused = set(captures) - set(pattern.captures)
    if unused:
        raise RuleDefinitionError(f"pattern {name}: {sorted(c.name for c in unused)} do not occur in {pattern}")
    return pattern


def _as_call(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """The function as `torch.fx.wrap` means it: of terms, a call of it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(wrapped, args, kwargs) if holds_term((*args, *kwargs.values())) else wrapped(*args, **kwargs)

    return called


def _is_tensor(annotation: Any) -> bool:
    return getattr(annotation, "__module__", "").startswith("torch") and getattr(annotation, "__name__", "") == "Tensor"


def parse(text: str, where: Iterable[Constraint | str] = ()) -> Pattern:
    """Parses the text form of a pattern with one output, or with several, separated by commas in parentheses.

    Raises:
        RuleDefinitionError: the text is not a pattern; the message names the column.
    """
    term = parse_term(text)
    items = getattr(term, "items", None)
    outputs = tuple(items) if isinstance(items, tuple) else (term,)
    return Pattern(outputs, _listed(where))  # pyright: ignore[reportArgumentType]  # texts are parsed there
