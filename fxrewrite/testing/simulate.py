"""A parallelism on simulated ranks, compared with the same model on one device: what an author checks first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxrewrite.backends import normalized
from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.context import contexts
from fxrewrite.spmd.parallelism.alternatives import chosen_for
from fxrewrite.spmd.parallelism.captured import captured_call, check_dense_gradients
from fxrewrite.spmd.parallelism.parallelism import Parallelism, Parallelisms, check_axes
from fxrewrite.spmd.parallelism.parameters import check_buffers
from fxrewrite.spmd.placement import Replicate, Shard
from fxrewrite.spmd.price.report import SpmdReport
from fxrewrite.spmd.propagation.input_placements import input_placements
from fxrewrite.testing.fake_mesh import fake_mesh
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
        num_nan: how many numbers of the loss and of gradients are not numbers on one device; where a rank's are none
            either, they count as equal.
    """

    program: fx.GraphModule
    report: SpmdReport
    loss_error: float
    grad_errors: Mapping[str, float]
    batch_error: float = 0.0
    num_nan: int = 0

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

    def __str__(self) -> str:
        worst = max(self.grad_errors, key=self.grad_errors.__getitem__, default="none")
        error = self.grad_errors.get(worst, 0.0)
        kinds = (", ".join(f"{n} {kind}" for kind, n in of.items()) or "nothing" for of in self.sent.values())
        sent = "; ".join(f"over {axis} {what}" for axis, what in zip(self.sent, kinds, strict=True))
        said = f"loss differs by {self.loss_error:.0e}, gradients by {error:.0e} ({worst}); sent forward: {sent}"
        if self.batch_error > _SAME:
            said += f"; the loss of the whole batch is another than the mean over its parts, by {self.batch_error:.0e}"
        if self.num_nan:
            said += f"; {self.num_nan} numbers are NaN on one device, and say nothing"
        return said


def simulate(
    model: nn.Module, inputs: Mapping[str, Any], plan: Parallelism | Parallelisms, mesh: Mapping[str, int]
) -> Simulated:
    """Train one step of `model(**inputs)` on one device and by the plan on simulated ranks, and compare.

    The loss is the first number among what the model returns. It runs as it is, without `shard_parameters`, each time
    with the same seed. Ranks along an axis with `data="own"` get their part of every tensor of the call, also of those
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
    check_axes(plan, mesh)
    check_buffers(model, plan)
    tensors = (value for value in tree_leaves((dict(inputs), *model.parameters())) if isinstance(value, torch.Tensor))
    if not any(tensor.requires_grad for tensor in tensors):
        raise FxRewriteError("nothing requires a gradient, so there is no step to train; call model.requires_grad_()")
    own = {member.axis: mesh[member.axis] for member in plan.members if member.data == "own"}
    call = captured_call(model, inputs, plan, mesh)
    program = normalized(call.program)
    check_dense_gradients(program)
    with fake_mesh(tuple(mesh.values()), tuple(mesh)) as device_mesh:
        plan = chosen_for(plan, program, lambda: contexts(device_mesh))
        report = SpmdReport.of(plan.plan().apply(program, context=contexts(device_mesh)), program, mesh)
        parts = [dict.fromkeys(own, Shard(0)) if is_cut else {} for is_cut in call.is_cut]
        held = zip(input_placements(program), parts, strict=True)
        placements = {i: {**of_plan, **of_call} for i, (of_plan, of_call) in enumerate(held)}
        torch.manual_seed(_SEED)
        run = run_on_ranks(program, call.given, device_mesh, placements=placements, backward=_loss_position(program))
    model.zero_grad()
    with torch.no_grad():
        whole = _loss(_from_own_buffers(model, inputs)) if own else torch.zeros(())
    loss = torch.stack([_loss(outputs) for outputs in _on_one_device(model, inputs, math.prod(own.values()))]).mean()
    loss.backward()
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
        max(_error(value, wanted, scale) for value in off),
        _grad_errors(model, found),
        _error(whole, wanted, scale) if own else 0.0,
        sum(int(x.isnan().sum()) for x in (wanted, *(p.grad for p in model.parameters() if p.grad is not None))),
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
    largest = max((_largest(grad.abs().nan_to_num(0.0)) for grad in expected.values()), default=0.0) or 1.0
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    errors: dict[str, float] = {}
    for name, *others in aliases.values():
        if name in expected:
            # in the graph, a tied parameter has one of its names
            each = next((found[one] for one in (name, *others) if one in found), [None])
            errors[name] = max(_error(value, expected[name], largest) for value in each)
    return errors


def _error(found: torch.Tensor | None, expected: torch.Tensor, scale: float) -> float:
    """The largest difference, over `scale`; infinite where there is no gradient, or one that alone is not a number."""
    if found is None:
        return math.inf
    are_none = found.isnan() & expected.isnan()
    error = _largest((found - expected).masked_fill(are_none, 0).abs()) / (scale or 1.0)  # all is 0 on one device
    return math.inf if math.isnan(error) else error


def _largest(values: torch.Tensor) -> float:
    return values.max().item() if values.numel() else 0.0  # a parameter may have no entries


def _loss_position(program: fx.GraphModule) -> int:
    """Which output of the program is the first that is one number with a gradient."""
    outputs = tree_leaves(program.graph.output_node().args[0])
    for position, node in enumerate(outputs):
        if isinstance(node, fx.Node) and _is_loss(node.meta.get("val")):
            return position
    raise FxRewriteError("the model returns no loss: among its outputs is no floating-point tensor of one number")


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _loss(outputs: Any) -> torch.Tensor:
    return next(value for value in tree_leaves(outputs) if _is_loss(value))
