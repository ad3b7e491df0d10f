"""The entries beside a rank's chunk, which its neighbours have, as a node that says what it sends."""

from __future__ import annotations

from torch import fx

from fxrewrite.match import Match
from fxrewrite.spmd.operators.halo import HALO
from fxrewrite.spmd.operators.shared_nodes import rank_node
from fxrewrite.spmd.placement import Axis
from fxrewrite.spmd.price.price import PRICE, Price, bytes_held


def exchange_halo(match: Match, x: fx.Proxy, dim: int, before: int, after: int, axis: Axis) -> fx.Proxy:
    """The chunk `x` that a rank has of a dimension, with so many entries before and after it; zeros beyond the ends.

    Shapes: x [..., n, ...] -> [..., before + n + after, ...].
    """
    rank = match.proxy(rank_node(match.edit, axis))
    made = match.call(HALO, x, dim, before, after, rank, axis.size, axis.group)
    sent = bytes_held(made.node) - bytes_held(x.node)
    match.edit.set_meta(made.node, "axis", axis.name)
    match.edit.set_meta(made.node, PRICE, Price(sent, sent))
    return made
