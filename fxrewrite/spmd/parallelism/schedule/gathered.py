"""What is gathered of parameters alone, and the means that ranks of other axes take of its gradient.

A *gathered* value is computed of parameters alone and of an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.ops import is_parameter, is_pure, memory_written, without_gradients
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.operators.gradient_ops import GATHER_CAST, MEAN_GRADIENT

GATHERS = (COLLECTIVES["all_gather"], GATHER_CAST)
Means: TypeAlias = "tuple[tuple[Any, ...], ...]"
"""Of each mean over ranks that is taken of a gradient: the name of the axis, the group, and the number of its ranks."""
MEANS = Fact[Means]("means")
"""Of a gather, the means that are left to take of its gradient, after that is scattered."""


def depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many gathers lie on the way from parameters to each node that is computed of them alone, in their order.

    What is written to is left out, with all that reads it: behind a write it would be another value.
    """
    depth, off = dict[fx.Node, int](), without_gradients(nodes)
    written = memory_written(nodes[0].graph) if nodes else set[fx.Node]()
    for node in nodes:
        if node in written:
            continue
        if node.op == "placeholder":
            if is_parameter(node):
                depth[node] = 0
            continue
        reads = node.all_input_nodes
        is_repeatable = is_pure(node) or node.target in COLLECTIVES.values()
        if (
            node.op == "call_function"
            and is_repeatable
            and node not in off
            and reads
            and all(read in depth for read in reads)
        ):
            depth[node] = max(depth[read] for read in reads) + (node.target in GATHERS)
    return depth


def sent_by(gather: fx.Node) -> fx.Node:
    """What an all-gather sends."""
    return gather.all_input_nodes[0]


def take_means(edit: Edit, reader: fx.Node, value: fx.Node, means: Means, rule: str) -> None:
    """Take these means of the gradient that the reader has of a value."""
    for axis, *mean in means:
        averaged = edit.call(MEAN_GRADIENT, (value, *mean), before=reader, like=value, rule=rule)
        edit.set_meta(averaged, "axis", axis)
        edit.replace_uses(value, averaged, [reader])
        value = averaged
