"""Attention over 2, 3 and 4 ranks equals one device's, loss and every gradient, whatever heads, masks and shapes."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from autosp_rules.report import AutoSPReport
from tests.autosp.attention_layer import BATCH, HEAD_DIM, IDS, LENGTH, VALUE_DIM, Attend, Layer, attention_line, check

sdpa = F.scaled_dot_product_attention


def strategies(reports: dict[int, AutoSPReport]) -> list[str]:
    """The strategy of the one attention, for each number of ranks; "" where the report has none."""
    return [re.sub(r"attention: 1 x ([\w ]+): .*", r"\1", attention_line(report)) for report in reports.values()]


def _positions() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(LENGTH)[:, None], torch.arange(LENGTH)


def _distances() -> torch.Tensor:
    rows, columns = _positions()
    return (rows - columns).abs()


SHAPES: dict[str, tuple[int, Attend, list[str]]] = {
    "batch and heads in one": (
        6,
        lambda q, k, v: sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (BATCH, -1)),
        ["ulysses", "ulysses", "ulysses"],
    ),
    "a batch alone": (
        1,
        lambda q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 0], is_causal=True)[:, None],
        ["ulysses", "gather_kv", "gather_kv"],
    ),
    "two batches": (
        6,
        lambda q, k, v: sdpa(
            q.unflatten(1, (2, 3)), k.unflatten(1, (2, 3)), v.unflatten(1, (2, 3)), is_causal=True
        ).flatten(1, 2),
        ["by the batch", "ulysses", "gather_kv"],
    ),
    "a sequence alone": (
        2,
        lambda q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0], is_causal=True).expand(BATCH, 2, LENGTH, VALUE_DIM),
        ["gather_kv", "gather_kv", "gather_kv"],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_rank(name: str) -> None:
    heads, attend, expected = SHAPES[name]
    assert strategies(check(Layer(lambda m, x, q, k, v: attend(q, k, v), heads, heads))) == expected


BIASES: dict[str, Attend] = {
    "by head and key": lambda m, x, q, k, v: sdpa(q, k, v, m.slopes[:, None, None] * _positions()[1]),
    "by batch, head and key": lambda m, x, q, k, v: sdpa(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        (m.slopes[:, None, None] * _positions()[1]).repeat(BATCH, 1, 1),
    ).unflatten(0, (BATCH, -1)),
    "by head and distance": lambda m, x, q, k, v: sdpa(q, k, v, m.table(_distances()).permute(2, 0, 1)[None]),
    "of the query": lambda m, x, q, k, v: sdpa(q, k, v, m.gate(x)[:, None]),
    "of the key": lambda m, x, q, k, v: sdpa(q, k, v, m.gate(x)[:, None].transpose(2, 3)),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.some(2)
def test_any_bias(name: str) -> None:
    check(Layer(BIASES[name]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_and_keys_of_two_lengths(is_causal: bool) -> None:
    reports = check(Layer(lambda m, x, q, k, v: sdpa(q, k, v, is_causal=is_causal), cross=True))
    assert strategies(reports) == ["ulysses", "ulysses", "gather_kv"]


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_one_side_that_is_not_sharded(side: str) -> None:
    """Learned queries that read a sequence, and a sequence that reads learned keys."""

    def attend(m: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        learned = (
            m.q(m.gate.weight).unflatten(-1, (m.heads, -1)).transpose(0, 1).expand(BATCH, m.heads, LENGTH, HEAD_DIM)
        )
        if side == "queries":
            return sdpa(learned, k, v)
        return F.pad(sdpa(q, learned, learned), (0, VALUE_DIM - HEAD_DIM))

    check(Layer(attend), strict=False)  # where heads do not divide, learned queries are every rank's


def test_a_symbolic_length() -> None:
    check(Layer(lambda m, x, q, k, v: sdpa(q, k, v, is_causal=True)), dynamic=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_symbolic_length_of_one_token_a_rank(num_ranks: int) -> None:
    """A size that is 1 in the trace, and not for every length, is no literal 1 beside it."""
    layer = Layer(lambda m, x, q, k, v: sdpa(q, k, v, is_causal=True))
    check(layer, ranks=(num_ranks,), ids=IDS[:, :num_ranks], dynamic=True)


COLLECTIVES: dict[str, tuple[int, int, int, dict[str, int]]] = {
    "multi-head": (6, 6, 2, {"all_to_all": 2}),
    "grouped": (6, 2, 2, {"all_to_all": 2}),
    "grouped, kv heads do not divide": (12, 2, 3, {"all_to_all": 2}),
    "grouped, kv heads are sent as all heads": (6, 3, 2, {"all_to_all": 2}),
    "fewer kv heads than ranks": (8, 2, 4, {"all_to_all": 2}),
    "one kv head": (6, 1, 3, {"all_to_all": 2}),
    "heads do not divide": (6, 2, 4, {"all_gather": 1}),
}


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """As Hugging Face models write it out."""
    return x[:, :, None].expand(*x.shape[:2], times, *x.shape[2:]).reshape(x.shape[0], -1, *x.shape[2:])


@pytest.mark.parametrize("is_written_out", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_and_their_bytes(name: str, is_written_out: bool) -> None:
    """q, k and v in one, the result in another, forward and backward; kv heads as few as the ranks' queries read."""
    heads, kv_heads, size, expected = COLLECTIVES[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if is_written_out:
            return sdpa(q, _repeated(k, heads // kv_heads), _repeated(v, heads // kv_heads), is_causal=True)
        return sdpa(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    layer = Layer(lambda m, x, q, k, v: attend(q, k, v), heads, kv_heads)
    report = check(layer, ranks=(size,), attention="ulysses" if "all_to_all" in expected else "gather_kv")[size]
    found = {(c.kind, c.direction): c for c in report.collectives if c.kind != "all_reduce"}
    adjoint = {"all_to_all": "all_to_all", "all_gather": "reduce_scatter"}
    counts = {(kind, "forward"): count for kind, count in expected.items()}
    counts |= {(adjoint[kind], "backward"): count for kind, count in expected.items()}
    assert {key: c.count for key, c in found.items()} == counts
    numbers = BATCH * LENGTH // size * (HEAD_DIM + VALUE_DIM) * 8  # of one head, of two operands
    if "all_to_all" in expected:
        num_bytes = numbers * (heads + math.lcm(kv_heads, size)) * (size - 1) // size
    else:
        num_bytes = numbers * kv_heads * (size - 1)
    assert {c.bytes_sent for c in found.values()} == {num_bytes}


def test_heads_of_32_and_8_send_five_eighths() -> None:
    layers = [Layer(lambda m, x, q, k, v: sdpa(q, k, v, enable_gqa=True), 8, heads) for heads in (8, 2)]
    repeated, grouped = (check(layer, ranks=(2,), attention="ulysses")[2].bytes_sent for layer in layers)
    loss = 2 * 8  # the all-reduce, forward and backward
    assert (grouped - loss) / (repeated - loss) == 0.625


def test_k_and_v_that_two_attentions_read_travel_once() -> None:
    reports = check(Layer(lambda m, x, q, k, v: sdpa(q, k, v) + sdpa(q.sin(), k, v)), ranks=(2,))
    (forward,) = [c for c in reports[2].collectives if c.kind == "all_to_all" and c.direction == "forward"]
    assert forward.count == 4  # q, k and v together; the other q; a result each
