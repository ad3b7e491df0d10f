"""Legal or undone: what must be true of a graph before its shapes become local, and before that is committed.

Before shapes become local, every placement is known, and every user reads what it runs on:

- a node runs as propagation decided, or, if rules made it or changed its arguments since, as its operands are placed;
- a redistribution starts from its operand's placement;
- nothing leaves the graph as a pending sum.

Before the transaction commits, no virtual operator is left. A violation names node, line and rule, and undoes the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite.errors import RefusedError, refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.ops import is_virtual, key
from fxrewrite.spmd.decision import Decision, operands_of
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.infer import inferred
from fxrewrite.spmd.layout import Layout, Partial, is_same_layout
from fxrewrite.spmd.redistribute import redistribute
from fxrewrite.spmd.rule import LayoutRules

__all__ = ["DECIDED", "check_lowered", "check_placements"]

DECIDED = Fact[Decision]("decided")
"""How propagation decided to run a node."""


def check_placements(edit: Edit, rules: LayoutRules) -> None:
    """Return where every value is placed as its users need it.

    Raises:
        RefusedError: a node is not; names the rule that made it.
    """
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
        wants = decided.wants if decided is not None else ()
        for operand, layout, want in zip(operands_of(node), have, wants, strict=True):
            if layout is None or isinstance(layout, (tuple, Partial)) or not is_same_layout(layout, want):
                refuse(f"%{operand.name} leaves the graph as {layout}, and {want} was decided", node=node)
        return
    placed = PLACEMENT.of(node)
    if node.target is redistribute:
        _check_source(node, have[0], node.args[1])
    elif decided is None or not (_are_same(have, decided.wants) and _are_same(_tuple(placed), decided.gives)):
        found = inferred(node, rules)
        if found is None and have and isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
            hint = f"add a LayoutRule for {key(node)}, or redistribute its operands to Replicated()"
            refuse(f"nothing says how ranks hold what {key(node)} gives", node=node, hint=hint)
        if found is not None and not _are_same(_tuple(placed), _tuple(found)):
            refuse(f"it is said to be {placed}, and its operands make it {found}", node=node)


def _check_source(node: fx.Node, layout: Any, stated: Any) -> None:
    if isinstance(layout, tuple) or layout is None or not is_same_layout(layout, stated):
        operand = node.all_input_nodes[0]
        refuse(f"it starts from {stated}, and its operand %{operand.name} is {layout}", node=node)


def _tuple(placed: Layout | tuple[Layout, ...] | None) -> tuple[Layout | None, ...]:
    return placed if isinstance(placed, tuple) else (placed,)


def _are_same(have: Any, wants: Any) -> bool:
    return len(have) == len(wants) and all(
        a is not None and b is not None and not isinstance(a, tuple) and is_same_layout(a, b)
        for a, b in zip(have, wants, strict=True)
    )


def check_lowered(edit: Edit) -> None:
    """Return where the graph has no virtual operator left.

    Raises:
        RefusedError: it has one; names it.
    """
    for node in edit.nodes():
        if is_virtual(node.target):
            moved = f" from {node.args[1]} to {node.args[2]}" if node.target is redistribute else ""
            refuse(
                f"{key(node)}{moved} is left in a graph whose shapes are local",
                node=node,
                hint="the plan needs a rule that lowers it, such as COLLECTIVE_RULES, after shapes are local",
            )
