"""What a dense mask means is found out; what means something else, or depends on data, stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import DeadCode, RuleSet, normalize
from fxrewrite.graph import copy_module
from fxrewrite.ops import key
from rules.masks.dense import MASKS
from tests.autosp.models import batch, build
from tests.autosp.one_device import captured

LENGTH, LONG = 9, 131_072
Mask = Callable[[int, int], torch.Tensor]
"""The mask of a batch and a length."""


def rows(length: int) -> torch.Tensor:
    return torch.arange(length)[:, None]


def columns(length: int) -> torch.Tensor:
    return torch.arange(length)


CAUSAL: dict[str, Mask] = {
    "compared": lambda b, s: columns(s) <= rows(s),
    "compared the other way": lambda b, s: rows(s) >= columns(s),
    "not of later": lambda b, s: ~(columns(s) > rows(s)),
    "as one document": lambda b, s: (columns(s) <= rows(s)) & ((rows(s) * 0) == (columns(s) * 0)),
    "with batch and heads": lambda b, s: (columns(s) <= rows(s)).expand(b, 1, s, s),
    "a triangle": lambda b, s: torch.tril(torch.ones(s, s, dtype=torch.bool)),
    "added": lambda b, s: torch.zeros(s, s, dtype=torch.float64).masked_fill(
        columns(s) > rows(s), torch.finfo(torch.float64).min
    ),
    "added infinity": lambda b, s: torch.full((s, s), float("-inf"), dtype=torch.float64).triu(1),
    "a window as long": lambda b, s: (columns(s) <= rows(s)) & (columns(s) > rows(s) - s),
}
NOTHING_HIDDEN: dict[str, Mask] = {
    "ones": lambda b, s: torch.ones(b, 1, s, s, dtype=torch.bool),
    "zeros added": lambda b, s: torch.zeros(s, s, dtype=torch.float64),
    "earlier or later": lambda b, s: (columns(s) <= rows(s)) | (columns(s) > rows(s)),
}
OTHER: dict[str, Mask] = {
    "window": lambda b, s: (columns(s) <= rows(s)) & (columns(s) > rows(s) - (s - 1)),
    "chunks": lambda b, s: (columns(s) <= rows(s)) & (columns(s) // 4 == rows(s) // 4),
    "prefix": lambda b, s: (columns(s) <= rows(s)) | (columns(s) < 3),
    "strictly earlier": lambda b, s: columns(s) < rows(s),
    "transposed": lambda b, s: columns(s) >= rows(s),
    "one entry more": lambda b, s: (columns(s) <= rows(s)) | ((rows(s) == s - 2) & (columns(s) == s - 1)),
    "one row of a batch": lambda b, s: (columns(s) <= rows(s)) & (torch.arange(b)[:, None, None, None] < b - 1),
    "a bias": lambda b, s: (columns(s) - rows(s)).double(),
    "a small penalty": lambda b, s: torch.where(columns(s) <= rows(s), 0.0, -1e4).double(),
}


def causal_but_for(first: int, last: int) -> Mask:
    """Causal, and open between tokens of an image."""

    def mask(b: int, s: int) -> torch.Tensor:
        in_row, in_column = ((x >= first) & (x < last) for x in (rows(s), columns(s)))
        return (columns(s) <= rows(s)) | (in_row & in_column)

    return mask


def put_together(b: int, s: int) -> torch.Tensor:
    """Causal, of two halves: no expression of rows and columns."""
    earlier = columns(s) <= rows(s)
    return torch.cat([earlier[: s // 2], earlier[s // 2 :]]).flip(0).flip(0)


def qkv(length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def traced(mask: Mask, tracing_mode: str = "fake", length: int = LENGTH) -> fx.GraphModule:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(q.shape[0], q.shape[2]))

    return make_fx(attend, tracing_mode=tracing_mode, pre_dispatch=True)(*qkv(length))


def fired(gm: fx.GraphModule) -> list[str]:
    report = RuleSet("read", MASKS, DeadCode()).apply(gm)
    return [entry.rule for entry in report.rules if entry.rewrites and entry.rule != "dead_code"]


def check_equal(gm: fx.GraphModule, mask: Mask, length: int = LENGTH) -> None:
    a, b = qkv(length), qkv(length)
    expected = F.scaled_dot_product_attention(*a, attn_mask=mask(2, length))
    found = gm(*b)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close([x.grad for x in b], [x.grad for x in a], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CAUSAL)
def test_causal(case: str) -> None:
    gm = traced(CAUSAL[case])
    assert fired(gm) == ["masks.causal"]
    assert [key(node) for node in gm.graph.nodes if node.op == "call_function"] == [
        "aten::scaled_dot_product_attention"
    ]
    check_equal(gm, CAUSAL[case])


@pytest.mark.parametrize("case", NOTHING_HIDDEN)
def test_nothing_hidden(case: str) -> None:
    gm = traced(NOTHING_HIDDEN[case])
    assert fired(gm) == ["masks.nothing_hidden"]
    check_equal(gm, NOTHING_HIDDEN[case])


@pytest.mark.parametrize("case", OTHER)
def test_what_means_something_else_stays(case: str) -> None:
    assert not fired(traced(OTHER[case]))


@pytest.mark.parametrize("length", [600, LONG])
@pytest.mark.parametrize("case", ["compared", "added", "with batch and heads", "a triangle", "a window as long"])
def test_long_masks(case: str, length: int) -> None:
    gm = traced(CAUSAL[case], length=length)
    assert fired(gm) == ["masks.causal"]
    assert not fired(traced(OTHER["window"], length=length))
    assert not fired(traced(OTHER["one entry more"], length=length))


@pytest.mark.parametrize(("first", "last"), [(40, 616), (70_001, 70_003), (LONG - 2, LONG)])
def test_no_row_of_a_long_mask_is_left_out(first: int, last: int) -> None:
    gm = traced(causal_but_for(first, last), length=LONG)
    assert not fired(gm)
    assert f"neither causal nor open at length {LONG}" in str(MASKS.once().explain(gm, "masks.causal"))


@pytest.mark.parametrize("first", [400, 100_000])
def test_no_row_is_left_out_where_the_length_is_a_symbol(first: int) -> None:
    gm = traced(causal_but_for(first, first + 576), "symbolic")
    assert not fired(gm)
    assert "neither causal nor open at length 262144" in str(MASKS.once().explain(gm, "masks.causal"))


def test_a_mask_without_a_proof_for_every_length_stays_and_is_reported() -> None:
    gm = traced(causal_but_for(1_000_000, 1_000_100), "symbolic")
    report = MASKS.apply(gm)
    assert not report.rewrites
    (reason,) = {refusal.reason for refusal in report.refusals}
    assert reason.endswith("it may be causal, and there is no proof for every length and batch")


def test_a_mask_that_is_no_expression_is_computed_whole() -> None:
    gm = traced(put_together)
    assert fired(gm) == ["masks.causal"]
    check_equal(gm, put_together)
    assert not fired(traced(lambda b, s: put_together(b, s).roll(1, 0)))


@pytest.mark.parametrize(("mode", "length"), [("fake", LONG), ("symbolic", LENGTH)])
def test_a_mask_that_is_too_large_to_be_computed_stays_and_is_reported(mode: str, length: int) -> None:
    """At 131,072 tokens it has 16 GiB."""
    report = MASKS.apply(traced(put_together, mode, length))
    assert not report.rewrites
    (reason,) = {refusal.reason for refusal in report.refusals}
    assert reason.endswith("entries, the limit is 67,108,864")


def test_a_mask_that_is_too_large_and_depends_on_data_is_not_reported() -> None:
    gm = traced(lambda b, s: put_together(b, s) & (torch.rand(s) > -1), length=LONG)
    report = MASKS.apply(gm)
    assert not report.rewrites
    assert not report.refusals
    assert "does not depend on sizes alone" in str(MASKS.once().explain(gm, "masks.causal"))


def test_one_number_for_all_rows_and_columns_is_not_causal() -> None:
    assert not fired(traced(lambda b, s: torch.ones(1, 1, dtype=torch.bool)))


@pytest.mark.parametrize("case", [case for case in CAUSAL if case != "a window as long"])
def test_a_length_that_is_a_symbol(case: str) -> None:
    gm = traced(CAUSAL[case], "symbolic")
    assert fired(gm) == ["masks.causal"]
    check_equal(gm, CAUSAL[case], length=14)

    def window(b: int, s: int) -> torch.Tensor:
        return (columns(s) <= rows(s)) & (columns(s) > rows(s) - 4096)

    assert fired(traced(window)) == ["masks.causal"]  # at this length it is
    assert not fired(traced(window, "symbolic"))


def test_a_mask_that_another_batch_would_get_otherwise_stays() -> None:
    def mask(b: int, s: int) -> torch.Tensor:
        return (columns(s) <= rows(s)) & (torch.arange(b)[:, None, None, None] < 2)

    assert fired(traced(mask)) == ["masks.causal"]  # of two
    assert not fired(traced(mask, "symbolic"))


def test_a_mask_that_is_changed_afterwards_is_read_anew() -> None:
    gm = traced(CAUSAL["compared"])
    assert fired(copy_module(gm)) == ["masks.causal"]
    (compared,) = (node for node in gm.graph.nodes if key(node) == "aten::le")
    compared.target = torch.ops.aten.lt.Tensor
    assert not fired(gm)


def test_what_depends_on_data_or_chance_stays() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, (columns(LENGTH) <= rows(LENGTH)) & padding[:, None, None])

    gm = make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*qkv(), torch.ones(2, LENGTH, dtype=torch.bool))
    assert not fired(gm)
    assert "does not depend on sizes alone" in str(MASKS.once().explain(gm, "masks.causal"))
    assert not fired(traced(lambda b, s: torch.rand(s, s) > -1))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_makes_hidden_scores_visible_stays(scale: float) -> None:
    """With is_causal, torch's kernel for CPUs multiplies -inf by it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, columns(LENGTH) <= rows(LENGTH), scale=scale)

    assert F.scaled_dot_product_attention(*qkv(), is_causal=True, scale=scale).isnan().any()
    gm = make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*qkv())
    report = MASKS.once().apply(gm)
    assert not report["masks.causal"].rewrites
    assert "is_causal multiplies hidden scores" in str(report)


def test_rows_and_columns_that_differ_stay() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, 1:], k, v, torch.ones(LENGTH - 1, LENGTH, dtype=torch.bool))

    assert not fired(make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*qkv()))


@pytest.mark.parametrize("dynamic", [False, True], ids=("static", "dynamic"))
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
@pytest.mark.some(2)
def test_a_decoder_holds_no_value_with_two_sequence_dimensions(name: str, dynamic: bool) -> None:
    inputs: dict[str, Any] = batch(name, "plain", length=24)
    if dynamic:
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 1)
    gm = normalize(captured(build(name), inputs)[0])
    assert fired(gm) == ["masks.causal"]
    lengths = {str(tensor.shape[1]) for tensor in inputs.values()} if not dynamic else set[str]()
    symbols = {str(n.meta["val"]) for n in gm.graph.find_nodes(op="placeholder") if not hasattr(n.meta["val"], "shape")}
    for node in gm.graph.nodes:
        shape = [str(size) for size in getattr(node.meta.get("val"), "shape", ())]
        assert sum(size in lengths | symbols for size in shape) < 2, f"{node.format_node()} {shape}"
