"""How every node of a graph runs: layout rules by worklist, forward, over regions that are relocated, and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set as AbstractSet
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite.capture.custom_backward import custom_function
from fxrewrite.errors import RefusedError, refuse
from fxrewrite.flow import Worklist, solve
from fxrewrite.graph.edit import Edit
from fxrewrite.ops import (
    is_pure,
    is_random,
    is_virtual,
    key,
    memory_origins,
    memory_written,
    mutated,
    mutates,
    updates_statistics,
)
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.facts import REQUIRED
from fxrewrite.spmd.layouts.notation import IndexMap
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules, results_of, why_unknown
from fxrewrite.spmd.placement import AnyPlacement, Partial, Placement, Replicate, Shard, as_placement, is_same_placement
from fxrewrite.spmd.propagation.bodies import CustomFunctions, stays_a_sum
from fxrewrite.spmd.propagation.decision import Decision, operands_of, producer_of, replicated, spread
from fxrewrite.spmd.propagation.decompose import write_parts
from fxrewrite.spmd.propagation.indexed_call import IndexedCall, is_divided
from fxrewrite.spmd.propagation.place import HELD, RETURNED
from fxrewrite.spmd.propagation.relocate import Relocation
from fxrewrite.spmd.redistribute import redistribute, without_padding

R = Replicate()
_BY_STRIDES = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})
"""Operators whose result depends on the strides of their operand, and not on its values alone."""
Preference: TypeAlias = "Callable[[fx.Node, torch.Tensor], AnyPlacement]"
"""The preferred placement of a result that was computed replicated from sharded operands, given its node and it."""


def replicated_values(node: fx.Node, value: torch.Tensor) -> Placement:
    """A result that was computed replicated stays replicated."""
    return R


class Propagation:
    """How the nodes of a graph, or of a body of a higher-order operator, run over an axis."""

    def __init__(
        self,
        edit: Edit,
        rules: LayoutRules,
        context: SpmdContext,
        prefer: Preference,
        given: Mapping[fx.Node, Placement] | None = None,
        own: AbstractSet[fx.Node] = frozenset(),
        *,
        moves_draws: bool = True,
    ) -> None:
        self._moves_draws = moves_draws
        self._edit, self.graph, self.erased = edit, edit.graph, edit.erased
        self.functions = CustomFunctions(edit, context, self._in_body)
        self._given = given
        """The placements of the inputs of a higher-order operator's body; None for the graph itself."""
        self._own = own
        """Values of which each rank has its own: Replicate says that a rank has all of it."""
        self.rules, self.context, self.axis = rules, context, context.axis
        self._call = cache(rules.of)
        self.decisions: dict[fx.Node, Decision] = {}
        self._derived: set[fx.Node] = set()
        """Nodes that are computed from sharded values, also where their own results are replicated."""
        self._prefer = prefer
        self._written = memory_written(self.graph)

    def run(self) -> dict[fx.Node, Decision]:
        """Returns how every node runs."""
        solve(self.graph, self._forward, facts=self.decisions)
        while self._given is None and self._write_parts():  # a body runs as it was written
            self.decisions.clear()
            self._derived.clear()
            self._written = memory_written(self.graph)
            solve(self.graph, self._forward, facts=self.decisions)
        # Relocation reads produced and required placements of all nodes, so it runs once the forward pass is at its
        # fixed point; and before the backward pass, which only moves what is replicated.
        if self._given is None:  # a body holds no all-to-all, so nothing in it can be relocated
            Relocation(self.decisions, self._movable, self._derived, self.axis).run(self.graph)
        self._backward()
        return self.decisions

    def _write_parts(self) -> bool:
        """Write calls as their parts that are gathered otherwise, and say whether there were any."""
        calls = [(node, rule) for node in self.graph.nodes if (rule := self._rule_of_parts(node)) is not None]
        written = [write_parts(self._edit, node, rule) for node, rule in calls]
        return any(written)

    def _rule_of_parts(self, node: fx.Node) -> LayoutRule | None:
        """The rule of a call whose first operand is gathered, and whose parts may run on its chunks; else None."""
        if node.op != "call_function" or node in self.erased or not self.decisions[node].gathered or node in self._own:
            return None
        call, rule, indices = self._call(node)
        if rule is None or call.key not in rule.parts or indices is None:
            return None
        part = indices.locate(indices.operands[0], self._shown(call.operands[0]))
        is_gathered = part is not None and (part.index in indices.whole or updates_statistics(node))
        return rule if is_gathered else None

    # forward

    def _forward(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        """How the node runs, given how the nodes before it run."""
        decision = self._run(node, facts)
        sharded = any(placement != R for placement in decision.produced + decision.shown)
        if sharded or any(operand in self._derived for operand in node.all_input_nodes):
            self._derived.add(node)
            return self._as_preferred(node, decision)
        return decision

    def _as_preferred(self, node: fx.Node, decision: Decision) -> Decision:
        """The decision, whose users see results that were computed replicated from shards as `prefer` places them.

        Results are still produced replicated: the next step slices them for free where a user requires a shard. What is
        written to in place keeps its placement, since a slice is a copy and would not see the write.
        """
        if any(placement != R for placement in decision.produced + decision.shown) or node in self._written:
            return decision
        if node.target is redistribute:
            return decision  # its placement was stated
        shown = tuple(
            as_placement(self._prefer(node, value)) if isinstance(value, torch.Tensor) else R
            for value in results_of(node)[: len(decision.shown)]
        )
        return replace(decision, shown=shown, preferred=any(placement != R for placement in shown))

    def _run(self, node: fx.Node, facts: dict[fx.Node, Decision]) -> Decision:
        """How the node runs on its operands as their producers place them."""
        if node.op == "output":
            return self._output(node)
        # Inputs have the placement that `Place` stated; an input of a body has that of the operand it stands for.
        if node.op != "call_function" or node in self.erased:
            held = HELD.of(node) if self._given is None else self._given.get(node)
            return Decision((), (held or R,), (held or R,))
        # A stated placement is a fixed point: it requires of its operand what it produces, and nothing moves it.
        if node.target in (redistribute, without_padding):
            placement: Any = node.args[2 if node.target is redistribute else 1]
            return Decision((placement,), (placement,), (placement,), "asked for")
        # One of several results has the placement that the operator produces it with.
        source, index = producer_of(node)
        if source is not node:
            return facts[source].item(index)
        operands = operands_of(node)
        return self._operator(node, operands, replicated(len(operands), len(results_of(node))))

    def _operator(self, node: fx.Node, operands: list[fx.Node], whole: Decision) -> Decision:
        """How an operator runs on operands as their producers place them; `whole` is how it runs on whole values."""
        placements = [self._shown(operand) for operand in operands]
        if key(node) in _BY_STRIDES and any(operand in self._derived for operand in operands):
            refuse(
                "it reads memory by strides, and those of values computed from shards differ from one device's",
                node=node,
                hint="write it with narrow, unfold, view or permute",
            )
        # Replicate operands need no layout rule: every rank computes the same as one device.
        if all(placement == R for placement in placements) and not self._writes_through_a_copy(node):
            return whole
        # Running statistics are buffers that every rank holds whole, so every rank must see all entries.
        if updates_statistics(node):
            return replace(whole, gathered="it writes statistics of all entries")
        if mutates(node):
            self._check_written(node, operands)
            return replace(whole, gathered="it writes to what every rank holds")
        if node in self._own:
            return self._on_own_values(node, placements, whole)
        # A function with its own backward runs on shards only if both of its bodies can.
        function = custom_function(node)
        if function is not None and self._given is None:
            preferred = any(self.decisions[operand].preferred for operand in operands)
            return replace(self.functions.decide(node, function, placements), preferred=preferred)
        # In a body a sum stays pending through linear steps: it is completed late or not at all, by as few as possible.
        if self._given is not None and stays_a_sum(node, operands, placements):
            return Decision(tuple(placements), (Partial(),), (Partial(),), "a sum stays one")
        return self._by_layout_rule(node, placements, whole)

    def _check_written(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """Refuse a write in place that a later reader would not see.

        It reaches all of them where what is written is replicated. A shard was redistributed, which made a copy, and
        the write to the copy would be lost.
        """
        written = mutated(node)
        is_whole = written and all(self._shown(operand) == R for operand in operands if operand in written)
        if not is_whole or self._writes_through_a_copy(node):
            refuse(
                "an in-place operation on a sharded value",
                node=node,
                hint="write it out of place (x = x + 1, not x += 1; an embedding: without max_norm), or have every "
                "rank hold it whole (param('*', but=...))",
            )

    def _by_layout_rule(self, node: fx.Node, placements: list[Placement], whole: Decision) -> Decision:
        """How an operator runs by its index map; without one nothing is known of it, so it runs on whole values."""
        call, rule, indices = self._call(node)
        if rule is None or indices is None:
            why = why_unknown(call, rule)
            if self.context.strict:
                refuse(
                    f"operator {why}",
                    node=node,
                    hint="add a LayoutRule for it, or drop strict=True to run it on the gathered value",
                )
            return replace(whole, gathered=why)
        preferred = tuple(self.decisions[operand].preferred for operand in call.operands)
        in_body = self._given is not None
        run = IndexedCall(call, rule, indices, tuple(placements), preferred, self.axis, in_body=in_body)
        try:
            return run.decision()
        except RefusedError as error:
            raise error.filled(rule=rule.id) from error

    def _on_own_values(self, node: fx.Node, placements: list[Placement], whole: Decision) -> Decision:
        """How an operator runs that reads a rank's own values beside shards of what all ranks have."""
        _, rule, indices = self._call(node)
        if rule is None or indices is None or not rule.sends_own:
            return replace(whole, gathered=f"{key(node)} reads values that each rank has of its own")
        parts = zip(indices.operands, placements, strict=True)
        part = next((found for terms, placed in parts if (found := indices.locate(terms, placed)) is not None), None)
        if part is None or indices.must_join(part) or not is_divided(indices, part, self.axis):
            return replace(whole, gathered=f"{key(node)}: its chunks fall between indices")
        return replace(whole, required=spread(indices, part, "").required, why=f"sends values to where {part.index} is")

    def _writes_through_a_copy(self, node: fx.Node) -> bool:
        """Whether the node writes to a view of a sharded value: the write stays in a view of a gathered copy.

        Such a copy is also what a plan states between the value and its reader.
        """
        origins, written = set[fx.Node](), list(mutated(node))
        while written:
            for value in memory_origins(written.pop()) - origins:
                origins.add(value)
                if value.target in (redistribute, without_padding):
                    written.append(value.all_input_nodes[0])
        shown = origins & self.decisions.keys()
        return any(placement != R for value in shown for placement in self.decisions[value].shown)

    def _output(self, node: fx.Node) -> Decision:
        """What leaves the graph has the placement that is stated for it, else the one that the context decides on."""
        operands = operands_of(node)
        # A preferred placement is an optimization inside of the graph; the caller must not depend on it.
        placements = [R if self.decisions[operand].preferred else self._shown(operand) for operand in operands]
        stated = RETURNED.of(node) or {}
        positions = [position for position, leaf in enumerate(tree_leaves(node.args[0])) if leaf in operands]
        required = [
            stated[position]
            if position in stated
            else as_placement(self.context.output_placement(position, operand, placement))
            for position, operand, placement in zip(positions, operands, placements, strict=True)
        ]
        return Decision(tuple(required), (), ())

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
        if current.shown != (R,) or current.produced != (R,) or not operands or current.gathered:
            return None
        # Ranks that draw random numbers for their shards would draw others than one device.
        if any(self._shown(operand) != R for operand in operands) or is_random(node) or not is_pure(node):
            return None
        wanted = [want for user in node.users for want in self.decisions[user].required_of(operands_of(user), node)]
        if not wanted or not isinstance(wanted[0], Shard) or any(not is_same_placement(w, wanted[0]) for w in wanted):
            return None
        _, rule, indices = self._call(node)
        if rule is None or indices is None or len(indices.results) != 1:
            return None
        part = indices.locate(indices.results[0], wanted[0])
        if part is None or indices.must_join(part) or not is_divided(indices, part, self.axis):
            return None
        if not any(indices.has(terms, part.index) for terms in indices.operands):
            return None  # broadcast along that dimension: nothing to save
        return spread(indices, part, why="every user wants it so")

    # shared

    def _in_body(self, body: Edit, given: Mapping[fx.Node, Placement]) -> dict[fx.Node, Decision]:
        context = replace(self.context, output_placement=_as_produced)
        return Propagation(body, self.rules, context, replicated_values, given).run()

    def _shown(self, node: fx.Node) -> Placement:
        return self.decisions[node].shown[0]

    def _movable(self, node: fx.Node) -> IndexMap | None:
        """The index map of a node that relocation may move; None where its placement is required or its operand's was
        stated, or where it shares memory that is written to in place."""
        if node.op != "call_function" or node in self.erased or node in self._own:
            return None
        if REQUIRED.of(node) is not None or (is_random(node) and not self._moves_draws):
            return None
        if node in self._written or mutates(node) or any(n.target is redistribute for n in node.all_input_nodes):
            return None
        if isinstance(node.target, torch._ops.OpOverload):
            return self._call(node)[2]
        # Of virtual operators only those move that have a halo: rules lower others for the placement that was decided.
        indices = self._call(node)[2] if is_virtual(node.target) else None
        return indices if indices is not None and indices.beside else None


def _as_produced(position: int, node: fx.Node, placement: Placement) -> Placement:
    return placement
