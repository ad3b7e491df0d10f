"""One attention between an embedding and a loss, and its comparison with one device on 2, 3 and 4 simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from autosp_rules import AutoSPConfig
from autosp_rules.config import AttentionOption
from autosp_rules.report import AutoSPReport
from tests.autosp.one_device import OneDevice

BATCH, LENGTH, MEMORY, WIDTH, HEAD_DIM, VALUE_DIM = 2, 12, 24, 8, 4, 6
RANKS = (2, 3, 4)
IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % 8
MEMORY_IDS = torch.arange(BATCH * MEMORY).reshape(BATCH, MEMORY) * 5 % 8
Attend = Callable[..., torch.Tensor]


class Layer(nn.Module):
    """q [B, H, S, 4] of embeddings, k [B, KV, S, 4] and v [B, KV, S, 6] of the same or others, `attend`, a loss."""

    def __init__(self, attend: Attend, heads: int = 6, kv_heads: int = 6, *, cross: bool = False) -> None:
        super().__init__()
        self.attend, self.heads, self.kv_heads, self.cross = attend, heads, kv_heads, cross
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, WIDTH)
        self.q = nn.Linear(WIDTH, heads * HEAD_DIM)
        self.k = nn.Linear(WIDTH, kv_heads * HEAD_DIM)
        self.v = nn.Linear(WIDTH, kv_heads * VALUE_DIM)
        self.o = nn.Linear(heads * VALUE_DIM, WIDTH)
        self.slopes = nn.Parameter(torch.rand(heads))
        self.table = nn.Embedding(LENGTH, heads)
        self.gate = nn.Linear(WIDTH, LENGTH)
        self.double()

    def forward(self, ids: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = self.embed(memory) if self.cross else x
        q, k, v = (
            proj(z).unflatten(-1, (count, -1)).transpose(1, 2)
            for z, proj, count in ((x, self.q, self.heads), (y, self.k, self.kv_heads), (y, self.v, self.kv_heads))
        )
        attended = self.attend(self, x, q, k, v)
        return self.o(attended.transpose(1, 2).flatten(2)).square().mean()


class LayerOnOneDevice(OneDevice):
    """A layer, called with ids and others; each gradient is compared by its own largest entry."""

    def __init__(self, layer: nn.Module, ids: torch.Tensor = IDS, *, dynamic: bool = False) -> None:
        inputs = {"ids": ids.clone(), "memory": MEMORY_IDS.clone()}
        if dynamic:
            torch._dynamo.mark_dynamic(inputs["ids"], 1)
        super().__init__(layer, inputs)

    def report(self, num_ranks: int, config: AutoSPConfig) -> AutoSPReport:
        """The report, where loss and gradients on so many ranks are those of one device."""
        return self.check(num_ranks, config, rtol=0, floor=1e-3).report


def attention_line(report: AutoSPReport) -> str:
    """What the report says of the one kind of attention that runs; "" where it says nothing."""
    (line,) = [line for line in report.lines if line.startswith("attention: ")] or [""]
    return line


def check(
    model: nn.Module,
    *,
    dynamic: bool = False,
    strict: bool = True,
    ranks: Sequence[int] = RANKS,
    attention: AttentionOption | Mapping[int, AttentionOption] = "auto",
    ids: torch.Tensor = IDS,
) -> dict[int, AutoSPReport]:
    """Loss and gradients on each number of ranks are those of one device; the reports."""
    asked = attention if isinstance(attention, Mapping) else dict.fromkeys(ranks, attention)
    one_device = LayerOnOneDevice(model, ids, dynamic=dynamic)
    return {n: one_device.report(n, AutoSPConfig(strict=strict, attention=asked[n])) for n in ranks}
