"""What a lowered program costs a rank: read off its collectives and its products, which have local shapes.

The bytes of the backward pass are those of the adjoints of collectives that a gradient flows through, and of the means
that `cotangents` writes. What must be computed again there, such as gathered parameters, is sent again.
An operator that communicates inside says itself what it costs (`PRICE`), one that multiplies is declared as a product.
Complexity: one pass over the nodes in each direction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.graph.differentiable import differentiated, passed, requires_gradient
from fxrewrite.graph.sizes import is_read_from_data, size_hint
from fxrewrite.ops import (
    Trait,
    bind,
    factors,
    has_trait,
    is_inexact,
    is_parameter,
    key,
)
from fxrewrite.spmd.group import ADJOINTS, COLLECTIVE_KINDS
from fxrewrite.spmd.operators.gradient_ops import GATHER_CAST, MEAN_GRADIENT, MEAN_GRADIENTS, PASS_GRADIENT
from fxrewrite.spmd.operators.send_rows import SEND_ROWS
from fxrewrite.spmd.price.price import PRICE, Price, bytes_held, collective_bytes
from fxrewrite.spmd.price.products import backward_operations, operations


def program_price(program: fx.GraphModule, sizes: Mapping[str, int]) -> Price:
    """The price of a step of a program that is lowered over all axes of a plan, at the sizes at hand.

    Rows that data send to ranks (`send_rows`) count as if they were spread evenly.

    Args:
        program: of one rank.
        sizes: how many ranks each axis has, by its name.
    """
    nodes = list(program.graph.nodes)
    through = differentiated(nodes, requires_gradient, _passed)
    live = _read_by_loss(nodes, through)
    again = _computed_again(nodes, through, live)
    forward = backward = flops = 0.0
    for node in nodes:
        times = 2 if node in again else 1
        there, back = _sent(node, sizes, through)
        forward += there
        backward += (times - 1) * there + (back if node in live else 0.0)
        inside = node.meta.get(PRICE)
        if inside is not None:
            forward += inside.forward
            backward += inside.backward if node in live else 0.0
            flops += inside.flops
        else:
            flops += times * operations(node) + (backward_operations(node, through) if node in live else 0.0)
    parameters = (node for node in nodes if node.op == "placeholder" and is_parameter(node))
    return Price(forward, backward, flops, sum(map(bytes_held, parameters)))


def _read_by_loss(nodes: list[fx.Node], through: set[fx.Node]) -> set[fx.Node]:
    """Of these values, those that a gradient flows back to from what the program returns."""
    live = set[fx.Node]()
    for node in reversed(nodes):
        if node.op == "output" or node in live:
            live.update(operand for operand in _passed(node) if operand in through)
    return live


def _computed_again(nodes: list[fx.Node], through: set[fx.Node], live: set[fx.Node]) -> set[fx.Node]:
    """Values that must be computed again for the backward pass, of which an operator reads what they lead to."""
    again = set[fx.Node]()
    for node in reversed(nodes):
        if node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE and any(
            user in again or (user in live and _reads_in_backward(user, node, through)) for user in node.users
        ):
            again.add(node)
    return again


def _reads_in_backward(user: fx.Node, value: fx.Node, through: set[fx.Node]) -> bool:
    """Whether the backward pass of an operator reads this operand; True where it is not known."""
    names = factors(user)
    if names is not None:  # of two factors, each is read for the gradient of the other
        given = bind(user)
        return any(given[name] in through for name, other in (names, names[::-1]) if given[other] is value)
    is_table = key(user) == "aten::embedding" and bind(user)["weight"] is value
    is_tagged = user.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE  # what reads that is asked in its place
    return not (is_table or is_tagged or has_trait(user, "saves_nothing", "saves_result", *_MOVES))


_MOVES: tuple[Trait, ...] = ("same", "cast", "reshape", "squeeze", "expand", "permute", "slice", "split")
"""Traits of operators whose backward pass reads no operand."""


def _passed(node: fx.Node) -> Collection[fx.Node]:
    """The operands that the node's gradient flows to."""
    if node.target is PASS_GRADIENT:  # the value, of which it is the identity, gets none
        return [operand for operand in node.args[1:2] if isinstance(operand, fx.Node)]
    return passed(node)


def _sent(node: fx.Node, sizes: Mapping[str, int], through: set[fx.Node]) -> tuple[float, float]:
    """The bytes that a rank sends in the node, and in its backward pass if a gradient flows to it."""
    kind = COLLECTIVE_KINDS.get(node.target)
    if kind is not None:
        num_ranks, held = sizes[node.meta["axis"]], bytes_held(node.all_input_nodes[0])
        return collective_bytes(kind, held, num_ranks), collective_bytes(ADJOINTS[kind], bytes_held(node), num_ranks)
    if node.target is GATHER_CAST:  # sent in the dtype of the result, and reduced in that of the operand
        num_ranks, held = sizes[node.meta["axis"]], bytes_held(node.all_input_nodes[0])
        return bytes_held(node) * (num_ranks - 1) / num_ranks, collective_bytes("all_gather", held, num_ranks)
    if node.target in (MEAN_GRADIENT, MEAN_GRADIENTS):
        averaged = [operand for operand in node.all_input_nodes if operand in through]
        *_, num_ranks = node.args
        return 0.0, collective_bytes("all_reduce", sum(map(bytes_held, averaged)), int(str(num_ranks)))
    if node.target is SEND_ROWS:
        return _sent_rows(node)
    return 0.0, 0.0


def _sent_rows(node: fx.Node) -> tuple[float, float]:
    given: Any = node.args
    values, counts, *_ = given
    num_ranks = int(counts.meta["val"].shape[1])
    forward = backward = 0.0
    for operand, result in zip(values, node.meta["val"], strict=True):
        value = operand.meta["val"]
        known = result if is_read_from_data(value.numel()) else value  # of one of both, data decide the rows
        sent = collective_bytes("all_to_all", size_hint(known.numel()) * known.element_size(), num_ranks)
        forward += sent
        backward += sent if is_inexact(value) else 0.0
    return forward, backward
