"""One rank of the first step of a job, over inductor: `torchrun -m tests.autosp.gloo_caches <layers> <folder>`.

Writes the seconds until the first step was done, and what torch counted in its caches.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from autosp_rules import autosp
from tests.autosp.models import batch, build


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.linear = nn.Embedding(61, 4), nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embed(input_ids)).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = int(sys.argv[1])
    model = build("llama_gqa", layers=layers) if layers else Tiny()
    backend, inputs = autosp(), batch("llama_gqa", "plain")
    started = time.perf_counter()
    output = torch.compile(model, backend=backend)(**inputs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    found = {"seconds": time.perf_counter() - started, "own": backend.reports[0].seconds, "loss": loss.item()}
    found["gradient"] = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
    found |= counters["aot_autograd"] | {k: n for k, n in counters["inductor"].items() if "cache" in k}
    (Path(sys.argv[2]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
