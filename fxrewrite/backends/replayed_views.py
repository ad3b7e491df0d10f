"""Results that AOTAutograd makes again outside of what it compiles, as views of inputs or of other results.

    y = x * 1; return y, scale_gradient(y, 0.5)     the caller gets y, and a plain view of y: its gradient is not halved

It replays the views of ATen that lead to a result, and loses what is the identity with a gradient of its own, an
operator or an `autograd.Function`, unless that is the last one, of an input. So a program must not return such a
result. Of a Function it is not known whether its result is a view: it is taken for one.
Source: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, OutputType.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable

import torch
from torch import fx

from fxrewrite.ops import is_view, memory_origins, mutates


def replayed_views(results: Iterable[fx.Node], inside: Container[fx.Node]) -> list[fx.Node]:
    """Which of the results of a program lose a gradient of their own.

    Args:
        results: of the program.
        inside: its nodes, without its inputs.
    """
    origins = {node: memory_origins(node) for node in results}
    times = Counter(itertools.chain.from_iterable(origins.values()))

    def is_shared(node: fx.Node) -> bool:
        return any(times[origin] > 1 or origin not in inside for origin in origins[node])

    return [node for node in origins if node in inside and has_own_gradient(node, inside) and is_shared(node)]


def copy_replayed(program: fx.GraphModule) -> None:
    """Afterwards a program returns copies of the results that would lose a gradient of their own."""
    output = program.graph.output_node()
    inside = {node for node in program.graph.nodes if node.op.startswith("call_")}
    replayed = replayed_views(output.all_input_nodes, inside)
    for node in replayed:
        with program.graph.inserting_before(output):
            copied = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = dict(node.meta)
        output.replace_input_with(node, copied)
    if replayed:
        program.recompile()


def is_view_of_input(node: fx.Node) -> bool:
    """Whether an output may be a view of what the program gets.

    AOTAutograd makes such a view again, outside of its program and of that input: the gradient of the view is then not
    changed as the program changes those of inputs in chunks.
    """
    return any(origin.op == "placeholder" for origin in memory_origins(node) - {node})


def has_own_gradient(node: fx.Node, inside: Container[fx.Node]) -> bool:
    """Whether the node is a view by an operator that is not ATen's, or a view of one, within these nodes."""
    views = [origin for origin in memory_origins(node) if origin in inside and is_view(origin)]
    if any(mutates(view) for view in views if isinstance(view.target, torch._ops.OpOverload)):
        return False
    return any(is_higher_order(view) or _is_foreign(view.target) for view in views)


def is_higher_order(node: fx.Node) -> bool:
    """Whether the node calls a higher-order operator, as an `autograd.Function` is in a graph."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _is_foreign(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace != "aten"
