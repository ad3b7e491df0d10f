"""Masks under AutoSP: exact, and computed by rows, whatever they mean and however attention runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from autosp_rules import AutoSPReport
from autosp_rules.config import AttentionOption
from fxrewrite.report import bytes_text
from tests.autosp.attention_layer import BATCH, HEAD_DIM, IDS, LENGTH, VALUE_DIM, Attend, Layer, attention_line, check

sdpa = F.scaled_dot_product_attention
TOKENS = torch.tensor([[1, 1, 2, 2, 2, 2, 3, 3, 3, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]])
Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The mask of positions by rows, positions by columns, and slopes."""
MASKS_OF: dict[str, tuple[Mask, str]] = {
    "right padding": (lambda r, c, _: (c <= r) & (TOKENS[:1, None, None] > 0), "causal and key padding"),
    "triangle": (
        lambda r, c, _: torch.ones(LENGTH, LENGTH).tril().bool() & (TOKENS[:1, None, None] > 0),
        "causal and key padding",
    ),
    "left padding": (lambda r, c, _: (c <= r) & (TOKENS[1:, None, None] > 0), "causal and key padding"),
    "window": (lambda r, c, _: (c <= r) & (c > r - 4), "causal and window 4"),
    "chunks": (lambda r, c, _: (c <= r) & (c // 5 == r // 5), "causal and chunks of 5"),
    "documents": (
        lambda r, c, _: (c <= r) & (TOKENS[:, None, :, None] == TOKENS[:, None, None]),
        "causal and documents",
    ),
    "prefix": (lambda r, c, _: (c <= r) | (c < 5), "causal after a prefix of 5"),
    "padding": (lambda r, c, _: (r >= 0) & (TOKENS[:, None, None] > 0), "key padding"),
    "alibi": (
        lambda r, c, slopes: ((c - r) * slopes[:, None, None]).masked_fill(c > r, -torch.inf),
        "a bias and causal",
    ),
}


def kinds(report: AutoSPReport) -> list[str]:
    """What the report says of masks, without numbers of nodes and places."""
    lines = (line.partition("; the first")[0] for line in report.lines if line.startswith("masks: "))
    return [line.partition(" x ")[2] for line in lines]


@pytest.mark.parametrize("name", MASKS_OF)
@pytest.mark.some(3)
def test_exact(name: str) -> None:
    """By all-to-all on two ranks, with k and v gathered on three."""
    mask, kind = MASKS_OF[name]

    def attend(layer: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(LENGTH)
        return sdpa(q, k, v, mask(columns[:, None], columns, layer.slopes.detach()))

    for report in check(Layer(attend, 4, 4), ranks=(2, 3)).values():
        assert kinds(report) == [f"{kind}, computed by rows"]


def attend_with_sinks(layer: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    hidden = (columns > rows) | (columns <= rows - 4) | (columns < 2)
    if layer.heads != layer.kv_heads:
        k, v = (x.repeat_interleave(layer.heads // layer.kv_heads, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 + hidden * torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype)
    return with_sinks(layer, scores) @ v


def with_sinks(layer: Layer, scores: torch.Tensor) -> torch.Tensor:
    both = torch.cat([scores, layer.slopes.reshape(1, -1, 1, 1).expand(BATCH, -1, scores.shape[2], -1)], -1)
    return torch.softmax(both - both.amax(-1, keepdim=True), -1)[..., :-1]


def attend_with_softcap(
    layer: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As Gemma 2 has it in transformers, with a cap that its scores exceed."""
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    hidden = (columns > rows) | (columns <= rows - 4)
    if layer.heads != layer.kv_heads:
        k, v = (x.repeat_interleave(layer.heads // layer.kv_heads, 1) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 / 0.3) * 0.3
    return torch.softmax(scores + hidden * torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype), -1) @ v


@pytest.mark.parametrize("kv_heads", [12, 2])
@pytest.mark.parametrize("attention", ["ulysses", "gather_kv", "ring", "ring_ulysses"])
@pytest.mark.parametrize("attend", [attend_with_sinks, attend_with_softcap])
@pytest.mark.some(3)
def test_sinks_and_softcaps_are_exact(attend: Attend, attention: AttentionOption, kv_heads: int) -> None:
    """Of 12 heads a rank has its own; two heads of keys divide over no ranks here. Beside sinks the first rows keep no
    key."""
    ranks = {"ring": (3,), "ring_ulysses": (4,)}.get(attention, (3, 4))
    for num_ranks, report in check(Layer(attend, 12, kv_heads), ranks=ranks, attention=attention).items():
        assert attention_line(report).startswith(f"attention: 1 x {attention}: asked for")
        sent = {c.kind: c for c in report.collectives if c.direction == "forward" and c.kind != "all_reduce"}
        assert set(sent) == SENT_WITH_SINKS[attention], num_ranks
        if attention == "ulysses":
            numbers = BATCH * LENGTH // num_ranks * (HEAD_DIM + VALUE_DIM) * 8  # of one head, of two operands
            num_bytes = numbers * (12 + math.lcm(kv_heads, num_ranks)) * (num_ranks - 1) // num_ranks
            assert (sent["all_to_all"].count, sent["all_to_all"].bytes_sent) == (2, num_bytes)
        if attention.startswith("ring"):
            num_bytes = sum(c.bytes_sent for c in sent.values())
            assert f"each sends {num_bytes:,} bytes per rank forward" in attention_line(report)
        else:
            assert [kind.endswith("computed by rows") for kind in kinds(report)] == [True]


SENT_WITH_SINKS: dict[AttentionOption, set[str]] = {
    "ulysses": {"all_to_all"},
    "gather_kv": {"all_gather"},
    "ring": {"ring_attention", "exchange"},
    "ring_ulysses": {"ring_attention", "exchange"},
}


@pytest.mark.parametrize("length", [7, 9])
@pytest.mark.parametrize("attend", [attend_with_sinks, attend_with_softcap])
def test_a_ring_whose_ranks_do_not_divide_the_length(attend: Attend, length: int) -> None:
    """With padding: 4 rows a rank, whose halves trade places, and 5, which have none."""
    check(Layer(attend, 12, 2), ranks=(2,), attention="ring", ids=IDS[:, :length])


@pytest.mark.parametrize("attention", ["ulysses", "gather_kv", "ring"])
def test_softcaps_of_every_length(attention: AttentionOption) -> None:
    check(Layer(attend_with_softcap, 12, 2), ranks=(4,), attention=attention, dynamic=True)


@pytest.mark.parametrize("attention", ["ulysses", "gather_kv"])
def test_sinks_with_a_mask_that_cannot_be_read(attention: AttentionOption) -> None:
    """All scores are held then; the report says so."""

    def attend(layer: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gate = layer.gate(x).detach()
        return with_sinks(layer, q @ k.transpose(-2, -1) * 0.3 + (gate @ gate.transpose(1, 2))[:, None]) @ v

    (kind,) = kinds(check(Layer(attend, 4, 4), ranks=(2,), attention=attention)[2])
    assert kind.startswith("dense: ")
    assert kind.endswith(f"; {bytes_text(BATCH * 4 // 2 * 131_072**2 * 8)} at 131,072 tokens"), "of scores"
