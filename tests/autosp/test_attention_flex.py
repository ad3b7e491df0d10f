"""A model's own flex attention is exact over 2, 3 and 4 ranks: loss and every gradient, and sharded where it is a mask.

On a CPU, torch's function refuses tensors that require gradients; what Dynamo makes of it, which is called here, runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.attention.flex_attention import _create_empty_block_mask, create_block_mask

from autosp_rules.events import AttentionCallLeft, AttentionRuns, MaskedAttention
from autosp_rules.parallelism import AUTOSP
from fxrewrite.spmd import Parallelism, Shard, param
from fxrewrite.testing import simulate
from rules.attention.flex_operator import FLEX_ATTENTION
from rules.attention.from_flex import why_not_raised
from tests.autosp.attention_layer import BATCH, IDS, LENGTH, Layer, check

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch, of an index under vmap
SCALE = 0.5
OPTIONS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
Function = Callable[..., torch.Tensor]


def _scores(score: Any, *_: Any) -> Any:
    return score


def _causal(b: Any, h: Any, i: Any, j: Any, documents: Any) -> Any:
    return i >= j


def _entries(function: Function, heads: int, *before: torch.Tensor) -> torch.Tensor:
    """The function of every entry, by indexing of whole tensors, and without torch.vmap."""
    sizes = (BATCH, heads, LENGTH, LENGTH)
    indices = (torch.arange(n).reshape(-1, *[1] * (3 - at)) for at, n in enumerate(sizes))
    return function(*before, *indices)


def flex(
    mask: Function | None = _causal,
    score: Function = _scores,
    finish: Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor] = lambda m, out, lse: out,
    per: str = "",
) -> Callable[..., torch.Tensor]:
    """Attention of a layer: flex attention where it is compiled, and otherwise scores that are written out.

    Args:
        mask: of (b, h, i, j, documents), or None; documents are of the data, [B, S].
        score: of (score, m, b, h, i, j).
        finish: of the layer, the result and the logsumexp.
        per: which of "b" and "h" the blocks differ by.
    """

    def attend(m: Layer, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        documents = (x.detach()[..., 0] > 0).cumsum(-1)

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            assert mask is not None
            return mask(b, h, i, j, documents)

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score(s, m, b, h, i, j)

        if torch.compiler.is_compiling():
            blocks = _create_empty_block_mask(q, k)
            if mask is not None:
                many = (q.shape[0] if "b" in per else None, m.heads if "h" in per else None)
                blocks = create_block_mask(mask_mod, *many, q.shape[2], k.shape[2], device="cpu")
            out, lse, _ = FLEX_ATTENTION(q, k, v, score_mod, blocks.as_tuple(), SCALE, OPTIONS)
            return finish(m, out, lse * math.log(2))
        k, v = (y.repeat_interleave(m.heads // m.kv_heads, 1) for y in (k, v))
        scores = _entries(score_mod, m.heads, q @ k.transpose(-1, -2) * SCALE)
        if mask is not None:
            scores = scores.masked_fill(~_entries(mask_mod, m.heads), -math.inf)
        keeps_none = scores.isneginf().all(-1, keepdim=True)
        out = scores.masked_fill(keeps_none, 0).softmax(-1).masked_fill(keeps_none, 0) @ v
        return finish(m, out, scores.logsumexp(-1))

    return attend


def _sinks(m: Layer, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """As transformers writes them."""
    column, sinks = lse.unsqueeze(-1), m.slopes.view(1, -1, 1, 1).expand(*out.shape[:-1], 1)
    return out * torch.exp(column - torch.logsumexp(torch.cat([column, sinks], -1), -1, keepdim=True))


def _sinks_by_rows(m: Layer, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """As torchtitan writes them."""
    share = torch.sigmoid(lse.transpose(1, 2) - m.slopes.view(1, 1, -1)).unsqueeze(-1)
    return (out.transpose(1, 2) * share).transpose(1, 2)


def _alibi(s: Any, m: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + m.rates[h] * (j - i)


class Rated(Layer):
    """With a rate for each head, which is not trained."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("rates", torch.rand(self.heads).double())


MASKED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "no mask": (flex(None), ""),
    "causal": (flex(), "causal"),
    "window": (flex(lambda b, h, i, j, d: (i >= j) & (i - j < 3)), "causal and window 3"),
    "documents": (
        flex(lambda b, h, i, j, d: (i >= j) & (d[b, i] == d[b, j]), per="b"),
        "causal and documents",
    ),
    "heads": (flex(lambda b, h, i, j, d: (i >= j) & ((h % 2 == 0) | (i - j < 3)), per="h"), "causal and a condition"),
    "rows that keep no key": (flex(lambda b, h, i, j, d: (i >= j) & (i > 1)), "causal and a condition on positions"),
    "score that hides": (flex(None, lambda s, m, b, h, i, j: torch.where(i >= j, s, -math.inf)), "causal"),
    "bias": (flex(score=_alibi), "a condition on data"),
    "trained bias": (flex(score=lambda s, m, b, h, i, j: s + m.table.weight[(i - j).abs(), h]), ""),
    "bent": (flex(score=lambda s, m, b, h, i, j: 2.0 * torch.tanh(s / 2.0)), "causal"),
    "bent, then bias": (flex(score=lambda s, m, *at: _alibi(torch.tanh(s / 2.0) * 2.0, m, *at)), "a condition on data"),
    "sinks": (flex(finish=_sinks), "causal"),
    "sinks by rows": (flex(finish=_sinks_by_rows), "causal"),
}
"""What becomes attention with a mask, and what the report calls it; "" if it holds the mask, or there is none."""

LEFT: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "scaled": (flex(score=lambda s, m, b, h, i, j: s * (i + 1)), "the score function calls aten::mul"),
    "biased, then bent": (
        flex(score=lambda s, m, b, h, i, j: 2.0 * torch.tanh((s + 0.1 * (j - i)) / 2.0)),
        "the score function calls aten::mul",
    ),
    "hidden by a number": (
        flex(None, lambda s, m, b, h, i, j: torch.where(i >= j, s, -1e4)),
        "the score function calls aten::where",
    ),
    "logsumexp": (flex(finish=lambda m, out, lse: out * lse.unsqueeze(-1)), "its logsumexp or greatest score is read"),
}
"""What stays flex attention, and why."""


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.some(4)
def test_a_mask_or_a_bias(name: str) -> None:
    """6 heads are sharded over 3 ranks; 4 gather keys and values."""
    attend, mask = MASKED[name]
    for report in check(Rated(attend), ranks=(3, 4)).values():
        assert report.events_of(AttentionRuns)
        assert not report.events_of(AttentionCallLeft)
    said = [event.mask for event in report.events_of(MaskedAttention) if event.computed == "rows"]
    assert all(text.startswith(mask) for text in said)
    assert bool(said) == bool(mask)


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_runs_whole(name: str) -> None:
    attend, why = LEFT[name]
    report = check(Layer(attend), strict=False, ranks=(3,))[3]
    (event,) = report.events_of(AttentionCallLeft)
    assert event.why.startswith(why)
    assert "%flex_attention" in str(event)
    assert any("flex_attention has no layout rule" in line for line in report.lines)


def test_grouped_heads_of_any_length() -> None:
    reports = check(Layer(MASKED["documents"][0], kv_heads=2), ranks=(2, 4), dynamic=True)
    assert {len(report.events_of(AttentionRuns)) for report in reports.values()} == {1}


def test_one_device_of_keys() -> None:
    """Keys of a batch of 1 are read by every entry of the batch."""

    def attend(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        one = k.mean(0, keepdim=True), v.mean(0, keepdim=True)
        return MASKED["causal"][0](m, x, q, *one)

    check(Layer(attend), ids=IDS)


def test_blocks_that_hide_by_themselves() -> None:
    def attend(m: Layer, x: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE)
        blocks = create_block_mask(
            lambda b, h, i, j: i.new_ones((), dtype=torch.bool), None, None, LENGTH, LENGTH, "cpu"
        )
        return FLEX_ATTENTION(q, k, v, lambda s, *_: s, blocks.as_tuple(), SCALE, OPTIONS)[0]

    (event,) = check(Layer(attend), strict=False, ranks=(2,))[2].events_of(AttentionCallLeft)
    assert event.why == "the block mask has blocks and no function"


def test_heads_over_another_axis() -> None:
    """Over the axis of heads, and over both axes, no key or value is gathered."""

    class Named(Layer):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids, ids)

    by_heads = {param(name): Shard(0) for name in ("q.*", "k.*", "v.*", "slopes")} | {param("o.weight"): Shard(1)}
    heads = Parallelism("heads", axis="tp", place=by_heads)
    model = Named(MASKED["sinks"][0])
    for plan, mesh in ((heads, {"tp": 2}), (AUTOSP | heads, {"sp": 3, "tp": 2})):
        found = simulate(model, {"ids": IDS}, plan, mesh)
        assert found.loss_error < 1e-12
        assert found.grad_error < 1e-9
        assert "all_gather" not in found.sent["tp"]


def _detached(s: fx.Node, b: fx.Node, h: fx.Node, i: fx.Node, j: fx.Node) -> fx.Node:
    call = s.graph.call_function
    return call(torch.ops.aten.add.Tensor, (s, call(torch.ops.aten.detach.default, (j,))))


NO_SCORES = "the score function does not return scores"


@pytest.mark.parametrize(
    ("score", "why"),
    [
        pytest.param(lambda s, b, h, i, j: i, NO_SCORES, id="an index"),
        pytest.param(lambda s, b, h, i, j: 0.5, NO_SCORES, id="a number"),
        pytest.param(_detached, "the score function detaches a value, which torch.vmap would differentiate"),
    ],
)
def test_a_function_that_cannot_be_written(score: Any, why: str) -> None:
    graph, body = fx.Graph(), fx.Graph()
    made = score(*(body.placeholder(name) for name in "sbhij"))
    body.output(made)
    mask = fx.Graph()
    _ = [mask.placeholder(name) for name in "bhij"]
    mask.output(True)
    q = graph.placeholder("q")
    bodies = [graph.get_attr(name) for name in ("score", "mask")]
    flex = graph.call_function(
        FLEX_ATTENTION, (q, q, q, bodies[0], (1, 1, 1 << 30, 1 << 30, bodies[1]), 0.5, {}, (), ())
    )
    graph.output(graph.call_function(operator.getitem, (flex, 0)))
    modules = {"score": fx.GraphModule({}, body), "mask": fx.GraphModule({}, mask)}
    fx.GraphModule(modules, graph)
    q.meta["val"] = torch.empty(1, 2, 4, 8)
    assert why_not_raised(flex) == why
