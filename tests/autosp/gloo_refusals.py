"""One rank of runs in which the ranks do not agree: `python gloo_refusals.py <cases> <folder for messages>`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autosp_rules import autosp

IDS = torch.arange(32).reshape(2, 16) % 8


class Model(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.activation = nn.Embedding(8, 4), activation()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.activation(self.embed(ids)).mean()


def different_graphs(rank: int) -> None:
    torch.compile(Model(nn.GELU if rank else nn.SiLU), backend=autosp("eager"))(IDS)


def one_rank_never_compiles(rank: int) -> None:
    if rank == 0:
        torch.compile(Model(nn.SiLU), backend=autosp("eager", timeout=3.0))(IDS)
    else:
        raise ValueError("rank 1 is elsewhere")


def generators_that_differ(rank: int) -> None:
    """They are alike when the model is compiled and in the call after; then one rank draws something of its own."""
    compiled = torch.compile(Model(nn.Dropout), backend=autosp("eager", rng="global"))
    torch.manual_seed(0)
    losses = torch.stack([compiled(IDS) for _ in range(2)]).detach()
    torch.manual_seed(0)
    torch.testing.assert_close(losses, torch.stack([compiled(IDS) for _ in range(2)]).detach())
    torch.manual_seed(rank)
    compiled(IDS)


def different_batches(rank: int) -> None:
    """As a sampler gives that counts all ranks as replicas."""
    torch.compile(Model(nn.SiLU), backend=autosp("eager"))((IDS + rank) % 8)


def one_rank_does_not_compile(rank: int) -> None:
    def inner(gm: torch.fx.GraphModule, inputs: object) -> object:
        if rank == 1:
            raise MemoryError("no room for kernels")
        return gm.forward

    torch.compile(Model(nn.SiLU), backend=autosp(inner))(IDS)


def entry_point_and_mesh(rank: int) -> None:
    """Two replicas of a sequence over two ranks each, the backend by name; every replica gets its own batch's mean."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    model, ids = Model(nn.SiLU), (IDS + rank // 2) % 8
    expected = model(ids)
    loss = torch.compile(model, backend="autosp", options={"inner": "eager", "mesh": mesh})(ids)
    torch.testing.assert_close(loss, expected)


def main() -> None:
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    messages: dict[str, str] = {}
    for case in cases:
        torch._dynamo.reset()
        messages[case] = "done"
        try:
            globals()[case](rank)
        except Exception as error:  # noqa: BLE001  # the test reads it from the file
            messages[case] = str(error)
    (folder / f"rank{rank}.json").write_text(json.dumps(messages))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
