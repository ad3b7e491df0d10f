"""What a compiled program keeps for its backward pass waits in host memory.

    offloaded(run)(*inputs)     every value that `run` saves for backward goes to the host at once and comes back when
                                the backward pass reads it; inputs stay, as parameters and the batch are held anyway

Which values are saved is the partitioner's choice, and so that of `AutoSPConfig.checkpoint`: with "attention", a
layer's input and attention's result. Copies are enqueued on the stream that computes, from and to pinned memory: in
order without waiting, and not beside the computation.
Source: torch.autograd.graph.save_on_cpu, which moves parameters too; Bekman et al., Arctic Long Sequence Training,
arXiv 2506.13996 (activation offload).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["MIN_BYTES", "offloaded"]

MIN_BYTES = 2**16
"""A smaller value stays: to send it takes longer than to compute with it."""

_OnHost: TypeAlias = tuple[torch.device, torch.Tensor]


def offloaded(run: Callable[..., Any], min_bytes: int = MIN_BYTES) -> Callable[..., Any]:
    """`run`, with what it saves for backward, from `min_bytes` bytes on, in host memory until it is read."""

    def call(*inputs: Any) -> Any:
        held = {_storage(value) for value in inputs if isinstance(value, torch.Tensor)}

        def pack(value: torch.Tensor) -> torch.Tensor | _OnHost:
            stays = value.nbytes < min_bytes or _storage(value) in held or not _is_dense(value)
            return value if stays else (value.device, _on_host(value))

        with saved_tensors_hooks(pack, _back):
            return run(*inputs)

    return call


def _on_host(value: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    return host.copy_(value.detach(), non_blocking=True)


def _back(saved: torch.Tensor | _OnHost) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, host = saved
    return host.to(device, non_blocking=True)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a copy has the same strides, which the compiled backward pass counts on."""
    return torch.empty_like(value, device="meta").stride() == value.stride()
