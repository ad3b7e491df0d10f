"""The nodes of a graph in an order that does not depend on where independent operators are.

    a = sin(x); b = cos(y); c = all_reduce(a); return (c, b)
    b = cos(y); a = sin(x); c = all_reduce(a); return (c, b)     ->  x, a, c, y, b, output for both

Code that iterates over a set of strings, as models do over kinds of layers, runs in another order in each process.
What has an effect keeps its order: what writes, draws or communicates, and reads of what is written. Everything else
comes where it is first needed.
"""

from __future__ import annotations

import torch
from torch import fx

from fxrewrite.graph.walk import operands_first
from fxrewrite.ops import is_barrier, is_pure, memory_written


def in_canonical_order(graph: fx.Graph) -> list[fx.Node]:
    """All nodes; what nothing needs comes last, inputs by name."""
    written = memory_written(graph)
    found: dict[fx.Node, None] = {}

    def missing(node: fx.Node) -> list[fx.Node]:
        return [operand for operand in node.all_input_nodes if operand not in found]

    for node in graph.nodes:
        if node.op == "output" or _keeps_its_place(node) or not written.isdisjoint((node, *node.all_input_nodes)):
            found |= dict.fromkeys(operands_first(node, missing))
    unread = [node for node in graph.nodes if node not in found]
    inputs = sorted((node for node in unread if node.op == "placeholder"), key=lambda node: str(node.target))
    return [*found, *inputs, *(node for node in unread if node.op != "placeholder")]


def _keeps_its_place(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return False
    target = node.target
    communicates = isinstance(target, torch._ops.OpOverload) and any(
        argument.name == "group_name" for argument in target._schema.arguments
    )
    return communicates or is_barrier(node) or not is_pure(node)
