"""The journal of a transaction: what was changed, and how that is undone."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxrewrite.graph.facts import facts_of
from fxrewrite.graph.fx_nodes import forget_name

ABSENT: Any = object()
"""What was there before, if nothing was."""


class Journal(list[tuple[Any, ...]]):
    """Records of changes, in order. The first two items of a record are its kind and the node that was changed:

    - ("create", node): a new node.
    - ("attach", node): a new `get_attr` or `call_module` node, for an attribute that was added with it.
    - ("args", node, args, kwargs): other arguments; these are the old ones.
    - ("call", node, op, target): another call; these are the old ones.
    - ("entry", node, mapping, key, value): another entry of its metadata or of facts; this is the old one, or `ABSENT`.
    - ("move", node, next): another place; this is the node that followed.
    - ("erase", node, args, kwargs): marked as erased; these are the arguments that it had.

    Args:
        gm: the module.
        erased: its nodes that are marked as erased.
    """

    def __init__(self, gm: fx.GraphModule, erased: set[fx.Node]) -> None:
        super().__init__()
        self._gm, self._erased = gm, erased

    def undo(self, mark: int) -> list[fx.Node]:
        """Undoes the records from `mark` on, last first; returns the nodes whose attributes were removed with them."""
        detached: list[fx.Node] = []
        while len(self) > mark:
            kind, node, *before = self.pop()
            if kind == "args":
                node._update_args_kwargs(*before)
            elif kind == "call":
                node.op, node.target = before
            elif kind == "entry":
                mapping, key, value = before
                if value is ABSENT:
                    mapping.pop(key, None)
                else:
                    mapping[key] = value
            elif kind == "move":
                before[0].prepend(node)
            elif kind == "erase":
                self._erased.discard(node)
                node._update_args_kwargs(*before)
            else:
                for known in facts_of(self._gm.graph).values():
                    known.pop(node, None)
                self._gm.graph.erase_node(node)
                forget_name(self._gm.graph, node)
                if kind == "attach":
                    delattr(self._gm, node.target)
                    detached.append(node)
        return detached
