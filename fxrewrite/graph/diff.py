"""The difference between a graph before and after a transform."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from torch import fx

from fxrewrite.graph.text import GraphWriter

_CONTEXT = 2
"""Equal lines that are shown before and after lines that differ."""
_NUMBERED = re.compile(r"%\d+(?![\w.])")
_DEFINED = re.compile(r"\s*(%\d+)(?![\w.])")
_TYPE = re.compile(r"^(\s*\S+?): .*? = ")


def graph_diff(before: fx.GraphModule, after: fx.GraphModule) -> str:
    """Returns the lines that differ, with the rules that made them and two lines around; "" if nothing differs.

    Two nodes are equal if they make the same call, by the same rules, on equal values; another number or shape is not a
    difference. Values are numbered as in `after`; removed values are `%-0`, `%-1`, ...
    """
    old, new = _lines(before), _lines(after)
    # Match lines without value numbers, renumber the old lines as the new ones, then compare with numbers.
    pairs = _matched([_anonymous(line) for line in old], [_anonymous(line) for line in new])
    old = _renamed(old, {i: new[j] for i, j in pairs})
    marked: list[tuple[str, str]] = []
    i = j = 0
    for next_i, next_j in [*pairs, (len(old), len(new))]:
        marked += [("-", line) for line in old[i:next_i]] + [("+", line) for line in new[j:next_j]]
        for was, now in zip(old[next_i : next_i + 1], new[next_j : next_j + 1], strict=True):
            marked += [(" ", now)] if _untyped(was) == _untyped(now) else [("-", was), ("+", now)]
        i, j = next_i + 1, next_j + 1
    return _windows(_removed_first(marked))


def _lines(gm: fx.GraphModule) -> list[str]:
    return [line for _, line in GraphWriter(gm, facts=False, rules=True).lines()]


def _untyped(line: str) -> str:
    return _TYPE.sub(r"\1 = ", line)


def _anonymous(line: str) -> str:
    """Returns the line without what depends on the rest of the graph: numbers of values, and types."""
    return _NUMBERED.sub("%_", _untyped(line))


def _matched(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the indices of equal lines, in order.

    Lines that occur once on both sides, such as a call with a parameter, are matched first (a patience diff). Little is
    left between them, whereas difflib alone takes quadratic time on layers that are structurally equal.
    """
    once = {line for line, count in Counter(old).items() if count == 1}
    once &= {line for line, count in Counter(new).items() if count == 1}
    at_old, at_new = [[i for i, line in enumerate(lines) if line in once] for lines in (old, new)]
    anchors = [(at_old[i], at_new[j]) for i, j in _common([old[i] for i in at_old], [new[j] for j in at_new])]
    pairs: list[tuple[int, int]] = []
    i = j = 0
    for next_i, next_j in [*anchors, (len(old), len(new))]:
        pairs += [(i + a, j + b) for a, b in _common(old[i:next_i], new[j:next_j])]
        pairs.append((next_i, next_j))
        i, j = next_i + 1, next_j + 1
    return pairs[:-1]


def _common(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return [(block.a + k, block.b + k) for block in blocks for k in range(block.size)]


def _renamed(old: list[str], match: Mapping[int, str]) -> list[str]:
    """Returns the lines of `old`, with each value named as in its match, or as a removed value."""
    names: dict[str, str] = {}
    num_gone = 0
    for i, line in enumerate(old):
        if (was := _DEFINED.match(line)) is None:
            continue
        if i in match and (now := _DEFINED.match(match[i])):
            names[was[1]] = now[1]
        else:
            names[was[1]] = f"%-{num_gone}"
            num_gone += 1
    return [_NUMBERED.sub(lambda found: names[found[0]], line) for line in old]


def _removed_first(marked: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sorts each run of changes: removed lines, then added lines."""
    ordered: list[tuple[str, str]] = []
    for _, run in groupby(marked, key=lambda entry: entry[0] == " "):
        ordered += sorted(run, key=lambda entry: entry[0] == "+")
    return ordered


def _windows(marked: list[tuple[str, str]]) -> str:
    shown = {
        near
        for i, (mark, _) in enumerate(marked)
        if mark != " "
        for near in range(max(0, i - _CONTEXT), min(len(marked), i + _CONTEXT + 1))
    }
    lines: list[str] = []
    for i in sorted(shown):
        if i and i - 1 not in shown:
            lines.append("...")
        lines.append("{} {}".format(*marked[i]))
    if lines and len(marked) - 1 not in shown:
        lines.append("...")
    return "\n".join(lines)
