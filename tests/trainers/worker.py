"""One rank of a trainer's run: `torchrun worker.py <case> <folder for results>`. One rank is one device, without AutoSP.

A case runs a script of docs/examples/trainers as a user would, and returns what shall be equal on one device.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "examples" / "trainers")]

from tests.trainers import cases


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch._dynamo.config.optimize_ddp = False
    os.chdir(folder)
    results = getattr(cases, name)()
    rank = int(os.environ["RANK"])
    torch.save(results, folder / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
