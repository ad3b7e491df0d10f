"""Each strategy of attention equals one device, or is refused with the reason and the strategy that would do it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from autosp_rules import AutoSPConfig, AutoSPError
from autosp_rules.config import AttentionOption
from autosp_rules.transform import transform
from fxrewrite.spmd import Axis
from tests.autosp.attention_layer import Attend, Layer, attention_line, check
from tests.autosp.one_device import captured
from tests.zoo import attention

sdpa = F.scaled_dot_product_attention
LENGTH = 24
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % 8
HEADS = {**attention.HEADS, "MQA 6/1": (6, 1), "GQA 12/3": (12, 3)}
MASKS: dict[str, Attend] = {
    **attention.MASKS,
    "of heads": lambda q, k, v, **gqa: sdpa(q, k, v, _of_heads(q.shape[1]), **gqa),
    "hidden by -1e9": lambda q, k, v, **gqa: sdpa(q, k, v, ~_of_heads(1) * torch.tensor(-1e9).double(), **gqa),
}


def _of_heads(heads: int) -> torch.Tensor:
    """A window of keys that is longer for each head. [H, S, S]"""
    by = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return (by >= 0) & (by < 3 * torch.arange(1, heads + 1)[:, None, None])


def layer(heads: str, mask: str) -> Layer:
    return attention.layer(MASKS[mask], *HEADS[heads])


CELLS: list[tuple[AttentionOption, str, str, int]] = [
    ("ulysses", "GQA 8/2", "padding", 4),
    ("ulysses", "GQA 12/3", "causal", 4),
    ("ulysses", "MQA 6/1", "ALiBi", 3),
    ("gather_kv", "MHA", "causal", 2),
    ("gather_kv", "GQA 8/2", "padding", 3),
    ("gather_kv", "6 heads", "none", 4),
    ("gather_kv", "MQA 6/1", "of heads", 4),
    ("ring", "MHA", "causal", 2),
    ("ring", "GQA 8/2", "padding", 3),
    ("ring", "MQA 6/1", "none", 4),
    ("ring", "6 heads", "causal", 4),
    ("ring", "GQA 8/2", "ALiBi", 4),
    ("ring", "6 heads", "hidden by -1e9", 3),
    ("ring_ulysses", "MHA", "padding", 4),
    ("ring_ulysses", "6 heads", "causal", 4),
    ("ring_ulysses", "6 heads", "of heads", 4),
    ("ring_ulysses", "GQA 8/2", "causal", 8),
]


@pytest.mark.parametrize(("strategy", "heads", "mask", "num_ranks"), CELLS)
def test_equal_to_one_device(strategy: AttentionOption, heads: str, mask: str, num_ranks: int) -> None:
    report = check(layer(heads, mask), ranks=(num_ranks,), attention=strategy, ids=IDS)[num_ranks]
    assert attention_line(report).startswith(f"attention: 1 x {strategy}: asked for")


def test_what_a_ring_sends_is_in_the_report() -> None:
    """k and v to the 3 others; so again, and their gradients home; halves of q, k, v and the result trade places."""
    report = check(layer("GQA 8/2", "causal"), ranks=(4,), attention="ring", ids=IDS)[4]
    chunk = 2 * LENGTH // 4 * 8  # of one number a token
    kv, qo = 2 * (4 + 6) * chunk, 8 * (4 + 6) * chunk
    sent = {(c.kind, c.direction): (c.count, c.bytes_sent) for c in report.collectives if c.kind != "all_reduce"}
    assert sent == {
        ("ring_attention", "forward"): (1, 3 * kv),
        ("ring_attention", "backward"): (1, 3 * kv + 4 * kv),
        ("exchange", "forward"): (2, kv + qo),
        ("exchange", "backward"): (2, kv + qo),
    }
    assert f"each sends {3 * kv + kv + qo:,} bytes per rank forward" in attention_line(report)


def test_attention_among_states_of_one_token_sends_nothing() -> None:
    """As in residuals that attend to the layers before, the sequence is where heads are, and queries are parameters."""

    def attend(m: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (y.transpose(1, 2) for y in (k, v))
        query = keys.new_ones(keys.shape[-1]).expand(*keys.shape[:-2], 1, -1)
        return v * sdpa(query, keys, values).transpose(1, 2)

    report = check(Layer(attend), ranks=(2,), ids=IDS)[2]
    assert "sends 0 bytes" in attention_line(report)
    assert {c.kind for c in report.collectives} == {"all_reduce"}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("length", [LENGTH, 23])
def test_rows_of_a_batch_as_one_sequence_over_a_ring(length: int, dynamic: bool) -> None:
    """A rank has a chunk of each, and the ring counts rows from the first of all to the last."""

    def attend(m: Layer, x: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.transpose(0, 1).flatten(1, 2).unsqueeze(0) for y in qkv)
        return sdpa(q, k, v, is_causal=True)[0].unflatten(1, x.shape[:2]).transpose(0, 1)

    for ranks, strategy in ((3, "ring"), (4, "ring_ulysses")):
        check(Layer(attend), dynamic=dynamic, ranks=(ranks,), attention=strategy, ids=IDS[:, :length])


def test_rows_that_every_rank_holds_need_no_ring() -> None:
    """As of attention to the first token alone, in a model whose other attention runs over a ring."""

    def attend(m: Layer, x: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        first = sdpa(*(y[:, :, :1] for y in qkv), is_causal=True)
        return sdpa(*qkv, is_causal=True) * first

    for strategy in ("ring", "ring_ulysses"):
        check(Layer(attend), ranks=(4,), attention=strategy, ids=IDS)


@pytest.mark.parametrize("length", [LENGTH, 21])
def test_a_symbolic_length_over_a_ring(length: int) -> None:
    check(layer("6 heads", "causal"), ranks=(4,), attention="ring", ids=IDS[:, :length], dynamic=True)


@pytest.mark.parametrize(
    ("strategy", "heads", "mask", "num_ranks", "length", "why"),
    [
        ("ring", "GQA 8/2", "none", 3, 4, "keys travel"),
        ("ring", "MHA", "causal", 4, 13, "keys travel"),  # halves of 2 rows trade places
        (
            "ring",
            "6 heads",
            "causal",
            8,
            3,
            "keys travel, 1 rows have no halves to trade",
        ),  # most ranks have padding alone
        ("ring_ulysses", "GQA 8/2", "causal", 8, 21, "2 groups of 4 ranks"),
        ("ring_ulysses", "6 heads", "causal", 4, 9, "2 groups of 2 ranks"),
    ],
)
@pytest.mark.some(2)
def test_lengths_that_the_ranks_do_not_divide_over_a_ring(
    strategy: AttentionOption, heads: str, mask: str, num_ranks: int, length: int, why: str
) -> None:
    report = check(layer(heads, mask), ranks=(num_ranks,), attention=strategy, ids=IDS[:, :length])[num_ranks]
    assert attention_line(report).startswith(f"attention: 1 x {strategy}: asked for: {why}")


def test_a_length_that_the_ranks_divide_costs_nothing_more_over_a_ring() -> None:
    gm, _ = captured(layer("MHA", "none"), {"ids": IDS.clone(), "memory": IDS.clone()})
    program, _ = transform(gm, AutoSPConfig(attention="ring"), Axis("sp", 4))
    names = {str(node.target) for node in program.graph.nodes}
    assert not names & {"aten.index_select.default", "aten.arange.default", "aten.lt.Scalar"}


def _crossed(m: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k[:, :, :12], v[:, :, :12])


_NO_GROUPS = "3 ranks cannot be split into two or more groups of two or more that share 4 heads"
REFUSED: dict[str, tuple[AttentionOption, Layer, int, str, str]] = {
    "heads": ("ulysses", layer("6 heads", "causal"), 4, "6 heads do not divide over axis sp (size 4)", "gather_kv"),
    "groups": (
        "ring_ulysses",
        layer("MHA", "none"),
        3,
        _NO_GROUPS,
        "gather_kv",
    ),
    "lengths": ("ring", Layer(_crossed), 2, "queries and keys have lengths 24 and 12", "gather_kv"),
    "added": (
        "ring",
        Layer(lambda m, x, q, k, v: sdpa(q, k, v, attention.padding(LENGTH).double())),
        4,
        "the mask is added to the scores, and may hide all keys of a row by a finite number",
        "gather_kv",
    ),
    "unreadable": (
        "ring",
        Layer(lambda m, x, q, k, v: sdpa(q, k, v, (m.gate(x) @ m.gate(x).transpose(1, 2) > 0)[:, None])),
        2,
        "the mask cannot be read as an expression of rows and columns: ",
        "ulysses",
    ),
    "rank": (
        "ring",
        Layer(lambda m, x, q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 0])[:, None].expand(-1, 6, -1, -1)),
        2,
        "q has rank 3",
        "ulysses",
    ),
    "dropout": (
        "ring",
        Layer(lambda m, x, q, k, v: sdpa(q, k, v, dropout_p=0.1)),
        2,
        "dropout draws in the scores (p = 0.1)",
        "ulysses",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_and_who_can_is_named(name: str) -> None:
    strategy, model, size, reason, other = REFUSED[name]
    gm, _ = captured(model, {"ids": IDS.clone(), "memory": IDS.clone()})
    with pytest.raises(AutoSPError, match=re.escape(f"attention='{strategy}': {reason}")) as error:
        transform(gm, AutoSPConfig(attention=strategy), Axis("sp", size))
    assert error.value.hint == f"use attention='{other}', which serves it, or 'auto'"


def chosen(model: _Attends, length: int, num_ranks: int, *, dynamic: bool = False) -> str:
    """What the report says of attention for a sequence of this length, which nothing computes."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    gm, _ = captured(model.to("meta"), {"ids": ids})
    return attention_line(transform(gm, AutoSPConfig(), Axis("sp", num_ranks))[1])


def test_a_ring_shares_causal_work_where_bytes_cost_less_than_operations() -> None:
    """Of long sequences the last rank reads all keys where they are gathered; short ones send more over a ring."""
    for length, expected in ((16, "gather_kv"), (1 << 20, "ring")):
        assert chosen(_Attends(3, 3, is_causal=True), length, 4).startswith(f"attention: 1 x {expected}: ")


CHEAPEST = {  # heads, kv heads, ranks, whether later keys are hidden
    (32, 32, 8, True): "ulysses",
    (32, 32, 2, False): "ulysses",  # as many bytes as gather_kv
    (32, 8, 2, True): "ulysses",  # more bytes than gather_kv, whose last rank has 1.5 x the work
    (32, 8, 8, True): "ulysses",
    (32, 8, 8, False): "ulysses",
    (32, 8, 2, False): "gather_kv",
    (32, 1, 8, True): "ulysses",
    (32, 1, 8, False): "gather_kv",
}


@pytest.mark.parametrize("masked", [False, True])
def test_what_costs_least_is_taken(masked: bool) -> None:
    """At 8192 tokens; a mask is as causal as `is_causal`."""
    for (heads, kv_heads, num_ranks, is_causal), expected in CHEAPEST.items():
        line = chosen(_Attends(heads, kv_heads, is_causal=is_causal, masked=masked), 8192, num_ranks)
        assert line.startswith(f"attention: 1 x {expected}: "), line
        assert ("costs less than ulysses" in line) == (expected == "gather_kv")


@pytest.mark.parametrize(("dynamic", "expected"), [(False, "gather_kv"), (True, "ulysses")])
def test_a_symbolic_length_is_decided_for_as_a_long_one(dynamic: bool, expected: str) -> None:
    line = chosen(_Attends(32, 8, is_causal=True), 64, 2, dynamic=dynamic)
    assert line.startswith(f"attention: 1 x {expected}: "), line


class _Attends(torch.nn.Module):
    def __init__(self, heads: int, kv_heads: int, *, is_causal: bool, masked: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.is_causal, self.masked = heads, kv_heads, is_causal, masked
        self.embed = torch.nn.Embedding(8, 32 * (heads + 2 * kv_heads))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).unflatten(-1, (-1, 32)).transpose(1, 2)
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if not self.masked:
            return sdpa(q, k, v, is_causal=self.is_causal, enable_gqa=True).square().mean()
        mask = (ids > 0)[:, None, None]
        if self.is_causal:
            positions = torch.arange(ids.shape[1], device=ids.device)
            mask = mask & (positions[:, None] >= positions)
        return sdpa(q, k, v, mask, enable_gqa=True).square().mean()
