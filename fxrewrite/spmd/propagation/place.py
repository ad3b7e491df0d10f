"""Placements that are stated: of a graph's inputs and outputs, and of what goes into modules and comes out of them.

    Place("shard_weights", {
        param("*.{gate,up}_proj.weight"): Shard(0),     each rank holds its rows; the gradient is that of its rows
        param("*.down_proj.weight"): Shard(1),
        inputs("input_ids"): Shard(0),                  each rank is called with its own part of the batch
        inputs("mask"): Zigzag(1),                      blocks r and 2P - 1 - r of 2P; put in order before any use
        module_output("*.mlp"): Shard(1),               a constraint; propagation finds what follows from it
        outputs(0): Replicate(),
    })

What is stated of an input is how ranks hold it from outside: the graph's input becomes the local one. What is stated of
a value inside the graph becomes a redistribution. Everything else follows by propagation, before which the step must
run; the default of inputs and outputs is that every rank holds them whole.
A glob is matched against qualified names as in `named_parameters`; `{a,b}` is one of several.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.inputs import input_name, is_buffer
from fxrewrite.graph.modules import matches_glob, module_calls
from fxrewrite.graph.sizes import Size, divide_exactly, require_divisible, size_hint, written_factor
from fxrewrite.ops import is_parameter, is_tensor, key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.events import NotInPart
from fxrewrite.spmd.operators.gradient_ops import MEAN_GRADIENT, SCALE_GRADIENT
from fxrewrite.spmd.operators.shared_nodes import size_nodes
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
    check_placement,
    is_same_placement,
)
from fxrewrite.spmd.propagation.input_placements import ZIGZAG, placements_of
from fxrewrite.spmd.properties import PLACEMENTS
from fxrewrite.spmd.redistribute import redistribute

__all__ = [
    "CHUNK",
    "HELD",
    "RETURNED",
    "STATED",
    "Place",
    "Placed",
    "Site",
    "Stored",
    "argument_name",
    "held_as",
    "held_placement",
    "hold_chunks",
    "input_of",
    "inputs",
    "module_input",
    "module_output",
    "outputs",
    "param",
]

T = TypeVar("T")
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


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter that ranks hold in shards and gather before any use; its gradient is reduced and scattered.

    Where the ranks do not divide the dimension, shards are uneven: of `ceil(S / P)` entries, and of fewer on the last
    ranks, as those of a DTensor. With `or_whole`, a parameter that cannot be held so is held whole: it has no such
    dimension, or the ranks divide neither it nor an inner axis's shards of it. With `kept`, what was gathered stays
    until the backward pass has read it; otherwise it is gathered again.
    """

    held: AnyPlacement
    or_whole: bool = False
    kept: bool = False

    def __str__(self) -> str:
        gathered = f"gathered before use{' and kept for the backward pass' * self.kept}"
        return f"{as_placement(self.held)}, {gathered}{' (whole where it does not fit)' * self.or_whole}"


Placed: TypeAlias = "AnyPlacement | Stored | Zigzag"
"""What can be stated of a site."""


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


@dataclass(frozen=True, slots=True)
class Site:
    """What a placement is stated of; made by `param`, `inputs`, `outputs`, `module_input` and `module_output`."""

    kind: Literal["param", "inputs", "outputs", "module_input", "module_output"]
    glob: str
    optional: bool = False
    but: str = ""

    def __post_init__(self) -> None:
        for glob in (self.glob, self.but):
            if not isinstance(glob, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise FxRewriteError(f"{self.kind}({glob!r}): a glob is a text, as in param('*.up.weight')")

    def matches(self, name: str) -> bool:
        """Whether the placement is stated of what has this qualified name."""
        return matches_glob(name, self.glob) and not (self.but and matches_glob(name, self.but))

    def __str__(self) -> str:
        but = f", but={self.but!r}" if self.but else ""
        return f"{self.kind}({self.glob!r}{but}{', optional=True' * self.optional})"


def param(glob: str, *, but: str = "", optional: bool = False) -> Site:
    """Parameters and buffers by qualified name, without those that the glob `but` matches.

    A glob that matches nothing is an error, unless it is `optional`: what not every model has, or what a tied one has
    under another name.
    """
    return Site("param", glob, optional, but)


def inputs(glob: str, *, optional: bool = False) -> Site:
    """Tensors that the model is called with, by the name of the argument; with `optional` the glob may match none.

    Where ranks hold them in chunks, each rank calls the model with its own: see `shard_parameters`.
    """
    return Site("inputs", glob, optional)


def outputs(position: int) -> Site:
    """The output at this position, outputs flattened, counted from the front."""
    if type(position) is not int or position < 0:
        raise MisstatedError(f"outputs({position!r}): a position is an int, counted from the front, from 0")
    return Site("outputs", str(position))


def module_input(glob: str, *, optional: bool = False) -> Site:
    """The activations that modules read, by the modules' qualified name; with `optional` the glob may match nothing."""
    return Site("module_input", glob, optional)


def module_output(glob: str, *, optional: bool = False) -> Site:
    """The values that modules compute and that others read, by the modules' qualified name; with `optional` the glob
    may match nothing."""
    return Site("module_output", glob, optional)


class _NothingMatchesError(MisstatedError):
    """A glob that matches nothing of the graph."""


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
            try:
                if isinstance(placed, Stored):
                    changes += _place_stored(edit, context.axis, site, placed, self.name)
                elif isinstance(placed, Zigzag):
                    changes += _place_zigzag(edit, context.axis, site, placed, self.name)
                else:
                    changes += _PLACED[site.kind](edit, context.axis, site, placed, self.name)
            except _NothingMatchesError:
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


def check_matches(name: str, sites: Iterable[Site], known: Iterable[str], where: str) -> None:
    """Raise FxRewriteError if every site is optional and none matches: what is stated is of another model."""
    sites, known = list(sites), list(known)
    named = [site for site in sites if site.kind != "outputs"]
    if named and named == sites and not any(site.matches(one) for site in named for one in known):
        raise MisstatedError(
            f"{name}: nothing of the {where} matches what is stated, {named[0]} for example; it has "
            f"{', '.join(map(repr, known[:3]))} ...: state the parallelism of the module that is compiled"
        )


def held_placement(
    shape: Sequence[Size], placed: Placed, axis: Axis, of: str, *, inner: Iterable[AnyPlacement] = ()
) -> Placement:
    """How ranks hold a parameter of this shape, of which that is stated.

    Args:
        shape: what the ranks of inner axes have left of it.
        placed: what is stated.
        axis: whose ranks they are.
        of: whose placement it is, for errors.
        inner: how ranks of inner axes hold the parameter.

    Raises:
        FxRewriteError: the placement does not fit the shape.
    """
    if isinstance(placed, Zigzag):
        raise MisstatedError(f"{of}: only inputs can be held as {placed}; state Shard({placed.dim})")
    placement: Placement = as_placement(placed.held if isinstance(placed, Stored) else placed)
    if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.uneven):
        raise MisstatedError(f"{of}: an input cannot be held as {placement}; Shard(dim) and Replicate() can be")
    if isinstance(placement, Shard):
        cut = [held for held in map(as_placement, inner) if isinstance(held, Shard) and held.dim == placement.dim]
        is_ragged = any(held.uneven for held in cut)  # `shape` has its padding, and the last ranks hold less
        if isinstance(placed, Stored) and (is_ragged or not _fits(shape, placement, axis)):
            if not cut and placement.dim in range(len(shape)) and placement == Shard(placement.dim):
                return replace(placement, uneven=True)
            if placed.or_whole:
                return Replicate()
        if is_ragged:
            raise MisstatedError(f"{of}: ranks of an inner axis hold uneven shards of dimension {placement.dim}")
    _check_fits(shape, placement, axis, of)
    return placement


def _place_stored(edit: Edit, axis: Axis, site: Site, placed: Stored, rule: str) -> int:
    if site.kind != "param":
        raise MisstatedError(f"{site}: {placed}: only parameters are gathered before use")
    first = next(node for node in edit.graph.nodes if node.op != "placeholder")
    changes = 0
    for name, node in _matching_inputs(edit, site, without_buffers=True):
        value, users = node.meta["val"], list(node.users)
        placement = held_placement(value.shape, placed, axis, f"{site}: {name}", inner=_inner(node))
        _hold(edit, node, placement, site, name)
        if isinstance(placement, Shard) and users:
            gathered = _redistributed(edit, axis, node, users, Replicate(), f"{site}: {name}", before=first, rule=rule)
            if placed.kept:
                edit.set_meta(gathered, "recompute", KEPT)
            changes += 1
    return changes


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


def _matching_inputs(edit: Edit, site: Site, *, without_buffers: bool = False) -> Iterator[tuple[str, fx.Node]]:
    """The inputs that a site matches, with their names."""
    known = _inputs(edit, of_model=site.kind == "param")
    if without_buffers:
        parameters = ((name, [node for node in nodes if not is_buffer(node)]) for name, nodes in known.items())
        known = {name: nodes for name, nodes in parameters if nodes}
    for name, nodes in _matching(site, known):
        yield from ((name, node) for node in nodes)


def _place_inputs(edit: Edit, axis: Axis, site: Site, placement: Placement, rule: str) -> int:
    changes = 0
    for name, node in _matching_inputs(edit, site):
        shape = node.meta["val"].shape
        held_placement(shape, placement, axis, f"{site}: {name}", inner=_inner(node))
        # A size that the graph reads of a local one, as P * s, stays right when the value becomes local.
        if isinstance(placement, Shard) and written_factor(shape[placement.dim]) % axis.size:
            raise FxRewriteError(
                f"{site}: {name}: dimension {placement.dim} is symbolic, and sizes in the graph are read off it as a "
                "whole; compile with dynamic=False, or mark_static this dimension"
            )
        _hold(edit, node, placement, site, name)
        changes += 1
    return changes


def _place_zigzag(edit: Edit, axis: Axis, site: Site, placed: Zigzag, rule: str) -> int:
    """The blocks of all ranks are gathered and put in order; what follows reads the value as one device has it."""
    if site.kind != "inputs":
        raise MisstatedError(f"{site}: only inputs can be held as {placed}; state Shard({placed.dim})")
    changes, blocks = _place_inputs(edit, axis, site, Shard(placed.dim), rule), 2 * axis.size
    first = next(node for node in edit.graph.nodes if node.op != "placeholder")
    for name, node in _matching_inputs(edit, site):
        shape: Any = node.meta["val"].shape
        if not require_divisible(shape[placed.dim], blocks):
            of = f"{site}: {name} {[size_hint(n) for n in shape]}"
            raise FxRewriteError(f"{of}: {placed} over {axis} has {blocks} blocks, which do not divide it")
        edit.set_fact(node, ZIGZAG, placed)
        users = list(node.users)
        if not users:
            continue
        whole = _redistributed(edit, axis, node, users, Replicate(), f"{site}: {name}", before=first, rule=rule)
        changes += 1
        sizes = [size_nodes(edit)(shape[placed.dim] // blocks)] * blocks
        split = edit.call(aten.split_with_sizes.default, (whole, sizes, placed.dim), before=first, like=node, rule=rule)
        of_ranks = [edit.call(operator.getitem, (split, i), before=first, like=node, rule=rule) for i in range(blocks)]
        ordered = [of_ranks[i] for i in Zigzag.order(axis.size)]
        joined = edit.call(aten.cat.default, (ordered, placed.dim), before=first, like=node, rule=rule)
        edit.set_meta(joined, "val", whole.meta["val"])
        edit.replace_uses(whole, joined, users)
    return changes


def _place_outputs(edit: Edit, axis: Axis, site: Site, placement: Placement, rule: str) -> int:
    output = edit.graph.output_node()
    leaves = tree_leaves(output.args[0])
    position = int(site.glob)
    value = leaves[position] if position < len(leaves) else None
    if not isinstance(value, fx.Node) or not is_tensor(value):
        raise MisstatedError(f"{site}: the graph returns no tensor there; it has {len(leaves)} outputs")
    if isinstance(placement, Partial):
        raise MisstatedError(f"{site}: an output cannot leave as {placement}; Shard(dim) and Replicate() can be stated")
    _check_fits(value.meta["val"].shape, placement, axis, str(site))
    edit.set_fact(output, RETURNED, {**(RETURNED.of(output) or {}), position: placement})
    return 1


def _place_module_outputs(edit: Edit, axis: Axis, site: Site, placement: Placement, rule: str) -> int:
    changes = 0
    for name, nodes in _matching_calls(edit, site):
        inside = set(nodes)
        for node in nodes:
            users = [user for user in node.users if user not in inside]
            if users and is_tensor(node):
                _redistributed(edit, axis, node, users, placement, f"{site}: {name}", after=node, rule=rule)
                changes += 1
    return changes


def _place_module_inputs(edit: Edit, axis: Axis, site: Site, placement: Placement, rule: str) -> int:
    changes = 0
    for name, nodes in _matching_calls(edit, site):
        inside = set(nodes)
        read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
        for operand in read:
            if is_tensor(operand) and not is_parameter(operand):
                users = [node for node in nodes if operand in node.all_input_nodes]
                # After an input there may already be what another axis sends of it.
                first = next(node for node in edit.graph.nodes if node.op != "placeholder")
                at = {"before": first} if operand.op == "placeholder" else {"after": operand}
                _redistributed(edit, axis, operand, users, placement, f"{site}: {name}", **at, rule=rule)
                changes += 1
    return changes


_PLACED: Mapping[str, Callable[[Edit, Axis, Site, Placement, str], int]] = {
    "param": _place_inputs,
    "inputs": _place_inputs,
    "outputs": _place_outputs,
    "module_input": _place_module_inputs,
    "module_output": _place_module_outputs,
}


def _redistributed(
    edit: Edit,
    axis: Axis,
    value: fx.Node,
    users: list[fx.Node],
    placement: Placement,
    of: str,
    *,
    rule: str,
    before: fx.Node | None = None,
    after: fx.Node | None = None,
) -> fx.Node:
    """The value with the stated placement, which these users read from now on; `of` is where that is stated."""
    _check_fits(value.meta["val"].shape, placement, axis, of)
    move = (value, Replicate(), placement, axis)
    moved = edit.call(redistribute, move, before=before, after=after, like=value, rule=rule, val=value.meta["val"])
    edit.set_fact(moved, STATED, of)
    edit.replace_uses(value, moved, users)
    return moved


def _check_fits(shape: Sequence[Size], placement: Placement, axis: Axis, of: str) -> None:
    check_placement(placement, shape, of)
    if not _fits(shape, placement, axis):
        do = _divisors(shape, placement)
        said = f"; {', '.join(map(str, do))} do" if do else ""
        raise FxRewriteError(f"{of} {[size_hint(n) for n in shape]}: {axis} ranks do not divide {placement}{said}")


def _inner(node: fx.Node) -> list[AnyPlacement]:
    """How ranks of inner axes hold an input."""
    return [held for held in placements_of(node).values() if not isinstance(held, Zigzag)]


def _fits(shape: Sequence[Size], placement: Placement, axis: Axis) -> bool:
    if not isinstance(placement, Shard):
        return True
    if placement.dim not in range(len(shape)):
        return False
    entries = divide_exactly(shape[placement.dim], placement.outer * placement.inner)
    return placement.uneven or (entries is not None and require_divisible(entries, axis.size))


_MOST_RANKS = 64
"""Up to which numbers of ranks are said to fit."""


def _divisors(shape: Sequence[Size], placement: Placement) -> list[int]:
    """The numbers of ranks, above one, that divide what is to be cut."""
    if not isinstance(placement, Shard) or placement.dim not in range(len(shape)):
        return []
    entries = divide_exactly(shape[placement.dim], placement.outer * placement.inner)
    return [n for n in range(2, min(entries, _MOST_RANKS) + 1) if entries % n == 0] if isinstance(entries, int) else []


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
    for name, calls in _matching(site, _modules(edit)):
        yield from ((name, nodes) for nodes in calls.values())


def _matching(site: Site, known: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    found = [name for name in known if site.matches(name)]
    if not found and not site.optional:
        near = get_close_matches(site.glob, known, n=3, cutoff=0.3) or list(known)[:3]
        said = f"{site} matches nothing; the graph has {', '.join(map(repr, near)) or 'none'}"
        if site.kind == "inputs":
            said += " (a tensor that is passed twice has its first name: pass labels=ids.clone(), for example)"
        raise _NothingMatchesError(said)
    yield from ((name, known[name]) for name in found)
