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
        of: the node; None for the heading of a body.
        body: number of the body that it is in.
        change: what became of it.
        rules: ids of the rules that made it, or made it go away, latest first.
    """

    text: str
    of: fx.Node | None = None
    body: int = 0
    change: Change = Change.SAME
    rules: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """Name of the node; empty for the heading of a body."""
        return self.of.name if self.of is not None else ""


Row: TypeAlias = tuple[Line | None, Line | None]


def written(gm: fx.GraphModule) -> list[Line]:
    """The lines of one graph; what rules made is marked as made."""
    lines = _lines(gm)
    for line in lines:
        line.rules = _makers(line.of)
        line.change = Change.MADE if line.rules else Change.SAME
    return lines


def compare(before: fx.GraphModule, after: fx.GraphModule) -> list[Row]:
    """The lines of both graphs side by side; a line that stayed is in the same row on both."""
    old, new = _lines(before), _lines(after)
    pairs = _pairs(old, new)
    stayed = {i for i, _ in pairs}, {j for _, j in pairs}
    for i, j in pairs:
        if _arguments(old[i].of) != _arguments(new[j].of):
            old[i].change = new[j].change = Change.ARGUMENTS
    for j, line in enumerate(new):
        if j not in stayed[1]:
            line.change, line.rules = Change.MADE, _makers(line.of)
    causes = _causes(old, new, pairs)
    for i, line in enumerate(old):
        if i not in stayed[0]:
            line.change, line.rules = Change.GONE, causes.get(line.of, ())
    rows: list[Row] = []
    i = j = 0
    for next_i, next_j in [*pairs, (len(old), len(new))]:
        rows += zip_longest(old[i:next_i], new[j:next_j])
        rows += zip(old[next_i : next_i + 1], new[next_j : next_j + 1], strict=True)
        i, j = next_i + 1, next_j + 1
    return rows


def _lines(gm: fx.GraphModule) -> list[Line]:
    lines: list[Line] = []
    body = 0
    for node, text in GraphWriter(gm).lines():
        body += node is None
        lines.append(Line(text, node, body))
    return lines


def _makers(node: fx.Node | None) -> tuple[str, ...]:
    return tuple(node.meta.get("fxrewrite", ())) if node is not None else ()


def _pairs(old: Sequence[Line], new: Sequence[Line]) -> list[tuple[int, int]]:
    """Indices of the lines that stayed, ascending on both sides."""
    place = {(line.body, line.node): j for j, line in enumerate(new)}
    pairs: list[tuple[int, int]] = []
    last = -1
    for i, line in enumerate(old):
        j = place.get((line.body, line.node), -1)
        if j > last and _is_same(line.of, new[j].of):
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
    old: Sequence[Line], new: Sequence[Line], pairs: Sequence[tuple[int, int]]
) -> Mapping[fx.Node | None, tuple[str, ...]]:
    """Node that went -> rules that made what its users read now; nothing when those read a node that was there before.

    A node inside of a match has only users that went with it, and went for the same reason.
    """
    now = {old[i].of: new[j].of for i, j in pairs}
    causes: dict[fx.Node | None, tuple[str, ...]] = {}
    for node in (line.of for line in reversed(old)):
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
