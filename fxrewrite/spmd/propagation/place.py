"""Placements that are stated: of a graph's inputs and outputs, and of what goes into modules and comes out of them.

    Place("shard_weights", {
        param("*.{gate,up}_proj.weight"): Shard(0),     each rank holds its rows; the gradient is that of its rows
        param("*.down_proj.weight"): Shard(1),
        param("*.norm.weight"): Stored(Shard(0)),       held in shards, gathered before any use
        inputs("input_ids"): Shard(0),                  each rank is called with its own part of the batch
        inputs("mask"): Zigzag(1),                      blocks r and 2P - 1 - r of 2P; put in order before any use
        module_output("*.mlp"): Shard(1),               a constraint; propagation finds what follows from it
        outputs(0): Replicate(),
    })

What is stated of an input is how ranks hold it from outside: the graph's input becomes the local one. What is stated of
a value inside the graph becomes a redistribution. Everything else follows by propagation, before which the step must
run; the default of inputs and outputs is that every rank holds them whole. `sites` has what it is stated of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.inputs import input_name, is_buffer
from fxrewrite.graph.modules import module_calls
from fxrewrite.graph.sizes import require_divisible, size_hint, written_factor
from fxrewrite.ops import is_parameter, is_tensor, key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import NotInPart
from fxrewrite.spmd.operators.gradient_ops import MEAN_GRADIENT, SCALE_GRADIENT
from fxrewrite.spmd.operators.shared_nodes import first_call, size_nodes
from fxrewrite.spmd.placement import (
    AnyPlacement,
    Axis,
    MisstatedError,
    Partial,
    Placement,
    Replicate,
    Shard,
    Zigzag,
    as_placement,
    is_same_placement,
)
from fxrewrite.spmd.propagation.input_placements import ZIGZAG, placements_of
from fxrewrite.spmd.propagation.sites import (
    NothingMatchesError,
    Placed,
    Site,
    Stored,
    check_fits,
    check_matches,
    held_placement,
    matching,
)
from fxrewrite.spmd.properties import PLACEMENTS
from fxrewrite.spmd.redistribute import redistribute

aten = torch.ops.aten
HELD = Fact["Placement"]("held")
"""How ranks hold an input of the graph, where that is stated."""
STATED = Fact["str"]("stated")
"""Where the placement of an input or of a redistribution is stated, as `param('*.weight')`."""
RETURNED = Fact["dict[int, Placement]"]("returned")
"""Of the output node: how outputs return, by position, where that is stated."""


CHUNK = "chunk"
"""In `meta` of an input that is passed as a DTensor: how the ranks of each axis hold it, by the axis's name."""
KEPT = CheckpointPolicy.PREFER_SAVE
"""The tag of what is gathered of a parameter that is `Stored(..., kept=True)`."""


def input_of(node: fx.Node) -> fx.Node:
    """The input that a node is a cast of, as under autocast, or whose gradient another axis has changed."""
    while node.target in (SCALE_GRADIENT, MEAN_GRADIENT) or key(node) in ("aten::to", "aten::_to_copy"):
        node = node.all_input_nodes[0]
    return node


def hold_chunks(edit: Edit, axis: Axis) -> dict[fx.Node, Shard]:
    """Afterwards it is known which inputs ranks of the axis hold in chunks because they enter so; returns these."""
    found: dict[fx.Node, Shard] = {}
    for node in edit.graph.find_nodes(op="placeholder"):
        placement = node.meta.get(CHUNK, {}).get(axis.name)
        if placement is not None:
            edit.set_fact(node, HELD, placement)
            edit.set_fact(node, STATED, "the DTensor that is passed")
            found[node] = placement
    return found


def held_as(node: fx.Node) -> Placement | None:
    """Returns how ranks hold an input, if that is stated; also of `input_of` the node."""
    return HELD.of(input_of(node))


class Place:
    """The step that writes down what is stated, in placements of `fxrewrite.spmd` or of `torch.distributed.tensor`.

    Raises:
        FxRewriteError: a glob matches nothing; says the nearest names. A placement does not fit a value's shape.
    """

    def __init__(self, name: str, placements: Mapping[Site, Placed]) -> None:
        self.name = name
        self.placements: dict[Site, Placement | Stored | Zigzag] = {
            site: stated if isinstance(stated, (Stored, Zigzag)) else as_placement(stated)
            for site, stated in placements.items()
        }
        self.precedes = (PLACEMENTS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        hold_chunks(edit, context.axis)
        self._check_modules(edit)
        changes = 0
        # What a step puts after inputs is no part of the modules that read them, so modules come first.
        for site, placed in sorted(self.placements.items(), key=lambda stated: stated[0].kind in ("param", "inputs")):
            if isinstance(placed, Stored) and site.kind != "param":
                raise MisstatedError(f"{site}: {placed}: only parameters are gathered before use")
            if isinstance(placed, Zigzag) and site.kind != "inputs":
                raise MisstatedError(f"{site}: only inputs can be held as {placed}; state Shard({placed.dim})")
            try:
                changes += _PLACED[site.kind](edit, context.axis, site, placed, self.name)
            except NothingMatchesError:
                if not context.is_part:
                    raise
                report.events.append(NotInPart(stated=str(site)))
        if self.placements and not changes and not context.is_part:
            known = {**_inputs(edit, of_model=True), **_inputs(edit, of_model=False), **_modules(edit)}
            check_matches(self.name, self.placements, known, "graph")
        return changes

    def _check_modules(self, edit: Edit) -> None:
        """Raise FxRewriteError where two sites state different placements of what one module reads or computes."""
        sites = [site for site in self.placements if site.kind in ("module_input", "module_output")]
        if len(sites) < 2:
            return
        for name in _modules(edit):
            stated: dict[str, Site] = {}
            for site in (site for site in sites if site.matches(name)):
                first = stated.setdefault(site.kind, site)
                if self.placements[first] != self.placements[site]:
                    both = " and ".join(f"{one}: {self.placements[one]}" for one in (first, site))
                    raise MisstatedError(f"{self.name}: {both} both match {name}; let one glob match it")

    def text(self) -> str:
        return "\n".join(f"{site}: {placement}" for site, placement in self.placements.items())


def _hold(edit: Edit, node: fx.Node, placement: Placement, site: Site, name: str) -> None:
    before = HELD.of(node)
    if before is not None and not is_same_placement(before, placement):
        raise MisstatedError(
            f"{name} is stated as {before} by {STATED.of(node)}, and as {placement} by {site}; let one glob match it"
        )
    edit.set_fact(node, HELD, placement)
    edit.set_fact(node, STATED, str(site))


def _inputs(edit: Edit, *, of_model: bool) -> dict[str, list[fx.Node]]:
    """Inputs by name; what another graph of the model computed (`meta["argument"]` is "") has none.

    Several have one name where the graph reads several models, as a policy and the reference that it started from.
    """
    found: dict[str, list[fx.Node]] = {}
    for node in edit.nodes():
        if node.op == "placeholder" and node.meta.get("argument") != "" and is_parameter(node) == of_model:
            found.setdefault(argument_name(node), []).append(node)
    return found


def _matching_inputs(edit: Edit, site: Site, *, without_buffers: bool) -> Iterator[tuple[str, fx.Node]]:
    """The inputs that a site matches, with their names."""
    known = _inputs(edit, of_model=site.kind == "param")
    if without_buffers:
        parameters = ((name, [node for node in nodes if not is_buffer(node)]) for name, nodes in known.items())
        known = {name: nodes for name, nodes in parameters if nodes}
    for name, nodes in matching(site, known):
        yield from ((name, node) for node in nodes)


def _place_inputs(edit: Edit, axis: Axis, site: Site, placed: Placement | Stored | Zigzag, rule: str) -> int:
    """Inputs become what a rank holds of them. What is stored in shards is gathered before use, and so are blocks in
    zigzag, which are put in order."""
    changes, first, is_stored = 0, first_call(edit), isinstance(placed, Stored)
    for name, node in _matching_inputs(edit, site, without_buffers=is_stored):
        of, shape, users = f"{site}: {name}", node.meta["val"].shape, list(node.users)
        stated = Shard(placed.dim) if isinstance(placed, Zigzag) else placed
        placement = held_placement(shape, stated, axis, of, inner=_inner(node))
        # A size that the graph reads of a local one, as P * s, stays right when the value becomes local.
        if not is_stored and isinstance(placement, Shard) and written_factor(shape[placement.dim]) % axis.size:
            raise FxRewriteError(
                f"{of}: dimension {placement.dim} is symbolic, and sizes in the graph are read off it as a whole; "
                "compile with dynamic=False, or mark_static this dimension"
            )
        _hold(edit, node, placement, site, name)
        changes += not is_stored
        if isinstance(placed, Zigzag):
            if not require_divisible(shape[placed.dim], 2 * axis.size):
                sizes = [size_hint(n) for n in shape]
                raise FxRewriteError(
                    f"{of} {sizes}: {placed} over {axis} has {2 * axis.size} blocks, which do not divide it"
                )
            edit.set_fact(node, ZIGZAG, placed)
        if isinstance(placed, (Stored, Zigzag)) and isinstance(placement, Shard) and users:
            whole = _redistributed(edit, axis, node, users, Replicate(), of, rule, before=first)
            if isinstance(placed, Zigzag):
                _put_in_order(edit, axis, whole, users, placed.dim, rule)
            elif placed.kept:
                edit.set_meta(whole, "recompute", KEPT)
            changes += 1
    return changes


def _put_in_order(edit: Edit, axis: Axis, gathered: fx.Node, users: list[fx.Node], dim: int, rule: str) -> None:
    """Afterwards these users read the value as one device has it, of the gathered blocks of all ranks."""
    (source,), before, value = gathered.all_input_nodes, gathered.next, gathered.meta["val"]

    def call(target: Any, *args: Any) -> fx.Node:
        return edit.call(target, args, before=before, like=source, rule=rule)

    blocks = 2 * axis.size
    sizes = [size_nodes(edit)(value.shape[dim] // blocks)] * blocks
    split = call(aten.split_with_sizes.default, gathered, sizes, dim)
    of_ranks = [call(operator.getitem, split, i) for i in range(blocks)]
    joined = call(aten.cat.default, [of_ranks[i] for i in Zigzag.order(axis.size)], dim)
    edit.set_meta(joined, "val", value)
    edit.replace_uses(gathered, joined, users)


def _place_output(edit: Edit, axis: Axis, site: Site, placement: Placement, rule: str) -> int:
    output = edit.graph.output_node()
    leaves = tree_leaves(output.args[0])
    position = int(site.glob)
    value = leaves[position] if position < len(leaves) else None
    if not isinstance(value, fx.Node) or not is_tensor(value):
        raise MisstatedError(f"{site}: the graph returns no tensor there; it has {len(leaves)} outputs")
    if isinstance(placement, Partial):
        raise MisstatedError(f"{site}: an output cannot leave as {placement}; Shard(dim) and Replicate() can be stated")
    check_fits(value.meta["val"].shape, placement, axis, str(site))
    edit.set_fact(output, RETURNED, {**(RETURNED.of(output) or {}), position: placement})
    return 1


def _place_values(edit: Edit, axis: Axis, site: Site, placement: Placement, rule: str) -> int:
    """What modules read, or what others read of them, is redistributed."""
    changes = 0
    for name, nodes in _matching_calls(edit, site):
        for value, users in _crossing(nodes, outward=site.kind == "module_output"):
            before = first_call(edit) if value.op == "placeholder" else value.next
            _redistributed(edit, axis, value, users, placement, f"{site}: {name}", rule, before=before)
            changes += 1
    return changes


def _crossing(nodes: list[fx.Node], *, outward: bool) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The activations that others read of these nodes, or that these nodes read of others, each with who reads it."""
    inside = set(nodes)
    read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
    for value in nodes if outward else read:
        users = [user for user in value.users if (user in inside) != outward]
        if users and is_tensor(value) and not is_parameter(value):
            yield value, users


_PLACED: Mapping[str, Callable[[Edit, Axis, Site, Any, str], int]] = {
    "param": _place_inputs,
    "inputs": _place_inputs,
    "outputs": _place_output,
    "module_input": _place_values,
    "module_output": _place_values,
}


def _redistributed(
    edit: Edit,
    axis: Axis,
    value: fx.Node,
    users: list[fx.Node],
    placement: Placement,
    of: str,
    rule: str,
    *,
    before: fx.Node,
) -> fx.Node:
    """The value with the stated placement, which these users read from now on; `of` is where that is stated."""
    check_fits(value.meta["val"].shape, placement, axis, of)
    move = (value, Replicate(), placement, axis)
    moved = edit.call(redistribute, move, before=before, like=value, rule=rule, val=value.meta["val"])
    edit.set_fact(moved, STATED, of)
    edit.replace_uses(value, moved, users)
    return moved


def _inner(node: fx.Node) -> list[AnyPlacement]:
    """How ranks of inner axes hold an input."""
    return [held for held in placements_of(node).values() if not isinstance(held, Zigzag)]


def argument_name(placeholder: fx.Node) -> str:
    """The name of an input as `Site`s know it: of an argument that goes by `**kwargs`, its own."""
    return input_name(placeholder).removeprefix("kwargs_")


def _modules(edit: Edit) -> dict[str, dict[str, list[fx.Node]]]:
    """By qualified name of a module: of each of its calls what runs in it, in its submodules as well."""
    found: dict[str, dict[str, list[fx.Node]]] = {}
    for node in edit.nodes():
        if node.op == "call_function":
            for call, name in module_calls(node):
                found.setdefault(name, {}).setdefault(call, []).append(node)
    return found


def _matching_calls(edit: Edit, site: Site) -> Iterator[tuple[str, list[fx.Node]]]:
    """What runs in each call of a module that a site matches, with the module's name."""
    for name, calls in matching(site, _modules(edit)):
        yield from ((name, nodes) for nodes in calls.values())
