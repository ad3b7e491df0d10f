"""Lists of any length: which items belong to which part of the pattern's list, and what they capture.

Items at the ends of a list have paths of their own, as in lists of fixed length. What is from the first part of any
length to the last is matched here: each part takes as few items as possible, the last one the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxrewrite.match.conditions import Condition
from fxrewrite.match.values import Candidate, Path, is_same

ITEM = Path.root(-1)
"""Root of the paths inside of an item."""


@dataclass(frozen=True, slots=True)
class Item:
    """One reading of an item.

    Attributes:
        conditions: on the item, whose path is ITEM.
        captures: name -> path below ITEM.
        operators: paths of the operators in it, whether users outside the match are allowed, whether they draw.
    """

    conditions: tuple[Condition, ...]
    captures: tuple[tuple[str, Path], ...]
    operators: tuple[tuple[Path, bool, bool], ...]


@dataclass(frozen=True, slots=True)
class ListPart:
    """A part of the pattern's list: exactly one item, or any number of items (`many`); `names` capture lists."""

    readings: tuple[Item, ...]
    many: bool
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class VariadicList:
    """The parts from the first of any length to the last.

    Attributes:
        path: of the list.
        front, back: how many items before and after these parts have paths of their own.
        parts: the parts.
        captures: name -> path at which the value is put, or where it is already if another part captured it.
        known: those of the names that are captured before.
    """

    path: Path
    front: int
    back: int
    parts: tuple[ListPart, ...]
    captures: Mapping[str, Path]
    known: frozenset[str]

    @property
    def nodes(self) -> Path:
        """Path at which the operators of the items are put: pairs of a node, and whether it may have other users."""
        return self.path / "*"


@dataclass(frozen=True, slots=True)
class Failed:
    """The condition that failed, on the item that got furthest.

    Attributes:
        condition: what did not hold; None if items hold one by one, and not together.
        candidate: the values of the item.
        item: its number in the list.
    """

    condition: Condition | None
    candidate: Candidate
    item: int


@dataclass(slots=True)
class _Fit:
    """An item in a reading that fits it."""

    part: ListPart
    values: dict[str, Any]
    nodes: tuple[tuple[fx.Node, bool], ...]
    drawn: tuple[fx.Node, ...]


class _Search:
    """Backtracking over where the parts begin; items of one part are taken one after the other."""

    def __init__(self, listed: VariadicList, candidate: Candidate) -> None:
        self.listed = listed
        self.candidate = candidate
        self.items = list(candidate.value(listed.path))
        self.stop = len(self.items) - listed.back
        self.chosen: list[tuple[_Fit, tuple[str, ...]]] = []
        self.values: dict[str, Any] = {name: candidate.value(listed.captures[name]) for name in listed.known}
        self.drawn: set[fx.Node] = set()
        self.furthest: Failed | None = None
        self._fits: dict[tuple[int, int], list[_Fit]] = {}
        owner = candidate.value(listed.path.parent) if listed.path.parent is not None else None
        self._owner = {owner} if isinstance(owner, fx.Node) else set[fx.Node]()

    def place(self, number: int, start: int) -> Iterator[None]:
        """Yields once for every way to match the parts from `number` on with the items from `start` on."""
        parts = self.listed.parts
        if number == len(parts):
            if start == self.stop:
                yield
            return
        part, is_last = parts[number], number == len(parts) - 1
        if part.many and (not is_last or start == self.stop):
            yield from self.place(number + 1, start)
        if start == self.stop:
            return
        for fit in self.fits(number, start):  # the values that all items share are decided by the first one
            mark = len(self.chosen)
            if not self.push(fit, start):
                continue
            at, decides = start + 1, bool(self.chosen[-1][1])
            if not part.many:
                yield from self.place(number + 1, at)
            while part.many:
                if not is_last or at == self.stop:
                    yield from self.place(number + 1, at)
                if at == self.stop or not any(self.push(other, at) for other in self.fits(number, at)):
                    break
                at += 1
            while len(self.chosen) > mark:
                self.pop()
            if part.many and not decides:
                return  # each item is taken in the first reading that fits it

    def push(self, fit: _Fit, at: int) -> bool:
        """Takes an item; False if it captures another value than the items before it, or a draw a second time."""
        shared = {name: value for name, value in fit.values.items() if name not in fit.part.names}
        differs = any(name in self.values and not is_same(self.values[name], value) for name, value in shared.items())
        if differs or not self.drawn.isdisjoint(fit.drawn):
            self.note(Failed(None, self.candidate, at))
            return False
        new = tuple(name for name in shared if name not in self.values)
        self.values.update(shared)
        self.drawn.update(fit.drawn)
        self.chosen.append((fit, new))
        return True

    def pop(self) -> None:
        fit, new = self.chosen.pop()
        for name in new:
            del self.values[name]
        self.drawn.difference_update(fit.drawn)

    def fits(self, number: int, at: int) -> list[_Fit]:
        """Returns the readings of a part that fit an item, those without other users of its operators first."""
        found = self._fits.get((number, at))
        if found is not None:
            return found
        part, good, others = self.listed.parts[number], list[_Fit](), list[_Fit]()
        for reading in part.readings:
            candidate = Candidate({ITEM: self.items[at]})
            wrong = next((condition for condition in reading.conditions if not condition.holds(candidate)), None)
            if wrong is not None:
                self.note(Failed(wrong, candidate, at))
                continue
            values = {name: candidate.value(path) for name, path in reading.captures}
            for name in part.names - values.keys():
                values[name] = None  # of an alternative that is not taken
            nodes = tuple((candidate.value(path), shared) for path, shared, _ in reading.operators)
            drawn = tuple(candidate.value(path) for path, _, draws in reading.operators if draws)
            inside = self._owner | {node for node, _ in nodes}
            is_free = all(shared or node.users.keys() <= inside for node, shared in nodes)
            (good if is_free else others).append(_Fit(part, values, nodes, drawn))
        self._fits[number, at] = good + others
        return good + others

    def note(self, failed: Failed) -> None:
        if self.furthest is None or failed.item > self.furthest.item:
            self.furthest = failed

    def solution(self) -> Candidate | None:
        """Returns the candidate with the values of all names; None if a list is another one than captured before."""
        listed, values = self.listed, dict(self.candidate.values)
        lists = {name: self.values[name] for name in listed.known}
        for part in listed.parts:
            for name in part.names:
                items = [fit.values[name] for fit, _ in self.chosen if fit.part is part]
                before = lists.setdefault(name, items)
                if len(before) != len(items) or not all(map(is_same, before, items)):
                    self.note(Failed(None, self.candidate, self.stop))
                    return None
                values[listed.captures[name]] = items
        for name, path in listed.captures.items():
            values.setdefault(path, self.values.get(name))
        values[listed.nodes] = [pair for fit, _ in self.chosen for pair in fit.nodes]
        return Candidate(values)


def solutions(listed: VariadicList, candidate: Candidate) -> Iterator[Candidate | Failed]:
    """Yields the ways in which the list matches; if there is none, how far it got."""
    search = _Search(listed, candidate)
    found = False
    for _ in search.place(0, listed.front):
        solved = search.solution()
        if solved is not None:
            found = True
            yield solved
    if not found:
        yield search.furthest or Failed(None, candidate, search.stop)
