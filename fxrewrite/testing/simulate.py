"""A parallelism on simulated ranks, compared with the same model on one device: what an author checks first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxrewrite.backends import normalized
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.copy import copy_module
from fxrewrite.spmd.context import contexts
from fxrewrite.spmd.parallelism.alternatives import chosen_for
from fxrewrite.spmd.parallelism.captured import captured_call, check_dense_gradients, check_module
from fxrewrite.spmd.parallelism.parallelism import AnyPlan, check_axes
from fxrewrite.spmd.parallelism.parameters import check_buffers
from fxrewrite.spmd.placement import Replicate, Shard
from fxrewrite.spmd.price.report import SpmdReport
from fxrewrite.spmd.propagation.input_placements import input_placements, output_placements
from fxrewrite.testing.fake_mesh import fake_mesh
from fxrewrite.testing.outputs import Outputs, largest, output_names, relative_error, run_whole
from fxrewrite.testing.ranks import run_on_ranks

_SAME = 1e-6
"""Up to here, a loss of a batch is the mean of the losses of its parts, in float32 too."""


@dataclass(frozen=True)
class Simulated:
    """What simulated ranks computed, and one device.

    Attributes:
        program: the lowered graph, the same for all ranks.
        report: what was done.
        loss_error: of each rank's loss against that of one device, relative; along axes with own data, of their mean.
        grad_errors: of each parameter's gradient the largest difference on any rank, relative to the largest gradient
            of all; infinite where a rank has none, or one that is not a number where one device's is.
        batch_error: of the mean of the losses of the parts that ranks with own data have, against the loss of the whole
            batch, relative; large where the loss is a sum, or a mean over labels of which parts have different numbers,
            or where it depends on statistics of the batch. 0 where no axis has own data.
        output_errors: of each other output the largest difference on any rank, relative to the largest number of the
            output on one device; along axes with own data from what one device computes of the rank's part. Infinite
            where shapes or dtypes differ, or one alone is not a number.
        num_nan: how many numbers of the loss and of gradients are not numbers on one device; where a rank's are none
            either, they count as equal.
    """

    program: fx.GraphModule
    report: SpmdReport
    loss_error: float
    grad_errors: Mapping[str, float]
    batch_error: float = 0.0
    num_nan: int = 0
    output_errors: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """How many collectives the forward program has, by axis and kind."""
        sent: dict[str, dict[str, int]] = {axis: {} for axis in self.report.axes}
        for collective in self.report.collectives:
            if collective.direction == "forward":
                sent[collective.axis][collective.kind] = collective.count
        return sent

    @property
    def grad_error(self) -> float:
        """The largest error of a gradient; infinite where one is missing."""
        return max(self.grad_errors.values(), default=0.0)

    @property
    def output_error(self) -> float:
        """The largest error of an output that is not the loss; 0 where there are no others."""
        return max(self.output_errors.values(), default=0.0)

    @property
    def error(self) -> float:
        """The largest error of all: of the loss, of a gradient, of another output."""
        return max(self.loss_error, self.grad_error, self.output_error)

    def __str__(self) -> str:
        kinds = (", ".join(f"{n} {kind}" for kind, n in of.items()) or "nothing" for of in self.sent.values())
        sent = "; ".join(f"over {axis} {what}" for axis, what in zip(self.sent, kinds, strict=True))
        outputs = f", other outputs by {_worst(self.output_errors)}" if self.output_errors else ""
        gradients = _worst(self.grad_errors)
        said = f"loss differs by {self.loss_error:.0e}, gradients by {gradients}{outputs}; sent forward: {sent}"
        if self.batch_error > _SAME:
            said += f"; the loss of the whole batch is another than the mean over its parts, by {self.batch_error:.0e}"
        if self.num_nan:
            said += f"; {self.num_nan} numbers are NaN on one device, and say nothing"
        return said


def _worst(errors: Mapping[str, float]) -> str:
    name = max(errors, key=errors.__getitem__, default="none")
    return f"{errors.get(name, 0.0):.0e} ({name})"


def simulate(model: nn.Module, inputs: Mapping[str, Any], plan: AnyPlan, mesh: Mapping[str, int]) -> Simulated:
    """Train one step of `model(**inputs)` on one device and by the plan on simulated ranks, and compare.

    The loss is the first number among what the model returns; every other tensor that it returns is compared, too, and
    named by where it is, `['logits']` or `[1]`. The model runs as it is, without `shard_parameters`, each time with the
    same seed. Ranks along an axis with `data="own"` get their part of every tensor of the call, also of those
    in lists and dictionaries, cut in dimension 0; one device then computes the mean of the losses of these parts, each
    from the same buffers.

    Args:
        model: is left with the gradients of one device.
        inputs: arguments of the call, for one device.
        plan: the parallelism, or several. Of alternatives the cheapest runs.
        mesh: axes with their numbers of ranks, the outermost first, such as `{"dp": 2, "tp": 2}`.

    Raises:
        FxRewriteError: the plan does not fit the model, an axis of the plan has no size, or the inputs have no names.
    """
    if not isinstance(inputs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FxRewriteError(f"inputs are arguments by name, {{'x': tensor}}, not a {type(inputs).__name__}")
    check_module(model)
    check_axes(plan, mesh)
    check_buffers(model, plan)
    tensors = (value for value in tree_leaves((dict(inputs), *model.parameters())) if isinstance(value, torch.Tensor))
    if not any(tensor.requires_grad for tensor in tensors):
        raise FxRewriteError("nothing requires a gradient, so there is no step to train; call model.requires_grad_()")
    named = dict(inputs) | dict(model.named_parameters()) | dict(model.named_buffers())
    empty = [name for name, value in named.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if empty:
        raise FxRewriteError(
            f"{empty[0]} is on the meta device, and has no entries to compute with; make the model on a device, or "
            'call model.to_empty(device="cpu") and initialize it'
        )
    own = {member.axis: mesh[member.axis] for member in plan.members if member.data == "own"}
    call = captured_call(model, inputs, plan, mesh)
    program = normalized(call.program)
    check_dense_gradients(program)
    on_one_device = copy_module(program)
    with fake_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
        plan = chosen_for(plan, program, lambda: contexts(device_mesh))
        report = SpmdReport.of(plan.plan().apply(program, context=contexts(device_mesh)), program, mesh)
        parts = [dict.fromkeys(own, Shard(0)) if is_cut else {} for is_cut in call.is_cut]
        inputs_held = zip(input_placements(program), parts, strict=True)
        # A rank's own part is cut before what the plan makes of that, as the loss on one device is of these parts.
        placements = {i: {**of_call, **of_plan, **of_call} for i, (of_plan, of_call) in enumerate(inputs_held)}
        torch.manual_seed(_SEED)
        loss_at, held = _loss_position(program), output_placements(program)
        run = run_on_ranks(program, call.given, device_mesh, placements=placements, backward=loss_at)
        others = [position for position, of_output in enumerate(held) if of_output and position != loss_at]
        expected = run_whole(on_one_device, call, math.prod(own.values()), _SEED) if others else []
        outputs = Outputs(device_mesh, list(own), held)
        output_errors = {position: outputs.errors(run, expected, position) for position in others}
    model.zero_grad()
    with torch.no_grad():
        whole = _loss(_from_own_buffers(model, inputs)) if own else torch.zeros(())
    returned = list(_on_one_device(model, inputs, math.prod(own.values())))
    loss = torch.stack([_loss(outputs) for outputs in returned]).mean()
    loss.backward()
    names = output_names(returned[0], expected[0]) if expected else []
    found: dict[str, list[torch.Tensor | None]] = {}
    for position, (name, joined) in enumerate(zip(call.names, run.gradients(), strict=True)):
        is_whole = all(placement == Replicate() for placement in placements[position].values())
        found[name] = [of_rank[position] for of_rank in run.grads] if is_whole else [joined]
    losses = [_loss(outputs) for outputs in run.outputs]
    wanted = loss.detach()
    scale = wanted.abs().nan_to_num(1.0).clamp_min(1e-300).item()
    off = [torch.stack(losses).mean()] if own else losses
    return Simulated(
        program,
        report,
        max(relative_error(value, wanted, scale) for value in off),
        _grad_errors(model, found),
        relative_error(whole, wanted, scale) if own else 0.0,
        sum(int(x.isnan().sum()) for x in (wanted, *(p.grad for p in model.parameters() if p.grad is not None))),
        {names[position]: error for position, error in output_errors.items()},
    )


_SEED = 0


def _on_one_device(model: nn.Module, inputs: Mapping[str, Any], num_parts: int) -> Iterator[Any]:
    """What the model returns of the inputs, or of each of their parts, which ranks have at the same time."""
    if num_parts == 1:
        torch.manual_seed(_SEED)
        yield model(**inputs)
        return
    for i in range(num_parts):
        part = tree_map_only(
            torch.Tensor, lambda x, i=i: (x.chunk(num_parts)[i] if x.dim() else x).clone(), dict(inputs)
        )
        yield _from_own_buffers(model, part)


def _from_own_buffers(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the model returns; its buffers stay as they are."""
    torch.manual_seed(_SEED)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers, kwargs=dict(inputs))


def _grad_errors(model: nn.Module, found: Mapping[str, list[torch.Tensor | None]]) -> dict[str, float]:
    """The error of each parameter's gradients, one or one of each rank, against those that the model has."""
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    scale = max((largest(grad.abs().nan_to_num(0.0)) for grad in expected.values()), default=0.0) or 1.0
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    errors: dict[str, float] = {}
    for name, *others in aliases.values():
        if name in expected:
            # in the graph, a tied parameter has one of its names
            each = next((found[one] for one in (name, *others) if one in found), [None])
            errors[name] = max(relative_error(value, expected[name], scale) for value in each)
    return errors


def _loss_position(program: fx.GraphModule) -> int:
    """Which output of the program is the first that is one number with a gradient."""
    outputs = tree_leaves(program.graph.output_node().args[0])
    for position, node in enumerate(outputs):
        if isinstance(node, fx.Node) and _is_loss(node.meta.get("val")):
            return position
    raise FxRewriteError(
        "the model returns no loss: among its outputs is no floating-point tensor of one number; "
        "wrap it in a module that returns one, such as out.square().mean()"
    )


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _loss(outputs: Any) -> torch.Tensor:
    return next(value for value in tree_leaves(outputs) if _is_loss(value))
