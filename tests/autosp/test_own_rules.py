"""A model with operators of its own is sharded by rules and layout rules of its own, given or registered."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from autosp_rules.events import AttentionRuns
from autosp_rules.rule_set import layouts_with
from fxrewrite import RuleSet, refuse, rule
from fxrewrite.spmd import IndexMap, LayoutRule, LayoutRules
from tests.autosp.one_device import assert_equal_to_one_device


@torch.library.custom_op("own_rules::gate", mutates_args=())
def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(2 * x)


@gate.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(2 * x)
    return grad * (s + 2 * x * s * (1 - s))


gate.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
GATE = LayoutRule("own.gate", ("own_rules::gate",), "a... -> a...")


@rule("own.use_gate", numerics="reassociates")
def use_gate(x):
    return x * torch.sigmoid(2 * x)


@use_gate.replacement
def _(x):
    """gate(x)"""
    return torch.ops.own_rules.gate(x)


class Gated(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.fused = fused

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.up(self.embed(input_ids))
        x = gate(x) if self.fused else x * torch.sigmoid(2 * x)
        return self.down(x).square().mean()


IDS = torch.arange(16).reshape(2, 8)


@rule("own.cut_at_the_traced_length", numerics="exact")
def cut_at_the_traced_length(x):
    return x * torch.sigmoid(2 * x)


@cut_at_the_traced_length.replacement
def _(x):
    """x + gate(x)[:, :8].sum(1, keepdim=True): of the right shape at every length"""
    y = torch.ops.aten.slice.Tensor(torch.ops.own_rules.gate(x), 1, 0, 8)
    return torch.ops.aten.add.Tensor(x, torch.ops.aten.sum.dim_IntList(y, [1], True))


def test_a_rule_that_writes_the_traced_length_as_a_number_is_refused() -> None:
    """The graph has guards for every length, so a longer batch would be cut without an error."""
    model, ids = Gated(fused=False).double(), IDS.clone()
    config = AutoSPConfig(rules=cut_at_the_traced_length)
    dry_run(model, {"input_ids": ids}, num_ranks=2, config=config)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(ids, 1)
    message = r"(?s)aten::slice .* at the sizes s\d+ = .*has a size of the trace as a number.*test_own_rules\.py:\d+"
    with pytest.raises(AutoSPError, match=message):
        dry_run(model, {"input_ids": ids}, num_ranks=2, config=config)


def gathered(report: Any) -> list[str]:
    return [line for line in report.lines if line.startswith("gathered") and "gate" in line]


def test_an_own_layout_rule_shards_an_own_operator() -> None:
    model, inputs = Gated(fused=True).double(), {"input_ids": IDS}
    assert gathered(assert_equal_to_one_device(model, inputs, ranks=(2,)))
    for rules in (LayoutRules([GATE]), [GATE]):
        assert not gathered(assert_equal_to_one_device(model, inputs, config=AutoSPConfig(layouts=rules)))


ABC, SIZES = (("a",), ("b",), ("c",)), {"a": 2, "b": 8, "c": 12}


def _fails(call: Any) -> Any:
    return call.args["axis"]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("b... !s -> b... s", "leaves free what the call names as its dim"),
        ("b !s d -> b s", "that has other ranks or sizes"),
        ("b !s d -> b d s", "that has other ranks or sizes"),
    ],
)
def test_a_notation_that_a_call_does_not_fit_is_not_used(says: str, why: str) -> None:
    """It would shard what the operator runs along, or say which dimension of the result is sharded, and be wrong."""

    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up = nn.Embedding(16, 8), nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.up(torch.renorm(self.embed(input_ids), 2.0, 0, 1.0)).square().mean()

    config = AutoSPConfig(layouts=[LayoutRule("own.renorm", ("aten::renorm",), says)])
    report = assert_equal_to_one_device(Renormed().double(), {"input_ids": IDS}, config=config)
    (line,) = (line for line in report.lines if line.startswith("gathered") and "renorm" in line)
    assert f"aten::renorm does not fit its layout rule own.renorm, {says}: " in line
    assert why in line


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_fails, "raised KeyError: 'axis'"),
        (lambda call: "a... -> a...", "gave 'a... -> a...'; it gives an IndexMap, or None where it cannot tell"),
        (lambda call: IndexMap((), ((),), {}), r"gave indices of \[\] dimensions; its operands have \[3\]"),
        (lambda call: IndexMap((ABC,), (ABC, ABC), SIZES), "gave indices of 2 results; it has 1"),
        (
            lambda call: IndexMap((ABC,), (ABC[:2],), SIZES),
            r"gave indices of \[2\] dimensions for its results; they have \[3\]",
        ),
        (lambda call: IndexMap((ABC,), (ABC,), {"a": 2}), "gave no size of its index 'b'"),
        (
            lambda call: IndexMap((ABC,), (ABC,), {**SIZES, "c": 7}),
            "gave indices c of size 7 for a dimension of 12",
        ),
    ],
)
def test_a_function_of_a_layout_rule_that_fails_is_named(function: Any, said: str) -> None:
    config = AutoSPConfig(layouts=[LayoutRule("own.gate", ("own_rules::gate",), function)])
    message = rf"layout rule own\.gate: its function, for own_rules::gate at %gate, {said}"
    with pytest.raises(AutoSPError, match=message):
        dry_run(Gated(fused=True), {"input_ids": IDS}, num_ranks=2, config=config)


@rule("own.fuse_temperature", numerics="reassociates", where=["rank(q) == 4", "rank(t) == 3", "size(t, -1) == 1"])
def fuse_temperature(q, k, v, t, mask):
    scores = torch.matmul(q, k.transpose(-2, -1)) * t + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)


@fuse_temperature.replacement
def _(q, k, v, t, mask):
    """sdpa(q * t, k, v, mask)"""
    return F.scaled_dot_product_attention(q * t, k, v, attn_mask=mask, scale=1.0)


class Cosine(nn.Module):
    """Attention by cosines with a learned temperature for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24)
        self.temperature = nn.Parameter(torch.tensor([[[0.3]], [[0.8]]]))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.qkv(self.embed(input_ids)).chunk(3, -1))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature.exp()
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
        return ((scores + mask).softmax(-1) @ v).square().mean()


def test_attention_that_an_own_rule_finds_is_served_like_any_other() -> None:
    config = AutoSPConfig(
        rules=fuse_temperature, attention="ring"
    )  # which takes no mask that is added, unless it is read
    report = assert_equal_to_one_device(Cosine().double(), {"input_ids": IDS}, config=config)
    assert [event.strategy for event in report.events_of(AttentionRuns)] == ["ring"]


@rule(
    "own.to_softmax",
    numerics="approximate",
    domain="finite",
    where=["size(x, -1) > 0", "dtype(x) in {float32, float64, bfloat16}"],
)
def to_softmax(x):
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True))


@to_softmax.replacement
def _(x):
    """softmax(x)"""
    return torch.softmax(x, -1)


class ByLogSumExp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (2, 4)) for x in self.qkv(self.embed(input_ids)).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k * 0.5)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).square().mean()


def test_an_own_rule_may_give_a_spelling_of_attention_that_is_known() -> None:
    assert to_softmax.verify(samples=8).ok
    model, inputs = ByLogSumExp().double(), {"input_ids": IDS}
    assert not assert_equal_to_one_device(model, inputs).events_of(AttentionRuns)
    report = assert_equal_to_one_device(model, inputs, ranks=(2,), config=AutoSPConfig(rules=to_softmax))
    assert [event.strategy for event in report.events_of(AttentionRuns)] == ["ulysses"]


def test_own_rules_run_before_anything_is_sharded() -> None:
    model, inputs = Gated(fused=False).double(), {"input_ids": IDS}
    for rules in (RuleSet("own", use_gate), use_gate, [use_gate]):
        config = AutoSPConfig(rules=rules, layouts=[GATE], strict=True)
        program, report = dry_run(model, inputs, num_ranks=2, config=config)
        (called,) = (node for node in program.graph.nodes if node.target is torch.ops.own_rules.gate.default)
        assert called.meta["val"].shape[1] == IDS.shape[1] // 2, "it runs on a chunk"
        assert not gathered(report)
    assert_equal_to_one_device(model, inputs, config=config)


def test_an_own_rule_that_refuses_stops_it() -> None:
    @rule("own.refuse")
    def never(x):
        return torch.sigmoid(x)

    @never.replacement
    def _(x):
        refuse("not this sigmoid", hint="use another")

    with pytest.raises(AutoSPError, match=r"own\.refuse: not this sigmoid"):
        dry_run(Gated(fused=False), {"input_ids": IDS}, num_ranks=2, config=AutoSPConfig(rules=never))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rules": 3}, "autosp: rules=3: it takes a RuleSet, a Rule, or a list of them"),
        ({"layouts": [use_gate]}, ".*: it takes LayoutRules, or a list of LayoutRule$"),
    ],
)
def test_what_is_no_rule_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(AutoSPError, match=said):
        AutoSPConfig(**settings)


def test_a_second_layout_rule_of_an_operator_names_both() -> None:
    again = LayoutRule("own.relu", ("aten::relu",), "a... -> a...")
    with pytest.raises(AutoSPError, match=re.escape("operator aten::relu has two layout rules: ") + ".* and own.relu"):
        dry_run(Gated(fused=False), {"input_ids": IDS}, num_ranks=2, config=AutoSPConfig(layouts=[again]))


def test_registered_layout_rules_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own_gate-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-gate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fxrewrite.layouts]\nown = own_gate_layouts:LAYOUTS\n")
    (tmp_path / "own_gate_layouts.py").write_text(
        "from fxrewrite.spmd import IndexMap, LayoutRule, LayoutRules\n"
        "LAYOUTS = LayoutRules([LayoutRule('own.gate', ('own_rules::gate',), 'a... -> a...')])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    layouts_with.cache_clear()
    try:
        config = AutoSPConfig(strict=True, timeout=1234.0)  # no other test's, whose rule set has its layout rules
        _, report = dry_run(Gated(fused=True), {"input_ids": IDS}, num_ranks=2, config=config)
        assert not gathered(report)
    finally:
        layouts_with.cache_clear()
