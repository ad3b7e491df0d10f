"""One rank of a real gloo run: `torchrun -m tests.autosp.gloo_ranks <jobs as JSON> <folder for results>`.

A job is (its name, a module of this folder, cases); the module's `run(cases)` returns what the tests read, as JSON.
Starting a rank costs more than most jobs do, so those of one number of ranks share a process.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class StoppedError(Exception):
    """A job ended where the ranks may be at different places; `results` is what it found."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self.results = results


def main() -> None:
    jobs, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    file = folder / f"rank{dist.get_rank()}.json"
    for name, module, cases in jobs:
        stopped = importlib.import_module("tests.autosp.gloo_ranks").StoppedError  # this file runs as __main__
        try:
            results[name] = importlib.import_module(f"tests.autosp.{module}").run(cases)
        except stopped as error:
            results[name] = error.results
            break
        finally:
            file.write_text(json.dumps(results))
    else:
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
