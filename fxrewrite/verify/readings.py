"""Readings of a pattern: with every alternative decided, a pattern is the text of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from fxrewrite import ops
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Capture, Chain, Either, ListOf, Maybe, Op, Siblings, Term, subterms
from fxrewrite.pattern.text import term_text
from fxrewrite.verify.calls import first_name

__all__ = ["Alternative", "ChoiceSite", "Choose", "Reading", "read", "sites"]


@dataclass(frozen=True, slots=True)
class ChoiceSite:
    """A choice in a pattern; equal terms are one site, wherever they occur."""

    text: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One option of one site."""

    site: ChoiceSite
    option: int

    def __str__(self) -> str:
        return f"{self.site.text}: {self.site.options[self.option]}"


Choose: TypeAlias = Callable[[ChoiceSite], int]


@dataclass(frozen=True, slots=True)
class Reading:
    """A pattern without alternatives.

    Attributes:
        outputs: terms that consist of operators, captures, lists, literals and `...` only.
        chosen: the alternatives that were taken.
        siblings: the capture that siblings share; the other captures of each sibling are named `name@1` ...
    """

    outputs: tuple[Term, ...]
    chosen: tuple[Alternative, ...]
    siblings: str = ""


def sites(pattern: Pattern) -> tuple[ChoiceSite, ...]:
    """Returns all sites of the pattern."""
    found = (site for output in pattern.outputs for term in subterms(output) for site in _sites_at(term))
    return tuple(dict.fromkeys(found))


def _sites_at(term: Term) -> Iterator[ChoiceSite]:
    text = term_text(term)
    if isinstance(term, Maybe):
        yield ChoiceSite(text, ("taken", "left out"))
    elif isinstance(term, Either):
        yield ChoiceSite(text, tuple(map(term_text, term.options)))
    elif isinstance(term, Chain):
        yield ChoiceSite(text, tuple(f"{count} operators" for count in range(term.least, term.most + 1)))
        yield ChoiceSite(f"operator of {text}", term.keys)
    elif isinstance(term, Siblings):
        yield ChoiceSite(text, (f"{term.least} siblings", f"{term.least + 1} siblings"))
    elif isinstance(term, Op) and _commutes(term):
        yield ChoiceSite(text, ("as written", "operands swapped"))


def _commutes(term: Op) -> bool:
    names = {name for name, _ in term.args}
    if not ops.is_commutative(term.key) or names != {"self", "other"} or term.loose:
        return False
    return term.args[0][1] != term.args[1][1]


def read(pattern: Pattern, choose: Choose) -> Reading:
    """Returns the reading in which `choose` decides every site that it reaches."""
    chosen: dict[Alternative, None] = {}

    def decide(site: ChoiceSite) -> int:
        option = choose(site)
        chosen[Alternative(site, option)] = None
        return option

    first = pattern.outputs[0]
    if isinstance(first, Siblings):
        (site,) = _sites_at(first)
        count = first.least + decide(site)
        each = [_renamed(_resolve(first.each, decide), first.on, f"@{index}") for index in range(count)]
        return Reading(tuple(each), tuple(chosen), first.on)
    outputs = tuple(_resolve(output, decide) for output in pattern.outputs)
    return Reading(outputs, tuple(chosen))


def _resolve(term: Term, decide: Choose) -> Term:
    if isinstance(term, Maybe):
        (site,) = _sites_at(term)
        return _resolve((term.step, term.base)[decide(site)], decide)
    if isinstance(term, Either):
        (site,) = _sites_at(term)
        return _resolve(term.options[decide(site)], decide)
    if isinstance(term, Chain):
        length, operator = _sites_at(term)
        below = _resolve(term.base, decide)
        for _ in range(term.least + decide(length)):
            key = term.keys[decide(operator)]
            below = Op(key, ((first_name(key), below),), loose=True)
        return below
    if isinstance(term, ListOf):
        return ListOf(tuple(_resolve(item, decide) for item in term.items))
    if not isinstance(term, Op):
        return term
    names, parts = [name for name, _ in term.args], [part for _, part in term.args]
    for site in _sites_at(term):
        names = names[::-1] if decide(site) else names
    return replace(term, args=tuple((name, _resolve(part, decide)) for name, part in zip(names, parts, strict=True)))


def _renamed(term: Term, on: str, suffix: str) -> Term:
    if isinstance(term, Capture) and term.name != on:
        return Capture(term.name + suffix, term.kind)
    if isinstance(term, ListOf):
        return ListOf(tuple(_renamed(item, on, suffix) for item in term.items))
    if isinstance(term, Op):
        return replace(term, args=tuple((name, _renamed(part, on, suffix)) for name, part in term.args))
    return term
