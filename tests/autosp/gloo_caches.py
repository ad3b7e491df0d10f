"""One rank of the first steps of a job, over inductor: `python gloo_caches.py <ignored> <folder for results>`.

Writes the seconds until the first step was done, and what torch counted in its caches.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[2]))

from autosp_rules import autosp
from tests.autosp.models import batch, build


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build("llama_gqa", layers=1)
    backend = autosp()
    started = time.perf_counter()
    inputs = batch("llama_gqa", "plain")
    loss = torch.compile(model, backend=backend)(**inputs).loss
    loss.backward()
    found = {
        "seconds": time.perf_counter() - started,
        "transform": backend.reports[0].seconds,
        "loss": loss.item(),
        "expected": model(**inputs).loss.item(),
        "gradient": [p.grad.norm().item() for p in model.parameters() if p.grad is not None],
        **dict(counters["aot_autograd"]),
        **{name: count for name, count in counters["inductor"].items() if "cache" in name},
    }
    (Path(sys.argv[2]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
