"""Legal or undone: what must be true of a graph before its shapes become local, and before that is committed.

Before shapes become local, every placement is known, and every node's operands have the placements that it requires:

- a node runs as propagation decided, or, if rules made it or changed its arguments since, as its operands are placed;
- a redistribution starts from its operand's placement;
- nothing leaves the graph as a pending sum, maximum or minimum, and no pending maximum or minimum is differentiated.

Before the transaction commits, no virtual operator is left. A violation names node, line and rule, and undoes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite.errors import RefusedError, refuse
from fxrewrite.graph.differentiable import is_differentiable
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.sizes import Size, size_hint
from fxrewrite.ops import is_virtual, key
from fxrewrite.spmd.facts import PLACEMENT, result_placements
from fxrewrite.spmd.layouts.rule import LayoutRules, tensor_of
from fxrewrite.spmd.placement import Partial, Shard, is_same_placement
from fxrewrite.spmd.propagation.decision import Decision, operands_of
from fxrewrite.spmd.propagation.infer import inferred
from fxrewrite.spmd.redistribute import redistribute

DECIDED = Fact[Decision]("decided")
"""How propagation decided to run a node: required and produced placements. Nodes that rules made since have none."""


def check_placements(edit: Edit, rules: LayoutRules) -> None:
    """Return if every operand has the placement that its user requires.

    Raises:
        RefusedError: one has not; names the rule that made the node.
    """
    # Every propagation decides on the output, so a graph without a decision would read shards as wholes.
    assert DECIDED.of(edit.graph.output_node()) is not None, "what gives placements decides how every node runs"
    for node in edit.nodes():
        if node.op not in ("call_function", "output"):
            continue
        try:
            _check(node, rules)
        except RefusedError as error:
            made_by = next(iter(node.meta.get("fxrewrite", ())), "")
            raise error.filled(rule=made_by) from error


def _check(node: fx.Node, rules: LayoutRules) -> None:
    have = [PLACEMENT.of(operand) for operand in operands_of(node)]
    decided = DECIDED.of(node)
    if node.op == "output":
        # The caller was promised these placements; a rule that replaced an output must keep the promise.
        required = decided.required if decided is not None else ()
        for operand, placement, want in zip(operands_of(node), have, required, strict=True):
            if placement is None or isinstance(placement, (tuple, Partial)) or not is_same_placement(placement, want):
                refuse(f"%{operand.name} leaves the graph as {placement}, and {want} was decided", node=node)
        return
    placed = result_placements(node)
    if node.target is redistribute:
        _check_source(node, have[0], node.args[1])
        _check_fits(node)
        _check_adjoint(node)
    # A node that still has the placements of its decision is right by propagation. Any other one, made or changed by a
    # rule, must be right by inference: this finds a rule that drops a reduction, or puts an operator on a wrong shard.
    elif decided is None or not (_are_same(have, decided.required) and _are_same(placed, decided.produced)):
        found = inferred(node, rules)
        if found is None and have and isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
            hint = f"add a LayoutRule for {key(node)}, or redistribute its operands to Replicate()"
            refuse(f"nothing says how ranks hold what {key(node)} gives", node=node, hint=hint)
        if found is not None and not _are_same(placed, found if isinstance(found, tuple) else (found,)):
            refuse(f"it is said to be {PLACEMENT.of(node)}, and its operands make it {found}", node=node)


def _check_adjoint(node: fx.Node) -> None:
    """Return where the adjoint of a redistribution is known, or not needed.

    Raises:
        RefusedError: a pending maximum or minimum is differentiated.
    """
    for placement in node.args[1:3]:
        if isinstance(placement, Partial) and placement.reduce_op != "sum" and is_differentiable(node):
            refuse(
                f"a value that is differentiated is {placement}, and a {placement.reduce_op} over ranks has no adjoint",
                node=node,
                hint="detach() it before the redistribution, or ask for Replicate()",
            )


def _check_source(node: fx.Node, placement: Any, stated: Any) -> None:
    if isinstance(placement, tuple) or placement is None or not is_same_placement(placement, stated):
        operand = node.all_input_nodes[0]
        refuse(f"it starts from {stated}, and its operand %{operand.name} is {placement}", node=node)


def _check_fits(node: fx.Node) -> None:
    """Return where every rank can have a chunk of the value, if it is redistributed to chunks."""
    dst: Any = node.args[2]
    axis: Any = node.args[3]
    if not isinstance(dst, Shard) or dst.uneven:
        return
    shape: Sequence[Size] = tensor_of(node).shape
    rest = shape[dst.dim] % (dst.outer * axis.size) if 0 <= dst.dim < len(shape) else 1
    if isinstance(rest, int) and rest:
        refuse(
            f"{axis} ranks do not divide a value {[*map(size_hint, shape)]} into {dst}",
            node=node,
            hint="in the rule, refuse() where axis.size does not divide the size, or state Shard(dim, uneven=True)",
        )


def _are_same(have: Any, required: Any) -> bool:
    return len(have) == len(required) and all(
        a is not None and b is not None and not isinstance(a, tuple) and is_same_placement(a, b)
        for a, b in zip(have, required, strict=True)
    )


def check_lowered(edit: Edit) -> None:
    """Return where the graph, with the bodies that it calls, has no virtual operator left.

    Raises:
        RefusedError: it has one; names it.
    """
    for node in (node for part in edit.parts() for node in part.nodes()):
        if is_virtual(node.target):
            moved = f" from {node.args[1]} to {node.args[2]}" if node.target is redistribute else ""
            refuse(
                f"{key(node)}{moved} is left in a graph whose shapes are local",
                node=node,
                hint="the plan needs a rule that lowers it, such as COLLECTIVE_RULES, after shapes are local",
            )
