"""Data-parallel wrappers of torch around a compiled program: over which ranks they reduce gradients.

This is the only file that reads the state of DistributedDataParallel, FSDP and fully_shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxrewrite.errors import FxRewriteError


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """How a wrapper reduces gradients in the backward pass: `factor` times their sum over `ranks`."""

    by: str
    """Name of the wrapper as users write it."""
    ranks: frozenset[int]
    """Ranks of the default process group."""
    factor: float
    hook: str = ""
    """The function of the caller's that reduces in the wrapper's place, in a way that is not known; or ''."""
    unread: str = field(default="", compare=False)
    """A trained parameter that the wrapper reduces in the same pass, and that is none of those asked about; or ''."""

    @property
    def is_mean(self) -> bool:
        """Whether the wrapper averages over its ranks."""
        return self.factor == 1 / len(self.ranks)


def keep_graph_whole_under_ddp() -> None:
    """Sets `torch._dynamo.config.optimize_ddp` to False, so that Dynamo compiles a model under DDP as one graph.

    Otherwise Dynamo splits each graph at DDP's buckets, the first of which has 1 MiB, and calls the parts with fake
    tensors. Other models of the process that are compiled under DDP lose the overlap of backward and all-reduce.
    """
    torch._dynamo.config.optimize_ddp = False


def refused_by_wrappers(said: Callable[[nn.Module], str]) -> dict[str, Any]:
    """Members of a class of modules that DistributedDataParallel refuses with this error, and not with an operator's.

    fully_shard reads nothing of a module that a class can define.
    """

    def read(module: nn.Module) -> Any:
        raise FxRewriteError(said(module))

    return {"_ddp_params_and_buffers_to_ignore": property(read)}  # the first attribute that it reads


def gradient_reductions(parameters: Sequence[torch.Tensor]) -> list[GradientReduction]:
    """Returns how DistributedDataParallel, FSDP and fully_shard reduce these parameters' gradients, each way once.

    Must be called inside the wrapped module's forward.
    """
    known = {id(parameter) for parameter in parameters}
    return list(dict.fromkeys([*_of_ddp(known), *_of_fsdp1(), *_of_fsdp2(known)]))


def _of_ddp(known: set[int]) -> list[GradientReduction]:
    module = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if module is None or known.isdisjoint(map(id, module.parameters())):
        return []
    ranks = dist.get_process_group_ranks(module.process_group)
    hook = next((_name_of(hook) for hook, _ in module._comm_hooks if not _averages(hook)), "")
    trained = ((name, p) for name, p in module.module.named_parameters() if p.requires_grad)
    unread = next((name for name, p in trained if id(p) not in known), "")
    return [GradientReduction("DistributedDataParallel", frozenset(ranks), 1 / len(ranks), hook, unread)]


def _averages(hook: Callable[..., Any]) -> bool:
    """Whether torch ships the communication hook, and what it wraps: these average as the wrapper does."""
    inside = (cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())
    is_of_torch = (getattr(hook, "__module__", None) or "").partition(".")[0] == "torch"
    return is_of_torch and all(_averages(one) for one in inside if isinstance(one, FunctionType))


def _name_of(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _of_fsdp1() -> list[GradientReduction]:
    """Finds FSDP 1 by the modules whose forward runs now, because its parameters are views without a known origin."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    found: list[GradientReduction] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, FullyShardedDataParallel):
            is_hybrid = module.sharding_strategy in hybrid  # reduces within and across groups, which cover all ranks
            ranks = range(dist.get_world_size()) if is_hybrid else dist.get_process_group_ranks(module.process_group)
            own = module._comm_hook
            hook = "" if own is None or _averages(own) else _name_of(own)
            found.append(GradientReduction("FullyShardedDataParallel", frozenset(ranks), 1 / len(ranks), hook))
        frame = frame.f_back
    return found


def _of_fsdp2(known: set[int]) -> list[GradientReduction]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    found: list[GradientReduction] = []
    for reference in list(_module_state_mapping.values()):
        state = reference()
        for group in _param_groups(state):
            if any(_is_read(p, known) for p in group.fsdp_params):
                ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
                divisor = getattr(group, "gradient_divide_factor", None) or len(ranks)
                found.append(GradientReduction("fully_shard", ranks, 1 / divisor, unread=_unread(state, known)))
    return found


def _is_read(param: Any, known: set[int]) -> bool:
    return id(getattr(param, "_unsharded_param", None)) in known  # set when it is first gathered


def _unread(state: Any, known: set[int]) -> str:
    """Returns the name of a trained parameter under the same root module that is not known, or ''."""
    params = (p for one in state._state_ctx.all_states for group in _param_groups(one) for p in group.fsdp_params)
    unread = (p for p in params if p.sharded_param.requires_grad and not _is_read(p, known))
    return next((p._param_fqn or "?" for p in unread), "")


def _param_groups(state: Any) -> list[Any]:
    """Returns the FSDPParamGroups of one module's state: one in torch 2.11, several from 2.13 on."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)
