"""What a graph promises its caller about inputs and outputs, preserved across a rewrite.

The inputs stay, and so does the number of outputs. An output that had its own memory still has: `x + 0` is a new tensor
that the caller may write to, `x` is not, and a subgraph of `torch.cond` must not return its input at all. Outputs that
were views of one such tensor still are. One that had a place for each entry still has: what the caller writes to a row
of `x.repeat(2, 1)` is in that row alone. An output that required gradients still does: `invoke_subgraph` requests that
of its subgraph.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxrewrite import ops
from fxrewrite.errors import InvariantError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.memories import Memories, Shared
from fxrewrite.graph.sizes import is_same_view

FRESH = "plan.fresh_output"
"""Takes the place of a rule's id on the copy of an output."""


class Promise:
    """The inputs of a graph, and for each output what shares memory with it and whether it requires gradients."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._memories = Memories(gm)
        self._inputs = _inputs(gm)
        self._outputs = _outputs(gm)
        self._shared = self._memories.shared(self._outputs)
        self._repeats = [self._repeating(output) for output in self._outputs]
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

    def _aliased(self, outputs: list[Any]) -> list[list[int]]:
        """Returns the outputs that must be copied, in groups that shared memory; changed outputs are preferred."""
        shared = self._memories.shared(outputs)

        def reluctance(group: list[int]) -> tuple[bool, bool, int]:
            before = [pair for index in group for pair in self._shared[index]]
            is_of_caller = any(pair.is_certain and isinstance(pair.other, fx.Node) for pair in before)
            return is_of_caller, all(outputs[index] is self._outputs[index] for index in group), len(before)

        copied: set[fx.Node | int] = set()
        found: list[list[int]] = []
        for group in sorted(_groups(self._shared), key=reluctance):  # what must be copied first lets the others be kept
            apart = copied.union(group)
            if self._newly_repeats(group, outputs) or any(
                p.other not in apart and not p.is_in(self._shared[at]) for at in group for p in shared[at]
            ):
                copied = apart
                found.append(group)
        return found

    def _repeating(self, output: Any) -> list[bool]:
        """Whether two entries may be one place in memory: of the output, of what it is a view of, and so on."""
        is_tensor = isinstance(output, fx.Node) and (ops.is_tensor(output) or ops.value(output) is ops.MISSING)
        return [ops.may_overlap_itself(node) for node in self._memories.chain(output)] if is_tensor else [False]

    def _newly_repeats(self, group: list[int], outputs: list[Any]) -> bool:
        """Whether what the caller writes to one entry of these outputs would newly be in another entry, too."""
        ends = None if len(group) > 1 else 1  # an output alone may be one row of what repeats it
        now = {at: self._repeating(outputs[at])[:ends] for at in group if outputs[at] is not None}
        return any(any(found) and not any(self._repeats[at][:ends]) for at, found in now.items())

    def _copy(self, edit: Edit, groups: list[list[int]]) -> None:
        end = self._gm.graph.output_node()
        outputs, spec = tree_flatten(end.args)
        views: list[fx.Node] = []
        for group in groups:
            chains = {index: self._memories.chain(outputs[index]) for index in group}
            for owner in dict.fromkeys(chain[-1] for chain in chains.values()):
                of_owner = {index: chain for index, chain in chains.items() if chain[-1] is owner}
                copies = self._copies(edit, of_owner)
                for index, chain in of_owner.items():
                    outputs[index] = copies[chain[0]]
                    views += [node for node in chain[:-1] if ops.is_pure(node)]
        edit.set_args(end, tree_unflatten(outputs, spec))
        edit.erase_unused(sorted(dict.fromkeys(views), reverse=True))

    def _copies(self, edit: Edit, chains: dict[int, list[fx.Node]]) -> dict[fx.Node, fx.Node]:
        """Returns a copy of every output: the same views of one copy of what they are views of, where that can be."""
        starts = {chain[0]: self._outputs[index] for index, chain in chains.items()}
        first, *others = chains.values()
        for node in first if len(starts) > 1 else ():
            if all(node in chain for chain in others) and ops.is_tensor(node):
                like = starts.get(node, self._outputs[next(iter(chains))])
                paths = [chain[: chain.index(node) + 1] for chain in chains.values()]
                if any(ops.may_overlap_itself(view) for path in paths for view in path[:-1]):
                    continue  # views of a copy of this would still repeat entries
                try:
                    with edit.savepoint():
                        return _views_of_copy(edit, _clone(edit, node, like), paths)
                except Exception:  # noqa: BLE001  # the views cannot be made of this copy
                    continue
        return {node: _clone(edit, node, like) for node, like in starts.items()}


def shared_outputs(gm: fx.GraphModule) -> frozenset[tuple[int, int]]:
    """Returns pairs of an output and what it certainly shares memory with: an earlier output, or -1, an input.

    Outputs that are inputs are not among them.
    """
    outputs = _outputs(gm)
    shared = enumerate(Memories(gm).shared(outputs))
    certain = ((at, pair.other) for at, pairs in shared for pair in pairs if pair.is_certain)
    found = ((at, other if isinstance(other, int) else -1) for at, other in certain)
    given = {at for at, output in enumerate(outputs) if isinstance(output, fx.Node) and output.op == "placeholder"}
    return frozenset((at, other) for at, other in found if other < at and given.isdisjoint((at, other)))


def _clone(edit: Edit, node: fx.Node, like: Any) -> fx.Node:
    end = edit.graph.output_node()  # the old output has the source line; an input returned instead has none
    target = torch.ops.aten.clone.default if ops.is_tensor(node) else fresh
    return edit.call(target, (node,), before=end, like=like, rule=FRESH)


def fresh(value: Any) -> Any:
    """A copy of a tensor; graphs without fake values call it, in which a value may be something else."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _views_of_copy(edit: Edit, clone: fx.Node, paths: list[list[fx.Node]]) -> dict[fx.Node, fx.Node]:
    """Returns the values of these paths, which end with what was cloned, as views of the clone.

    Raises:
        InvariantError: one of them would show other entries.
    """
    copied = paths[0][-1]
    repeats = ops.may_overlap_itself(copied)  # the copy does not, so only its own entries are at the right places
    if repeats and any(ops.key(view) == "aten::as_strided" for path in paths for view in path[:-1]):
        raise InvariantError(f"%{copied.name} has entries that share memory, and a copy of it has not")
    new, values = {copied: clone}, {copied: ops.value(clone if repeats else copied)}
    _require_same_places(values, new, copied, copied)
    for view, base in (pair for path in paths for pair in reversed([*pairwise(path)])):
        if view in new:
            continue
        if ops.mutated(view):  # a write returns what it wrote to, of which the clone has the last entries
            if not is_same_view(ops.value(view), ops.value(base)):
                raise InvariantError(f"%{view.name} changes the shape of %{base.name} in place")
            new[view], values[view] = new[base], values[base]
            continue
        args, kwargs = map_arg(  # pyright: ignore[reportGeneralTypeIssues]
            (view.args, view.kwargs), lambda node, old=base, by=new[base]: by if node is old else node
        )
        values[view] = edit.values.run_with(view, {base: values[base]})
        new[view] = edit.call(view.target, args, kwargs, before=edit.graph.output_node(), like=view)
        _require_same_places(values, new, view, copied)
    return new


def _require_same_places(
    values: dict[fx.Node, Any], new: dict[fx.Node, fx.Node], node: fx.Node, copied: fx.Node
) -> None:
    """Checks that the entries of a view and of its copy are at the same places, from the copied value on."""
    shifts = values[copied].storage_offset(), ops.value(new[copied]).storage_offset()
    pairs = zip(ops.tensors_in(values[node]), ops.tensors_in(ops.value(new[node])), strict=True)
    if not all(is_same_view(a, b, *shifts) for a, b in pairs):
        raise InvariantError(f"%{node.name} of a copy of %{copied.name} has its entries at other places")


def _groups(shared: list[frozenset[Shared]]) -> list[list[int]]:
    """Returns the outputs in groups that certainly share memory, in order; most groups have one output."""
    group_of: dict[int, list[int]] = {}
    for index, pairs in enumerate(shared):
        joined = next((p.other for p in pairs if p.is_certain and isinstance(p.other, int) and p.other < index), index)
        group_of[index] = group_of.get(joined, [])
        group_of[index].append(index)
    return [group for index, group in group_of.items() if group[0] == index]


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _outputs(gm: fx.GraphModule) -> list[Any]:
    return tree_leaves(gm.graph.output_node().args)


def _requires_grad(output: Any) -> bool:
    found = ops.value(output) if isinstance(output, fx.Node) else None
    return isinstance(found, torch.Tensor) and found.requires_grad
