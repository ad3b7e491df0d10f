"""A complete pattern: its outputs, its constraints, and how to trace it from a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.combinators import captures_of
from fxrewrite.pattern.terms import (
    ONCE,
    Capture,
    CaptureKind,
    Each,
    Either,
    ListOf,
    LiteralValue,
    Maybe,
    Op,
    Siblings,
    Term,
    as_term,
    call,
    holds_term,
    is_number,
    parts_of,
    subterms,
    tracing,
)
from fxrewrite.pattern.text import parse_term, term_text
from fxrewrite.pattern.where import Constraint, parse as parse_constraint
from fxrewrite.pattern.where.facts import ListRelation
from fxrewrite.pattern.where.numbers import Relation

_PASSED = ("node", "param", "any")
"""Kinds of captures that may be outputs."""
_ARITHMETIC = frozenset(
    f"aten::{name}" for name in ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "neg", "rsub")
)
MAX_DEPTH = 200
"""Most operators that a pattern has one in the other: terms are walked over by calls, of which Python allows 1000."""
_TOO_DEEP = (
    f"a pattern has at most {MAX_DEPTH} operators one in the other; match a part of them, run the rule to a fixpoint, "
    'or take a run of operators by chain(x, "sin", most=...)'
)
ROOT = "root"
"""Name of the first output in constraints and replacements."""


@dataclass(frozen=True)
class Pattern:
    """What a rule looks for.

    Attributes:
        outputs: the values that the replacement replaces; the rest of the match is removed with them. Captures among
            those that are given become `through`.
        where: constraints on the captures; texts are parsed.
        absent: names that the replacement may ask for, and that are None in every match.
        through: (place among all outputs, name) of the captures that are outputs: what is computed after the match of
            the captured value is computed of the replacement's value in its place.
    """

    outputs: tuple[Term, ...]
    where: tuple[Constraint, ...] = ()
    absent: tuple[str, ...] = ()
    through: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.outputs, tuple) or not all(isinstance(output, Term) for output in self.outputs):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(
                "Pattern((output, ...), (constraint, ...)) takes tuples; for a text form use parse()"
            )
        self._check_depth()
        self._split_outputs()
        read = tuple(parse_constraint(c) if isinstance(c, str) else c for c in _listed(self.where))
        object.__setattr__(self, "where", read)
        self._check_outputs()
        self._check_numbers()
        self._check_siblings()
        self._check_lists()
        self._check_where(self._checked_kinds())

    def _terms(self) -> Iterator[Term]:
        return (term for output in self.outputs for term in subterms(output))

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        """All captures, in the order of the text form."""
        return tuple(dict.fromkeys(term for term in self._terms() if isinstance(term, Capture)))

    @cached_property
    def lists(self) -> frozenset[str]:
        """The captures that are lists, with an entry for each item that `*x` or `each` matched."""
        return frozenset(name for term in self._terms() if isinstance(term, Each) for name in term.names)

    @cached_property
    def values(self) -> frozenset[str]:
        """The captures of which None is a value like others: constraints read it, where one that is absent holds."""
        return frozenset(capture.name for capture in self.captures if capture.kind in ("literal", "any"))

    def _check_depth(self) -> None:
        """Refuses operators one in the other deeper than Python can walk over."""
        level: list[Term] = list(self.outputs)
        for _ in range(MAX_DEPTH + 1):  # the last are captures
            level = list({id(part): part for term in level for part in parts_of(term)}.values())
        if level:
            raise RuleDefinitionError(_TOO_DEEP)

    def _split_outputs(self) -> None:
        """Moves captures among the outputs to `through` if another output is an operator: nothing replaces them."""
        if any(isinstance(output, Op) for output in self.outputs):
            passed = {
                i: term.name
                for i, term in enumerate(self.outputs)
                if isinstance(term, Capture) and term.kind in _PASSED
            }
            object.__setattr__(self, "through", self.through or tuple(passed.items()))
            object.__setattr__(self, "outputs", tuple(t for i, t in enumerate(self.outputs) if i not in passed))

    def _check_numbers(self) -> None:
        """Refuses arithmetic on captured numbers alone: a graph holds its result, and no call."""
        for term in self._terms():
            if isinstance(term, Op) and term.key in _ARITHMETIC and all(is_number(part) for _, part in term.args):
                raise RuleDefinitionError(
                    f"{term_text(term)} is computed of captured numbers, and a graph holds the result alone; capture "
                    'that as another Literal, and relate them in where, as "m == n * 2"'
                )

    def _check_outputs(self) -> None:
        if not self.outputs:
            raise RuleDefinitionError("a pattern needs an output")
        for output in self.outputs:
            if isinstance(output, (LiteralValue, ListOf)):
                value = output.value if isinstance(output, LiteralValue) else []
                is_kind = isinstance(value, (dict, list, FunctionType))
                found = f"a {type(value).__name__}" if is_kind else term_text(output)
                missing = "; is its `return` missing?" if value is None else ""
                missing = "; are its () missing?" if isinstance(value, FunctionType) else missing
                raise RuleDefinitionError(f"a pattern gives a call, or a tuple of calls, not {found}{missing}")
            if not _is_anchored(output):
                raise RuleDefinitionError(
                    f"the output {term_text(output)} of a pattern must be an operator: it would match every node"
                )
        if any(isinstance(term, Op) and term.key == ONCE for term in self._terms()):
            raise RuleDefinitionError("once() is for replacements: a pattern matches what the graph computes")

    def _checked_kinds(self) -> dict[str, CaptureKind]:
        """The kind of each capture, of which there is one."""
        kinds: dict[str, CaptureKind] = {}
        unknown = [name for _, name in self.through if name not in {capture.name for capture in self.captures}]
        if unknown:
            raise RuleDefinitionError(f"the output {unknown[0]} of a pattern must be captured by another output")
        for capture in self.captures:
            if capture.name == ROOT:
                raise RuleDefinitionError(f"{ROOT} is the name of the first output; call the capture something else")
            if kinds.setdefault(capture.name, capture.kind) != capture.kind:
                raise RuleDefinitionError(f"{capture.name} is captured as {kinds[capture.name]} and as {capture.kind}")
        return kinds

    def _check_where(self, kinds: Mapping[str, CaptureKind]) -> None:
        """Constraints read what is captured, and as a list what is one."""
        for constraint in self.where:
            unknown = [name for name in constraint.names if name not in kinds and name != ROOT]
            if unknown:
                raise RuleDefinitionError(
                    f"constraint {constraint} reads {unknown}, the pattern captures {list(kinds)}"
                )
            asked = isinstance(constraint, (ListRelation, Relation))
            for name in constraint.whole[:2] if asked else ():  # the third name of are_sizes is a dimension
                if name not in self.lists and kinds.get(name) not in ("literal", "any"):
                    raise RuleDefinitionError(
                        f"constraint {constraint} reads {name} as a list; capture a list as [*{name}], "
                        f"or one of numbers as lit({name})"
                    )

    def _check_siblings(self) -> None:
        found = [term for term in self._terms() if isinstance(term, Siblings)]
        if not found:
            return
        if found != list(self.outputs):
            raise RuleDefinitionError("siblings() must be the only output of a pattern, not a part of it")
        if Capture(found[0].on) not in self.captures:
            raise RuleDefinitionError(f"siblings(on={found[0].on!r}): the pattern captures no node of that name")

    def _check_lists(self) -> None:
        for term in self._terms():
            for part in parts_of(term):
                if isinstance(part, Each) and not isinstance(term, ListOf):
                    raise RuleDefinitionError(
                        f"`{term_text(part)}` is any number of items of a list; write it in one, as in [x, *rest]"
                    )
            if isinstance(term, Each) and any(isinstance(part, Each) for part in subterms(term.term)):
                raise RuleDefinitionError(
                    f"`{term_text(term)}` has a list of any length in each item; capture the items, and match "
                    "their lists by another rule"
                )
            if isinstance(term, Siblings) and self.lists:
                raise RuleDefinitionError("siblings() cannot have lists of any length in them; capture the list")
        single = {part.name for output in self.outputs for part in _outside_of_lists(output)}
        for name in self.lists:
            if name in single:
                raise RuleDefinitionError(
                    f"{name} is a list, an entry for each item, and also one value; name it in each(..., on={name!r}) "
                    "if all items share it, or call one of the two something else"
                )

    @property
    def num_outputs(self) -> int:
        """How many values the replacement gives."""
        return len(self.outputs) + len(self.through)

    def __str__(self) -> str:
        texts = [term_text(output) for output in self.outputs]
        for place, name in self.through:
            texts.insert(place, name)
        text = ", ".join(texts)
        return text + (f" where {' and '.join(map(str, self.where))}" if self.where else "")

    def __repr__(self) -> str:
        return str(self)


def _outside_of_lists(term: Term) -> Iterator[Capture]:
    """Yields the captures that are one value, also those that all items of a list share."""
    if isinstance(term, Capture):
        yield term
    elif isinstance(term, Each):
        yield from (part for part in subterms(term.term) if isinstance(part, Capture) and part.name in term.on)
    else:
        for part in parts_of(term):
            yield from _outside_of_lists(part)


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
    captures = captures_of(function)
    try:
        calls = {name: _as_call(wrapped) for name, wrapped in ops.wrapped_in(function).items()}
        with tracing():
            result = ops.with_globals(function, calls)(**{capture.name: capture for capture in captures})
    except (TypeError, ValueError, AttributeError) as error:  # torch or a term rejected the call
        raise RuleDefinitionError(f"pattern {name}: {error}") from error
    except RecursionError as error:
        raise RuleDefinitionError(f"pattern {name}: {_TOO_DEEP}") from error
    outputs = tuple(map(as_term, result)) if isinstance(result, tuple) else (as_term(result),)
    pattern = Pattern(outputs, _listed(where))  # pyright: ignore[reportArgumentType]  # texts are parsed there
    unused = set(captures) - set(pattern.captures)
    if unused:
        names = ", ".join(sorted(capture.name for capture in unused))
        raise RuleDefinitionError(f"pattern {name}: take the parameters {names} out, which {pattern} does not have")
    return pattern


def _as_call(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """The function as `torch.fx.wrap` means it: of terms, a call of it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(wrapped, args, kwargs) if holds_term((*args, *kwargs.values())) else wrapped(*args, **kwargs)

    return called


def parse(text: str, where: Iterable[Constraint | str] = ()) -> Pattern:
    """Parses the text form of a pattern with one output, or with several, separated by commas in parentheses.

    Raises:
        RuleDefinitionError: the text is not a pattern; the message names the column.
    """
    term = parse_term(text)
    if text.lstrip().startswith("[") and isinstance(term, ListOf):
        raise RuleDefinitionError(f"pattern {text!r}, column 1: several outputs are written (a, b), and one as it is")
    items = getattr(term, "items", None)
    outputs = tuple(items) if isinstance(items, tuple) else (term,)
    return Pattern(outputs, _listed(where))  # pyright: ignore[reportArgumentType]  # texts are parsed there
