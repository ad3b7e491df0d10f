"""Offloads what a compiled program saves for its backward pass to host memory.

    offloaded(run)(*inputs)     every value that `run` saves for backward goes to the host at once and comes back when
                                the backward pass reads it; inputs stay, as parameters and the batch are held anyway

The partitioner chooses which values are saved, guided by `AutoSPConfig.checkpoint`: with "attention", a layer's input
and attention's result. Copies from and to pinned memory are enqueued on the computing stream: in order without waiting,
but not overlapped with computation.
Source: torch.autograd.graph.save_on_cpu, which moves parameters too; Bekman et al., Arctic Long Sequence Training,
arXiv 2506.13996 (activation offload).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 2**16
"""Smallest value, in bytes, that is offloaded; a smaller one takes longer to send than to compute with."""

_OnHost: TypeAlias = tuple[torch.device, torch.Tensor]


def offloaded(run: Callable[..., Any], min_bytes: int = MIN_BYTES) -> Callable[..., Any]:
    """Returns `run` with host memory for the values of at least `min_bytes` bytes that it saves for backward."""

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
    """Whether a copy has the same strides, on which the compiled backward pass relies."""
    return torch.empty_like(value, device="meta").stride() == value.stride()
