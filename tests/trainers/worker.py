"""One rank of a trainer's run: `torchrun worker.py <case> <folder for results>`. One rank: without AutoSP.

A case runs a script of docs/examples/trainers as a user would, and returns what shall be equal on one device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples" / "trainers"))

from tests.trainers import cases


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    os.chdir(folder)
    results = getattr(cases, name)()
    sharded = [sum(bool(report.tokens_per_rank) for report in backend.reports) for backend in cases.BACKENDS]
    torch.save({**results, "sharded": sharded}, folder / f"rank{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
