"""What a lowered program costs a rank: read off its collectives and its products, which have local shapes.

An operator that communicates inside says itself what it costs (`PRICE`), one that multiplies is declared as a product.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxrewrite.ops import is_parameter
from fxrewrite.spmd.price.price import PRICE, Price, bytes_held
from fxrewrite.spmd.price.products import backward_operations, operations
from fxrewrite.spmd.price.sent import GradientFlow, sent_in


def program_price(program: fx.GraphModule, sizes: Mapping[str, int]) -> Price:
    """The price of a step of a program that is lowered over all axes of a plan, at the sizes at hand.

    Args:
        program: of one rank.
        sizes: how many ranks each axis has, by its name.
    """
    flow = GradientFlow(program)
    forward = backward = flops = 0.0
    for collective in sent_in(flow, sizes):
        if collective.direction == "forward":
            forward += collective.num_bytes
        else:
            backward += collective.num_bytes
    for node in flow.nodes:
        inside = node.meta.get(PRICE)
        if inside is not None:
            flops += inside.flops
            continue
        once = operations(node)
        flops += 2 * once if once and flow.is_computed_again(node) else once
        flops += backward_operations(node, flow.through) if node in flow.live else 0.0
    return Price(forward, backward, flops, parameter_bytes(program))


def parameter_bytes(program: fx.GraphModule) -> int:
    """Bytes of parameters that a rank holds between steps, of those that the program reads."""
    return sum(bytes_held(node) for node in program.graph.find_nodes(op="placeholder") if is_parameter(node))
