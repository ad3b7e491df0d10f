"""Is a cotangent complete on every rank, or a summand? Found for every value, beside its placement.

Every rank returns the same loss L and differentiates it, so what is differentiated is the sum of P equal losses. With
g = dL/dx on one device, the cotangent that arrives at a value x on rank r is

    x sharded                 P * g of the rank's chunk
    x partial                 P * g
    x replicated, summand     a summand: the sum over the ranks is P * g, so their mean is g
    x replicated, complete    g itself, on every rank

Summands need nothing: every collective's backward is then its true adjoint. Where a replicated value and its cotangent
are equal on all ranks, adjoints are free. Complete ones are summands, too (their mean is g); the converse is false:

    P -> R            all-reduce; backward: P * gradient if complete, else an all-reduce
    R -> summands     the identity; backward: an all-reduce, the mean, if the value is complete
    R -> P            the value on one rank, else zeros; backward: gradient / P, which is complete

An operator that every rank runs on whole values passes on what it gets. One that runs on chunks gives each replicated
operand a summand. So the values whose cotangents are complete are one side of a cut, and an edge that crosses it pays
an all-reduce: the minimum cut says where cotangents are summed, as once for q, k and v after a norm, and not at every
weight. The loss is complete where it leaves the graph. Inputs that are held whole are complete where the caller reduces
nothing (`SpmdContext.gradients`); where it averages, summands are right, and where it sums, they are divided by P, as
gradients of inputs in shards are. That is one node after the input (`gradient_ops`).

Source: JAX's varying and invariant values (JEP 17111, docs/notebooks/shard_map.md); the operators f and g
of arXiv 1909.08053, figure 3; types R and I of Meta's spmd_types.
"""

from __future__ import annotations

from typing import TypeAlias

import networkx as nx
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite.errors import refuse
from fxrewrite.graph.differentiable import differentiated
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.inputs import input_name
from fxrewrite.ops import has_inexact, is_parameter, memory_written, mutates
from fxrewrite.spmd.context import Reduction
from fxrewrite.spmd.facts import PLACEMENT, placement_of, result_placements
from fxrewrite.spmd.operators.gradient_ops import MEAN_GRADIENT, SCALE_GRADIENT
from fxrewrite.spmd.operators.shared_nodes import first_call
from fxrewrite.spmd.placement import Axis, Partial, Replicate, Shard
from fxrewrite.spmd.price.price import bytes_held, collective_bytes
from fxrewrite.spmd.propagation.decision import is_getitem
from fxrewrite.spmd.propagation.place import RETURNED
from fxrewrite.spmd.redistribute import is_added_once, redistribute

COMPLETE = Fact[bool]("complete cotangent")
"""Of a replicated value: True where its cotangent is complete on every rank."""

LATENCY_BYTES = 1 << 20
"""What a rank sends in the time that a collective needs to start: 5 microseconds at 200 GB/s. So one all-reduce after a
norm is cheaper than one before its last product and one of its weight, even if the latter are fewer bytes."""
R = Replicate()
_COMPLETE, _SUMMAND = "complete", "summand"
"""The two sides of the cut."""
Network: TypeAlias = "nx.DiGraph[object]"


def write_gradients(edit: Edit, axis: Axis, reduction: Reduction, rule: str, *, own_inputs: bool = False) -> int:
    """Afterwards gradients of inputs are right for a caller who reduces them as `reduction` says.

    Placements are known and shapes are global. What is complete is known as `COMPLETE`, for the lowering of
    redistributions; where it is read as summands, and after inputs, there are operators of `gradient_ops`.
    With `own_inputs` each rank computes a loss of its own, and the objective is their mean: nothing that is computed is
    equal on the ranks, so gradients are summed where parameters are read.
    """
    nodes = edit.nodes()
    _check_inputs(edit, reduction, own_inputs=own_inputs)
    if reduction != "done":
        complete = set[fx.Node]()
    elif own_inputs:
        complete = {n for n in nodes if _is_input(n) and is_parameter(n) and PLACEMENT.of(n) == R}
    else:
        complete = complete_cotangents(edit, axis)
    flows = differentiated(nodes, lambda _: True)  # the caller may differentiate any input
    first = first_call(edit)
    changes = 0
    for node in nodes:
        users = list(node.users)
        if node in complete:
            edit.set_fact(node, COMPLETE, value=True)
            # what reads an output computes the same on every rank, unless each has inputs of its own
            users = [user for user in users if user not in complete and (own_inputs or user.op != "output")]
            users = [user for user in users if not is_added_once(user)]
            if users and node in flows:
                made = _after(edit, node, first, users, MEAN_GRADIENT, (axis.group, axis.size), rule)
                edit.set_meta(made, "axis", axis.name)
                changes += 1
        elif _is_input(node) and node in flows and users and (reduction == "sum" or _is_sharded(node)):
            _after(edit, node, first, users, SCALE_GRADIENT, (1 / axis.size,), rule)
            changes += 1
    return changes + _scale_outputs(edit, axis, rule)


def _after(
    edit: Edit,
    node: fx.Node,
    first: fx.Node,
    users: list[fx.Node],
    target: object,
    args: tuple[object, ...],
    rule: str,
) -> fx.Node:
    """An identity on the value that these users read from now on, placed as the value is.

    It is right after the value (after all inputs, before `first`), and not before its first user: that may run without
    autograd, and the others not.
    """
    before = first if node.op == "placeholder" else node.next
    made = edit.call(target, (node, *args), before=before, like=min(users), rule=rule, val=node.meta["val"])
    edit.set_fact(made, PLACEMENT, placement_of(node))
    edit.replace_uses(node, made, users)
    return made


def _scale_outputs(edit: Edit, axis: Axis, rule: str) -> int:
    """Outputs that are stated to leave in shards come back with g of the rank's chunk; in the graph that is P * g."""
    output = edit.graph.output_node()
    leaves = tree_leaves(output.args[0])
    stated = RETURNED.of(output) or {}
    values = [leaves[position] for position, placement in stated.items() if isinstance(placement, Shard)]
    for value in dict.fromkeys(values):
        made = edit.call(SCALE_GRADIENT, (value, float(axis.size)), before=output, rule=rule, val=value.meta["val"])
        edit.set_fact(made, PLACEMENT, placement_of(value))
        edit.replace_uses(value, made, [output])
    return len(values)


# which cotangents are complete


def complete_cotangents(edit: Edit, axis: Axis) -> set[fx.Node]:
    """The replicated values whose cotangents are complete on every rank, where that costs least.

    Inputs that are held whole are among them, and so are values that leave the graph if that costs nothing more.
    """
    network: Network = nx.DiGraph()
    network.add_nodes_from((_COMPLETE, _SUMMAND))
    nodes, written = edit.nodes(), memory_written(edit.graph)
    free = {node for node in nodes if _may_be_complete(node) and node not in written}
    free |= {node for node in nodes if is_getitem(node) and node.args[0] in free}
    flows = differentiated(nodes, lambda _: True)  # the caller may differentiate any input
    for node in nodes:
        if node not in free:
            continue
        sent = collective_bytes("all_reduce", bytes_held(node), axis.size)
        all_reduce = round(sent) + LATENCY_BYTES if node in flows else 0
        if _is_input(node):
            network.add_edge(_COMPLETE, node)  # no capacity: what is held whole is complete
        elif node.target is redistribute and all_reduce:
            network.add_edge(_COMPLETE, node, capacity=all_reduce)  # the adjoint of the all-reduce that makes it
        elif is_getitem(node):
            network.add_edge(node.args[0], node)
            network.add_edge(node, node.args[0])
        users = [user for user in node.users if user.op != "output" and not is_added_once(user)]
        if users and all_reduce:
            # paid once, for all users that give it summands
            network.add_edge(node, (node, "read"), capacity=all_reduce)
            network.add_edges_from(((node, "read"), user if user in free else _SUMMAND) for user in users)
    _, (_, summands) = nx.minimum_cut(network, _COMPLETE, _SUMMAND)
    return {node for node in free if node not in summands}


def _check_inputs(edit: Edit, reduction: Reduction, *, own_inputs: bool) -> None:
    """Refuse inputs that are written to, as by `Embedding(max_norm=...)`, and would be read unwritten.

    What reads an input reads it after an operator on its gradient, which is not written to; a write to the gathered
    value of shards is lost; and ranks with batches of their own would write different values. Buffers, and arguments
    that do not require one, have no gradient.
    """
    written = memory_written(edit.graph)
    shown = written | {node.all_input_nodes[0] for node in written if node.target is redistribute}
    for node in edit.graph.find_nodes(op="placeholder"):
        if node not in shown or not has_inexact(node) or not (_requires_grad(node) or _is_sharded(node)):
            continue
        if reduction != "mean" or own_inputs or _is_sharded(node):
            refuse(
                f"input {input_name(node)} is written to in place, which is only right where every rank holds it "
                "whole, and, if it has a gradient, computes the same and the caller averages gradients",
                node=node,
                hint='write it out of place (an embedding: without max_norm); or average them (gradients="mean")',
            )


def _may_be_complete(node: fx.Node) -> bool:
    """Whether every rank has the whole value, and what computes it passes on the cotangent that it gets."""
    if _is_input(node):
        return PLACEMENT.of(node) == R
    if node.op != "call_function" or mutates(node) or not all(placement == R for placement in result_placements(node)):
        return False
    if isinstance(node.meta.get("val"), (list, tuple)) and not all(map(is_getitem, node.users)):
        return False  # there is no value to put an operator after
    if node.target is redistribute:
        return node.args[1] == Partial()
    return all(placement == R for operand in node.all_input_nodes for placement in result_placements(operand))


def _is_sharded(node: fx.Node) -> bool:
    return isinstance(PLACEMENT.of(node), Shard)


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _requires_grad(node: fx.Node) -> bool:
    """Whether an input may have a gradient: as the value says that it was traced with, which programs are guarded by.

    Where that is unknown, an argument may have one, and a parameter or buffer that is written to has none.
    """
    traced = node.meta.get("example_value")
    return traced.requires_grad if isinstance(traced, torch.Tensor) else not is_parameter(node)
