"""Checks whether a match may be rewritten: effects, aliases, what autograd saves, draws, a place for the new nodes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence, Set as AbstractSet
from itertools import combinations, product
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from fxrewrite import ops
from fxrewrite.errors import Reason, refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.walk import reached
from fxrewrite.match.match import Match
from fxrewrite.pattern.pattern import ROOT


class Effects:
    """The nodes of a graph that write to memory or draw random numbers, in graph order.

    In a normalized graph both lists are empty or short, so every check below is cheap.
    """

    __slots__ = ("_erased", "draws", "writers")

    def __init__(self, edit: Edit) -> None:
        self._erased = edit.erased
        self.writers: list[fx.Node] = []
        self.draws: list[fx.Node] = []
        for op, target, nodes in edit.calls():
            if op == "call_module" or ops.may_have_effects(target):
                self._note(nodes)
            elif ops.may_take_out(target):
                self._note([node for node in nodes if node._kwargs and "out" in node._kwargs])  # of all calls
        self.writers.sort()
        self.draws.sort()

    def add(self, nodes: Iterable[fx.Node], draws: Iterable[fx.Node]) -> None:
        """Adds new nodes that `may_act`, and those of them that draw."""
        for node in nodes:
            if _writes(node):
                bisect.insort(self.writers, node)
        for node in draws:
            bisect.insort(self.draws, node)

    def _note(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if _writes(node):
                self.writers.append(node)
            if ops.may_draw(node.target) and ops.is_random(node):
                self.draws.append(node)

    def between(self, nodes: list[fx.Node], first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
        """Yields those of `nodes` (writers or draws) that are strictly between two nodes."""
        if nodes:
            for index in range(bisect.bisect_right(nodes, first), bisect.bisect_left(nodes, last)):
                if nodes[index] not in self._erased:
                    yield nodes[index]

    def is_without_gradients(self, node: fx.Node) -> bool:
        """Whether the node runs while gradients are off, as under `torch.no_grad()`."""
        before = self.writers[: bisect.bisect_left(self.writers, node)]
        return next((not switch.args[0] for switch in reversed(before) if ops.switches_gradients(switch)), False)

    def later_writer(self, node: fx.Node, memory: AbstractSet[fx.Node], *, is_known: bool = False) -> fx.Node | None:
        """Returns the first node after this one that may write to the memory of these nodes.

        With `is_known`, only a node of which it is known what it writes to.
        """
        later = (writer for writer in self.after(self.writers, node) if not ops.sets_mode(writer))
        later = (writer for writer in later if not (is_known and ops.is_barrier(writer)))
        return next((writer for writer in later if _may_touch(writer, memory)), None) if memory else None

    def after(self, nodes: list[fx.Node], first: fx.Node) -> Iterator[fx.Node]:
        """Yields those of `nodes` that are after a node."""
        return (node for node in nodes[bisect.bisect_right(nodes, first) :] if node not in self._erased)


def may_act(node: fx.Node) -> bool:
    """False if the node, which may be any call, neither writes nor draws."""
    return node.op == "call_module" or ops.may_have_effects(node.target) or "out" in node._kwargs


def _writes(node: fx.Node) -> bool:
    possible = node.op == "call_module" or ops.may_write(node.target) or "out" in node.kwargs
    return possible and ops.mutates(node)


def check_region(match: Match, effects: Effects) -> None:
    """Refuses a match with a write between its nodes: the replacement would read after the write what was read before.

    Raises:
        RefusedError: a node between the matched nodes writes, or may write, to memory that the match reads.
    """
    first, last = min(match.nodes), max(match.nodes)
    for writer in effects.between(effects.writers, first, last):
        if ops.sets_mode(writer) or writer in match.nodes:
            continue
        if _may_touch(writer, _sources(match.nodes)):
            unknown = ops.is_barrier(writer)
            does = "has effects that are not known," if unknown else "may write to memory of the match"
            refuse(
                f"%{writer.name} ({ops.key(writer)}) {does} between %{first.name} and %{last.name}",
                hint=_unknown_effects_hint(writer) if unknown else "functionalize the graph before rewriting it",
                node=match.root,
                kind=Reason.EFFECT,
                effect=ops.key(writer),
            )


def _unknown_effects_hint(node: fx.Node) -> str:
    if node.op == "call_module" or str(ops.key(node)).startswith("torch."):
        return "fxrewrite.normalize writes the graph as operators, whose effects are known"
    return "declare a function of your own that only gives a new value with fxrewrite.ops.declare_pure"


def check_modes(match: Match, place: fx.Node | None, effects: Effects) -> None:
    """Refuses a match whose nodes run in different modes, as some under `no_grad`: its replacement runs in one.

    Raises:
        RefusedError: a node between those that are replaced and the place of the new ones switches a mode, and the
            modes are not the same again.
    """
    if not effects.writers:
        return
    ends = (*match.nodes, place) if place is not None else match.nodes
    first, last = min(ends), max(ends)
    switch = next((node for node in effects.between(effects.writers, first, last) if ops.sets_mode(node)), None)
    if switch is None:
        return
    switches = [node for node in effects.writers if ops.sets_mode(node)]
    if place is None or len({ops.modes_at(node, switches) for node in ends}) > 1:
        refuse(
            f"%{switch.name} ({ops.key(switch)}) {ops.says_of_mode(switch)} between nodes of the match, and the "
            "replacement would be on one side of it",
            hint="match what is on one side of it, or move the region in the model; fxrewrite.normalize and "
            'backend(..., graph="aten") make casts of autocast',
            node=match.root,
            kind=Reason.EFFECT,
            effect=ops.key(switch),
        )


def check_aliases(match: Match, results: list[fx.Node], created: list[fx.Node], effects: Effects) -> None:
    """Refuses a replacement that shares memory differently from the original, if a later node writes to that memory.

    Raises:
        RefusedError: a later node writes, or may write, to memory that only one of the two shares.
    """
    own_was = {node for node in match.nodes if node not in match.kept}
    own_is = set(created)
    # Compare, per output, with what else old and new value share memory, and which outputs share memory mutually.
    was = [_shared_with(old, own_was) for old in match.outputs]
    is_now = [_shared_with(new, own_is) for new in results]
    paired = _share_each_other(match.outputs) != _share_each_other(results)
    for old, new, before, after in zip(match.outputs, results, was, is_now, strict=True):
        # An entry that is written is one entry of the one, and several of the other, as of `repeat` and `expand`.
        repeats = ops.may_overlap_itself(old) != ops.may_overlap_itself(new)
        if before != after or None in before or paired or repeats:
            memory = {node for node in before | after if node is not None}
            check_later_writes(old, memory | {old, new}, effects)


def check_writes(match: Match, created: list[fx.Node], acting: list[fx.Node]) -> None:
    """Refuses a replacement that writes to memory that it did not create, which other nodes may read.

    Args:
        match: what is replaced.
        created: the new nodes.
        acting: those of them that `may_act`.

    Raises:
        RefusedError: a new node writes to memory of a capture.
    """
    own = set(created)
    for node in acting:
        if _writes(node):
            for written in ops.mutated(node):
                foreign = [origin for origin in ops.memory_origins(written) if origin not in own]
                if foreign:
                    refuse(
                        f"the replacement writes to %{foreign[0].name} ({ops.key(node)}), which is not its own",
                        hint="use the operator that gives a new tensor",
                        node=match.root,
                        kind=Reason.EFFECT,
                        effect=ops.key(node),
                    )


def _share_each_other(outputs: Sequence[fx.Node]) -> list[bool]:
    """Returns, for each pair of outputs, whether they may share memory."""
    return [bool(ops.memory_origins(a) & ops.memory_origins(b)) for a, b in combinations(outputs, 2)]


def check_later_writes(old: fx.Node, memory: AbstractSet[fx.Node], effects: Effects) -> None:
    """Refuses what is after a write, by a node after `old`, to this memory.

    Raises:
        RefusedError: such a node writes, or may write, to it.
    """
    writer = effects.later_writer(old, memory)
    if writer is not None:
        does = "may write" if ops.is_barrier(writer) else "writes"
        refuse(
            f"%{writer.name} ({ops.key(writer)}) {does} later to memory that the replacement shares differently",
            hint="functionalize the graph before rewriting it",
            node=old,
            kind=Reason.ALIAS,
            effect=ops.key(writer),
        )


def check_saved(
    edit: Edit, match: Match, results: Sequence[fx.Node], created: Iterable[fx.Node], effects: Effects
) -> None:
    """Refuses new operators that save what a later node writes to, unless the original saves it too.

    Autograd raises in the backward pass then: `tanh` saves its result, and `y.mul_(2)` writes to it. Calls of which it
    is not known what they write to, such as `register_hook`, are taken to write to nothing here.

    Raises:
        RefusedError: such a node writes, or may write, to what would be saved.
    """
    replaced = [(old, new) for old, new in zip(match.outputs, results, strict=True) if _requires_gradient(old)]
    if not replaced or next(effects.after(effects.writers, min(match.outputs)), None) is None:
        return
    own = [node for node in match.nodes if node not in match.kept]
    known = ops.memory_origins(*(node for old in own for node in edit.values.saved_for_backward(old)))
    for node in created:
        for saved in edit.values.saved_for_backward(node):
            memory = ops.memory_origins(saved)
            memory |= {old for old, new in replaced if saved in ops.memory_origins(new) and old not in known}
            writer = effects.later_writer(min(match.outputs), memory - known, is_known=True)
            if writer is not None:
                what = "its result" if saved is node else f"%{saved.name}"
                refuse(
                    f"the replacement's {ops.key(node)} saves {what} for the backward pass, and "
                    f"%{writer.name} ({ops.key(writer)}) writes to it later",
                    hint="functionalize the graph before rewriting it, or give the replacement a copy",
                    node=match.root,
                    kind=Reason.ALIAS,
                    effect=ops.key(writer),
                )


def _requires_gradient(node: fx.Node) -> bool:
    """Whether a value requires gradients, or may: only Dynamo's values say it."""
    unsaid = ops.value_key(node) == "val"
    found = ops.tensors_of(node)
    return torch.is_grad_enabled() and any(value.requires_grad or (unsaid and ops.is_inexact(value)) for value in found)


def check_draws(match: Match, draws: list[fx.Node], rng: str, effects: Effects) -> None:
    """Refuses a replacement that draws other random numbers than the match, unless the rule declares it.

    Raises:
        RefusedError: draws are removed, added or reordered, and `rng` does not declare it.
    """
    if rng == "changes" or not (draws or effects.draws):
        return
    drawn = sorted(node for node in match.nodes if node not in match.kept and ops.is_random(node))
    was, is_now = [ops.key(node) for node in drawn], [ops.key(node) for node in draws]
    if not (was or is_now):
        return
    if was == is_now:
        moved = [d for d in effects.between(effects.draws, min(match.nodes), max(match.nodes)) if d not in match.nodes]
        if not moved:
            return
        what = f"it draws random numbers before or after %{moved[0].name} and the original does it the other way round"
    elif len(is_now) < len(was):
        if rng == "removes":
            return
        what = f"it removes random draws: {', '.join(was)} before, {', '.join(is_now) or 'none'} after"
    elif len(is_now) > len(was):
        if rng == "duplicates":
            return
        what = f"it adds random draws: {', '.join(was) or 'none'} before, {', '.join(is_now)} after"
    else:
        what = f"its draws differ: {', '.join(was)} before, {', '.join(is_now)} after"
    hint = 'declare it on the rule with rng="removes", "duplicates" or "changes" if that is meant'
    refuse(what, hint=hint, node=match.root, kind=Reason.DRAW, before=was, after=is_now)


def insertion_point(match: Match) -> fx.Node | None:
    """Returns the node before which new nodes are inserted: after all captures, before all users of the outputs.

    With one output, that is right after it. With several outputs, it is the first output, or right after the last
    capture if that is later. None if there is no such place, as where one output is read before a capture of another is
    computed: then each new node is placed after what it reads.

    Raises:
        RefusedError: a capture is computed from an output that it would have to be before.
    """
    if len(match.outputs) == 1:
        return match.root.next
    point = min(match.outputs)
    inputs = _nodes(value for name, value in match.captures.items() if name != ROOT)
    last = max(inputs) if inputs else point
    if not point < last and point not in inputs:
        return point
    early = [(output, u) for output in match.outputs for u in output.users if u not in match.nodes and not last < u]
    # what is before the first output is not computed from it
    between = reached(inputs, lambda node: [operand for operand in node.all_input_nodes if not operand < point])
    through = set(match.outputs).intersection(between)
    if through:
        output, user = early[0] if early else (min(through), None)
        refuse(
            f"%{user.name} uses the output %{output.name} before the capture %{last.name} is computed"
            if user is not None
            else f"a capture is the output %{output.name}, or is computed from it",
            hint="the outputs cannot be computed at one place; match them with separate rules",
            node=match.root,
            kind=Reason.CONVEXITY,
        )
    return None if early else last.next


def check_order(match: Match, results: list[fx.Node], draws: Sequence[fx.Node]) -> None:
    """Refuses results that are computed after they are read, and draws, whose order would change.

    Raises:
        RefusedError: a user of an output is before the new value, or the replacement draws random numbers.
    """
    if draws:
        hint = "the outputs cannot be computed at one place; match them with separate rules"
        refuse("it would draw random numbers at another place", hint=hint, node=match.root, kind=Reason.DRAW)
    for output, result in zip(match.outputs, results, strict=True):
        for user in output.users:
            if user not in match.nodes and not result < user:
                refuse(
                    f"%{user.name} uses the output %{output.name} before its new value is computed, %{result.name}",
                    hint="match the outputs with separate rules",
                    node=match.root,
                    kind=Reason.CONVEXITY,
                )


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in values:
        map_arg(value, found.append)  # pyright: ignore[reportArgumentType]
    return found


def _may_touch(writer: fx.Node, memory: AbstractSet[fx.Node]) -> bool:
    """Whether a writer may write to memory of these nodes."""
    if ops.is_barrier(writer):
        return True
    written = ops.memory_origins(*ops.mutated(writer))
    pairs = product(_from_outside(written), _from_outside(memory))
    return bool(written & memory) or any(_may_be_one_memory(a, b) for a, b in pairs)


def _from_outside(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the inputs and attributes among the nodes, without sizes and other numbers, which have no memory."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    from_outside = (node for node in nodes if node.op in ("placeholder", "get_attr"))
    return [node for node in from_outside if not isinstance(node.meta.get("val"), numbers)]


def _may_be_one_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether two inputs may share memory: they did when traced (AOTAutograd keeps that), or it is unknown."""
    first, second = (node.meta.get("val") for node in (a, b))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return True
    return StorageWeakRef(first.untyped_storage()) == StorageWeakRef(second.untyped_storage())


def _sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes, their operands, and everything of which any of these may be a view."""
    return ops.memory_origins(*(start for node in nodes for start in (node, *node.all_input_nodes)))


def _shared_with(node: fx.Node, own: AbstractSet[fx.Node]) -> set[fx.Node | None]:
    """Returns the nodes, other than `own`, of which this node may be a view; empty for fresh memory.

    The result contains None if one of `own` decides only at run time whether it is a view.
    """
    origins = ops.memory_origins(node)
    found: set[fx.Node | None] = {o for o in origins if o not in own and not ops.is_view(o)}
    if found and any(origin in own and ops.is_maybe_view(origin) for origin in origins):
        found.add(None)
    return found
