"""What a graph promises its caller about inputs and outputs, preserved across a rewrite.

The inputs stay, and so does the number of outputs. An output that had its own memory still has: `x + 0` is a new tensor
that the caller may write to, `x` is not, and a subgraph of `torch.cond` must not return its input at all. An output
that required gradients still does: `invoke_subgraph` requests that of its subgraph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxrewrite import ops
from fxrewrite.errors import InvariantError
from fxrewrite.graph.edit import Edit

__all__ = ["FRESH", "Promise"]

FRESH = "plan.fresh_output"
"""Takes the place of a rule's id on the copy of an output."""


class Promise:
    """The inputs of a graph, and for each output what shares memory with it and whether it requires gradients."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._inputs = _inputs(gm)
        self._outputs = _outputs(gm)
        self._shared = _shared(self._outputs)
        self._differentiable = [_requires_grad(output) for output in self._outputs]

    def keep(self, edit: Edit) -> None:
        """Copies outputs that share more memory than before, and restores requires_grad of outputs that had it.

        Raises:
            InvariantError: the graph has other inputs, or another number of outputs.
        """
        inputs, outputs = _inputs(self._gm), _outputs(self._gm)
        if inputs != self._inputs:
            was, is_now = (", ".join(f"%{node.name}" for node in nodes) or "none" for nodes in (self._inputs, inputs))
            raise InvariantError(
                f"the plan changed the graph's inputs, which its caller passes: {was} before, {is_now} after"
            )
        if len(outputs) != len(self._outputs):
            raise InvariantError(
                f"the plan changed the number of the graph's outputs, which its caller counts: {len(self._outputs)} "
                f"before, {len(outputs)} after"
            )
        for output, required in zip(outputs, self._differentiable, strict=True):
            if required and not _requires_grad(output):
                ops.value(output).requires_grad_()
        # An output that shares more memory than before could show the caller's writes elsewhere, so it is copied.
        aliased = self._aliased(outputs)
        if aliased:
            self._copy(edit, aliased)

    def _aliased(self, outputs: list[Any]) -> list[int]:
        """Returns indices of the outputs that must be copied; the copy of a changed output is preferred."""
        shared = _shared(outputs)
        copied: set[fx.Node | int] = set()
        order = sorted(
            range(len(outputs)), key=lambda index: (outputs[index] is self._outputs[index], len(self._shared[index]))
        )
        for index in order:  # changed outputs come first, so that the others are kept
            if not shared[index] - copied <= self._shared[index]:
                copied.add(index)
        return [index for index in range(len(outputs)) if index in copied]

    def _copy(self, edit: Edit, indices: list[int]) -> None:
        end = self._gm.graph.output_node()
        outputs, spec = tree_flatten(end.args)
        for index in indices:
            like = self._outputs[index]  # the old output has the source line; an input returned instead has none
            outputs[index] = edit.call(
                torch.ops.aten.clone.default, (outputs[index],), before=end, like=like, rule=FRESH
            )
        edit.set_args(end, tree_unflatten(outputs, spec))


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _outputs(gm: fx.GraphModule) -> list[Any]:
    return tree_leaves(gm.graph.output_node().args)


def _requires_grad(output: Any) -> bool:
    found = ops.value(output) if isinstance(output, fx.Node) else None
    return isinstance(found, torch.Tensor) and found.requires_grad


def _shared(outputs: Sequence[Any]) -> list[frozenset[fx.Node | int]]:
    """Returns, for each output, the inputs, attributes and other outputs (by index) whose memory it may share."""
    owners = [_owners(output) for output in outputs]
    users: defaultdict[fx.Node, set[int]] = defaultdict(set)
    for place, own in enumerate(owners):
        for node in own:
            users[node].add(place)
    return [
        frozenset(
            {node for node in own if node.op in ("placeholder", "get_attr")}.union(
                *(users[node] - {place} for node in own)
            )
        )
        for place, own in enumerate(owners)
    ]


def _owners(output: Any) -> frozenset[fx.Node]:
    """Returns the nodes of whose memory the output may be a view, at least itself; none if it is not a known tensor."""
    if not isinstance(output, fx.Node) or not isinstance(ops.value(output), torch.Tensor):
        return frozenset()
    return frozenset(node for node in ops.memory_origins(output) if not ops.is_view(node))
