"""What a plan over one mesh axis knows while it runs; given to `plan.apply(gm, context=...)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import Size, SizeNodes
from fxrewrite.match import Match
from fxrewrite.spmd.group import axis_rank
from fxrewrite.spmd.layout import Axis, Layout, Replicated
from fxrewrite.spmd.padding import EntryNodes

__all__ = ["SpmdContext", "size_proxy"]


def _whole(node: fx.Node, layout: Layout) -> Layout:
    return Replicated()


@dataclass(slots=True)
class SpmdContext:
    """One run of a plan on one graph: its axis, what the user allows, and the nodes that all ranks' sizes come from."""

    axis: Axis
    strict: bool = False
    """Refuse an operator without a layout rule instead of gathering its operands."""
    output_layout: Callable[[fx.Node, Layout], Layout] = _whole
    """How an output of the graph that lies as the given layout is returned."""
    _sizes: dict[fx.Graph, SizeNodes] = field(default_factory=dict[fx.Graph, SizeNodes], init=False)
    _rank: fx.Node | None = field(default=None, init=False)
    _entries: EntryNodes | None = field(default=None, init=False)

    @staticmethod
    def required(context: Any, by: str) -> SpmdContext:
        """The context, if there is one.

        Raises:
            FxRewriteError: the plan was applied without; says who needs it.
        """
        if context is None:
            raise FxRewriteError(
                f"{by} needs to know the mesh axis; pass plan.apply(gm, context=SpmdContext(Axis(name, size)))"
            )
        return context

    def size_nodes(self, edit: Edit) -> SizeNodes:
        """Writes sizes as nodes in front of the graph, each once; in a body from its integer inputs alone."""
        if edit.graph not in self._sizes:
            self._sizes[edit.graph] = SizeNodes(
                edit.graph,
                lambda op, args, before: edit.call(op, args, before=before, val=None),
                of_tensors=not edit.path,  # the tensors that a body is given may be chunks
            )
        return self._sizes[edit.graph]

    def rank_node(self, edit: Edit) -> fx.Node:
        """The node that holds this rank's position on the axis."""
        if self._rank is None:
            sizes = self.size_nodes(edit)
            first = next(node for node in edit.graph.nodes if node.op != "placeholder")
            # its value is 0 for shape computations only: shapes are equal on all ranks, and so is the graph's text
            self._rank = sizes.stand_first(edit.call(axis_rank, (self.axis.group,), before=first, val=0))
            edit.set_meta(self._rank, "axis", self.axis.name)
        return self._rank

    def entry_nodes(self, edit: Edit) -> EntryNodes:
        """Writes nodes over the entries of chunks that are padded."""
        if self._entries is None:
            self._entries = EntryNodes(edit, self.size_nodes(edit), self.rank_node(edit), self.axis.size)
        return self._entries


def size_proxy(match: Match, size: Size) -> Any:
    """A size as a replacement can use it: the int, or the proxy of the node that computes it from the inputs."""
    if isinstance(size, int):
        return size
    node = SpmdContext.required(match.context, "this rule").size_nodes(match.edit)(size)
    return match.proxy(node) if isinstance(node, fx.Node) else node
