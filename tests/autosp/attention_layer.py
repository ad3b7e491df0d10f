"""One attention between an embedding and a loss, and its comparison with one device on 2, 3 and 4 simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from autosp_rules import AutoSPConfig
from autosp_rules.config import AttentionOption
from autosp_rules.report import AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.one_device import captured

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


class OneDevice:
    """A layer on one device: its loss and gradients, and the graph that is made for ranks."""

    def __init__(self, model: nn.Module, ids: torch.Tensor = IDS, *, dynamic: bool = False) -> None:
        inputs = {"ids": ids.clone(), "memory": MEMORY_IDS.clone()}
        if dynamic:
            torch._dynamo.mark_dynamic(inputs["ids"], 1)
        self._gm, self._inputs = captured(model, inputs)
        model.zero_grad()
        self._loss = model(**inputs)
        self._loss.backward()

    def check(self, num_ranks: int, config: AutoSPConfig) -> AutoSPReport:
        """Loss and gradients on so many ranks are those of one device; the report."""
        with fake_mesh((num_ranks,), ("sp",)) as mesh:
            program, report = transform(self._gm, config, axis_of(mesh, "sp"))
            done = run_on_ranks(program, self._inputs, num_ranks, backward=0)
        for outputs in done.outputs:
            torch.testing.assert_close(outputs[0], self._loss.detach(), rtol=1e-12, atol=1e-12)
        for value, grad in zip(self._inputs, done.gradients(), strict=True):
            if isinstance(value, nn.Parameter):
                assert (grad is None) == (value.grad is None)
                if grad is not None and value.grad is not None:
                    assert (grad - value.grad).abs().max() <= 1e-12 * max(1e-3, value.grad.abs().max())
        return report


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
    one_device = OneDevice(model, ids, dynamic=dynamic)
    return {n: one_device.check(n, AutoSPConfig(strict=strict, attention=asked[n])) for n in ranks}
