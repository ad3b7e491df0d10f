"""Attention that a model writes out is exact over 2, 3 and 4 ranks: loss and every gradient, rows without keys too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosp_rules.events import AttentionWrittenOut
from tests.autosp.attention_layer import BATCH, HEAD_DIM, LENGTH, VALUE_DIM, Attend, Layer, check

LEAST = torch.finfo(torch.float64).min
SCALE = 0.5


def _kept(window: int = LENGTH, chunk: int = LENGTH) -> torch.Tensor:
    """Causal, the first tokens of a sequence are padding, whose own rows keep no key. [B, 1, S, S]"""
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    near = (rows >= columns) & (rows - columns < window) & (rows // chunk == columns // chunk)
    return near & (columns >= torch.tensor([3, 5])[:, None, None, None])


def _mask(**options: int) -> torch.Tensor:
    """As eager implementations add it: such a row attends to all keys alike, with gradients to q and k."""
    return ~_kept(**options) * torch.tensor(LEAST, dtype=torch.float64)


def _window() -> torch.Tensor:
    """Each row keeps its own key and the one before. [S, S]"""
    by = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return ((by < 0) | (by >= 2)) * torch.tensor(LEAST, dtype=torch.float64)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) * SCALE


def _distances() -> torch.Tensor:
    return (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()


def _grouped(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def repeat(x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, dim = x.shape
        many = x[:, :, None].expand(batch, heads, m.heads // heads, length, dim)
        return many.reshape(batch, m.heads, length, dim)

    return (_scores(q, repeat(k)) + _mask()).softmax(-1) @ repeat(v)


def _sinks(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = _scores(q, k) + _mask()
    sinks = m.slopes.reshape(1, -1, 1, 1).expand(BATCH, m.heads, LENGTH, 1)
    scores = torch.cat([scores, sinks], -1)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


def _differential(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    both = ((_scores(a, b) + _mask()).softmax(-1) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
    one, other = both
    return (one - m.slopes[:, None, None] * other) @ v


def _flat(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    alibi = (m.slopes[:, None, None] * torch.arange(LENGTH)).repeat(BATCH, 1, 1)
    scores = torch.baddbmm(alibi.expand(-1, LENGTH, LENGTH), q, k.transpose(1, 2), alpha=SCALE)
    weights = (scores.view(BATCH, -1, LENGTH, LENGTH) + _mask()).softmax(-1)
    return torch.bmm(weights.view(-1, LENGTH, LENGTH), v).view(BATCH, -1, LENGTH, VALUE_DIM)


def _latent(m: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys of one part for each head and one for all, as in multi-head latent attention."""
    shared = x[:, None, :, :HEAD_DIM].expand(BATCH, m.heads, LENGTH, HEAD_DIM)
    return (_scores(torch.cat([q, q], -1), torch.cat([k, shared], -1)) + _mask()).softmax(-1) @ v


def _blocks(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Blocks of 4 queries that attend to their own block and the one before."""
    q, k, v = (z.unflatten(2, (3, 4)) for z in (q, k, v))
    k, v = (torch.cat([z.roll(1, 2), z], 3) for z in (k, v))
    return (_scores(q, k).softmax(-1) @ v).flatten(2, 3)


EAGER: dict[str, Attend] = {
    "no mask": lambda m, x, q, k, v: _scores(q, k).softmax(-1) @ v,
    "mask": lambda m, x, q, k, v: (_scores(q, k) + _mask()).softmax(-1) @ v,
    "filled": lambda m, x, q, k, v: _scores(q, k).masked_fill(~_kept(), LEAST).softmax(-1) @ v,
    "where": lambda m, x, q, k, v: torch.where(_kept(), _scores(q, k), -1e9).softmax(-1) @ v,
    "own keys": lambda m, x, q, k, v: (_scores(q, k) + _window()).softmax(-1) @ v,
    "window": lambda m, x, q, k, v: (_scores(q, k) + _mask(window=4)).softmax(-1) @ v,
    "chunks": lambda m, x, q, k, v: (_scores(q, k) + _mask(chunk=4)).softmax(-1) @ v,
    "softcap": lambda m, x, q, k, v: (torch.tanh(_scores(q, k) / 2.0) * 2.0 + _mask()).softmax(-1) @ v,
    "alibi": lambda m, x, q, k, v: (
        (_scores(q, k) + m.slopes[:, None, None] * torch.arange(LENGTH) + _mask()).softmax(-1) @ v
    ),
    "relative bias": lambda m, x, q, k, v: (
        (_scores(q, k) + m.table(_distances()).permute(2, 0, 1)[None] + _mask()).softmax(-1) @ v
    ),
    "einsum": lambda m, x, q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) + _mask()).softmax(-1), v
    ),
    "sinks": _sinks,
    "differential": _differential,
    "batch and heads in one": _flat,
    "latent": _latent,
    "blocks": _blocks,
}


FUSED = {"no mask", "filled", "where", "own keys", "softcap", "sinks"}
"""What becomes one operator: no row's keys are all hidden by a number that is added, or there is a softcap."""
GATHERED = {"einsum", "batch and heads in one", "latent", "blocks"}
"""What gathers more than keys and values where heads do not divide."""


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.some(3)
def test_written_out(name: str) -> None:
    """Of 6 heads: a region moves to them on 3 ranks, and gathers keys and values on 4."""
    reports = check(Layer(EAGER[name]), strict=False, ranks=(3, 4))
    assert {len(report.events_of(AttentionWrittenOut)) for report in reports.values()} == {int(name not in FUSED)}
    if name not in GATHERED:
        for num_ranks, report in reports.items():
            kinds = {c.kind for c in report.collectives if c.direction == "forward"}
            assert kinds == {"all_gather" if num_ranks == 4 else "all_to_all", "all_reduce"}


def test_the_report_says_why_it_stays_written_out() -> None:
    (event,) = check(Layer(EAGER["window"]), ranks=(2,))[2].events_of(AttentionWrittenOut)
    assert event.num_calls == 1
    assert event.why.startswith("keeps_own_keys(mask), found %")
    assert event.num_bytes == BATCH * 6 * LENGTH * LENGTH * 8
    (event,) = check(Layer(EAGER["latent"]), ranks=(2,), attention="ring")[2].events_of(AttentionWrittenOut)
    assert "left so without ring, which was asked for: " in str(event)
    assert "attn_implementation='sdpa'" in str(event)
    bent = check(Layer(lambda m, x, q, k, v: _scores(q, k).tanh().softmax(-1) @ v), ranks=(2,))[2]
    (event,) = bent.events_of(AttentionWrittenOut)
    assert "found aten::tanh" in str(event)
    assert "sdpa" not in str(event)


def test_grouped() -> None:
    check(Layer(_grouped, 6, 2), strict=False, ranks=(3, 4))


def test_queries_and_keys_of_two_lengths() -> None:
    check(Layer(lambda m, x, q, k, v: _scores(q, k).softmax(-1) @ v, cross=True), strict=False, ranks=(3, 4))
