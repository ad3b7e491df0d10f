"""Which values of parameters share a collective: a bucket is what one layer reads, of one axis and dtype.

A layer is a module of a list, the outermost if they are nested; parameters outside of lists share buckets with their
neighbours. All values of a bucket require gradients, or none does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import fx

from fxrewrite.graph.differentiable import requires_gradient
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.walk import reached


def buckets_of(
    edit: Edit,
    nodes: Sequence[fx.Node],
    first_read: Mapping[fx.Node, fx.Node],
    apart: Container[fx.Node] = (),
) -> list[list[fx.Node]]:
    """The nodes, each of one parameter, that are one collective; in the order in which those of a bucket are read.

    Those `apart` share no bucket with others.
    """
    at = {node: position for position, node in enumerate(edit.nodes())}
    ordered = sorted(nodes, key=lambda node: (at[first_read[node]], at[node]))
    found: list[list[fx.Node]] = []
    for _, of_layer in itertools.groupby(ordered, lambda node: layer_of(parameter_of(node))):
        alike: dict[Any, list[fx.Node]] = {}
        for node in of_layer:
            alike.setdefault((_in_bucket(node), node in apart), []).append(node)
        found += alike.values()
    return found


def parameter_of(node: fx.Node) -> str:
    """The name of the parameter that a node is computed from, the first if there are several."""
    return input_name(_first_parameter(node))


def layer_read_by(bucket: Sequence[fx.Node]) -> str:
    """The layer whose parameters a bucket has; "" outside of lists."""
    return layer_of(parameter_of(bucket[0]))


def layer_of(parameter: str) -> str:
    """The outermost module of a list that a parameter belongs to: `model.layers.0`; "" where there is none."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.)", parameter)
    return found[0] if found else ""


def _first_parameter(node: fx.Node) -> fx.Node:
    return min(n for n in reached([node]) if n.op == "placeholder")


def _in_bucket(node: fx.Node) -> tuple[Any, ...]:
    """In what nodes of one bucket are alike."""
    value, is_trained = node.meta["val"], requires_gradient(_first_parameter(node))
    return (*node.args[1:], value.dtype, value.device, node.meta.get("recompute"), is_trained)


def move_operands(edit: Edit, bucket: Sequence[fx.Node], before: fx.Node) -> None:
    """Compute all that these nodes read before a node."""
    walk = reached(read for node in bucket for read in node.all_input_nodes)
    for needed in sorted(node for node in walk if node.op != "placeholder"):
        if not needed < before:
            edit.move(needed, before)
