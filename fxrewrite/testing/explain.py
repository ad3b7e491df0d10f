"""Why a parallelism places a value of a model as it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fxrewrite.backends import normalized
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.edit import Edit
from fxrewrite.spmd.context import contexts
from fxrewrite.spmd.parallelism.alternatives import chosen_for
from fxrewrite.spmd.parallelism.captured import captured_call
from fxrewrite.spmd.parallelism.parallelism import AnyPlan, check_axes
from fxrewrite.spmd.placement import Axis
from fxrewrite.spmd.propagation.explain import explain_values
from fxrewrite.testing.fake_mesh import fake_mesh


def explain_placement(
    model: nn.Module, inputs: Mapping[str, Any], plan: AnyPlan, mesh: Mapping[str, int], value: str
) -> str:
    """Why ranks hold a value of `model(**inputs)` as they do, step by step, and what is sent for whoever reads it.

    The model is captured, and not run; where a later step of the plan refuses it, what came before is explained.

    Args:
        model: as it is before `shard_parameters`.
        inputs: arguments of the call, for one device.
        plan: the parallelism, or several. Of alternatives the cheapest is explained.
        mesh: axes with their numbers of ranks, the outermost first, such as `{"dp": 2, "tp": 2}`.
        value: a glob over modules, whose results are meant, over parameters and arguments, and over nodes of the graph.

    Returns:
        Which alternatives were chosen. For each axis, from the innermost to the outermost, each value's placement, the
        decisions from which it follows up to what was stated, and the bytes that a rank sends for it forward.

    Raises:
        FxRewriteError: the glob names nothing; says the nearest names. Or the plan refuses the model before any value
            has a placement.
    """
    check_axes(plan, mesh)
    program = normalized(captured_call(model, inputs, plan, mesh).program)
    found: list[str] = []

    def watch(edit: Edit, axis: Axis) -> None:
        found.append(explain_values(edit, axis, value))

    with fake_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
        plan = chosen_for(plan, program, lambda: contexts(device_mesh))
        chosen = [str(one) for member in plan.members for one in member.chosen]
        context = {name: replace(of, watch=watch) for name, of in contexts(device_mesh).items()}
        try:
            plan.plan().apply(program, context=context)
        except FxRewriteError as error:
            if not found:
                raise
            found.append(f"then refused: {error}")
    return "\n".join([*chosen, *found])
