"""Layout propagation: how every value lies over the axis, found by worklist, written into the graph as `redistribute`.

1. forward   a node's operands lie somehow; its layout rule says how it wants them and how its results then lie.
2. backward  a value that every user wants sharded the same way is computed sharded in the first place.
3. write     where an operand lies otherwise than its user wants it, a `redistribute` node stands on that edge.

The graph keeps its global meaning: `redistribute` is the identity on whole values, so a graph with these nodes still
computes what it did. Nothing is guessed: an operator without a rule gets its operands whole, with a line in the report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite.errors import RefusedError, refuse
from fxrewrite.flow import Worklist, solve
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import require_divisible, size_hint
from fxrewrite.graph.source import source_line
from fxrewrite.ops import declare_pure, is_pure, is_random, is_view, key, mutated, mutates
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.layout import Axis, Layout, Partial, Replicated, Shard, is_same_layout
from fxrewrite.spmd.notation import IndexMap, IndexPart
from fxrewrite.spmd.rule import Call, LayoutRule, LayoutRules, tensor_of

__all__ = ["PropagateLayouts", "layout_of", "redistribute"]

R = Replicated()


def redistribute(x: torch.Tensor, src: Layout, dst: Layout, axis: Axis) -> torch.Tensor:
    """`x`, lying as `dst` from here on where it lay as `src`. The identity on global values; lowering makes it a
    slice or a collective."""
    return x


declare_pure(redistribute)


@dataclass(frozen=True, slots=True)
class Decision:
    """How one node runs: its operands as `wants`, its results as `gives`, which its users see as `shows`."""

    wants: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    shows: tuple[Layout, ...]
    why: str = ""
    gathered: str = ""
    """Why operands had to be made whole, where they had."""


def layout_of(node: fx.Node) -> Layout:
    """How the value that `node` computes lies, after propagation; replicated before."""
    layout = node.meta.get("layout", R)
    return R if isinstance(layout, tuple) else layout


class PropagateLayouts:
    """The step of a plan that runs layout rules by worklist."""

    def __init__(self, name: str, rules: LayoutRules) -> None:
        self.name = name
        self.rules = rules

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        propagation = _Propagation(edit, self.rules, context)
        decisions = propagation.run()
        for node, decision in decisions.items():
            if decision.gathered:
                report.lines.append(_gather_line(node, decision))
            if is_random(node):
                sharded = any(isinstance(layout, Shard) for layout in decision.gives)
                what = (
                    "each rank draws the numbers of its chunk"
                    if sharded
                    else "every rank must draw alike: seed them so"
                )
                report.lines.append(f"random: %{node.name} {source_line(node)}: {what}")
        report.lines.extend(_whole_products(decisions))
        return _write(edit, decisions, context.axis, self.name)

    def text(self) -> str:
        lines = ["layout rules by worklist; a redistribution on every edge whose ends disagree"]
        return "\n".join(lines + [f"    {rule.text()}" for rule in self.rules])


class _Propagation:
    def __init__(self, edit: Edit, rules: LayoutRules, context: SpmdContext) -> None:
        self.graph, self.erased = edit.graph, edit.erased
        self.rules, self.context, self.axis = rules, context, context.axis
        self._calls: dict[fx.Node, tuple[Call, LayoutRule | None, IndexMap | None]] = {}
        self.decisions: dict[fx.Node, Decision] = {}

    def run(self) -> dict[fx.Node, Decision]:
        solve(self.graph, self._forward, facts=self.decisions)
        self._backward()
        return self.decisions

    # forward

    def _forward(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        if node.op == "output":
            return self._output(node)
        if node.op != "call_function" or node in self.erased:
            return Decision((), (R,), (R,))
        if node.target is redistribute:
            _, src, dst, _ = node.args
            return Decision((src,), (dst,), (dst,), "asked for")  # pyright: ignore[reportArgumentType]
        if _is_getitem(node):
            source, index = node.args
            if isinstance(source, fx.Node) and isinstance(index, int):
                made = facts[source]
                return Decision((), (made.gives[index],), (made.shows[index],), "part of a result")
        operands = operands_of(node)
        layouts = [self._shown(operand) for operand in operands]
        num_results = _num_results(node)
        if all(layout == R for layout in layouts) and not self._writes_through_a_copy(node):
            return _replicated(len(operands), num_results)
        if mutates(node):
            refuse(
                "an in-place operation on a sharded value",
                node=node,
                hint="write it out of place (x = x + 1, not x += 1)",
            )
        call, rule, indices = self._call(node)
        if rule is None or indices is None:
            if self.context.strict:
                refuse(
                    f"operator {call.key} has no layout rule",
                    node=node,
                    hint="add a LayoutRule for it, or drop strict=True to run it on the gathered value",
                )
            return replace(_replicated(len(operands), num_results), gathered=f"{call.key} has no layout rule")
        try:
            return self._decide(call, rule, indices, layouts)
        except RefusedError as error:
            raise error.filled(rule=rule.id) from error

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
        parts = [indices.locate(terms, layout) for terms, layout in zip(indices.operands, layouts, strict=True)]
        blocked = next((part for part in parts if part is not None and part.index in indices.whole), None)
        free = [part for part in parts if part is not None and part.index not in indices.whole]
        free = [part for part in free if self._divides(indices, part)]
        if blocked is not None:
            for index in rule.move_to:
                part = IndexPart(index)
                if index in indices.sizes and self._divides(indices, part):
                    why = f"{blocked.index} must be whole: moved to {index}"
                    return self._spread(indices, part, home=blocked, why=why)
            if rule.otherwise == "refuse":
                self._refuse_move(call, rule, indices)
        kept = [part for part in free if any(indices.has(terms, part.index) for terms in indices.results)]
        chosen = next(iter(kept or free), None)
        if chosen is not None:
            decision = self._spread(indices, chosen, why=f"sharded on {chosen.index}")
            moved = [
                i
                for i, (layout, want) in enumerate(zip(layouts, decision.wants, strict=True))
                if isinstance(layout, Shard) and not is_same_layout(layout, want)
            ]
            if moved:
                why = f"{call.key} runs over {chosen.index}; operand {moved} must be whole there"
                decision = replace(decision, gathered=why)
            return decision
        decision = _replicated(len(layouts), len(indices.results))
        if not any(isinstance(layout, Shard) for layout in layouts):
            return decision  # partial sums only: added up, and nothing else is lost
        shows = decision.shows
        if blocked is not None and self._divides(indices, blocked):
            shows = tuple(indices.layout(terms, blocked) for terms in indices.results)
        where = f"its index {blocked.index} must be whole" if blocked else "its chunks fall between indices"
        return replace(decision, shows=shows, gathered=f"{call.key}: {where}")

    def _spread(self, indices: IndexMap, part: IndexPart, *, why: str, home: IndexPart | None = None) -> Decision:
        """Run the node with `part` sharded; show the results sharded on `home` where they have that index."""
        wants = tuple(indices.layout(terms, part) for terms in indices.operands)
        gives = tuple(
            indices.layout(terms, part) if indices.has(terms, part.index) else Partial() for terms in indices.results
        )
        shows = gives
        if home is not None:
            shows = tuple(
                indices.layout(terms, home) if indices.has(terms, home.index) else give
                for terms, give in zip(indices.results, gives, strict=True)
            )
        return Decision(wants, gives, shows, why)

    def _divides(self, indices: IndexMap, part: IndexPart) -> bool:
        return require_divisible(indices.sizes[part.index] // part.within, self.axis.size)

    def _refuse_move(self, call: Call, rule: LayoutRule, indices: IndexMap) -> None:
        sizes = {index: size_hint(indices.sizes[index]) for index in rule.move_to if index in indices.sizes}
        names = {"h": "heads", "g": "kv heads"}
        what = ", ".join(f"{size} {names.get(index, index)}" for index, size in sizes.items())
        common = [n for n in range(1, max(sizes.values(), default=1) + 1) if all(s % n == 0 for s in sizes.values())]
        data: dict[str, Any] = {names.get(i, i).replace(" ", "_"): size for i, size in sizes.items()}
        refuse(
            f"{what} do not divide over axis {self.axis.name} (size {self.axis.size})",
            node=call.node,
            hint=f"use {self.axis.name} in {{{', '.join(map(str, common))}}}",
            **data,
            size=self.axis.size,
        )

    def _output(self, node: fx.Node) -> Decision:
        wants = tuple(self.context.output_layout(value, self._shown(value)) for value in operands_of(node))
        return Decision(wants, (), ())

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
            return None  # broadcast along the sequence: nothing to save
        return self._spread(indices, part, why="every user wants it so")

    def _wants_of(self, user: fx.Node, value: fx.Node) -> list[Layout]:
        decision = self.decisions[user]
        operands = operands_of(user)
        if len(decision.wants) != len(operands):
            return [R]
        return [want for operand, want in zip(operands, decision.wants, strict=True) if operand is value]

    # shared

    def _shown(self, node: fx.Node) -> Layout:
        return self.decisions[node].shows[0]

    def _call(self, node: fx.Node) -> tuple[Call, LayoutRule | None, IndexMap | None]:
        if node not in self._calls:
            call = Call.of(node)
            rule = self.rules.get(call.key)
            self._calls[node] = (call, rule, rule.map(call) if rule is not None else None)
        return self._calls[node]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node: in schema order for an operator, in order of appearance for the output."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return list(Call.of(node).operands)
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def _replicated(num_operands: int, num_results: int) -> Decision:
    return Decision((R,) * num_operands, (R,) * num_results, (R,) * num_results)


def _num_results(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (list, tuple)) else 1


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


_PRODUCTS = frozenset({"aten::linear", "aten::matmul", "aten::mm", "aten::bmm", "aten::scaled_dot_product_attention"})


def _whole_products(decisions: dict[fx.Node, Decision]) -> list[str]:
    """A line where matrix products, which are what a model's time is made of, run whole on every rank."""
    products = [node for node in decisions if node.op == "call_function" and key(node) in _PRODUCTS]
    whole = [node for node in products if decisions[node].wants and all(want == R for want in decisions[node].wants)]
    if not whole:
        return []
    first = f"%{whole[0].name} {source_line(whole[0])}".rstrip()
    return [f"whole: {len(whole)} of {len(products)} matrix products run whole on every rank, the first is {first}"]


def _gather_line(node: fx.Node, decision: Decision) -> str:
    whole = [operand for operand, want in zip(operands_of(node), decision.wants, strict=True) if want == R]
    num_bytes = sum(size_hint(tensor_of(n).numel()) * tensor_of(n).element_size() for n in whole)
    return f"gathered: %{node.name} {source_line(node)}: {decision.gathered} ({num_bytes:,} bytes whole on each rank)"


def _write(edit: Edit, decisions: dict[fx.Node, Decision], axis: Axis, name: str) -> int:
    """Put a `redistribute` on every edge whose two ends disagree; one for all edges that agree on where."""
    made: dict[tuple[fx.Node, str, int], fx.Node] = {}
    region = changes = 0
    for node in list(edit.graph.nodes):
        if mutates(node):
            region += 1  # what was made before a write, or under another autograd mode, must not serve what comes after
        decision = decisions[node]
        if decision.gives:
            several = isinstance(node.meta.get("val"), (list, tuple))
            edit.set_meta(node, "layout", decision.gives if several else decision.gives[0])
        if not decision.wants or node.target is redistribute:
            continue
        swap: dict[fx.Node, list[fx.Node]] = {}
        for operand, want in zip(operands_of(node), decision.wants, strict=True):
            have = decisions[operand].gives[0]
            value = operand
            if not is_same_layout(have, want):
                at = (operand, str(want), region)
                if at not in made:
                    like = node if node.op != "output" else operand
                    moved = (operand, have, want, axis)
                    made[at] = edit.call(redistribute, moved, before=node, like=like, rule=name, val=tensor_of(operand))
                    edit.set_meta(made[at], "layout", want)
                    changes += 1
                value = made[at]
            swap.setdefault(operand, []).append(value)
        if any(value is not operand for operand, values in swap.items() for value in values):
            edit.set_args(node, *_swapped(node, swap))
    return changes


def _swapped(node: fx.Node, swap: dict[fx.Node, list[fx.Node]]) -> tuple[Any, Any]:
    """The node's arguments with each tensor operand replaced, occurrence by occurrence, in schema order."""
    queues = {operand: list(values) for operand, values in swap.items()}

    def take(n: fx.Node) -> fx.Node:
        values = queues.get(n)
        return values.pop(0) if values else n

    return map_arg(node.args, take), map_arg(node.kwargs, take)
