"""Propagation: finds every value's placement over the axis, and inserts `redistribute` where placements disagree.

1. forward   the operator's layout rule turns the placements of a node's operands into the placements that the node
             requires of them, and the placements that its results are produced with. A call that would be gathered, and
             whose rule says of what it consists (`LayoutRule.parts`), is written so, and this step runs again.
2. relocate  where operators require a sharded dimension whole, a region around them runs on another dimension if that
             sends fewer bytes.
3. backward  a replicated value that every user requires sharded in the same way is produced sharded.
4. write     an edge whose produced placement is not the required one gets a `redistribute` node.

The graph keeps its global meaning: `redistribute` is the identity on global values, so the graph still computes what it
did, and rules between propagation and lowering are verified like any others. Nothing is guessed: the operands of an
operator without a layout rule are gathered, with a line in the report.
"""

from __future__ import annotations

from torch import fx

from fxrewrite.errors import refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.inputs import is_buffer
from fxrewrite.graph.sizes import is_read_from_data
from fxrewrite.graph.source import source_line
from fxrewrite.ops import is_parameter, is_random, key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import Drawn, Gathered, ProductsWhole
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.group import COLLECTIVES, axis_rank
from fxrewrite.spmd.layouts.rule import LayoutRules, tensor_of
from fxrewrite.spmd.placement import Axis, Replicate, Shard, check_placement
from fxrewrite.spmd.price.price import bytes_held
from fxrewrite.spmd.price.products import is_product, operations
from fxrewrite.spmd.propagation.decision import Decision, operands_of
from fxrewrite.spmd.propagation.fixed_point import Preference, Propagation, replicated_values
from fxrewrite.spmd.propagation.infer import inferred
from fxrewrite.spmd.propagation.insert import Insertion
from fxrewrite.spmd.properties import PLACEMENTS
from fxrewrite.spmd.redistribute import convert_placements, redistribute

R = Replicate()


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
        moves_draws: whether what draws random numbers may run on chunks of a dimension that is cheaper than the one
            that its operands are sharded on; no, where draws on chunks are refused.
    """

    def __init__(
        self,
        name: str,
        rules: LayoutRules,
        prefer: Preference = replicated_values,
        *,
        own_inputs: bool = False,
        moves_draws: bool = True,
    ) -> None:
        self.name = name
        self.moves_draws = moves_draws
        self.own_inputs = own_inputs
        self.rules = rules
        self.prefer = prefer
        self.gives = (PLACEMENTS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        # Everything that can be refused without looking at values comes first: the graph is not touched yet.
        _refuse_lowered(edit, context.axis)
        convert_placements(edit)
        _check_stated(edit)
        _drop_redistributions_in_bodies(edit)
        own = _own_values(edit) if self.own_inputs else frozenset[fx.Node]()
        propagation = Propagation(edit, self.rules, context, self.prefer, own=own, moves_draws=self.moves_draws)
        decisions = propagation.run()
        left = {node: decision for node, decision in decisions.items() if node not in edit.erased}
        _report_gathers_and_draws(left, report)
        if not self.own_inputs:
            _report_whole_products(left, context.axis, report)
        propagation.functions.write(report, own)
        changes = Insertion(edit, decisions, context.axis, self.name).run()
        # From here on a node that a rule makes gets its placement as it gets its fake value: no rule sets it by hand.
        edit.derive(PLACEMENT, lambda node: inferred(node, self.rules))
        if context.watch is not None:
            context.watch(edit, context.axis)
        return changes

    def text(self) -> str:
        lines = ["layout rules by worklist; a redistribution on every edge whose ends disagree"]
        return "\n".join(lines + [f"    {rule.text()}" for rule in self.rules])


def _own_values(edit: Edit) -> frozenset[fx.Node]:
    """What is computed from other values than parameters, where ranks are called with values of their own."""
    found = set[fx.Node]()
    for node in edit.nodes():
        is_called_with = node.op == "placeholder" and (not is_parameter(node) or is_buffer(node))
        if is_called_with or is_random(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _refuse_lowered(edit: Edit, axis: Axis) -> None:
    """Refuse a graph that is lowered over this axis: it is the program of one of its ranks, with local shapes."""
    of_ranks = {axis_rank, *COLLECTIVES.values()}
    for node in edit.nodes():
        if node.target in of_ranks and node.meta.get("axis") == axis.name and axis.group in node.args:
            refuse(f"the graph is lowered over axis {axis.name} already", node=node, hint="lower the original graph")


def _check_stated(edit: Edit) -> None:
    """Refuse a redistribution that is stated with a placement which its value cannot have."""
    for node in edit.nodes():
        if node.target is redistribute:
            for placement in node.args[1:3]:
                check_placement(placement, tensor_of(node).shape, f"%{node.name}")


def _drop_redistributions_in_bodies(edit: Edit) -> None:
    """Drop redistributions in bodies of higher-order operators: a rule that was written for the graph inserted them
    there. Propagation writes those that a body may hold."""
    for part in edit.parts():
        for node in part.nodes() if part is not edit else ():
            if node.target is redistribute:
                part.replace_uses(node, node.all_input_nodes[0])
                part.erase(node)


def _report_gathers_and_draws(decisions: dict[fx.Node, Decision], report: Report) -> None:
    """An event for each node whose operands are gathered, and for each that draws random numbers."""
    for node, decision in decisions.items():
        whole = _gathered(node, decisions)
        if whole and node.target is not redistribute:  # a stated redistribution is reported by who states it
            num_bytes, is_more = (
                sum(map(bytes_held, whole)),
                any(is_read_from_data(tensor_of(n).numel()) for n in whole),
            )
            why, where = decision.gathered or f"{key(node)} reads it whole", source_line(node)
            report.events.append(Gathered(node=node.name, source=where, why=why, num_bytes=num_bytes, is_more=is_more))
        if is_random(node):
            sharded = any(isinstance(placement, Shard) for placement in decision.produced)
            report.events.append(Drawn(node=node.name, source=source_line(node), is_sharded=sharded))


def _gathered(node: fx.Node, decisions: dict[fx.Node, Decision]) -> list[fx.Node]:
    """The sharded operands of a node that are gathered for it."""
    if node.op != "call_function" or not decisions[node].required:
        return []
    ends = zip(operands_of(node), decisions[node].required, strict=True)
    return [operand for operand, want in ends if want == R and isinstance(decisions[operand].produced[0], Shard)]


def _report_whole_products(decisions: dict[fx.Node, Decision], axis: Axis, report: Report) -> None:
    """An event for matrix products that every rank computes whole, with their share of all operations: most of the time
    of a model is spent in its products, and sharding saves nothing of these."""
    products = [node for node in decisions if is_product(node)]
    whole = [
        node for node in products if decisions[node].required and all(want == R for want in decisions[node].required)
    ]
    if whole:
        report.events.append(
            ProductsWhole(
                axis=axis.name,
                num_whole=len(whole),
                num_products=len(products),
                share=sum(map(operations, whole)) / max(sum(map(operations, products)), 1.0),
                first=whole[0].name,
                source=source_line(whole[0]),
            )
        )
