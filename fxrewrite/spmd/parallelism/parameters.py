"""Parameters at rest in shards: DTensors in the module, and their whole values wherever a forward reads them.

    model = shard_parameters(model, plan, mesh)

Parameters become DTensors under their own names, so `state_dict`, optimizers and `torch.distributed.checkpoint` see
those; tied ones stay one. What a forward reads, `self.weight`, is `whole(parameter)`: one call in the graph that Dynamo
captures, which the backend `spmd` takes out, so that the program starts from the shards. Outside of a compiled program
`self.weight` is the DTensor, which can be initialized and written to; `whole_parameters()` evaluates without one.

The private `_StridedShard` is how torch writes that an outer axis cuts what an inner axis has left.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement, _StridedShard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxrewrite.backends import given_up, refused_by_wrappers
from fxrewrite.errors import FxRewriteError, did_you_mean
from fxrewrite.spmd.group import axis_of
from fxrewrite.spmd.parallelism.accumulate import (
    Accumulation,
    no_sync,
    reduce_left,
    reduced_gradient,
    refuse_unreduced,
    unshared,
)
from fxrewrite.spmd.parallelism.alternatives import require_chosen
from fxrewrite.spmd.parallelism.arguments import Stated, joining, stated_arguments
from fxrewrite.spmd.parallelism.parallelism import AnyPlan, Parallelism, check_axes
from fxrewrite.spmd.parallelism.schedule.local_gradients import KEEPS
from fxrewrite.spmd.parallelism.subclassed import subclassed
from fxrewrite.spmd.placement import AnyPlacement, Placement, Replicate, Shard, Zigzag, as_placement, local_shape
from fxrewrite.spmd.propagation.sites import Site, Stored, check_matches, held_placement
from fxrewrite.spmd.runtime.chunked_tensor import ChunkedTensor

M = TypeVar("M", bound=nn.Module)


@torch.compiler.allow_in_graph
def whole(parameter: DTensor, keeps: bool = False) -> torch.Tensor:
    """The whole value of a parameter that is held in shards, without a gradient; `spmd` leaves it to the program.

    With `keeps`, the program leaves its gradient unreduced (`fxrewrite.spmd.parallelism.accumulate`).

    Raises:
        FxRewriteError: a program that `spmd` has not lowered is compiled, or is to be differentiated.
    """
    local = local_value(parameter)  # autograd would fail in transforms of torch.func, before the backend refuses them
    is_trained = parameter.requires_grad and torch.is_grad_enabled() and not _reads_whole.get()
    if isinstance(local, FunctionalTensor) or (is_trained and not is_fake(local)):  # the call was not taken out
        raise FxRewriteError(
            f"a parameter of shape {tuple(parameter.shape)} is in shards (shard_parameters), and read by a program "
            "that spmd has not lowered; compile the model with backend=spmd(plan, mesh=mesh), not with another backend"
        )
    if is_fake(local):  # Dynamo looks at the result's shape; without_whole takes the call out
        return local.new_empty(parameter.shape, requires_grad=parameter.requires_grad)
    with torch.no_grad():
        return parameter.full_tensor()


_reads_whole: ContextVar[bool] = ContextVar("reads_whole", default=False)


@contextmanager
def whole_parameters() -> Generator[None]:
    """Inside, models whose parameters are in shards run without torch.compile, to evaluate or to generate.

    A module gathers a parameter, on all ranks of the mesh, each time that it reads it, and there are no gradients. What
    is written to a parameter's value there is lost.
    """
    before = _reads_whole.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _reads_whole.reset(before)


def _refuse_eager(module: nn.Module, args: Any) -> None:
    """Refuse a forward pass that would mix shards with whole activations."""
    if not torch.compiler.is_compiling() and not _reads_whole.get():
        raise FxRewriteError(
            f"{type(module).__name__} has its parameters in shards: "
            + (
                given_up()
                or "train and evaluate it through torch.compile(model, backend=spmd(plan, mesh=mesh)), the whole of it "
                "(regions='once' compiles equal blocks once), or evaluate it with fxrewrite.spmd.whole_parameters()"
            )
        )


def _reduced_by_spmd(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} has its parameters in shards, and spmd reduces their gradients; train it without a "
        "wrapper that reduces them again, and state the axis of replicas in the plan, as DATA | plan"
    )


_SHARDED: WeakSet[nn.Module] = WeakSet()
"""Models whose parameters are in shards, which know the qualified names of those."""
_REPLACED: Any = WeakIdKeyDictionary()
"""Parameters that have become DTensors, as they were, with their names: whoever still has one trains nothing."""


@cache
def _watch_optimizers() -> None:
    """From now on no optimizer steps on parameters which have become DTensors since, or with unreduced gradients."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        refuse_unreduced(parameters)
        if torch.compiler.is_compiling():
            return
        for parameter in parameters:
            if parameter in _REPLACED:
                raise FxRewriteError(
                    f"the optimizer has {_REPLACED[parameter]} as it was before shard_parameters, which the model does "
                    "not read any more; make the optimizer of model.parameters() after shard_parameters"
                )

    register_optimizer_step_pre_hook(check)


def shard_parameters(model: M, plan: AnyPlan, mesh: DeviceMesh) -> M:
    """The same module, each parameter of which is a DTensor that holds what the plan says, in place.

    Of an axis that says nothing of a parameter, every rank holds it whole. Buffers stay as they are.
    A parameter on the meta device stays there: `model.to_empty(device=...)` then allocates the shards alone.
    Where the plan states `inputs` in chunks, each rank calls the compiled model with its own (`spmd.arguments`); eager
    calls, inside of `whole_parameters()`, take them whole.

    Raises:
        FxRewriteError: a glob matches no parameter; says the nearest names. A placement does not fit a shape. The model
            is sharded already, or is what torch.compile returned, or a parameter has a hook. A module reads its
            parameters in another way than by their names, or gives them sparse gradients. The mesh lacks an axis of
            the plan.
    """
    check_axes(plan, mesh)
    require_chosen(plan)
    check_buffers(model, plan)
    _check_modules(model)
    if isinstance(model, OptimizedModule):
        raise FxRewriteError(
            "the model is what torch.compile returned; shard the parameters of the model itself, and then compile it: "
            "torch.compile(shard_parameters(model, plan, mesh), backend=spmd(plan, mesh=mesh))"
        )
    names = _names(model)
    sharded = next((names[p][0] for p in names if isinstance(p, DTensor)), None)
    if sharded is not None:
        raise FxRewriteError(f"{sharded} is a DTensor already; shard the parameters of a model once")
    hooked = next((of[0] for parameter, of in names.items() if _is_hooked(parameter)), None)
    if hooked is not None:
        raise FxRewriteError(
            f"{hooked} has a hook on its gradient, which what replaces it would not have; register hooks on parameters "
            "after shard_parameters, where they get gradients as DTensors"
        )
    axes = {member.axis: axis_of(mesh, member.axis) for member in plan.members}
    stated = {member.axis: _stated(member, names) for member in plan.members}
    made: dict[nn.Parameter, nn.Parameter] = {}
    placements: dict[nn.Parameter, Mapping[str, Placement]] = {}
    for parameter, of in names.items():
        held: dict[str, Placement] = {}
        shape = list(parameter.shape)
        for member in reversed(plan.members):  # an outer axis cuts what the inner ones have left
            placed = stated[member.axis].get(of[0])
            if placed is not None:
                name = f"{member.name}: {of[0]}"
                placement = held_placement(shape, placed, axes[member.axis], name, inner=held.values())
                held[member.axis] = placement
                shape = [int(n) for n in local_shape(shape, placement, axes[member.axis].size)]
        shards = _shards(parameter.detach(), held, mesh)
        made[parameter] = nn.Parameter(shards, requires_grad=parameter.requires_grad)
        placements[parameter] = held
    _watch_optimizers()
    _REPLACED.update({parameter: of[0] for parameter, of in names.items()})
    accumulation = Accumulation()
    for module in model.modules():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            module._parameters[name] = made[parameter]
        called_with = stated_arguments(plan, mesh) if module is model else None
        if own or module is model:
            module.__class__ = _in_shards(type(module), tuple(own), called_with)
        if own:
            module._accumulation = accumulation  # pyright: ignore[reportArgumentType]
            held_here = {name: placements[parameter] for name, parameter in own.items()}
            module.register_load_state_dict_pre_hook(partial(_load_whole, held_here))
    model.register_forward_pre_hook(_refuse_eager)
    _SHARDED.add(model)
    model.no_sync = partial(no_sync, model)  # pyright: ignore[reportArgumentType]  # trainers look for it
    return model


def _check_modules(model: nn.Module) -> None:
    """Raise FxRewriteError for a module of torch whose parameters cannot be DTensors that are read whole."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):  # keeps its parameters in a list of its own beside their names
            raise FxRewriteError(
                f"{name or 'the model'} is an nn.{type(module).__name__}, which does not read its parameters by their "
                "names; write the loop over time by nn.LSTMCell, nn.GRUCell or nn.RNNCell, which does"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise FxRewriteError(
                f"{name or 'the model'} has sparse gradients, and those of DTensors are dense; set sparse=False"
            )


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether something is called with the parameter's gradient, or once that is accumulated."""
    return any(getattr(parameter, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def check_buffers(model: nn.Module, plan: AnyPlan) -> None:
    """Raise FxRewriteError if the plan states a buffer in shards, which `shard_parameters` leaves whole."""
    stated = [(member, site, placed) for member in plan.members for site, placed in member.place.items()]
    for member, site, placed in stated:
        if site.kind != "param" or isinstance(placed, (Stored, Zigzag)) or as_placement(placed) == Replicate():
            continue
        buffers = [name for name, _ in model.named_buffers() if site.matches(name)]
        kept = [name for name, _ in model.named_parameters(remove_duplicate=False) if site.matches(name)]
        if buffers:
            advice = f"leave buffers out, as {site.without(buffers, kept)}" if kept else "remove this entry of place"
            raise FxRewriteError(
                f"{member.name}: {site}: {placed} matches {buffers[0]}, a buffer, which every rank holds whole; "
                f"{advice}, or make it a parameter"
            )


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All qualified names of each parameter; tied ones have several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def _stated(member: Parallelism, names: Mapping[nn.Parameter, list[str]]) -> dict[str, Any]:
    """What the member states of each parameter, by its first name."""
    found: dict[str, tuple[Site, Any]] = {}
    every = [name for of in names.values() for name in of]
    for site, placed in member.place.items():
        if site.kind != "param":
            continue
        matching = [of[0] for of in names.values() if site.matches(of[0])]
        tied = next((of for of in names.values() if any(map(site.matches, of))), None)
        if not matching and tied is not None and not site.optional:
            raise FxRewriteError(
                f"{member.name}: {site} names a tied parameter by another of its names; write {tied[0]!r}"
            )
        if not matching and not site.optional:
            near = did_you_mean(site.glob, every) or f"; the model has {', '.join(every[:3])} ..."
            raise FxRewriteError(f"{member.name}: {site} matches no parameter{near}")
        for name in matching:
            before = found.setdefault(name, (site, placed))
            if before[1] != placed:
                raise FxRewriteError(
                    f"{member.name}: {name} is stated as {before[1]} by {before[0]}, and as {placed} by {site}; "
                    "let one glob match it"
                )
    if all(site.kind == "param" for site in member.place):
        check_matches(member.name, member.place, every, "model")
    return {name: placed for name, (_, placed) in found.items()}


def _shards(whole: torch.Tensor, held: Mapping[str, Placement], mesh: DeviceMesh) -> DTensor:
    """The whole value as a DTensor, of which this rank holds what is stated."""
    names, position = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if position is None:
        raise FxRewriteError("this rank is not in the mesh")
    local = whole
    for axis in reversed(names):
        placement = held.get(axis)
        if isinstance(placement, Shard):
            local = _chunk(local, placement, mesh.size(names.index(axis)), position[names.index(axis)])
    if any(isinstance(placement, Shard) for placement in held.values()):
        local = local.clone(memory_format=torch.contiguous_format)  # the whole is freed
    placements = torch_placements(held, mesh)
    stride = whole.contiguous().stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def _load_whole(
    held: Mapping[str, Mapping[str, Placement]], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before `load_state_dict`: of whole tensors in the dictionary, a rank takes what it holds."""
    for name, of_axes in held.items():
        value, parameter = state.get(prefix + name), module._parameters[name]
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
            continue
        if value.shape == parameter.shape:  # torch reports others
            state[prefix + name] = _shards(value.detach(), of_axes, parameter.device_mesh)


def _chunk(value: torch.Tensor, placement: Shard, ranks: int, rank: int) -> torch.Tensor:
    """Rank's chunk of each run of the sharded dimension; an uneven one has no padding."""
    if placement.uneven:
        entries = value.shape[placement.dim]
        start = min(rank * -(-entries // ranks), entries)
        return value.narrow(placement.dim, start, min(-(-entries // ranks), entries - start))
    runs = value.unflatten(placement.dim, (int(placement.outer), ranks, -1))
    return runs.select(placement.dim + 1, rank).flatten(placement.dim, placement.dim + 1)


def torch_placements(held: Mapping[str, AnyPlacement], mesh: DeviceMesh) -> list[TorchPlacement]:
    """How a DTensor over the mesh is placed that the ranks of each axis hold so; inner axes cut first.

    Raises:
        FxRewriteError: torch has no name for it.
    """
    names = mesh.mesh_dim_names or ()
    found: list[TorchPlacement] = []
    for position, axis in enumerate(names):
        placement = as_placement(held.get(axis, Replicate()))
        if not isinstance(placement, Shard):
            found.append(TorchReplicate())
            continue
        inner = [(other, as_placement(held[other])) for other in names[position + 1 :] if other in held]
        cuts = [(other, p) for other, p in inner if isinstance(p, Shard) and p.dim == placement.dim]
        runs = int(placement.outer)
        for other, cut in cuts:
            if runs != 1 or int(cut.outer) != 1:
                raise FxRewriteError(
                    f"{axis} and {other} both cut runs of dimension {placement.dim}; torch has no name for it"
                )
        for other, _ in cuts:
            runs *= mesh.size(names.index(other))
        found.append(TorchShard(placement.dim) if runs == 1 else _StridedShard(placement.dim, split_factor=runs))
    return found


@cache
def _in_shards(cls: type[nn.Module], names: tuple[str, ...], called_with: Stated | None) -> type[nn.Module]:
    """The class, whose attributes of these names give whole values of the parameters.

    Of the model itself, arguments are joined as `called_with` states, and it is refused where gradients would be
    reduced again; `called_with` is None of the modules in it.
    """
    members: dict[str, Any] = {name: _reading_whole(name) for name in names}
    if called_with is not None:
        members |= refused_by_wrappers(_reduced_by_spmd) | joining(cls, called_with)
    return subclassed(_in_shards, cls, (names, called_with), members)


def _reading_whole(name: str) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        if name not in module._parameters:
            raise FxRewriteError(
                f"{name} of {type(module).__name__} is in shards, and something has put another value in its "
                "place since, as torch.nn.utils.parametrize does, and peft for its target_parameters at each call; "
                "parametrize a model before shard_parameters, and adapt modules (target_modules)"
            )
        parameter = module._parameters[name]
        reads_whole = torch.compiler.is_compiling() or _reads_whole.get()
        if not (reads_whole and isinstance(parameter, DTensor)):
            return parameter
        accumulation: Any = module._accumulation
        return whole(parameter, accumulation.keeps)

    return property(read)


# at the border of a compiled program


def local_value(value: Any) -> Any:
    """What this rank holds of a DTensor, without a gradient; any other value itself."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def local_values(values: Sequence[Any], sizes: Mapping[int, torch.Size], differentiated: Container[int]) -> list[Any]:
    """What this rank holds of DTensors, through which gradients flow, all of them at once; other values themselves.

    Args:
        values: what a program is called with.
        sizes: by position, what the program reads of a DTensor; shards with fewer entries are filled up with zeros.
        differentiated: positions of those through which gradients flow.
    """
    found = [_filled_up(local_value(x), sizes[i]) if isinstance(x, DTensor) else x for i, x in enumerate(values)]
    where = [i for i in sizes if i in differentiated and values[i].requires_grad] if torch.is_grad_enabled() else []
    if where:
        for i, value in zip(where, _Local.apply([found[i] for i in where], *(values[i] for i in where)), strict=True):
            found[i] = value
    return found


class _Local(torch.autograd.Function):
    """One node for all parameters: `DTensor.to_local` makes one each, whose backward is slower."""

    @staticmethod
    def forward(ctx: Any, local: Sequence[torch.Tensor], *given: DTensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.given = given
        return tuple(value.view_as(value) for value in local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        reduce_left(ctx.given)
        given = zip(unshared(grads), ctx.given, strict=True)
        return None, *(None if grad is None else reduced_gradient(grad, value) for grad, value in given)


def _filled_up(held: torch.Tensor, size: torch.Size) -> torch.Tensor:
    if held.shape == size:
        return held
    filled = held.new_zeros(size)
    filled[tuple(map(slice, held.shape))] = held
    return filled


def without_whole(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, DTensor]:
    """Afterwards the graph, as Dynamo captured it, starts from whole values of the parameters.

    They have the names that they have in the model. Dynamo's are relative to the module whose forward it captured, and
    where the graph breaks, that is a part of the model.

    Returns:
        the parameters that are DTensors when the program is called, by position, as Dynamo traced them.

    Raises:
        FxRewriteError: a DTensor is read otherwise than through `whole`, or a parameter as it was before it became one.
    """
    found: dict[int, DTensor] = {}
    names = {id(p): of[0] for model in list(_SHARDED) for p, of in _names(model).items()}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        held = node.meta.get("example_value")
        if isinstance(example_inputs[position], nn.Parameter) and example_inputs[position] in _REPLACED:
            raise FxRewriteError(
                f"{_REPLACED[example_inputs[position]]} is read as it was before shard_parameters: a module keeps a "
                "reference to it, in a list for example; read it as an attribute of its module (module.weight)"
            )
        if not isinstance(held, DTensor) or isinstance(held, ChunkedTensor):
            continue
        found[position] = held
        if name := names.get(id(example_inputs[position])):
            node.meta["argument"] = name
        value = _read_whole(gm, node)
        if value is not None:
            node.meta["example_value"] = value.detach().requires_grad_(held.requires_grad)
            node.meta["is_parameter"] = True
    gm.recompile()
    return found


def _read_whole(gm: fx.GraphModule, held: fx.Node) -> torch.Tensor | None:
    """Make all that reads `whole(held)` read `held`, also in bodies of checkpoints; returns the whole value.

    Raises:
        FxRewriteError: it is read otherwise.
    """
    value: torch.Tensor | None = None
    for user in list(held.users):
        if user.target is whole:
            value, (_, keeps) = user.meta["example_value"], user.args
            held.meta[KEEPS] = keeps and user.meta["example_value"].requires_grad
            user.replace_all_uses_with(held)
            gm.graph.erase_node(user)
            continue
        body = _body(gm, user)
        if body is None:
            raise FxRewriteError(
                f"{held.name} is read as a DTensor by {user.target}: a parameter is taken from model.parameters() or "
                "from a reference that a module keeps, or its module runs inside of an operator of higher order; read "
                "it as an attribute of its module (module.weight), or compute what reads it outside of the compiled "
                "function"
            )
        for operand, placeholder in zip(user.args[1:], body.graph.find_nodes(op="placeholder"), strict=True):
            if operand is held:
                inside = _read_whole(body, placeholder)
                value = placeholder.meta["example_value"] if inside is None else inside
                placeholder.meta["example_value"] = value
                held.meta[KEEPS] = held.meta.get(KEEPS) or placeholder.meta.get(KEEPS)
        body.recompile()
    return value


def _body(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule | None:
    """The subgraph that a call runs on its other operands, as `torch.utils.checkpoint` does."""
    first = call.args[0] if call.args else None
    if not (isinstance(call.target, HigherOrderOperator) and isinstance(first, fx.Node) and first.op == "get_attr"):
        return None
    found = gm.get_submodule(str(first.target))
    return found if isinstance(found, fx.GraphModule) else None
