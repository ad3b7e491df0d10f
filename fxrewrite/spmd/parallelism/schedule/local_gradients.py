"""Gradients of parameters that leave a program before they are reduced over ranks, for `accumulate`.

    mean_gradient(p)               ->   pass_gradient(p, leaf, 1 / P)
    all_gather(scale_gradient(p))  ->   pass_gradient(all_gather(p), leaf, 1 / P)

The value that readers read is found from the parameter on, past what changes gradients alone and what gathers it. It is
read as it was, and its gradient goes to an input of its own, a leaf, times all factors: the sum of the leaf's gradients
over the ranks is the parameter's gradient, and nothing is sent for it. Where the gradients of some readers alone are
averaged, those of the others are complete, and equal their mean.

It runs before the gathers are placed, on parameters whose placeholder has `meta[KEEPS]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import is_pure
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.operators.gradient_ops import MEAN_GRADIENT, PASS_GRADIENT, SCALE_GRADIENT

KEEPS = "keeps_gradient"
"""In the metadata of a parameter's placeholder: its gradient leaves the program unreduced."""
_LEAF, _AXES = "leaf_of", "summed_over"
"""In the metadata of a leaf: the position of its parameter, and the axes over which its gradients are summands."""


class LocalGradients:
    """The step that takes reductions of parameters' gradients out of a program."""

    name = "local_gradients"

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        inputs = edit.graph.find_nodes(op="placeholder")
        leaves = list(filter(is_leaf, inputs))
        for leaf in leaves:
            value, axes, factor = self._passed(edit, inputs[leaf.meta[_LEAF]])
            edit.set_meta(leaf, "val", value.meta["val"])
            edit.set_meta(leaf, "is_parameter", value=True)
            edit.set_meta(leaf, _AXES, tuple(axes))
            users = list(value.users)
            made = edit.call(PASS_GRADIENT, (value, leaf, factor), after=value, like=value, rule=self.name)
            edit.replace_uses(value, made, users)
        return len(leaves)

    def _passed(self, edit: Edit, value: fx.Node) -> tuple[fx.Node, list[str], float]:
        """The value that readers read of a parameter, the axes that its gradient is summed over, and its factor."""
        axes, factor = list[str](), 1.0
        while True:
            found = next((user for user in value.users if _changes_gradient(user)), None)
            if found is not None:
                if found.target == SCALE_GRADIENT:
                    factor *= float(found.args[1])  # pyright: ignore[reportArgumentType]
                elif found.meta["axis"] not in axes:
                    axes.append(found.meta["axis"])
                    factor /= int(found.args[2])  # pyright: ignore[reportArgumentType]
                edit.replace_uses(found, value)
                edit.erase(found)
                continue
            gather = list(_gather(value))
            if not any(node.target is COLLECTIVES["all_gather"] for node in gather):
                return value, axes, factor
            axes += [node.meta["axis"] for node in gather if node.target is COLLECTIVES["all_gather"]]
            value = gather[-1]

    def text(self) -> str:
        return "inside of no_sync, gradients of parameters leave before they are reduced"


def _changes_gradient(node: fx.Node) -> bool:
    """Whether the gradient of all readers of what it reads is changed alike, or may be."""
    return node.target == MEAN_GRADIENT or (node.target == SCALE_GRADIENT and len(node.all_input_nodes[0].users) == 1)


def _gather(value: fx.Node) -> Iterator[fx.Node]:
    """The operators that one gather of a value was lowered to, if nothing else reads it."""
    rules: Any = None
    while len(value.users) == 1:
        (value,) = value.users
        here = value.meta.get("fxrewrite")
        rules = rules or here
        is_gather = bool(here) and here == rules and here[0] == "collectives.all_gather"
        if not (is_gather and (is_pure(value) or value.target in COLLECTIVES.values())):
            return
        yield value


def add_leaves(program: fx.GraphModule) -> None:
    """Afterwards a program that was not lowered yet has a leaf, after all inputs, for each gradient that it keeps."""
    graph = program.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for position, parameter in enumerate(graph.find_nodes(op="placeholder")):
        if parameter.meta.get(KEEPS) and parameter.users:
            with graph.inserting_before(first):
                leaf = graph.placeholder(f"{parameter.name}_gradient")
            # "": no argument of the model, of which anything could be stated
            leaf.meta = {"val": parameter.meta["val"], "argument": "", "is_parameter": False, _LEAF: position}
            leaf._dynamo_source = None  # AOTAutograd asks every input for it
    program.recompile()


def is_leaf(node: fx.Node) -> bool:
    """Whether the input is a leaf."""
    return _LEAF in node.meta


def leaves_of(program: fx.GraphModule) -> list[tuple[int, tuple[str, ...], fx.Node]]:
    """The leaves of a lowered program, in order: the position of each one's parameter, its axes, and itself."""
    leaves = filter(is_leaf, program.graph.find_nodes(op="placeholder"))
    return [(leaf.meta[_LEAF], leaf.meta[_AXES], leaf) for leaf in leaves]
