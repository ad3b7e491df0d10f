"""One rank of runs under what averages gradients: `python gloo_wrappers.py <cases> <folder for results>`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from autosp_rules import autosp
from tests.autosp.models import batch, build


def _compiled_in_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(torch.compile(model, backend=autosp("aot_eager", mesh=mesh)))  # type: ignore[arg-type]


def _ddp_compiled(model: nn.Module, mesh: DeviceMesh) -> Callable[..., object]:
    return torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=autosp("aot_eager", mesh=mesh))


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    return fully_shard(model)


def _fsdp_by_layer(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.get_submodule("model.layers"):
        fully_shard(layer)
    model.compile(backend=autosp("aot_eager", mesh=mesh))
    return fully_shard(model)


WRAPPERS = {
    "compiled in DDP": _compiled_in_ddp,
    "DDP compiled": _ddp_compiled,
    "FSDP": _fsdp,
    "FSDP by layer": _fsdp_by_layer,
}


def compare(case: str) -> str:
    """Two replicas of a sequence over two ranks each, every replica with its own batch; one device has both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    batches = [batch("llama_gqa", kind, length=16) for kind in ("plain", "uneven_labels")]
    alone, model = build("llama_gqa", layers=1), build("llama_gqa", layers=1)
    for inputs in batches:
        (alone(**inputs).loss / len(batches)).backward()
    step = WRAPPERS[case](model, mesh)
    for _ in range(2):
        model.zero_grad()
        step(**batches[mesh.get_local_rank("dp")]).loss.backward()
    worst = 0.0
    for (name, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        found, want = parameter.grad, expected.grad
        assert found is not None, name
        assert want is not None, name
        found = found.full_tensor() if isinstance(found, DTensor) else found
        worst = max(worst, ((found - want).abs().max() / want.abs().max()).item())
    return f"{worst}"


def main() -> None:
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, str] = {}
    for case in cases:
        torch._dynamo.reset()
        try:
            results[case] = compare(case)
        except Exception as error:  # noqa: BLE001  # the test reads it from the file
            results[case] = f"{type(error).__name__}: {error}"
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
