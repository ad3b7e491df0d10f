"""Accelerate, and what is built on it (transformers' Trainer, trl): batches that the ranks of one axis share.

    share_batches(trainer, mesh)         # a transformers.Trainer or one of its subclasses, before it trains
    share_batches(accelerator, mesh)     # an accelerate.Accelerator, before it prepares a data loader

Accelerate deals every process its own samples. AutoSP needs the same whole batch on every rank of the sequence axis, so
the ranks along it count as one process, a *replica*, where samples are dealt out and where they are collected again:

    data loaders            replica i of R reads what process i of R would read
    gather_for_metrics      one copy of each replica's samples, in the order of the data set
    learning rate           a prepared scheduler makes R steps for each step of the optimizer, not one for each process

Everything else stays as it is: DDP and FSDP average gradients over all ranks, which is what AutoSP needs, and `gather`
collects from all ranks, as Trainer expects it when it counts the labels of a batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from autosp_rules.errors import AutoSPError
from autosp_rules.integrations.packages import load

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def share_batches(trainer: Any, mesh: DeviceMesh | None = None, axis: str = "sp") -> None:
    """Batches are the same for all ranks along `axis` and differ along the other axes of the mesh.

    Args:
        trainer: a transformers.Trainer (or a subclass, as those of trl), or an accelerate.Accelerator.
        mesh: the mesh that the backend has; None is all ranks as one axis.
        axis: name of the mesh axis over which the sequence is sharded.

    Raises:
        AutoSPError: it is neither; the mesh does not fit; a data loader is already prepared, or deals out batches by
            itself; an Accelerator is passed that belongs to a Trainer.
    """
    accelerator = getattr(trainer, "accelerator", trainer)
    if not all(
        hasattr(accelerator, name) for name in ("prepare_data_loader", "gather_for_metrics", "prepare_scheduler")
    ):
        raise AutoSPError.of(
            f"share_batches: {type(trainer).__name__} is neither a transformers.Trainer nor an accelerate.Accelerator",
            hint="data loaders of your own: DistributedSampler over the data axis",
        )
    if accelerator is trainer and _belongs_to_a_trainer(accelerator):
        raise AutoSPError.of(
            "share_batches: this Accelerator belongs to a Trainer, which has already looked up how it gathers metrics",
            hint="share_batches(trainer, mesh) instead of share_batches(trainer.accelerator, mesh)",
        )
    if accelerator._dataloaders:
        raise AutoSPError.of(
            "share_batches: the Accelerator has already prepared a data loader, which deals each rank its own batches",
            hint="call share_batches before accelerator.prepare",
        )
    if getattr(getattr(trainer, "args", None), "train_sampling_strategy", "") == "batch_rebalance":
        raise AutoSPError.of(
            "share_batches: train_sampling_strategy='batch_rebalance' deals each rank its own batches by itself",
            hint="any other strategy; 'group_by_length' also makes batches of equal lengths",
        )
    replicas = _replicas(mesh, axis, accelerator.num_processes)
    one = _Replica(accelerator, replicas)
    accelerator.prepare_data_loader = partial(_prepare_data_loader, one)
    accelerator.gather_for_metrics = partial(_gather_for_metrics, one)
    accelerator.prepare_scheduler = partial(_prepare_scheduler, one)
    if hasattr(trainer, "gather_function"):
        trainer.gather_function = accelerator.gather_for_metrics


class _Replica:
    """The Accelerator as its own methods see it where the ranks of a replica count as one process."""

    dispatch_batches = False  # else process 0 reads for all processes and deals out one part to each of them

    def __init__(self, accelerator: Any, replicas: torch.Tensor) -> None:
        self.accelerator = accelerator
        self.num_processes = len(replicas)
        self.process_index = int((replicas == accelerator.process_index).any(1).nonzero())
        self.first_ranks: list[int] = replicas[:, 0].tolist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def gather(self, tensors: Any) -> Any:
        """Of what all ranks have, the part of the first rank of each replica."""
        operations = load("accelerate.utils")
        num_ranks = self.accelerator.num_processes

        def first(gathered: torch.Tensor) -> torch.Tensor:
            return gathered.unflatten(0, (num_ranks, -1))[self.first_ranks].flatten(0, 1)

        return operations.recursively_apply(first, self.accelerator.gather(tensors))

    def of_accelerator(self, name: str) -> Callable[..., Any]:
        """The Accelerator's method of that name, run on this view of it."""
        return MethodType(getattr(type(self.accelerator), name), self)


def _prepare_data_loader(one: _Replica, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
    if one.accelerator.dispatch_batches:
        raise AutoSPError.of(
            "share_batches: with dispatch_batches=True process 0 deals every other rank its own part of a batch",
            hint="leave dispatch_batches out: every rank reads the data set and keeps what its replica needs",
        )
    sampler: Any = getattr(data_loader, "sampler", None)
    if one.num_processes == 1 and not one.use_seedable_sampler and getattr(sampler, "generator", 0) is None:
        seed = load("accelerate.utils").broadcast(torch.empty((), dtype=torch.int64, device=one.device).random_())
        sampler.generator = torch.Generator().manual_seed(int(seed))  # accelerate does so for several processes only
    return one.of_accelerator("prepare_data_loader")(data_loader, *args, **kwargs)


def _gather_for_metrics(one: _Replica, input_data: Any, use_gather_object: bool = False) -> Any:
    utils = load("accelerate.utils")
    if not use_gather_object and _is_tensors(utils, input_data):
        return one.of_accelerator("gather_for_metrics")(input_data)
    of_ranks = utils.gather_object([input_data])
    data = [item for rank in one.first_ranks for item in of_ranks[rank]]
    state = one.gradient_state
    return data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else data


def _prepare_scheduler(one: _Replica, scheduler: Any) -> Any:
    """The prepared scheduler, which makes as many steps as there are replicas, not processes."""
    prepared = one.of_accelerator("prepare_scheduler")(scheduler)
    if prepared is scheduler or prepared.split_batches or not prepared.step_with_optimizer:
        return prepared
    prepared.split_batches = True  # the form that makes one step

    def step(*args: Any, **kwargs: Any) -> None:
        for _ in range(one.num_processes if prepared.gradient_state.sync_gradients else 1):
            if getattr(scheduler, "total_steps", None) is None or scheduler._step_count <= scheduler.total_steps:
                type(prepared).step(prepared, *args, **kwargs)

    prepared.step = step
    return prepared


def _replicas(mesh: DeviceMesh | None, axis: str, num_ranks: int) -> torch.Tensor:
    """The ranks of each replica, a row for each."""
    if mesh is None:
        return torch.arange(num_ranks)[None]
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise AutoSPError.of(f"share_batches: the mesh has no axis {axis!r}; it has {names}")
    if mesh.mesh.numel() != num_ranks:
        raise AutoSPError.of(
            f"share_batches: the mesh has {mesh.mesh.numel()} ranks, the job has {num_ranks}",
            hint=f"name the other axes too: init_device_mesh(device, (R, P), mesh_dim_names=('dp', '{axis}'))",
        )
    return mesh.mesh.movedim(names.index(axis), -1).flatten(0, -2)


def _belongs_to_a_trainer(accelerator: Any) -> bool:
    """Whether somebody keeps the bound method `gather_for_metrics`, as a Trainer does from its construction on."""
    return any(
        isinstance(user, MethodType) and user.__self__ is accelerator and user.__name__ == "gather_for_metrics"
        for user in gc.get_referrers(accelerator)
    )


def _is_tensors(utils: Any, data: Any) -> bool:
    try:
        utils.recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
