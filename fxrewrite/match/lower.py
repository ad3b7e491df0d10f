"""Lowers a pattern to variants: a flat list of conditions for each combination of alternatives.

Variants share their beginnings, and the decision program that merges them (program.py) runs shared conditions once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match.conditions import (
    ARGUMENTS,
    HAS_ITEMS,
    HAS_RANK,
    IS_ANOTHER,
    IS_LIST,
    IS_LITERAL,
    IS_NODE,
    IS_ONE_OF,
    IS_OPERATOR,
    IS_OPTIONAL_NODE,
    IS_PARAMETER,
    IS_PLAIN,
    IS_SAME,
    IS_SAME_NUMBER,
    Arguments,
    Condition,
)
from fxrewrite.match.lists import ITEM, Item, ListPart, VariadicList
from fxrewrite.match.size_conditions import size_conditions
from fxrewrite.match.values import FIRST, Path
from fxrewrite.ops.schemas import repeats_of
from fxrewrite.pattern.pattern import ROOT, Pattern
from fxrewrite.pattern.terms import (
    Capture,
    Chain,
    Each,
    Either,
    Ignore,
    ListOf,
    LiteralValue,
    Maybe,
    Op,
    Siblings,
    Term,
    in_steps,
    is_number,
    is_size,
    part_of,
    reflected,
    subterms,
    twins,
    with_sizes,
)
from fxrewrite.pattern.text import term_text

MAX_VARIANTS = 1024
"""Limit of variants per pattern. A pattern with more is refused, because it should be several rules."""


Link: TypeAlias = tuple[tuple[Path, tuple[frozenset[str], ...]], ...]
"""How to find a further output: climb from a value that an earlier output captured too.

Each choice is the path of such a value, and the operators from its user up to the output. The matcher climbs from the
value with the fewest users, so a mask that every layer reads does not make it walk through all layers.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One of several results of an operator, by number, and the path of that operator in another output."""

    operator: Path
    number: int


@dataclass(frozen=True)
class Variant:
    """One reading of a pattern.

    Attributes:
        stages: conditions per output; those of output 0 are evaluated first, the others once their output is chosen.
        links: how to find the outputs 1, 2 ...
        captures: name -> path; None if the name belongs to an alternative that this reading does not take.
        below: paths of the operators below the outputs, users before what they use, and whether each may have users
            outside the match.
        siblings: for a pattern of siblings, how to get from the value that they share up to each of them.
        lists: per output, its lists of any length.
        first: the place in the pattern of output 0; the graph reads none of those before it, which are `unread`.
        may_miss: per output, what result it is if the graph need not read it; empty if the graph must read all.
    """

    stages: tuple[tuple[Condition, ...], ...]
    links: tuple[Link, ...]
    captures: dict[str, Path | None]
    below: tuple[tuple[Path, bool], ...]
    siblings: Link | None = None
    lists: tuple[tuple[VariadicList, ...], ...] = ()
    first: int = 0
    unread: tuple[Result, ...] = ()
    may_miss: tuple[Result | None, ...] = ()

    @cached_property
    def is_plain(self) -> bool:
        """Whether the conditions of output 0 are all that there is before captures are known."""
        return len(self.stages) == 1 and not self.lists and not self.unread

    @cached_property
    def outputs(self) -> tuple[Path, ...]:
        """Paths of the outputs."""
        return tuple(Path.root(index) for index in range(len(self.stages)))

    @cached_property
    def paths(self) -> frozenset[Path]:
        """All paths whose values belong to the match."""
        captured = [path for path in self.captures.values() if path is not None]
        return frozenset([*self.outputs, *(path for path, _ in self.below), *captured])

    @property
    def root_key(self) -> str:
        """The operator of output 0: the first condition of every variant."""
        return self.stages[0][0].operands[0]


_CAPTURED = {"node": IS_NODE, "literal": IS_PLAIN, "optional": IS_OPTIONAL_NODE, "param": IS_PARAMETER, "any": None}
"""What a capture of each kind asks of its value."""


@dataclass(slots=True)
class _Part:
    """Tests and captures of one reading of one term; `+` concatenates."""

    conditions: tuple[Condition, ...] = ()
    captures: tuple[tuple[str, Path], ...] = ()
    operators: tuple[tuple[Path, Op | Chain], ...] = ()
    lists: tuple[tuple[Path, ListOf], ...] = ()
    sizes: tuple[tuple[Path, Op], ...] = ()

    def __add__(self, other: _Part) -> _Part:
        return _Part(
            self.conditions + other.conditions,
            self.captures + other.captures,
            self.operators + other.operators,
            self.lists + other.lists,
            self.sizes + other.sizes,
        )


class _TooManyError(RuleDefinitionError):
    """A pattern has more than MAX_VARIANTS variants."""


def lower(pattern: Pattern) -> tuple[Variant, ...]:
    """Returns all variants of a pattern; optional steps taken and earlier options come first.

    One that has too many with the twins of its operators has none of these.

    Raises:
        RuleDefinitionError: there are more than MAX_VARIANTS, or an output shares no captured value with the others.
    """
    try:
        return _lower(pattern, _Reader(has_twins=True))
    except _TooManyError:
        return _lower(pattern, _Reader(has_twins=False))


def _lower(pattern: Pattern, reader: _Reader) -> tuple[Variant, ...]:
    variants: dict[tuple[object, ...], Variant] = {}
    for first in range(len(pattern.outputs)):
        outputs = pattern.outputs[first:]
        per_output = [list(reader.read(output, Path.root(index))) for index, output in enumerate(outputs)]
        # Every combination of the outputs' readings is a variant; equal ones are merged.
        for parts in itertools.product(*per_output):
            unread = _unread(pattern.outputs[:first], parts)
            if unread is None:
                continue
            variant = _variant(parts, pattern, first, unread, reader)
            variants.setdefault((variant.stages, tuple(variant.captures.items()), unread), variant)
            if len(variants) > MAX_VARIANTS:
                raise _TooManyError(f"pattern {pattern} has more than {MAX_VARIANTS} readings; write several rules")
    return tuple(variants.values())


def _unread(before: tuple[Term, ...], parts: tuple[_Part, ...]) -> tuple[Result, ...] | None:
    """Returns which results the outputs `before` are, that the graph does not read; None if one is no such result."""
    found: list[Result] = []
    for output in before:
        options = output.options if isinstance(output, Either) else (output,)
        results = (_result(part_of(option), parts) for option in options)
        result = next((result for result in results if result is not None), None)
        if result is None:
            return None
        found.append(result)
    return tuple(found)


def _result(part: tuple[Op, int] | None, parts: Iterable[_Part]) -> Result | None:
    """Returns where another output has the operator of which the part is one result; None if none has it."""
    for other in parts if part is not None else ():
        path, term = other.operators[0] if other.operators else (None, None)
        of = part_of(term) if isinstance(term, Op) else None
        if part is not None and of is not None and of[0] == part[0] and path is not None and isinstance(term, Op):
            return Result(path / term.args[0][0], part[1])
    return None


class _Reader:
    """Reads terms, with the twins of operators or without."""

    def __init__(self, *, has_twins: bool) -> None:
        self._has_twins = has_twins

    def read(self, term: Term, path: Path) -> Iterator[_Part]:
        """Yields the readings of a term at a path."""
        if isinstance(term, Op) and is_size(term) and path.parent is not None:
            yield _Part(sizes=((path, term),))
        elif isinstance(term, Op):
            yield from self._operator(term, path)
            for other in (in_steps(term), with_sizes(term), *reflected(term)):
                if other is not None:
                    yield from self._operator(other, path)
            for other, name, ranks in twins(term) if self._has_twins else ():
                needed = _Part((HAS_RANK(path / name, *ranks),)) if ranks else _Part()
                for part in self._operator(other, path):
                    yield part + needed
        elif isinstance(term, Capture):
            kind = _CAPTURED[term.kind]
            yield _Part((kind(path),) if kind is not None else (), ((term.name, path),))
        elif isinstance(term, LiteralValue):
            yield _Part((IS_LITERAL(path, term, path.step, path.parent),))
        elif isinstance(term, ListOf):
            front, middle, back = _ends(term.items)
            fixed = sum(not isinstance(item, Each) for item in term.items)
            head = _Part((HAS_ITEMS(path, fixed),), lists=((path, term),)) if middle else _Part((IS_LIST(path, fixed),))
            ends = [*enumerate(front), *((index - len(back), item) for index, item in enumerate(back))]
            for parts in _product([list(self.read(item, path / index)) for index, item in ends]):
                yield sum(parts, head)
        elif isinstance(term, Maybe):
            yield from self.read(term.step, path)
            yield from self.read(term.base, path)
        elif isinstance(term, Either):
            for option in term.options:
                yield from self.read(option, path)
        elif isinstance(term, Chain):
            yield from self._chain(term, path)
        elif isinstance(term, Siblings):
            yield from self.read(term.each, path)
        else:
            assert isinstance(term, Ignore)
            yield _Part()

    def _operator(self, term: Op, path: Path) -> Iterator[_Part]:
        names = tuple(name for name, _ in term.args)
        is_called = (IS_OPERATOR(path, term.key), Arguments(path, names, ARGUMENTS))
        head = _Part(is_called[:1] if term.loose else is_called, (), ((path, term),))
        for order in _orders(term, names):
            arguments = [list(self.read(part, path / name)) for name, (_, part) in zip(order, term.args, strict=True)]
            for parts in _product(arguments):
                yield sum(parts, head)

    def _chain(self, term: Chain, path: Path) -> Iterator[_Part]:
        """Yields the readings of a chain, the longest run first."""
        steps = [path]
        for _ in range(term.most):
            steps.append(steps[-1] / FIRST)
        for length in range(term.most, term.least - 1, -1):
            run = steps[:length]
            head = _Part(tuple(IS_ONE_OF(step, term.keys) for step in run), (), tuple((step, term) for step in run))
            for part in self.read(term.base, steps[length]):
                yield head + part


def _ends(items: tuple[Term, ...]) -> tuple[tuple[Term, ...], tuple[Term, ...], tuple[Term, ...]]:
    """Returns the items before the first part of any length, those up to the last such part, and those after it."""
    places = [index for index, item in enumerate(items) if isinstance(item, Each)]
    first, last = (places[0], places[-1] + 1) if places else (len(items), len(items))
    return items[:first], items[first:last], items[last:]


def _variadic(path: Path, term: ListOf, captures: dict[str, Path], reader: _Reader) -> VariadicList:
    """Returns how the list at the path is matched; afterwards `captures` has the names in it."""
    front, middle, back = _ends(term.items)
    parts: list[ListPart] = []
    names: dict[str, None] = {}
    for part in middle:
        inner = part.term if isinstance(part, Each) else part
        readings = tuple(map(_item, reader.read(inner, ITEM)))
        is_many = isinstance(part, Each)
        parts.append(ListPart(readings, is_many, frozenset(part.names if is_many else ())))
        names.update((found.name, None) for found in subterms(inner) if isinstance(found, Capture))
    known = frozenset(names.keys() & captures.keys())
    captures.update((name, path / f"*{name}") for name in names if name not in known)
    return VariadicList(path, len(front), len(back), tuple(parts), {name: captures[name] for name in names}, known)


def _item(part: _Part) -> Item:
    if part.sizes:
        raise RuleDefinitionError(
            f"`{term_text(part.sizes[0][1])}` inside of each() is not supported; compare the sizes by a predicate"
        )
    captures: dict[str, Path] = {}
    conditions = list(part.conditions)
    repeats = _repeats(part)
    for name, path in part.captures:
        if captures.setdefault(name, path) is not path:
            conditions.append(_same(path, captures[name], repeats))
    operators = tuple(
        (path, isinstance(term, Op) and term.shared, isinstance(term, Op) and term.may_draw)
        for path, term in part.operators
    )
    return Item(tuple(conditions), tuple(captures.items()), operators)


def _orders(term: Op, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the possible orders of the operands; one order if one is a number, as `Arguments` puts numbers second."""
    pair = ops.exchangeable(term.key)
    if pair is None or term.loose or set(names) != {"self", *pair}:
        return [names]
    first, second = (names.index(name) for name in pair)
    exchanged = list(names)
    exchanged[first], exchanged[second] = names[second], names[first]
    one, other = term.args[first][1], term.args[second][1]
    if one == other:
        return [names]
    if pair[0] == "self" and is_number(one) != is_number(other):
        return [tuple(exchanged) if is_number(one) else names]
    return [names, tuple(exchanged)]


def _product(choices: list[list[_Part]]) -> Iterator[tuple[_Part, ...]]:
    count = 1
    for options in choices:
        count *= len(options)
    if count > MAX_VARIANTS:
        raise _TooManyError(f"a pattern has more than {MAX_VARIANTS} readings; write several rules")
    return itertools.product(*choices)


@dataclass(slots=True)
class _Known:
    """What the readings of the outputs so far have named, drawn and, if a size may name it, computed."""

    pattern: Pattern
    has_sizes: bool
    captures: dict[str, Path] = field(default_factory=dict)
    repeats: dict[Path, int] = field(default_factory=dict)
    drawn: dict[Op, Path] = field(default_factory=dict)
    computed: dict[Term, Path] = field(default_factory=dict)

    def join(self, part: _Part, *, may_miss: bool) -> tuple[Condition, ...]:
        """Takes over what the part names, draws and computes; returns what must hold for it to fit the others.

        The second occurrence of a name is not a capture but a condition for the first one's value. Of an integer that
        occurs where it means a list, and where it does not, the integer is captured: it can be passed for both.
        """
        conditions = list(part.conditions)
        self.repeats |= _repeats(part)
        for name, path in part.captures:
            first = self.captures.setdefault(name, path)
            if first is not path:
                conditions.append(_same(path, first, self.repeats))
                if self.repeats.get(first) and not self.repeats.get(path) and not may_miss:
                    self.captures[name] = path
        conditions += _draws_apart(part, self.drawn, self.pattern)
        if self.has_sizes:  # to look a term up takes a walk over it
            self.computed |= {term: path for path, term in reversed(part.operators)}
        for path, term in part.sizes:
            conditions += size_conditions(path, term, self.captures, self.computed, self.pattern)
        return tuple(conditions)


def _repeats(part: _Part) -> dict[Path, int]:
    """Returns the paths of literals where an integer means a list, with the length of the list."""
    operators = {path: ops.named_operator(term.key) for path, term in part.operators if isinstance(term, Op)}
    found: dict[Path, int] = {}
    for _, path in part.captures:
        packet = operators.get(path.parent) if path.parent is not None else None
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found[path] = repeats_of(packet, str(path.step))
    return {path: repeats for path, repeats in found.items() if repeats}


def _same(path: Path, other: Path, repeats: Mapping[Path, int]) -> Condition:
    here, there = repeats.get(path, 0), repeats.get(other, 0)
    return IS_SAME_NUMBER(path, other, here, there) if here or there else IS_SAME(path, other)


def _variant(
    parts: tuple[_Part, ...],
    pattern: Pattern,
    first_output: int,
    unread: tuple[Result, ...],
    reader: _Reader,
) -> Variant:
    """Combines one reading per output: equal names must be equal values, equal draws different nodes."""
    known = _Known(pattern, any(part.sizes for part in parts))
    captures = known.captures
    stages: list[tuple[Condition, ...]] = []
    links: list[Link] = []
    lists: list[tuple[VariadicList, ...]] = []
    may_miss: list[Result | None] = []
    for index, part in enumerate(parts):
        may_miss.append(_result_that_may_miss(part, parts[:index], captures))
        # Any further output is found by climbing from a value that an earlier output captured.
        if index:
            links.append(_link(index, part, captures, pattern))
        stages.append(known.join(part, may_miss=may_miss[-1] is not None))
        lists.append(tuple(_variadic(path, term, captures, reader) for path, term in part.lists))
    # Operators below the outputs are inner nodes; the match checks their users.
    operators = [item for part in parts for item in part.operators if item[0].parent is not None]
    below = tuple((path, isinstance(term, Op) and term.shared) for path, term in operators)
    named = {capture.name: captures.get(capture.name) for capture in pattern.captures} | dict.fromkeys(pattern.absent)
    named[ROOT] = Path.root(0)
    first = pattern.outputs[0]
    return Variant(
        tuple(stages),
        tuple(links),
        named,
        below,
        _link_of_siblings(first, parts[0], captures, pattern) if isinstance(first, Siblings) else None,
        lists=tuple(lists) if any(lists) else (),
        first=first_output,
        unread=unread,
        may_miss=tuple(may_miss) if any(may_miss) else (),
    )


def _result_that_may_miss(part: _Part, before: tuple[_Part, ...], captures: Mapping[str, Path]) -> Result | None:
    """Returns which of an operator's results the output is, if it names nothing new: nobody misses it then."""
    path, top = part.operators[0]
    if part.lists or not isinstance(top, Op) or path is not Path.root(len(before)):
        return None
    return _result(part_of(top), before) if all(name in captures for name, _ in part.captures) else None


def _draws_apart(part: _Part, drawn: dict[Op, Path], pattern: Pattern) -> Iterator[Condition]:
    """Yields that each draw is another node than equal ones in `drawn`, which it joins: two draws must be two nodes.

    Equal pure terms may be one node or two.
    """
    for path, term in part.operators:
        if isinstance(term, Chain) or not term.may_draw:
            continue
        if term in drawn:
            raise RuleDefinitionError(
                f"pattern {pattern}: {term.key} draws twice with the same arguments, which can be one draw used "
                "twice or two draws; capture its result instead"
            )
        yield from (IS_ANOTHER(path, earlier) for draw, earlier in drawn.items() if draw.key == term.key)
        drawn[term] = path


def _above(path: Path) -> Iterator[Path]:
    while path.parent is not None:
        path = path.parent
        yield path


def _climb_keys(path: Path, part: _Part) -> tuple[frozenset[str], ...]:
    """Returns the operators on the way from a path up to its output."""
    keys = {path: frozenset((term.key,) if isinstance(term, Op) else term.keys) for path, term in part.operators}
    return tuple(keys[above] for above in _above(path) if above in keys)


def _link_of_siblings(term: Siblings, part: _Part, captures: dict[str, Path], pattern: Pattern) -> Link:
    on = captures.get(term.on)
    if on is None:
        raise RuleDefinitionError(
            f"pattern {pattern}: a reading of it does not capture {term.on}, what they have in common"
        )
    return ((on, _climb_keys(on, part)),)


def _link(index: int, part: _Part, captures: dict[str, Path], pattern: Pattern) -> Link:
    kinds = {capture.name: capture.kind for capture in pattern.captures}
    choices: list[tuple[Path, tuple[frozenset[str], ...]]] = []
    for name, path in part.captures:
        if name in captures and kinds[name] != "literal":
            choices.append((captures[name], _climb_keys(path, part)))
    for path, term in part.lists:
        items = (item.term for item in term.items if isinstance(item, Each))
        bare = (item.name for item in items if isinstance(item, Capture) and item.kind in ("node", "param"))
        choices += [(captures[name], _climb_keys(path / "*", part)) for name in bare if name in captures]
    if not choices:
        raise RuleDefinitionError(
            f"pattern {pattern}: output {index} captures no value of the graph that an earlier output captures, so it "
            "could be anywhere; write two rules, or a step, which sees the whole graph"
        )
    return tuple(choices)
