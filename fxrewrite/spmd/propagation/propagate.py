"""Propagation: finds every value's placement over the axis, and inserts `redistribute` where placements disagree.

1. forward   the operator's layout rule turns the placements of a node's operands into the placements that the node
             requires of them, and the placements that its results are produced with.
2. relocate  where operators require a sharded dimension whole, a region around them runs on another dimension if that
             sends fewer bytes.
3. backward  a replicated value that every user requires sharded in the same way is produced sharded.
4. write     an edge whose produced placement is not the required one gets a `redistribute` node.

The graph keeps its global meaning: `redistribute` is the identity on global values, so the graph still computes what it
did, and rules between propagation and lowering are verified like any others. Nothing is guessed: the operands of an
operator without a layout rule are gathered, with a line in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxrewrite.capture.custom_backward import custom_function
from fxrewrite.errors import RefusedError, refuse
from fxrewrite.flow import Worklist, solve
from fxrewrite.graph.differentiable import is_differentiable
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.inputs import is_buffer
from fxrewrite.graph.sizes import is_read_from_data, require_divisible
from fxrewrite.graph.source import source_line
from fxrewrite.ops import (
    is_parameter,
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
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import Drawn, Gathered, ProductsWhole
from fxrewrite.spmd.facts import PLACEMENT, REQUIRED
from fxrewrite.spmd.group import COLLECTIVES, axis_rank
from fxrewrite.spmd.layouts.notation import IndexMap, IndexPart
from fxrewrite.spmd.layouts.rule import Call, LayoutRule, LayoutRules, tensor_of
from fxrewrite.spmd.placement import (
    AnyPlacement,
    Axis,
    Partial,
    Placement,
    Replicate,
    Shard,
    as_placement,
    check_placement,
    is_same_placement,
)
from fxrewrite.spmd.price.price import bytes_held
from fxrewrite.spmd.price.products import is_product, share_of
from fxrewrite.spmd.propagation.bodies import CustomFunctions, stays_a_sum
from fxrewrite.spmd.propagation.decision import Decision, is_getitem, operands_of, replicated, spread
from fxrewrite.spmd.propagation.infer import inferred
from fxrewrite.spmd.propagation.legal import DECIDED
from fxrewrite.spmd.propagation.place import HELD, RETURNED
from fxrewrite.spmd.propagation.relocate import relocate
from fxrewrite.spmd.redistribute import convert_placements, redistribute, without_padding
from fxrewrite.spmd.stages import PLACEMENTS

__all__ = ["PropagatePlacements", "memory_written"]

R = Replicate()
_BY_STRIDES = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})
"""Operators whose result depends on the strides of their operand, and not on its values alone."""


Preference: TypeAlias = "Callable[[fx.Node, torch.Tensor, Mapping[fx.Node, Placement]], AnyPlacement]"
"""The preferred placement of a result that was computed replicated from sharded operands; its arguments are the node,
that result, and the placements of the node's operands."""


def replicated_values(node: fx.Node, value: torch.Tensor, operands: Mapping[fx.Node, Placement]) -> Placement:
    """A result that was computed replicated stays replicated."""
    return R


class PropagatePlacements:
    """The step of a plan that runs layout rules by worklist.

    Args:
        name: of the step.
        rules: layout rules of all operators that may run on shards.
        prefer: the placement of a result that had to be computed replicated from sharded operands. By default it stays
            replicated; whoever knows which dimensions are worth sharding states it here. It changes the speed, and not
            the results.
        own_inputs: whether each rank of the axis is called with values of its own; then no work is done twice, and the
            report counts none. Shards of parameters are gathered for whatever else reads such values, unless its layout
            rule says that it sends them (`LayoutRule.sends_own`).
    """

    def __init__(
        self, name: str, rules: LayoutRules, prefer: Preference = replicated_values, *, own_inputs: bool = False
    ) -> None:
        self.name = name
        self.own_inputs = own_inputs
        self.rules = rules
        self.prefer = prefer
        self.gives = (PLACEMENTS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        # Everything that can be refused without looking at values comes first: the graph is not touched yet.
        _refuse_lowered(edit, context.axis)
        convert_placements(edit)
        _check_asked_for(edit)
        _drop_redistributions_in_bodies(edit)
        own = _own_values(edit) if self.own_inputs else frozenset[fx.Node]()
        propagation = _Propagation(edit, self.rules, context, self.prefer, own=own)
        decisions = propagation.run()
        for node, decision in decisions.items():
            if node in edit.erased:
                continue
            whole = _gathered(node, decisions)
            if whole and node.target is not redistribute:  # a stated redistribution is reported by who states it
                report.events.append(_gathering(node, decision.gathered or f"{key(node)} reads it whole", whole))
            if is_random(node):
                sharded = any(isinstance(placement, Shard) for placement in decision.gives)
                report.events.append(Drawn(node=node.name, source=source_line(node), is_sharded=sharded))
        if not self.own_inputs:
            _say_what_runs_whole({n: d for n, d in decisions.items() if n not in edit.erased}, report)
        propagation.functions.write(report)
        changes = _write(edit, decisions, context.axis, self.name)
        # From here on a node that a rule makes gets its placement as it gets its fake value: no rule sets it by hand.
        edit.derive(PLACEMENT, lambda node: inferred(node, self.rules))
        if context.watch is not None:
            context.watch(edit, context.axis)
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
        given: Mapping[fx.Node, Placement] | None = None,
        own: AbstractSet[fx.Node] = frozenset(),
    ) -> None:
        self.graph, self.erased = edit.graph, edit.erased
        self.functions = CustomFunctions(edit, context, self._in_body)
        self._given = given
        """The placements of the inputs of a higher-order operator's body; None for the graph itself."""
        self._own = own
        """Values that differ between the ranks, each of which has its own: Replicate says that a rank has all of it."""
        self.rules, self.context, self.axis = rules, context, context.axis
        self._calls: dict[fx.Node, tuple[Call, LayoutRule | None, IndexMap | None]] = {}
        self.decisions: dict[fx.Node, Decision] = {}
        self._derived: set[fx.Node] = set()
        """Nodes that are computed from sharded values, also where their own results are replicated."""
        self._prefer = prefer
        self._written = memory_written(self.graph)

    def run(self) -> dict[fx.Node, Decision]:
        solve(self.graph, self._forward, facts=self.decisions)
        # Relocation reads produced and required placements of all nodes, so it runs once the forward pass is at its
        # fixed point; and before the backward pass, which only moves what is replicated.
        if self._given is None:  # a body holds no redistribution, so nothing in it can be relocated
            relocate(self.graph, self.decisions, self._movable, self._derived, self.axis)
        self._backward()
        return self.decisions

    # forward

    def _forward(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        """How the node runs, given how the nodes before it run."""
        decision = self._run(node, facts)
        sharded = any(placement != R for placement in decision.gives + decision.shows)
        if sharded or any(operand in self._derived for operand in node.all_input_nodes):
            self._derived.add(node)
            return self._as_preferred(node, decision)
        return decision

    def _as_preferred(self, node: fx.Node, decision: Decision) -> Decision:
        """The decision, whose users see results that were computed replicated from shards as `prefer` places them.

        Results are still produced replicated: the next step slices them for free where a user requires a shard. What is
        written to in place keeps its placement, since a slice is a copy and would not see the write.
        """
        if any(placement != R for placement in decision.gives + decision.shows) or node in self._written:
            return decision
        if node.target is redistribute:
            return decision  # its placement was stated
        values = node.meta.get("val")
        values = values if isinstance(values, (list, tuple)) else [values]
        placed = {operand: self._shown(operand) for operand in operands_of(node)}
        values = [value if isinstance(value, torch.Tensor) else None for value in values[: len(decision.shows)]]
        shows = tuple(R if value is None else as_placement(self._prefer(node, value, placed)) for value in values)
        return replace(decision, shows=shows, preferred=any(placement != R for placement in shows))

    def _run(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        """How the node runs on its operands as their producers place them."""
        if node.op == "output":
            return self._output(node)
        # Inputs have the placement that `Place` stated; an input of a body has that of the operand it stands for.
        if node.op != "call_function" or node in self.erased:
            held = HELD.of(node) if self._given is None else self._given.get(node)
            return Decision((), (held or R,), (held or R,))
        # A stated placement is a fixed point: it requires of its operand what it produces, and nothing moves it.
        if node.target is redistribute:
            dst: Any = node.args[2]
            return Decision((dst,), (dst,), (dst,), "asked for")
        if node.target is without_padding:
            placement: Any = node.args[1]
            return Decision((placement,), (placement,), (placement,), "asked for")
        # One of several results has the placement that the operator produces it with.
        if is_getitem(node):
            source, index = node.args
            if isinstance(source, fx.Node) and isinstance(index, int):
                return facts[source].item(index)
        operands = operands_of(node)
        placements = [self._shown(operand) for operand in operands]
        num_results = _num_results(node)
        if key(node) in _BY_STRIDES and any(operand in self._derived for operand in operands):
            refuse(
                "it reads memory by strides, and those of values computed from shards differ from one device's",
                node=node,
                hint="write it with narrow, unfold, view or permute",
            )
        # Replicate operands need no layout rule: every rank computes the same as one device.
        if all(placement == R for placement in placements) and not self._writes_through_a_copy(node):
            return replicated(len(operands), num_results)
        # Running statistics are buffers that every rank holds whole, so every rank must see all entries.
        if updates_statistics(node):
            return replace(replicated(len(operands), num_results), gathered="it writes statistics of all entries")
        # A write in place must reach every later reader. It does where what is written is replicated; a shard was
        # redistributed, which made a copy, and the write to the copy would be lost.
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
        if node in self._own:
            return self._on_own_values(node, placements, num_results)
        # A function with its own backward runs on shards only if both of its bodies can.
        function = custom_function(node)
        if function is not None and self._given is None:
            preferred = any(self.decisions[operand].preferred for operand in operands)
            return replace(self.functions.decide(node, function, placements), preferred=preferred)
        # A body cannot hold the collective that completes a sum, so there a sum may stay pending through linear steps.
        if self._given is not None and stays_a_sum(node, operands, placements):
            return Decision(tuple(placements), (Partial(),), (Partial(),), "a sum stays one")
        # Without index map nothing is known of the operator: only replicated operands are certainly right.
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
            decision = self._decide(call, rule, indices, placements)
        except RefusedError as error:
            raise error.filled(rule=rule.id) from error
        return replace(decision, preferred=self._is_preferred(call, indices, decision))

    def _on_own_values(self, node: fx.Node, placements: list[Placement], num_results: int) -> Decision:
        """How an operator runs that reads a rank's own values beside shards of what all ranks have."""
        _, rule, indices = self._call(node)
        whole = replicated(len(placements), num_results)
        if rule is None or indices is None or not rule.sends_own:
            return replace(whole, gathered=f"{key(node)} reads values that each rank has of its own")
        parts = zip(indices.operands, placements, strict=True)
        part = next((found for terms, placed in parts if (found := indices.locate(terms, placed)) is not None), None)
        if part is None or part.index in indices.whole or not self._divides(indices, part):
            return replace(whole, gathered=f"{key(node)}: its chunks fall between indices")
        return replace(whole, wants=spread(indices, part, "").wants, why=f"sends values to where {part.index} is")

    def _writes_through_a_copy(self, node: fx.Node) -> bool:
        """Whether the node writes to a view of a sharded value: the write stays in a view of a gathered copy."""
        shown = {value for written in mutated(node) for value in memory_origins(written)} & self.decisions.keys()
        return any(placement != R for value in shown for placement in self.decisions[value].shows)

    def _decide(self, call: Call, rule: LayoutRule, indices: IndexMap, placements: list[Placement]) -> Decision:
        """How an operator with an index map runs: one index is sharded, or none."""
        # Operands may be sharded on different indices, and only one can be kept. A placement that follows from the
        # inputs comes before one that was merely preferred, so that a preference never causes a collective.
        preferred = [self.decisions[operand].preferred for operand in call.operands]
        order = sorted(range(len(placements)), key=preferred.__getitem__)
        parts = [indices.locate(indices.operands[i], placements[i]) for i in order]
        required = REQUIRED.of(call.node)
        if required is not None and any(part is not None for part in parts):
            return self._as_required(call, indices, parts, required)
        blocked = next((part for part in parts if part is not None and part.index in indices.whole), None)
        free = [part for part in parts if part is not None and part.index not in indices.whole]
        free = [part for part in free if self._divides(indices, part)]
        # The index that is sharded must be whole: run over another one (heads, for attention) if the rule names it.
        # Two all-to-alls send 2/P of what a gather sends. Users see the result on the index it came with ("home"), so
        # the way back is decided by who reads it.
        if blocked is not None:
            home = next((p for p in parts if p is not None and _is_in_results(indices, p.index)), blocked)
            for index in rule.move_to:
                part = IndexPart(index)
                if index in indices.sizes and self._divides(indices, part):
                    why = f"{blocked.index} must be whole: moved to {index}"
                    return spread(indices, part, home=home, why=why)
        # An index that results have costs nothing; one that they lack makes them partial, which costs a reduction.
        kept = [part for part in free if _is_in_results(indices, part.index)]
        chosen = next(iter(kept or free), None)
        # Padding of an uneven shard must count nothing in a reduction; in a body, nobody could clear it.
        sums_padding = chosen is not None and self._given is None and _sums_padding(indices, chosen)
        neutral = rule.neutral_of(call, indices, chosen.index) if chosen is not None and sums_padding else None
        if chosen is not None and (neutral is not None or not sums_padding):
            decision = replace(
                spread(indices, chosen, f"sharded on {chosen.index}", reduce_op=rule.reduce_op), neutral=neutral
            )
            moved = [
                i
                for i, (placement, want) in enumerate(zip(placements, decision.wants, strict=True))
                if isinstance(placement, Shard) and not is_same_placement(placement, want)
            ]
            if moved:
                why = f"{call.key} runs over {chosen.index}; operand {moved} must be whole there"
                decision = replace(decision, gathered=why)
            return decision
        decision = replicated(len(placements), len(indices.results))
        if not any(isinstance(placement, Shard) for placement in placements):
            return decision  # pending sums only: they are completed, and no shard is lost
        # All operands are gathered. What runs whole may still be seen as a shard, which is a slice of it for free.
        shows = decision.shows
        if blocked is not None and self._divides(indices, blocked):
            shows = tuple(indices.placement(terms, blocked) for terms in indices.results)
        where = "its chunks fall between indices"
        if sums_padding:
            where = "its rule does not say what padding counts nothing in its sum"
        elif blocked is not None:
            where = f"its index {blocked.index} must be whole"
            if rule.reduce_op != "sum" and is_differentiable(call.node):
                where += f", since its {rule.reduce_op} is differentiated; detach() it where it is only a constant"
        return replace(decision, shows=shows, gathered=f"{call.key}: {where}")

    def _as_required(
        self, call: Call, indices: IndexMap, parts: Sequence[IndexPart | None], required: Placement
    ) -> Decision:
        """How an operator runs whose result must be produced with this placement; whoever states it knows the price.

        Raises:
            RefusedError: the operator cannot produce it.
        """
        part = indices.locate(indices.results[0], required)
        if part is None or part.index in indices.whole or not self._divides(indices, part):
            why = "its chunks fall between indices"
            if part is not None:
                is_whole = part.index in indices.whole
                why = f"{part.index} must be whole" if is_whole else f"{self.axis} ranks do not divide {part.index}"
            refuse(
                f"{call.key} is required to produce {required}, and {why}",
                node=call.node,
                hint="require a placement that its layout rule allows, or none",
            )
        # As where an index moves: users see the result on the index that the operands came with.
        home = next((p for p in parts if p is not None and _is_in_results(indices, p.index)), part)
        return spread(indices, part, f"required to produce {required}", home=home)

    def _is_preferred(self, call: Call, indices: IndexMap, decision: Decision) -> bool:
        """Whether a result has a placement that no operand's placement leads to by the index map: it was preferred.

        Users within the graph may rely on it; outputs do not leave the graph so.
        """
        operands = zip(call.operands, indices.operands, strict=True)
        found = [indices.locate(terms, self._shown(n)) for n, terms in operands if not self.decisions[n].preferred]
        parts = [part for part in found if part is not None]
        for terms, shown in zip(indices.results, decision.shows, strict=True):
            followed = [indices.placement(terms, part) for part in parts if indices.has(terms, part.index)]
            if isinstance(shown, Shard) and not any(is_same_placement(shown, placement) for placement in followed):
                return True
        return False

    def _divides(self, indices: IndexMap, part: IndexPart) -> bool:
        return part.uneven or require_divisible(indices.sizes[part.index] // part.within, self.axis.size)

    def _output(self, node: fx.Node) -> Decision:
        """What leaves the graph has the placement that is stated for it, else the one that the context decides on."""
        operands = operands_of(node)
        # A preferred placement is an optimization inside of the graph; the caller must not depend on it.
        placements = [R if self.decisions[operand].preferred else self._shown(operand) for operand in operands]
        stated = RETURNED.of(node) or {}
        positions = [position for position, leaf in enumerate(tree_leaves(node.args[0])) if leaf in operands]
        wants = [
            stated[position] if position in stated else as_placement(self.context.output_placement(operand, placement))
            for position, operand, placement in zip(positions, operands, placements, strict=True)
        ]
        return Decision(tuple(wants), (), ())

    # backward

    def _backward(self) -> None:
        """Produce replicated values sharded where all users require the same shard, from users to producers.

        A slice after the operator is exact as well; this saves computing and holding what is then thrown away, such as
        the rows of a mask or of position embeddings that belong to other ranks.
        """
        work = Worklist(self.graph, backward=True)
        work.push(self.graph.nodes)
        for node in work:
            decision = self._demanded(node)
            if decision is not None:
                self.decisions[node] = decision
                work.push(node.all_input_nodes)

    def _demanded(self, node: fx.Node) -> Decision | None:
        """The decision to produce a replicated value sharded, where every user requires the same shard; else None."""
        if node.op != "call_function" or not node.users or node.target is redistribute:
            return None
        current = self.decisions[node]
        operands = operands_of(node)
        # Only what is replicated because its operands are: what was gathered has a reason to be whole.
        if current.shows != (R,) or current.gives != (R,) or not operands or current.gathered:
            return None
        # Ranks that draw random numbers for their shards would draw others than one device.
        if any(self._shown(operand) != R for operand in operands) or is_random(node) or not is_pure(node):
            return None
        wanted = [want for user in node.users for want in self._wants_of(user, node)]
        if not wanted or not isinstance(wanted[0], Shard) or any(not is_same_placement(w, wanted[0]) for w in wanted):
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

    def _wants_of(self, user: fx.Node, value: fx.Node) -> list[Placement]:
        decision = self.decisions[user]
        operands = operands_of(user)
        if len(decision.wants) != len(operands):
            return [R]
        return [want for operand, want in zip(operands, decision.wants, strict=True) if operand is value]

    # shared

    def _in_body(self, body: Edit, given: Mapping[fx.Node, Placement]) -> dict[fx.Node, Decision]:
        context = replace(self.context, output_placement=_as_it_lies)
        return _Propagation(body, self.rules, context, replicated_values, given).run()

    def _shown(self, node: fx.Node) -> Placement:
        return self.decisions[node].shows[0]

    def _movable(self, node: fx.Node) -> IndexMap | None:
        """The index map of a node that relocation may move; None where its placement is required or its operand's was
        stated, or where it shares memory that is written to in place."""
        if not isinstance(node.target, torch._ops.OpOverload) or node in self.erased or node in self._own:
            return None
        if REQUIRED.of(node) is not None:
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


def _own_values(edit: Edit) -> frozenset[fx.Node]:
    """What is computed from other values than parameters, where ranks are called with values of their own."""
    found = set[fx.Node]()
    for node in edit.nodes():
        is_called_with = node.op == "placeholder" and (not is_parameter(node) or is_buffer(node))
        if is_called_with or is_random(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _as_it_lies(node: fx.Node, placement: Placement) -> Placement:
    return placement


def _refuse_lowered(edit: Edit, axis: Axis) -> None:
    """Refuse a graph that is lowered over this axis: it is the program of one of its ranks, with local shapes."""
    of_ranks = {axis_rank, *COLLECTIVES.values()}
    for node in edit.nodes():
        if node.target in of_ranks and node.meta.get("axis") == axis.name and axis.group in node.args:
            refuse(f"the graph is lowered over axis {axis.name} already", node=node, hint="lower the original graph")


def _check_asked_for(edit: Edit) -> None:
    for node in edit.nodes():
        if node.target is redistribute:
            for placement in node.args[1:3]:
                check_placement(placement, tensor_of(node).shape, f"%{node.name}")


def _drop_redistributions_in_bodies(edit: Edit) -> None:
    """Drop redistributions in bodies of higher-order operators: a rule that was written for the graph inserted them
    there, and a body cannot communicate."""
    for part in edit.parts():
        for node in part.nodes() if part is not edit else ():
            if node.target is redistribute:
                part.replace_uses(node, node.all_input_nodes[0])
                part.erase(node)


def memory_written(graph: fx.Graph) -> set[fx.Node]:
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
    """Whether a rank that runs on `part` would reduce over padding."""
    return part.uneven and not all(indices.has(terms, part.index) for terms in indices.results)


def _num_results(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (list, tuple)) else 1


def _say_what_runs_whole(decisions: dict[fx.Node, Decision], report: Report) -> None:
    """An event for matrix products that every rank computes whole, with their share of all operations: most of the time
    of a model is spent in its products, and sharding saves nothing of these."""
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
    """The sharded operands of a node that are gathered for it."""
    if node.op != "call_function" or not decisions[node].wants:
        return []
    ends = zip(operands_of(node), decisions[node].wants, strict=True)
    return [operand for operand, want in ends if want == R and isinstance(decisions[operand].gives[0], Shard)]


def _gathering(node: fx.Node, why: str, whole: list[fx.Node]) -> Gathered:
    num_bytes, is_more = sum(map(bytes_held, whole)), any(is_read_from_data(tensor_of(n).numel()) for n in whole)
    return Gathered(node=node.name, source=source_line(node), why=why, num_bytes=num_bytes, is_more=is_more)


def _write(edit: Edit, decisions: dict[fx.Node, Decision], axis: Axis, name: str) -> int:
    """Insert a `redistribute` on every edge whose produced placement is not the required one.

    Users that require the same placement of a value share one: it is sent once.
    """
    made: dict[tuple[fx.Node, str, int], fx.Node] = {}
    region = changes = 0
    for node in edit.nodes():
        if mutates(node):
            region += 1  # a copy made before a write, or under another autograd mode, is not right for users after it
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
            if operand.target is redistribute and not is_same_placement(decisions[operand].gives[0], want):
                origin = operand.all_input_nodes[0]  # straight from the producer, not by way of the stated placement
            have = decisions[origin].gives[0]
            value = origin
            if not is_same_placement(have, want):
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
    """Give a stated redistribution the placement that its operand is produced with; drop it where they are the same."""
    value, _, dst, axis = node.args
    assert isinstance(value, fx.Node)
    have = decisions[value].gives[0]
    if is_same_placement(have, dst):  # pyright: ignore[reportArgumentType]
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
