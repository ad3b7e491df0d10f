"""Arguments of a model that each rank passes a chunk of, and the whole program that Dynamo captures nevertheless.

    plan = Parallelism(..., place={inputs("{x,y}"): Shard(1)})
    model = shard_parameters(model, plan, mesh)          step(x=chunk)     chunk [B, S / P],   the program [B, S]

While Dynamo traces the model, each tensor that it is called with becomes `joined(chunk, ...)`: one call in the graph,
whose fake value has the whole shape. So whatever the model computes of shapes is what it computes on one device, of
symbolic lengths as well (P times that of a chunk). The backend `spmd` takes the calls out: the program starts from
whole inputs, of which `Place` says how ranks hold them. An eager call passes its arguments on as they are.
"""

from __future__ import annotations

import functools
import inspect
from ast import literal_eval
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.modules import matches_glob
from fxrewrite.ops import is_parameter
from fxrewrite.spmd.parallelism.parallelism import AnyPlan
from fxrewrite.spmd.placement import Shard, Zigzag, as_placement

Stated: TypeAlias = "tuple[tuple[str, str, int, int], ...]"
"""Of each statement: the axis, the glob over arguments, the dimension that is cut, and the number of ranks."""


@torch.compiler.allow_in_graph
def joined(chunk: torch.Tensor, name: str, stated: str) -> torch.Tensor:
    """The argument `name` on all ranks together, of which this one holds `chunk`; `spmd` leaves it to the program.

    `stated` is text, `repr` of what is stated: Dynamo may take a number for a dynamic size.
    """
    if not hasattr(chunk, "fake_mode"):  # a tensor that is computed with: the call was not taken out
        raise FxRewriteError(
            f"{name} is passed in chunks to a program that spmd has not lowered; compile the model with "
            "backend=spmd(plan, mesh=mesh)"
        )
    shape = list(chunk.shape)
    for _, glob, dim, ranks in literal_eval(stated):
        if matches_glob(name, glob) and dim < len(shape):  # Place refuses one that has no such dimension
            shape[dim] = shape[dim] * ranks
    made = torch.empty_like(chunk) if shape == list(chunk.shape) else chunk.new_empty(shape)
    return made.requires_grad_(chunk.requires_grad)


def stated_arguments(plan: AnyPlan, mesh: DeviceMesh) -> Stated:
    """What the plan states of arguments that ranks hold in chunks."""
    found: list[tuple[str, str, int, int]] = []
    for member in plan.members:
        for site, placed in member.place.items():
            placement: Any = as_placement(placed)
            if site.kind == "inputs" and isinstance(placement, (Shard, Zigzag)):
                found.append((member.axis, site.glob, placement.dim, mesh[member.axis].size()))
    return tuple(found)


def joining(cls: type[nn.Module], stated: Stated) -> dict[str, Any]:
    """Members of a subclass whose forward reads its arguments through `joined` while Dynamo traces it.

    A hook would not do: Dynamo runs those of the outermost module before its program. An argument that only `*args`
    takes is named as Dynamo names it, `args_0`.
    """
    if not stated:
        return {}
    text = repr(stated)
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    further = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            names = [*positional, *[f"{further}_{i}" for i in range(len(args) - len(positional))]]
            named = zip(names, args, strict=False)
            args = tuple([joined(x, name, text) if isinstance(x, torch.Tensor) else x for name, x in named])
            kwargs = {n: joined(x, n, text) if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
        return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


def without_joined(gm: fx.GraphModule, stated: Stated, *, is_part: bool) -> dict[int, Stated]:
    """Afterwards the graph, as Dynamo captured it, starts from the whole arguments of the model.

    Args:
        gm: changed.
        stated: by the plan of the backend.
        is_part: whether it is a part of the model; one without its arguments starts from whole values of others.

    Returns:
        what is stated of inputs that a rank holds a chunk of, by position.

    Raises:
        FxRewriteError: the model was prepared for another plan, its argument is computed inside of the program, or one
            input is several arguments of different placements.
    """
    found: dict[int, Stated] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    read = {node for node in placeholders if any(user.target is not joined for user in node.users)}
    """Inputs that something else than the model reads."""
    for call in gm.graph.find_nodes(op="call_function", target=joined):
        chunk, name, of_model = call.args
        if of_model != repr(stated):
            raise FxRewriteError(
                f"{name}: the model was prepared for inputs in chunks {of_model}, and the plan says {stated}; give "
                "shard_parameters and spmd the same plan and mesh"
            )
        here = tuple(entry for entry in stated if matches_glob(name, entry[1]))
        is_input = chunk in placeholders and chunk not in read
        if here and not is_input:
            raise FxRewriteError(
                f"{name} is stated in chunks, and the compiled function computes it, or reads it outside of the model; "
                "compile the model alone: torch.compile(model, backend=spmd(plan, mesh=mesh))"
            )
        if is_input:
            position = placeholders.index(chunk)
            if found.setdefault(position, here) != here:
                other = chunk.meta["argument"]
                raise FxRewriteError(f"one tensor is passed as {other} and as {name}, held differently; pass a copy")
            chunk.meta.setdefault("argument", name)
            chunk.meta["whole"] = call.meta["example_value"]
        call.replace_all_uses_with(chunk)
        gm.graph.erase_node(call)
    for position, node in enumerate(placeholders):
        whole = node.meta.pop("whole", None)
        if found.get(position):
            node.meta["example_value"] = whole.detach().requires_grad_(node.meta["example_value"].requires_grad)
        elif not is_parameter(node) and (found or (is_part and stated)):
            node.meta.setdefault("argument", "")
    gm.recompile()
    return {position: here for position, here in found.items() if here}
