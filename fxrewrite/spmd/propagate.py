"""Layout propagation: how every value lies over the axis, found by worklist, written into the graph as `redistribute`.

1. forward   a node's operands lie somehow; its layout rule says how it wants them and how its results then lie.
2. relocate  where operators need a sharded dimension whole, a region moves to another one if fewer bytes travel so.
3. backward  a value that every user wants sharded the same way is computed sharded in the first place.
4. write     where an operand lies otherwise than its user wants it, a `redistribute` node stands on that edge.

The graph keeps its global meaning: `redistribute` is the identity on whole values, so a graph with these nodes still
computes what it did. Nothing is guessed: an operator without a rule gets its operands whole, with a line in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxrewrite.capture.custom_backward import custom_function
from fxrewrite.errors import RefusedError, refuse
from fxrewrite.flow import Worklist, solve
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import is_read_from_data, require_divisible, size_hint
from fxrewrite.graph.source import source_line
from fxrewrite.ops import (
    is_pure,
    is_random,
    is_view,
    key,
    memory_origins,
    mutated,
    mutates,
    updates_statistics,
)
from fxrewrite.report import Report
from fxrewrite.spmd.bodies import CustomFunctions, stays_a_sum
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.decision import Decision, is_getitem, operands_of, replicated, spread
from fxrewrite.spmd.events import Drawn, Gathered, ProductsWhole
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.group import COLLECTIVES, axis_rank
from fxrewrite.spmd.infer import inferred
from fxrewrite.spmd.layout import (
    Axis,
    Layout,
    Partial,
    Replicated,
    Shard,
    check_layout,
    is_same_layout,
)
from fxrewrite.spmd.legal import DECIDED
from fxrewrite.spmd.notation import IndexMap, IndexPart
from fxrewrite.spmd.place import HELD, RETURNED
from fxrewrite.spmd.products import is_product, share_of
from fxrewrite.spmd.redistribute import redistribute, without_padding
from fxrewrite.spmd.relocate import relocate
from fxrewrite.spmd.rule import Call, LayoutRule, LayoutRules, tensor_of
from fxrewrite.spmd.stages import PLACEMENTS

__all__ = ["PropagateLayouts"]

R = Replicated()
_BY_STRIDES = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})
"""Operators whose result depends on how their operand lies in memory, not on its values alone."""


Preference: TypeAlias = "Callable[[fx.Node, torch.Tensor, Mapping[fx.Node, Layout]], Layout]"
"""How a value is to be placed that was computed whole from sharded ones: of the node, one of its results, and the
placements of its operands."""


def replicated_values(node: fx.Node, value: torch.Tensor, operands: Mapping[fx.Node, Layout]) -> Layout:
    """What was computed whole stays whole."""
    return R


class PropagateLayouts:
    """The step of a plan that runs layout rules by worklist.

    Args:
        name: of the step.
        rules: layout rules of all operators that may run on chunks.
        prefer: how to place what had to be computed whole from sharded values. By default it stays whole; whoever knows
            which dimensions are worth sharding says so here. It decides what is fast: results are the same.
    """

    def __init__(self, name: str, rules: LayoutRules, prefer: Preference = replicated_values) -> None:
        self.name = name
        self.rules = rules
        self.prefer = prefer
        self.gives = (PLACEMENTS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        _refuse_lowered(edit, context.axis)
        _check_asked_for(edit)
        _drop_redistributions_in_bodies(edit)
        propagation = _Propagation(edit, self.rules, context, self.prefer)
        decisions = propagation.run()
        for node, decision in decisions.items():
            if node in edit.erased:
                continue
            whole = _gathered(node, decisions)
            if whole and node.target is not redistribute:  # who asks for one says why
                report.events.append(_gathering(node, decision.gathered or f"{key(node)} reads it whole", whole))
            if is_random(node):
                sharded = any(isinstance(layout, Shard) for layout in decision.gives)
                report.events.append(Drawn(node=node.name, source=source_line(node), is_sharded=sharded))
        _say_what_runs_whole({n: d for n, d in decisions.items() if n not in edit.erased}, report)
        propagation.functions.write(report)
        changes = _write(edit, decisions, context.axis, self.name)
        edit.derive(PLACEMENT, lambda node: inferred(node, self.rules))
        return changes

    def text(self) -> str:
        lines = ["layout rules by worklist; a redistribution on every edge whose ends disagree"]
        return "\n".join(lines + [f"    {rule.text()}" for rule in self.rules])


class _Propagation:
    def __init__(
        self,
        edit: Edit,
        rules: LayoutRules,
        context: SpmdContext,
        prefer: Preference,
        given: Mapping[fx.Node, Layout] | None = None,
    ) -> None:
        self.graph, self.erased = edit.graph, edit.erased
        self.functions = CustomFunctions(edit, context, self._in_body)
        self._given = given
        """In a body, how its inputs lie."""
        self.rules, self.context, self.axis = rules, context, context.axis
        self._calls: dict[fx.Node, tuple[Call, LayoutRule | None, IndexMap | None]] = {}
        self.decisions: dict[fx.Node, Decision] = {}
        self._derived: set[fx.Node] = set()
        """Nodes that are computed from sharded values."""
        self._prefer = prefer
        self._written = _memory_written(self.graph)

    def run(self) -> dict[fx.Node, Decision]:
        solve(self.graph, self._forward, facts=self.decisions)
        if self._given is None:  # bodies hold no redistribution, so nothing in them can move
            relocate(self.graph, self.decisions, self._movable, self._derived, self.axis)
        self._backward()
        return self.decisions

    # forward

    def _forward(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        decision = self._run(node, facts)
        sharded = any(layout != R for layout in decision.gives + decision.shows)
        if sharded or any(operand in self._derived for operand in node.all_input_nodes):
            self._derived.add(node)
            return self._as_preferred(node, decision)
        return decision

    def _as_preferred(self, node: fx.Node, decision: Decision) -> Decision:
        """A value that was computed whole from sharded ones, placed as is preferred."""
        if any(layout != R for layout in decision.gives + decision.shows) or node in self._written:
            return decision
        if node.target is redistribute:
            return decision  # whole, as asked for
        values = node.meta.get("val")
        values = values if isinstance(values, (list, tuple)) else [values]
        placed = {operand: self._shown(operand) for operand in operands_of(node)}
        values = [value if isinstance(value, torch.Tensor) else None for value in values[: len(decision.shows)]]
        shows = tuple(R if value is None else self._prefer(node, value, placed) for value in values)
        return replace(decision, shows=shows, preferred=any(layout != R for layout in shows))

    def _run(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        if node.op == "output":
            return self._output(node)
        if node.op != "call_function" or node in self.erased:
            held = HELD.of(node) if self._given is None else self._given.get(node)
            return Decision((), (held or R,), (held or R,))
        if node.target is redistribute:
            dst: Any = node.args[2]
            return Decision((dst,), (dst,), (dst,), "asked for")
        if node.target is without_padding:
            layout: Any = node.args[1]
            return Decision((layout,), (layout,), (layout,), "asked for")
        if is_getitem(node):
            source, index = node.args
            if isinstance(source, fx.Node) and isinstance(index, int):
                return facts[source].item(index)
        operands = operands_of(node)
        layouts = [self._shown(operand) for operand in operands]
        num_results = _num_results(node)
        if key(node) in _BY_STRIDES and any(operand in self._derived for operand in operands):
            refuse(
                "it reads memory by strides, which are others than on one device behind sharded values",
                node=node,
                hint="write it with narrow, unfold, view or permute",
            )
        if all(layout == R for layout in layouts) and not self._writes_through_a_copy(node):
            return replicated(len(operands), num_results)
        if updates_statistics(node):
            return replace(replicated(len(operands), num_results), gathered="it writes statistics of all entries")
        if mutates(node):
            written = mutated(node)
            is_whole = written and all(self._shown(operand) == R for operand in operands if operand in written)
            if is_whole and not self._writes_through_a_copy(node):
                return replace(replicated(len(operands), num_results), gathered="it writes to what every rank holds")
            refuse(
                "an in-place operation on a sharded value",
                node=node,
                hint="write it out of place (x = x + 1, not x += 1)",
            )
        function = custom_function(node)
        if function is not None and self._given is None:
            preferred = any(self.decisions[operand].preferred for operand in operands)
            return replace(self.functions.decide(node, function, layouts), preferred=preferred)
        if self._given is not None and stays_a_sum(node, operands, layouts):
            return Decision(tuple(layouts), (Partial(),), (Partial(),), "a sum stays one")
        call, rule, indices = self._call(node)
        if rule is None or indices is None:
            why = (
                f"{call.key} has a size that depends on data" if call.reads_sizes else f"{call.key} has no layout rule"
            )
            if self.context.strict:
                refuse(
                    f"operator {why}",
                    node=node,
                    hint="add a LayoutRule for it, or drop strict=True to run it on the gathered value",
                )
            return replace(replicated(len(operands), num_results), gathered=why)
        try:
            decision = self._decide(call, rule, indices, layouts)
        except RefusedError as error:
            raise error.filled(rule=rule.id) from error
        return replace(decision, preferred=self._is_preferred(call, indices, decision))

    def _writes_through_a_copy(self, node: fx.Node) -> bool:
        """Whether the node writes to a view of a sharded value: the view was gathered, so the write would be lost."""
        todo, seen = list(mutated(node)), set[fx.Node]()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.decisions and any(layout != R for layout in self.decisions[value].shows):
                return True
            if is_view(value):
                todo += value.all_input_nodes
        return False

    def _decide(self, call: Call, rule: LayoutRule, indices: IndexMap, layouts: list[Layout]) -> Decision:
        preferred = [self.decisions[operand].preferred for operand in call.operands]
        order = sorted(range(len(layouts)), key=preferred.__getitem__)  # a dimension that dataflow found comes first
        parts = [indices.locate(indices.operands[i], layouts[i]) for i in order]
        blocked = next((part for part in parts if part is not None and part.index in indices.whole), None)
        free = [part for part in parts if part is not None and part.index not in indices.whole]
        free = [part for part in free if self._divides(indices, part)]
        if blocked is not None:
            home = next((p for p in parts if p is not None and _is_in_results(indices, p.index)), blocked)
            for index in rule.move_to:
                part = IndexPart(index)
                if index in indices.sizes and self._divides(indices, part):
                    why = f"{blocked.index} must be whole: moved to {index}"
                    return spread(indices, part, home=home, why=why)
        kept = [part for part in free if _is_in_results(indices, part.index)]
        chosen = next(iter(kept or free), None)
        sums_padding = chosen is not None and self._given is None and _sums_padding(indices, chosen)
        neutral = rule.neutral_of(call, indices, chosen.index) if chosen is not None and sums_padding else None
        if chosen is not None and (neutral is not None or not sums_padding):
            decision = replace(spread(indices, chosen, why=f"sharded on {chosen.index}"), neutral=neutral)
            moved = [
                i
                for i, (layout, want) in enumerate(zip(layouts, decision.wants, strict=True))
                if isinstance(layout, Shard) and not is_same_layout(layout, want)
            ]
            if moved:
                why = f"{call.key} runs over {chosen.index}; operand {moved} must be whole there"
                decision = replace(decision, gathered=why)
            return decision
        decision = replicated(len(layouts), len(indices.results))
        if not any(isinstance(layout, Shard) for layout in layouts):
            return decision  # partial sums only: added up, and nothing else is lost
        shows = decision.shows
        if blocked is not None and self._divides(indices, blocked):
            shows = tuple(indices.layout(terms, blocked) for terms in indices.results)
        where = "its chunks fall between indices"
        if sums_padding:
            where = "its rule does not say what padding counts nothing in its sum"
        elif blocked is not None:
            where = f"its index {blocked.index} must be whole"
        return replace(decision, shows=shows, gathered=f"{call.key}: {where}")

    def _is_preferred(self, call: Call, indices: IndexMap, decision: Decision) -> bool:
        """Whether a result is shown sharded otherwise than on a dimension that dataflow follows to it."""
        operands = zip(call.operands, indices.operands, strict=True)
        found = [indices.locate(terms, self._shown(n)) for n, terms in operands if not self.decisions[n].preferred]
        parts = [part for part in found if part is not None]
        for terms, shown in zip(indices.results, decision.shows, strict=True):
            followed = [indices.layout(terms, part) for part in parts if indices.has(terms, part.index)]
            if isinstance(shown, Shard) and not any(is_same_layout(shown, layout) for layout in followed):
                return True
        return False

    def _divides(self, indices: IndexMap, part: IndexPart) -> bool:
        return part.uneven or require_divisible(indices.sizes[part.index] // part.within, self.axis.size)

    def _output(self, node: fx.Node) -> Decision:
        operands = operands_of(node)
        layouts = [R if self.decisions[operand].preferred else self._shown(operand) for operand in operands]
        stated = RETURNED.of(node) or {}
        positions = [position for position, leaf in enumerate(tree_leaves(node.args[0])) if leaf in operands]
        wants = [
            stated[position] if position in stated else self.context.output_layout(operand, layout)
            for position, operand, layout in zip(positions, operands, layouts, strict=True)
        ]
        return Decision(tuple(wants), (), ())

    # backward

    def _backward(self) -> None:
        work = Worklist(self.graph, backward=True)
        work.push(self.graph.nodes)
        for node in work:
            decision = self._demanded(node)
            if decision is not None:
                self.decisions[node] = decision
                work.push(node.all_input_nodes)

    def _demanded(self, node: fx.Node) -> Decision | None:
        """The decision to compute a replicated value sharded, where every user wants it sharded alike."""
        if node.op != "call_function" or not node.users or node.target is redistribute:
            return None
        current = self.decisions[node]
        operands = operands_of(node)
        if current.shows != (R,) or current.gives != (R,) or not operands or current.gathered:
            return None
        if any(self._shown(operand) != R for operand in operands) or is_random(node) or not is_pure(node):
            return None
        wanted = [want for user in node.users for want in self._wants_of(user, node)]
        if not wanted or not isinstance(wanted[0], Shard) or any(not is_same_layout(w, wanted[0]) for w in wanted):
            return None
        _, rule, indices = self._call(node)
        if rule is None or indices is None or len(indices.results) != 1:
            return None
        part = indices.locate(indices.results[0], wanted[0])
        if part is None or part.index in indices.whole or not self._divides(indices, part):
            return None
        if not any(indices.has(terms, part.index) for terms in indices.operands):
            return None  # broadcast along that dimension: nothing to save
        return spread(indices, part, why="every user wants it so")

    def _wants_of(self, user: fx.Node, value: fx.Node) -> list[Layout]:
        decision = self.decisions[user]
        operands = operands_of(user)
        if len(decision.wants) != len(operands):
            return [R]
        return [want for operand, want in zip(operands, decision.wants, strict=True) if operand is value]

    # shared

    def _in_body(self, body: Edit, given: Mapping[fx.Node, Layout]) -> dict[fx.Node, Decision]:
        context = replace(self.context, output_layout=_as_it_lies)
        return _Propagation(body, self.rules, context, replicated_values, given).run()

    def _shown(self, node: fx.Node) -> Layout:
        return self.decisions[node].shows[0]

    def _movable(self, node: fx.Node) -> IndexMap | None:
        """The index map of a node that may run otherwise than decided: not where sharding was asked for, nor where
        memory is shared that is written to."""
        if not isinstance(node.target, torch._ops.OpOverload) or node in self.erased:
            return None
        if node in self._written or mutates(node) or any(n.target is redistribute for n in node.all_input_nodes):
            return None
        return self._call(node)[2]

    def _call(self, node: fx.Node) -> tuple[Call, LayoutRule | None, IndexMap | None]:
        if node not in self._calls:
            call = Call.of(node)
            rule = self.rules.get(call.key)
            indices = None if rule is None or call.reads_sizes else rule.map(call)
            self._calls[node] = (call, rule, indices)
        return self._calls[node]


def _as_it_lies(node: fx.Node, layout: Layout) -> Layout:
    return layout


def _refuse_lowered(edit: Edit, axis: Axis) -> None:
    """A graph that is lowered over an axis is a program of one of its ranks: there is nothing left to shard on it."""
    of_ranks = {axis_rank, *COLLECTIVES.values()}
    for node in edit.nodes():
        if node.target in of_ranks and node.meta.get("axis") == axis.name and axis.group in node.args:
            refuse(f"the graph is lowered over axis {axis.name} already", node=node, hint="lower the original graph")


def _check_asked_for(edit: Edit) -> None:
    for node in edit.nodes():
        if node.target is redistribute:
            for layout in node.args[1:3]:
                check_layout(layout, tensor_of(node).shape, f"%{node.name}")


def _drop_redistributions_in_bodies(edit: Edit) -> None:
    """What is asked for in a body, by rules that mean the graph, is not to be had there."""
    for part in edit.parts():
        for node in part.nodes() if part is not edit else ():
            if node.target is redistribute:
                part.replace_uses(node, node.all_input_nodes[0])
                part.erase(node)


def _memory_written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that may share memory with what any node writes to."""
    written = {origin for node in graph.nodes for value in mutated(node) for origin in memory_origins(value)}
    if written:
        for node in graph.nodes:
            if is_view(node) and not written.isdisjoint(node.all_input_nodes):
                written.add(node)
    return written


def _is_in_results(indices: IndexMap, index: str) -> bool:
    return any(indices.has(terms, index) for terms in indices.results)


def _sums_padding(indices: IndexMap, part: IndexPart) -> bool:
    """Whether a rank that runs on `part` would sum up its padding."""
    return part.uneven and not all(indices.has(terms, part.index) for terms in indices.results)


def _num_results(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (list, tuple)) else 1


def _say_what_runs_whole(decisions: dict[fx.Node, Decision], report: Report) -> None:
    """An event where matrix products, which are what a model's time is made of, run whole on every rank."""
    products = [node for node in decisions if is_product(node)]
    whole = [node for node in products if decisions[node].wants and all(want == R for want in decisions[node].wants)]
    if whole:
        report.events.append(
            ProductsWhole(
                num_whole=len(whole),
                num_products=len(products),
                share=share_of(whole, products),
                first=whole[0].name,
                source=source_line(whole[0]),
            )
        )


def _gathered(node: fx.Node, decisions: dict[fx.Node, Decision]) -> list[fx.Node]:
    """The operands of an operator that lie sharded and are made whole for it."""
    if node.op != "call_function" or not decisions[node].wants:
        return []
    ends = zip(operands_of(node), decisions[node].wants, strict=True)
    return [operand for operand, want in ends if want == R and isinstance(decisions[operand].gives[0], Shard)]


def _gathering(node: fx.Node, why: str, whole: list[fx.Node]) -> Gathered:
    known = [tensor_of(n) for n in whole if not is_read_from_data(tensor_of(n).numel())]
    num_bytes = sum(size_hint(value.numel()) * value.element_size() for value in known)
    is_more = len(known) < len(whole)
    return Gathered(node=node.name, source=source_line(node), why=why, num_bytes=num_bytes, is_more=is_more)


def _write(edit: Edit, decisions: dict[fx.Node, Decision], axis: Axis, name: str) -> int:
    """Put a `redistribute` on every edge whose two ends disagree; one for all edges that agree on where."""
    made: dict[tuple[fx.Node, str, int], fx.Node] = {}
    region = changes = 0
    for node in edit.nodes():
        if mutates(node):
            region += 1  # what was made before a write, or under another autograd mode, must not serve what comes after
        decision = decisions[node]
        if decision.gives:
            several = isinstance(node.meta.get("val"), (list, tuple))
            edit.set_fact(node, PLACEMENT, decision.gives if several else decision.gives[0])
        edit.set_fact(node, DECIDED, decision)
        if node.target is redistribute:
            changes += _settle(edit, node, decisions)
        if not decision.wants or node.target is redistribute:
            continue
        swap: dict[fx.Node, list[fx.Node]] = {}
        for position, (operand, want) in enumerate(zip(operands_of(node), decision.wants, strict=True)):
            origin = operand
            if operand.target is redistribute and not is_same_layout(decisions[operand].gives[0], want):
                origin = operand.all_input_nodes[0]  # not there and back
            have = decisions[origin].gives[0]
            value = origin
            if not is_same_layout(have, want):
                at = (origin, str(want), region)
                if at not in made:
                    like = node if node.op != "output" else operand
                    moved = (origin, have, want, axis)
                    made[at] = edit.call(redistribute, moved, before=node, like=like, rule=name, val=tensor_of(operand))
                    edit.set_fact(made[at], PLACEMENT, want)
                    changes += 1
                value = made[at]
            neutral = decision.neutral
            if neutral is not None and neutral.operand == position and value.target is not without_padding:
                masked = (value, f"{want} with {neutral.fill}", region)
                if masked not in made:
                    cleared = (value, want, axis, neutral.fill)
                    made[masked] = edit.call(
                        without_padding, cleared, before=node, like=node, rule=name, val=tensor_of(operand)
                    )
                    edit.set_fact(made[masked], PLACEMENT, want)
                    changes += 1
                value = made[masked]
            swap.setdefault(operand, []).append(value)
        if any(value is not operand for operand, values in swap.items() for value in values):
            edit.set_args(node, *_swapped(node, swap))
    return changes


def _settle(edit: Edit, node: fx.Node, decisions: dict[fx.Node, Decision]) -> int:
    """A redistribution that was asked for starts from how its operand lies; it is dropped where that is asked for."""
    value, _, dst, axis = node.args
    assert isinstance(value, fx.Node)
    have = decisions[value].gives[0]
    if is_same_layout(have, dst):  # pyright: ignore[reportArgumentType]
        edit.replace_uses(node, value)
        edit.erase(node)
    else:
        edit.set_args(node, (value, have, dst, axis))
    return 1


def _swapped(node: fx.Node, swap: dict[fx.Node, list[fx.Node]]) -> tuple[Any, Any]:
    """The node's arguments with each tensor operand replaced, occurrence by occurrence, in schema order."""
    queues = {operand: list(values) for operand, values in swap.items()}

    def take(n: fx.Node) -> fx.Node:
        values = queues.get(n)
        return values.pop(0) if values else n

    return map_arg(node.args, take), map_arg(node.kwargs, take)
