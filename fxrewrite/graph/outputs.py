"""What a graph promises its caller about inputs and outputs, kept across a rewrite.

The same inputs and as many outputs. An output that had memory of its own still has: `x + 0` is a new tensor that the
caller may write to, `x` is not, and a body of `torch.cond` may not return its input at all. An output that required
gradients still does: a body of `invoke_subgraph` is asked for that.
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
"""What stands in the place of a rule's id on the copy of an output."""


class Promise:
    """The inputs of a graph, and for each output what it shares memory with and whether it requires gradients."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._inputs = _inputs(gm)
        self._outputs = _outputs(gm)
        self._shared = _shared(self._outputs)
        self._differentiable = [_requires_grad(output) for output in self._outputs]

    def keep(self, edit: Edit) -> None:
        """Copy outputs that share more memory than before, and let values require gradients that did.

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
        aliased = self._aliased(outputs)
        if aliased:
            self._copy(edit, aliased)

    def _aliased(self, outputs: list[Any]) -> list[int]:
        """Places of the outputs that must be copied: those that were most on their own come first."""
        shared = _shared(outputs)
        copied: set[fx.Node | int] = set()
        order = sorted(
            range(len(outputs)), key=lambda index: (outputs[index] is self._outputs[index], len(self._shared[index]))
        )
        for index in order:  # outputs that are another node now come first: the others stand where they stood
            if not shared[index] - copied <= self._shared[index]:
                copied.add(index)
        return [index for index in range(len(outputs)) if index in copied]

    def _copy(self, edit: Edit, indices: list[int]) -> None:
        end = self._gm.graph.output_node()
        outputs, spec = tree_flatten(end.args)
        for index in indices:
            like = self._outputs[index]  # what was fresh says where it came from, the input that stands there does not
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
    """For each output, the inputs and attributes, and the other outputs (by place), whose memory it may share."""
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
    """The nodes whose memory the output may be a view of, at least itself; none for what is not known as a tensor."""
    if not isinstance(output, fx.Node) or not isinstance(ops.value(output), torch.Tensor):
        return frozenset()
    return frozenset(node for node in ops.memory_origins(output) if not ops.is_view(node))
