"""Readings of a pattern: with every alternative decided, a pattern is the text of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fxrewrite import ops
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Capture, Chain, Each, Either, ListOf, Maybe, Op, Siblings, Term, part_of, subterms
from fxrewrite.pattern.text import term_text
from fxrewrite.verify.calls import first_name

_LENGTHS = ("one item", "several items", "no items")
_ONE, _SEVERAL, _NONE = range(3)
SEVERAL = (3, 2, 5, 4)
"""How many items several are: of a list of any length, samples have 0, 1, and these by turns."""


@dataclass(frozen=True, slots=True)
class ChoiceSite:
    """A choice in a pattern; equal terms are one site, wherever they occur."""

    text: str
    options: tuple[str, ...]
    rare: tuple[int, ...] = ()
    """Options that need not occur, since few operators take them."""


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
        lists: how many items there are, by captures that are lists; the items are named `name@0`, `name@1` ...
        through: the captures that are outputs too.
    """

    outputs: tuple[Term, ...]
    chosen: tuple[Alternative, ...]
    siblings: str = ""
    lists: Mapping[str, int] = field(default_factory=dict[str, int], compare=False)
    through: tuple[str, ...] = ()


def by_item(reading: Reading, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a sampler gave with names for the items of lists; None if a list has another number of items."""
    found = dict(given)
    for name in reading.lists.keys() & found.keys():
        items = found.pop(name)
        if not isinstance(items, (list, tuple)) or len(items) != reading.lists[name]:
            return None
        found.update((f"{name}@{index}", item) for index, item in enumerate(items))
    return found


def sites(pattern: Pattern) -> tuple[ChoiceSite, ...]:
    """Returns all sites of the pattern."""
    found = (site for output in pattern.outputs for term in subterms(output) for site in _sites_at(term))
    return tuple(dict.fromkeys([*found, *_read_results(pattern)]))


def _read_results(pattern: Pattern) -> Iterator[ChoiceSite]:
    """Yields the choice of a result that nothing reads, if some outputs are results of one operator."""
    of = [_operators(output) for output in pattern.outputs]
    texts = [
        f"all but {term_text(output)}"
        for place, output in enumerate(pattern.outputs)
        if any(of[place] & others for other, others in enumerate(of) if other != place)
    ]
    if texts:
        yield ChoiceSite("results that are read", ("all", *texts), rare=tuple(range(1, len(texts) + 1)))


def _operators(output: Term) -> set[Term]:
    parts = map(part_of, output.options if isinstance(output, Either) else (output,))
    return {part[0] for part in parts if part is not None}


def _sites_at(term: Term) -> Iterator[ChoiceSite]:
    text = term_text(term)
    if isinstance(term, Maybe):
        yield ChoiceSite(text, ("taken", "left out"))
    elif isinstance(term, Either):
        yield ChoiceSite(text, tuple(map(term_text, term.options)))
    elif isinstance(term, Chain):
        yield ChoiceSite(text, tuple(f"{count} operators" for count in range(term.least, term.most + 1)))
        yield ChoiceSite(f"operator of {text}", term.keys)
    elif isinstance(term, Each):
        yield ChoiceSite(text, _LENGTHS, rare=(_NONE,))
    elif isinstance(term, Siblings):
        yield ChoiceSite(text, (f"{term.least} siblings", f"{term.least + 1} siblings"))
    elif isinstance(term, Op) and _commutes(term):
        yield ChoiceSite(text, ("as written", "operands swapped"))


def _commutes(term: Op) -> bool:
    names = {name for name, _ in term.args}
    if not ops.is_commutative(term.key) or names != {"self", "other"} or term.loose:
        return False
    return term.args[0][1] != term.args[1][1]


def read(
    pattern: Pattern, choose: Choose, given: Mapping[str, Any] | None = None, *, several: int = SEVERAL[0]
) -> Reading:
    """Returns the reading in which `choose` decides every site that it reaches.

    Lists that are `given` by name have as many items as these; of others, several items are as many as `several`.
    """
    chosen: dict[Alternative, None] = {}

    def decide(site: ChoiceSite, decided: int | None = None) -> int:
        option = choose(site) if decided is None else decided
        chosen[Alternative(site, option)] = None
        return option

    first = pattern.outputs[0]
    if isinstance(first, Siblings):
        (site,) = _sites_at(first)
        count = first.least + decide(site)
        each = [
            _renamed(_resolve(first.each, decide, _Lists({}, several)), (first.on,), f"@{index}")
            for index in range(count)
        ]
        return Reading(tuple(each), tuple(chosen), first.on)
    lists = {name: len(given[name]) for name in pattern.lists if given and name in given}
    outputs = tuple(_resolve(output, decide, _Lists(lists, several)) for output in pattern.outputs)
    for site in _read_results(pattern):
        left_out = site.options[decide(site)]
        terms = zip(outputs, pattern.outputs, strict=True)
        outputs = tuple(output for output, term in terms if left_out != f"all but {term_text(term)}")
    return Reading(outputs, tuple(chosen), lists=lists, through=tuple(name for _, name in pattern.through))


@dataclass(frozen=True, slots=True)
class _Lists:
    """How many items lists have, by name, and how many several are of those that are not decided yet."""

    decided: dict[str, int]
    several: int


def _resolve(term: Term, decide: Callable[..., int], lists: _Lists) -> Term:
    if isinstance(term, Maybe):
        (site,) = _sites_at(term)
        return _resolve((term.step, term.base)[decide(site)], decide, lists)
    if isinstance(term, Either):
        (site,) = _sites_at(term)
        return _resolve(term.options[decide(site)], decide, lists)
    if isinstance(term, Chain):
        length, operator = _sites_at(term)
        below = _resolve(term.base, decide, lists)
        for _ in range(term.least + decide(length)):
            key = term.keys[decide(operator)]
            below = Op(key, ((first_name(key), below),), loose=True)
        return below
    if isinstance(term, ListOf):
        items: list[Term] = []
        for item in term.items:
            if not isinstance(item, Each):
                items.append(_resolve(item, decide, lists))
                continue
            items += [
                _renamed(_resolve(item.term, decide, lists), item.on, f"@{index}")
                for index in range(_length(item, decide, lists))
            ]
        return ListOf(tuple(items))
    if not isinstance(term, Op):
        return term
    names, parts = [name for name, _ in term.args], [part for _, part in term.args]
    for site in _sites_at(term):
        names = names[::-1] if decide(site) else names
    return replace(
        term, args=tuple((name, _resolve(part, decide, lists)) for name, part in zip(names, parts, strict=True))
    )


def _length(term: Each, decide: Callable[..., int], lists: _Lists) -> int:
    """Returns how many items there are; lists of one name have as many wherever they occur."""
    decided = next((lists.decided[name] for name in term.names if name in lists.decided), None)
    (site,) = _sites_at(term)
    if decided is None:
        decided = {_ONE: 1, _SEVERAL: lists.several, _NONE: 0}[decide(site)]
    else:
        decide(site, _SEVERAL if decided > 1 else _ONE if decided else _NONE)
    lists.decided.update(dict.fromkeys(term.names, decided))
    return decided


def _renamed(term: Term, on: tuple[str, ...], suffix: str) -> Term:
    if isinstance(term, Capture) and term.name not in on:
        return Capture(term.name + suffix, term.kind)
    if isinstance(term, ListOf):
        return ListOf(tuple(_renamed(item, on, suffix) for item in term.items))
    if isinstance(term, Op):
        return replace(term, args=tuple((name, _renamed(part, on, suffix)) for name, part in term.args))
    return term
