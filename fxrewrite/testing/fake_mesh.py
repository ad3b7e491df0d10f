"""A device mesh of any size in one process, for graphs that hold collectives but never run them.

Torch's fake process group is private (`torch.testing._internal`); this is the only file that knows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(
    shape: Sequence[int], names: Sequence[str], *, rank: int = 0, device: str = "cpu"
) -> Generator[DeviceMesh]:
    """The mesh of devices of this type as `rank` sees it, destroyed on leaving.

    Its collectives return wrong numbers of the right shape. `device` matters where tensors become DTensors; "cuda"
    needs a card.
    """
    if dist.is_initialized():
        raise ValueError("fake_mesh: a process group is already initialized; destroy it or use its mesh")
    if min(shape, default=1) < 1 or len(shape) != len(names):
        raise ValueError(f"fake_mesh: {tuple(shape)} over {tuple(names)}: each axis has a name and one rank or more")
    hook = sys.excepthook  # torch adds one that writes the rank before each line of an error, and leaves it there
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        yield init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
