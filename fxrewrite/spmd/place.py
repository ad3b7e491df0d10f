"""Placements that are stated: of a graph's inputs and outputs, and of what goes into modules and comes out of them.

    Place("shard_weights", {
        param("*.{gate,up}_proj.weight"): Shard(0),     each rank holds its rows; the gradient is that of its rows
        param("*.down_proj.weight"): Shard(1),
        inputs("input_ids"): Shard(0),                  each rank is called with its own part of the batch
        module_output("*.mlp"): Shard(1),               asked for; propagation finds what follows from it
        outputs(0): Replicated(),
    })

What is stated of an input is how ranks hold it from outside: the graph's input becomes the local one. What is stated of
a value inside the graph is a redistribution that is asked for. Everything else follows by propagation, before which the
step must run; the default of inputs and outputs is that every rank holds them whole.
A glob is matched against qualified names as in `named_parameters`; `{a,b}` is one of several.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.sizes import divide_exactly, require_divisible, size_hint
from fxrewrite.ops import is_parameter
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.gradient_ops import MEAN_GRADIENT, SCALE_GRADIENT
from fxrewrite.spmd.layout import AnyPlacement, Axis, Layout, Partial, Replicated, Shard, as_layout, check_layout
from fxrewrite.spmd.redistribute import redistribute
from fxrewrite.spmd.stages import PLACEMENTS

__all__ = ["HELD", "RETURNED", "Place", "held_as", "inputs", "module_input", "module_output", "outputs", "param"]

T = TypeVar("T")
HELD = Fact["Layout"]("held")
"""How ranks hold an input of the graph, where that is stated."""
RETURNED = Fact["dict[int, Layout]"]("returned")
"""Of the output node: how outputs return, by position, where that is stated."""


def held_as(node: fx.Node) -> Layout | None:
    """Returns how ranks hold an input, if that is stated; also of an input whose gradient another axis has changed."""
    while node.target in (SCALE_GRADIENT, MEAN_GRADIENT):
        node = node.all_input_nodes[0]
    return HELD.of(node)


@dataclass(frozen=True, slots=True)
class Site:
    """What a placement is stated of; made by `param`, `inputs`, `outputs`, `module_input` and `module_output`."""

    kind: Literal["param", "inputs", "outputs", "module_input", "module_output"]
    glob: str

    def __str__(self) -> str:
        return f"{self.kind}({self.glob!r})"


def param(glob: str) -> Site:
    """Parameters and buffers by qualified name."""
    return Site("param", glob)


def inputs(glob: str) -> Site:
    """Tensors that the model is called with, by the name of the argument."""
    return Site("inputs", glob)


def outputs(position: int) -> Site:
    """The output at this position, outputs flattened."""
    return Site("outputs", str(position))


def module_input(glob: str) -> Site:
    """The activations that modules read, by the modules' qualified name."""
    return Site("module_input", glob)


def module_output(glob: str) -> Site:
    """The values that modules compute and that others read, by the modules' qualified name."""
    return Site("module_output", glob)


class Place:
    """The step that writes down what is stated, in placements of `fxrewrite.spmd` or of `torch.distributed.tensor`.

    Raises:
        FxRewriteError: a glob matches nothing; says the nearest names. A placement does not fit a value's shape.
    """

    def __init__(self, name: str, placements: Mapping[Site, AnyPlacement]) -> None:
        self.name = name
        self.placements: dict[Site, Layout] = {site: as_layout(placement) for site, placement in placements.items()}
        self.precedes = (PLACEMENTS,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        axis = SpmdContext.required(context, self.name).axis
        changes = 0
        for site, layout in self.placements.items():
            changes += _PLACED[site.kind](edit, axis, site, layout, self.name)
        return changes

    def text(self) -> str:
        return "\n".join(f"{site}: {layout}" for site, layout in self.placements.items())


def _place_inputs(edit: Edit, axis: Axis, site: Site, layout: Layout, rule: str) -> int:
    is_of_model = site.kind == "param"
    known = {_input_name(n): n for n in edit.nodes() if n.op == "placeholder" and is_parameter(n) == is_of_model}
    for name, node in _matching(site, known):
        _check_fits(node.meta["val"], layout, axis, f"{site}: {name}")
        if isinstance(layout, Partial) or (isinstance(layout, Shard) and layout.uneven):
            raise FxRewriteError(f"{site}: an input cannot be held as {layout}; Shard(dim) and Replicated() can be")
        if isinstance(layout, Shard) and not isinstance(node.meta["val"].shape[layout.dim], int):
            raise FxRewriteError(
                f"{site}: {name}: dimension {layout.dim} is symbolic, and sizes in the graph are read off it as a "
                "whole; compile with dynamic=False, or mark_static this dimension"
            )
        edit.set_fact(node, HELD, layout)
    return sum(1 for _ in _matching(site, known))


def _place_outputs(edit: Edit, axis: Axis, site: Site, layout: Layout, rule: str) -> int:
    output = edit.graph.output_node()
    leaves = tree_leaves(output.args[0])
    position = int(site.glob)
    value = leaves[position] if position < len(leaves) else None
    if not isinstance(value, fx.Node) or not _is_tensor(value):
        raise FxRewriteError(f"{site}: the graph returns no tensor there; it has {len(leaves)} outputs")
    _check_fits(value.meta["val"], layout, axis, str(site))
    edit.set_fact(output, RETURNED, {**(RETURNED.of(output) or {}), position: layout})
    return 1


def _place_module_outputs(edit: Edit, axis: Axis, site: Site, layout: Layout, rule: str) -> int:
    changes = 0
    for name, nodes in _matching(site, _modules(edit)):
        inside = set(nodes)
        for node in nodes:
            users = [user for user in node.users if user not in inside]
            if users and _is_tensor(node):
                changes += _ask(edit, axis, node, users, layout, f"{site}: {name}", after=node, rule=rule)
    return changes


def _place_module_inputs(edit: Edit, axis: Axis, site: Site, layout: Layout, rule: str) -> int:
    changes = 0
    for name, nodes in _matching(site, _modules(edit)):
        inside = set(nodes)
        read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
        for operand in read:
            if _is_tensor(operand) and not is_parameter(operand):
                users = [node for node in nodes if operand in node.all_input_nodes]
                changes += _ask(edit, axis, operand, users, layout, f"{site}: {name}", before=users[0], rule=rule)
    return changes


_PLACED: Mapping[str, Callable[[Edit, Axis, Site, Layout, str], int]] = {
    "param": _place_inputs,
    "inputs": _place_inputs,
    "outputs": _place_outputs,
    "module_input": _place_module_inputs,
    "module_output": _place_module_outputs,
}


def _ask(
    edit: Edit,
    axis: Axis,
    value: fx.Node,
    users: list[fx.Node],
    layout: Layout,
    of: str,
    *,
    rule: str,
    before: fx.Node | None = None,
    after: fx.Node | None = None,
) -> int:
    _check_fits(value.meta["val"], layout, axis, of)
    move = (value, Replicated(), layout, axis)
    moved = edit.call(redistribute, move, before=before, after=after, like=value, rule=rule, val=value.meta["val"])
    edit.replace_uses(value, moved, users)
    return 1


def _check_fits(value: torch.Tensor, layout: Layout, axis: Axis, of: str) -> None:
    check_layout(layout, value.shape, of)
    if isinstance(layout, Shard) and not layout.uneven:
        entries = divide_exactly(value.shape[layout.dim], layout.outer * layout.inner)
        if entries is None or not require_divisible(entries, axis.size):
            shape = [size_hint(n) for n in value.shape]
            raise FxRewriteError(f"{of} {shape}: {axis} ranks do not divide {layout}")


def _input_name(placeholder: fx.Node) -> str:
    return input_name(placeholder).removeprefix("kwargs_")


def _modules(edit: Edit) -> dict[str, list[fx.Node]]:
    """The calls that run in each module, those of its submodules as well, by qualified name."""
    found: dict[str, list[fx.Node]] = {}
    for node in edit.nodes():
        if node.op == "call_function":
            paths = (path for path, _ in node.meta.get("nn_module_stack", {}).values())
            for name in dict.fromkeys(map(_module_name, paths)):
                found.setdefault(name, []).append(node)
    return found


def _module_name(path: str) -> str:
    """`layers.0.mlp` of Dynamo's `L['self'].layers.0.mlp`."""
    return re.sub(r"^L\['\w+'\]\.?|^L__self___?", "", path)


def _matching(site: Site, known: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    globs = list(_alternatives(site.glob))
    found = [name for name in known if any(fnmatchcase(name, glob) for glob in globs)]
    if not found:
        near = get_close_matches(site.glob, known, n=3, cutoff=0.3) or list(known)[:3]
        raise FxRewriteError(f"{site} matches nothing; the graph has {', '.join(map(repr, near)) or 'none'}")
    yield from ((name, known[name]) for name in found)


def _alternatives(glob: str) -> Iterator[str]:
    """`a.{b,c}.d` as `a.b.d` and `a.c.d`."""
    parts = re.split(r"\{([^{}]*)\}", glob)
    for choice in itertools.product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))):
        yield "".join(choice)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
