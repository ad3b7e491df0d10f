"""The graph of a model as a rank of a mesh calls it, which Dynamo captures and nobody runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fxrewrite.backends import capture_with_inputs
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph import source_line
from fxrewrite.graph.inputs import input_name
from fxrewrite.ops import bind, key
from fxrewrite.spmd.parallelism.parallelism import AnyPlan

_EMBEDDINGS = ("aten::embedding", "aten::embedding_bag")


def _part(value: Any, own: Mapping[str, int]) -> Any:
    """What the first rank of axes with own data is called with: its rows of tensors, and all of a number."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    for axis, size in own.items():
        if len(value) % size:
            raise FxRewriteError(f"{size} ranks of axis {axis} do not divide dimension 0 of {list(value.shape)}")
        value = value.narrow(0, 0, len(value) // size)
    return value.clone() if own else value


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """Dynamo's graph of what one rank calls.

    Attributes:
        program: the graph, which was not run.
        given: what its inputs are on all ranks together.
        names: of its inputs.
        is_cut: which of them ranks along axes with own data have in parts.
    """

    program: fx.GraphModule
    given: list[Any]
    names: list[str]
    is_cut: list[bool]


def _name_as_the_model(gm: fx.GraphModule, model: nn.Module) -> None:
    """Give each parameter that several modules share its first name, as `shard_parameters` does."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    others = {name: first[of] for name, of in model.named_parameters(remove_duplicate=False) if first[of] != name}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        if name := others.get(input_name(placeholder)):
            placeholder.meta["argument"] = name


def check_module(model: object) -> None:
    """Raise FxRewriteError for what has no parameters by name, such as a function."""
    if not isinstance(model, nn.Module):
        raise FxRewriteError(
            f"the model is a {type(model).__name__}, and a plan places parameters by name: pass an nn.Module"
        )


def captured_call(model: nn.Module, inputs: Mapping[str, Any], plan: AnyPlan, mesh: Mapping[str, int]) -> CapturedCall:
    """The graph of `model(**inputs)` as a rank of the mesh calls it, which has a part of what own data are cut into.

    Raises:
        FxRewriteError: the parameters are in shards already, the data do not divide, or the model does not compile to
            one graph.
    """
    check_module(model)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise FxRewriteError("the model's parameters are in shards already; pass the model as it is before that")
    own = {member.axis: mesh[member.axis] for member in plan.members if member.data == "own"}
    part = tree_map(lambda value: _part(value, own), dict(inputs))
    gm, given = capture_with_inputs(model, part)
    _name_as_the_model(gm, model)
    whole = {id(cut): value for cut, value in zip(tree_leaves(part), tree_leaves(dict(inputs)), strict=True)}
    is_cut = [isinstance(value, torch.Tensor) and whole.get(id(value), value) is not value for value in given]
    names = [input_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    return CapturedCall(gm, [whole.get(id(value), value) for value in given], names, is_cut)


def check_dense_gradients(program: fx.GraphModule) -> None:
    """Raise FxRewriteError for an embedding with sparse gradients: what ranks add up or scatter is dense."""
    for node in program.graph.nodes:
        if node.op == "call_function" and key(node.target) in _EMBEDDINGS and bind(node)["sparse"] is True:
            raise FxRewriteError(
                f"an embedding has sparse gradients ({source_line(node)}), and those of a plan over ranks are dense; "
                "set sparse=False"
            )
