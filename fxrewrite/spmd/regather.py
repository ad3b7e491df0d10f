"""What is computed of parameters alone is computed again in the backward pass, collectives included.

A parameter that ranks hold in shards is gathered before use. Kept for the backward pass, all of them together would be
the whole model; so the gathers, and the casts and transposes after them, get the tag that AOTAutograd's partitioner
reads. A backend without AOTAutograd, such as "eager", ignores it and keeps them.

Source: Zhao et al. (arXiv 2304.11277, section 3.3, resharding after the forward pass).
"""

from __future__ import annotations

import itertools

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import is_parameter, is_pure
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.stages import COLLECTIVE_CALLS

__all__ = ["Regather"]

_regions = itertools.count(1 << 20)
"""Numbers of recomputed regions, apart from those of checkpoints."""


class Regather:
    """The step that tags what is gathered of parameters alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.needs = (COLLECTIVE_CALLS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        axis = SpmdContext.required(context, self.name).axis
        of_parameters, gathered = set[fx.Node](), set[fx.Node]()
        for node in edit.nodes():
            if node.op == "placeholder":
                if is_parameter(node):
                    of_parameters.add(node)
                continue
            reads = node.all_input_nodes
            if not (node.op == "call_function" and _is_repeatable(node) and reads and of_parameters.issuperset(reads)):
                continue
            of_parameters.add(node)
            is_gather = node.target == COLLECTIVES["all_gather"] and node.meta.get("axis") == axis.name
            if is_gather or not gathered.isdisjoint(reads):
                gathered.add(node)
        region = next(_regions)  # one: between two regions the partitioner saves what one reads of the other
        for node in gathered:
            edit.set_meta(node, "recompute", CheckpointPolicy.MUST_RECOMPUTE)
            edit.set_meta(node, "ac_graph_id", region)
        return len(gathered)

    def text(self) -> str:
        return "what is gathered of parameters alone is gathered again in the backward pass"


def _is_repeatable(node: fx.Node) -> bool:
    return is_pure(node) or node.target in COLLECTIVES.values()
