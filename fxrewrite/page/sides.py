"""Two graphs line by line: what stayed, what went, what came, and which rules did it.

A rewrite leaves the nodes that it does not touch as they are, under their names. So a node of the one graph is a node
of the other when name, target and the rules that made it agree: exact, and linear in the size of the graph.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

from torch import fx
from torch.fx.node import map_arg

from fxrewrite.graph.text import GraphWriter

__all__ = ["Change", "Line", "Row", "compare", "written"]


class Change(enum.StrEnum):
    """What became of a line."""

    SAME = "same"
    ARGUMENTS = "arguments"
    """The same call with other arguments: it reads what came instead of what went."""
    GONE = "gone"
    MADE = "made"


@dataclass(slots=True)
class Line:
    """One line of one side.

    Attributes:
        text: the canonical text, without the rules.
        node: name of the node; empty for the heading of a body.
        change: what became of it.
        rules: ids of the rules that made it, or made it go away, latest first.
    """

    text: str
    node: str = ""
    change: Change = Change.SAME
    rules: tuple[str, ...] = ()


Row: TypeAlias = tuple[Line | None, Line | None]
_Key: TypeAlias = tuple[int, str]


@dataclass(slots=True)
class _Entry:
    key: _Key
    node: fx.Node | None
    line: Line


def written(gm: fx.GraphModule) -> list[Line]:
    """The lines of one graph; what rules made is marked as made."""
    entries = _entries(gm)
    for entry in entries:
        entry.line.rules = _makers(entry.node)
        entry.line.change = Change.MADE if entry.line.rules else Change.SAME
    return [entry.line for entry in entries]


def compare(before: fx.GraphModule, after: fx.GraphModule) -> list[Row]:
    """The lines of both graphs side by side; a line that stayed is in the same row on both."""
    old, new = _entries(before), _entries(after)
    pairs = _pairs(old, new)
    stayed = {i for i, _ in pairs}, {j for _, j in pairs}
    for i, j in pairs:
        if _arguments(old[i].node) != _arguments(new[j].node):
            old[i].line.change = new[j].line.change = Change.ARGUMENTS
    for j, entry in enumerate(new):
        if j not in stayed[1]:
            entry.line.change, entry.line.rules = Change.MADE, _makers(entry.node)
    causes = _causes(old, new, pairs)
    for i, entry in enumerate(old):
        if i not in stayed[0]:
            entry.line.change, entry.line.rules = Change.GONE, causes.get(entry.node, ())
    rows: list[Row] = []
    i = j = 0
    for next_i, next_j in [*pairs, (len(old), len(new))]:
        gone, made = [e.line for e in old[i:next_i]], [e.line for e in new[j:next_j]]
        rows += zip_longest(gone, made)
        if next_i < len(old):
            rows.append((old[next_i].line, new[next_j].line))
        i, j = next_i + 1, next_j + 1
    return rows


def _entries(gm: fx.GraphModule) -> list[_Entry]:
    entries: list[_Entry] = []
    body = 0
    for node, text in GraphWriter(gm).lines():
        body += node is None
        name = node.name if node is not None else ""
        entries.append(_Entry((body, name), node, Line(text, name)))
    return entries


def _makers(node: fx.Node | None) -> tuple[str, ...]:
    return tuple(node.meta.get("fxrewrite", ())) if node is not None else ()


def _pairs(old: Sequence[_Entry], new: Sequence[_Entry]) -> list[tuple[int, int]]:
    """Indices of the lines that stayed, ascending on both sides."""
    place = {entry.key: j for j, entry in enumerate(new)}
    pairs: list[tuple[int, int]] = []
    last = -1
    for i, entry in enumerate(old):
        j = place.get(entry.key, -1)
        if j > last and _is_same(entry.node, new[j].node):
            pairs.append((i, j))
            last = j
    return pairs


def _is_same(a: fx.Node | None, b: fx.Node | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.op == b.op and a.target == b.target and _makers(a) == _makers(b)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that it reads, in the order of its arguments, with repetitions."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), lambda node: found.append(node) or node)
    return found


def _arguments(node: fx.Node | None) -> Any:
    """Its arguments as text: comparing them as they are could guard on a symbolic size."""
    return None if node is None else repr((node.args, node.kwargs))


def _causes(
    old: Sequence[_Entry], new: Sequence[_Entry], pairs: Sequence[tuple[int, int]]
) -> Mapping[fx.Node | None, tuple[str, ...]]:
    """Node that went -> rules that made what its users read now; nothing when those read a node that was there before.

    A node inside of a match has only users that went with it, and went for the same reason.
    """
    now = {old[i].node: new[j].node for i, j in pairs}
    causes: dict[fx.Node | None, tuple[str, ...]] = {}
    for entry in reversed(old):
        node = entry.node
        if node is None or node in now:
            continue
        rules: dict[str, None] = {}
        for user in node.users:
            then = now.get(user)
            if then is None:
                rules |= dict.fromkeys(causes.get(user, ()))
                continue
            for was, reads in zip(_inputs(user), _inputs(then), strict=False):
                if was is node:
                    rules |= dict.fromkeys(rule for rule in _makers(reads) if rule not in _makers(node))
        causes[node] = tuple(rules)
    return causes
