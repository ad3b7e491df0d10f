"""Which values of a graph share memory, as far as that is certain, and what decides it where it is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.graph.fake_values import FakeValues


class Shared(NamedTuple):
    """One thing with which a value shares memory, or may share it.

    Attributes:
        other: an input, an attribute, or another value, by its place.
        mine, theirs: the call that decides when it runs whether this value, or the other one, is a view; None if there
            is no such call.
    """

    other: fx.Node | int
    mine: fx.Node | None
    theirs: fx.Node | None

    @property
    def is_certain(self) -> bool:
        """Whether the memory is shared in every run."""
        return self.mine is None is self.theirs

    def is_in(self, others: frozenset[Shared]) -> bool:
        """Whether one of these is shared wherever this is."""
        return any(Shared(self.other, a, b) in others for a in {self.mine, None} for b in {self.theirs, None})


class Memories:
    """The memory of the values of one graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._values = FakeValues(gm)
        self._decided: dict[fx.Node, tuple[list[fx.Node], set[fx.Node] | None]] = {}

    def shared(self, values: Sequence[Any]) -> list[frozenset[Shared]]:
        """Returns, for each value, the inputs, the attributes and the other values that share, or may share, memory."""
        owners = [self._owners(value) for value in values]
        users: defaultdict[fx.Node, list[tuple[int, fx.Node | None]]] = defaultdict(list)
        for place, own in enumerate(owners):
            for node, decider in own:
                users[node].append((place, decider))
        return [
            frozenset(
                {Shared(node, decider, None) for node, decider in own if node.op in ("placeholder", "get_attr")}
                | {Shared(at, decider, theirs) for node, decider in own for at, theirs in users[node] if at != place}
            )
            for place, own in enumerate(owners)
        ]

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """Returns the node, of which it is a view, and so on, up to what owns the memory as far as that is certain."""
        found = [node]
        while (viewed := self._viewed(found[-1])) is not None and len(viewed) == 1:
            found += viewed
        return found

    def _owners(self, value: Any) -> set[tuple[fx.Node, fx.Node | None]]:
        """Returns the nodes whose memory a value shares, and the first call that decides it; none if it is no tensor.

        A call that decides it may have memory of its own.
        """
        found: set[tuple[fx.Node, fx.Node | None]] = set()
        known = ops.value(value) if isinstance(value, fx.Node) else None
        if not isinstance(value, fx.Node) or not (known is ops.MISSING or isinstance(known, torch.Tensor)):
            return found
        stack: list[tuple[fx.Node, fx.Node | None]] = [(value, None)]
        seen: set[tuple[fx.Node, fx.Node | None]] = set()
        while stack:
            node, decider = stack.pop()
            if (node, decider) in seen:
                continue
            seen.add((node, decider))
            certain = self._viewed(node)
            if not certain:
                found.add((node, decider))
            if certain is None:
                stack += [(used, decider or node) for used in ops.viewed(node)]
            else:
                stack += [(used, decider) for used in certain]
        return found

    def _viewed(self, node: fx.Node) -> set[fx.Node] | None:
        """Returns the operand whose memory the result shares; none if it is new, and None if that is not certain."""
        viewed = set(ops.viewed(node))
        if viewed and ops.is_maybe_view(node):
            known = self._decided.get(node)
            if known is None or known[0] != node.all_input_nodes:
                known = self._decided[node] = node.all_input_nodes, self._values.viewed(node)
            viewed = known[1]
        return viewed if viewed is None or len(viewed) < 2 else None
