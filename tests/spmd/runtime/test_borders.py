"""Values in chunks between compiled programs, in eager code of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxrewrite.spmd import chunked
from tests.versions import TORCH

pytestmark = pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 does not dispatch to subclasses of DTensor")


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("sp",))
    dist.destroy_process_group()


def test_operators_of_a_function_that_dynamo_leaves_alone_are_their_own(one_rank: DeviceMesh) -> None:
    """Dynamo runs a loop with a break as it is, and would compile the Python code that each of its operators calls."""
    graphs: list[torch.fx.GraphModule] = []

    def record(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    def loop(x: Tensor) -> tuple[Tensor, ...]:
        found = (x,)
        for _ in range(2):
            torch._dynamo.graph_break()
            found = (x.abs(), x.exp(), x.mean(), x * torch.ones(3, dtype=torch.float64))
        return found

    value = torch.arange(-12.0, 12.0, dtype=torch.float64).view(2, 4, 3)
    torch._dynamo.reset()
    found = torch.compile(loop, backend=record)(chunked(distribute_tensor(value, one_rank, [Shard(1)])))
    for result, expected in zip(found, loop(value), strict=True):
        assert isinstance(result, DTensor)
        assert torch.equal(result.full_tensor(), expected)
    assert not graphs


def test_chunks_of_rows_that_were_a_view_enter_a_trace(one_rank: DeviceMesh) -> None:
    """torch's placement for them, and its own order of shards, which it refuses when it makes one for a trace."""
    value = torch.arange(24.0).view(2, 4, 3)
    given = chunked(distribute_tensor(value, one_rank, [Shard(1)])).reshape(-1, 3)
    assert "_StridedShard" in str(given.placements)
    torch._dynamo.reset()
    found = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(given)
    assert torch.equal(found.full_tensor(), value.reshape(-1, 3) * 2)
