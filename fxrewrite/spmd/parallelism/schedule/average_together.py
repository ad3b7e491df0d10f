"""Gradients of a layer's parameters that ranks average alike are averaged by one collective.

    mean_gradient(a), mean_gradient(b), ...      ->   mean_gradients([a, b, ...])

Numerics: exact.
"""

from __future__ import annotations

import operator

from fxrewrite.graph.edit import Edit
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.operators.gradient_ops import MEAN_GRADIENT, MEAN_GRADIENTS
from fxrewrite.spmd.parallelism.schedule.buckets import buckets_of, move_operands, parameter_of
from fxrewrite.spmd.parallelism.schedule.gathered import depths


class AverageTogether:
    """The step that takes the means of gradients a layer at a time."""

    name = "average_together"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        depth = depths(edit.nodes())
        means = [node for node in depth if node.target == MEAN_GRADIENT and node.users]
        own = [node for node in means if len(node.all_input_nodes[0].users) == 1]
        first_read = {node: min(node.users) for node in own}
        found = [bucket for bucket in buckets_of(edit, own, first_read) if len(bucket) > 1]
        for bucket in found:
            bucket.sort(key=parameter_of)  # ranks may read parameters in other orders
            first, values = min(bucket), [node.all_input_nodes[0] for node in bucket]
            move_operands(edit, bucket, before=first)
            call = (MEAN_GRADIENTS, (values, *first.args[1:]))
            together = edit.call(*call, before=first, like=first, rule=self.name)
            edit.set_meta(together, "axis", first.meta["axis"])
            for i, node in enumerate(bucket):
                part = edit.call(operator.getitem, (together, i), before=first, like=node, rule=self.name)
                edit.replace_uses(node, part)
                edit.erase(node)
        return len(found)

    def text(self) -> str:
        return "gradients of whole parameters are averaged a layer at a time"
