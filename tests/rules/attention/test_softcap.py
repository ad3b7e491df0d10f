"""Attention with a softcap, in every spelling, is one operator, and holds no scores by rows: values, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fxrewrite import DeadCode, RuleSet
from fxrewrite.ops import bind, key
from rules.attention.by_rows import BY_ROWS
from rules.attention.composite import ATTENTION_UNBIASED
from rules.attention.flex import flex_rules
from rules.attention.flex_operator import FLEX_ATTENTION
from rules.attention.groups import SHARE_HEADS
from rules.attention.operator import ATTEND, LOWER_ATTENTION, attentions
from tests.rewriting import check_stages, traced
from tests.rules.attention.cases import LOW, B, D, H, S, added, dense_values, kept, results

pytestmark = pytest.mark.usefixtures("three_rows_a_block")
SCALE, CAP = 0.5, 0.6
"""Scores are a few times the cap."""
FUSE = RuleSet("softcaps", DeadCode("drop_first"), ATTENTION_UNBIASED, SHARE_HEADS)
Function = Callable[..., Tensor]


def operands(*, width: int = D, kv_heads: int = H, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, S, D), (B, kv_heads, S, D), (B, kv_heads, S, width)]
    made = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in made]


def capped(q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(q @ k.transpose(-2, -1) * SCALE / CAP) * CAP


def gemma2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
    scores = torch.tanh(scores / CAP) * CAP + added()
    weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1, None].expand(B, 1, H, S, D).reshape(B, H, S, D) for x in (k, v))
    return (capped(q, k) + added()).softmax(-1) @ v


def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.matmul((capped(q, k) + added()).softmax(-1), v)


def in_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE
    return torch.einsum("bhqk,bhkd->bhqd", (CAP * torch.tanh(scores / CAP) + added()).softmax(-1), v)


SPELLINGS: dict[str, Function] = {
    "gemma 2": gemma2,
    "scale in q": lambda q, k, v: (torch.tanh(q * SCALE @ k.mT / CAP) * CAP + added()).softmax(-1) @ v,
    "scale and cap in one number": lambda q, k, v: (torch.tanh(q @ k.mT * (SCALE / CAP)) * CAP).softmax(-1) @ v,
    "times its inverse": lambda q, k, v: (CAP * torch.tanh(q @ k.mT / 2.0 * (1 / CAP)) + added()).softmax(-1) @ v,
    "no scale": lambda q, k, v: (torch.tanh(q @ k.mT) * CAP + added()).softmax(-1) @ v,
    "two caps": lambda q, k, v: (torch.tanh(q @ k.mT * SCALE / CAP) * 2.0 + added()).softmax(-1) @ v,
    "a cap below 0": lambda q, k, v: (torch.tanh(q @ k.mT * SCALE / CAP) * -CAP + added()).softmax(-1) @ v,
    "no mask": lambda q, k, v: capped(q, k).softmax(-1) @ v,
    "window": lambda q, k, v: (capped(q, k) + added(window=3)).softmax(-1) @ v,
    "einsum": in_einsum,
    "filled": lambda q, k, v: capped(q, k).masked_fill(~kept(window=3), LOW).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(kept(), capped(q, k), -1e9).softmax(-1) @ v,
    "grouped": grouped,
    "batch and heads in one": flat,
    "rows without keys, by the lowest number": lambda q, k, v: (capped(q, k) + added(first=3)).softmax(-1) @ v,
    "rows without keys, filled": lambda q, k, v: capped(q, k).masked_fill(~kept(first=3), LOW).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name: str) -> None:
    """By rows and written out; by rows no scores are held, and the mask only to see which filled rows keep no key."""
    given = operands()
    wanted = results(SPELLINGS[name], given)
    for lowered in (BY_ROWS, LOWER_ATTENTION):
        gm = traced(SPELLINGS[name], *given)
        FUSE.apply(gm)
        (call,) = attentions(gm.graph.nodes)
        assert bind(call)["softcap"] in (CAP, 2.0)
        assert bind(call)["enable_gqa"] == (name == "grouped")
        lowered.apply(gm)
        assert not attentions(gm.graph.nodes)
        holds = {key(node) for node in gm.graph.nodes if node.name in dense_values(gm)}
        assert ("aten::softmax" in holds) == ("aten::matmul" in holds) == (lowered is LOWER_ATTENTION)
        assert not holds or lowered is LOWER_ATTENTION or name in ("filled", "where", "rows without keys, filled")
        torch.testing.assert_close(results(gm, given), wanted, rtol=1e-12, atol=1e-13)


def test_values_of_another_size_than_keys() -> None:
    given = operands(width=D + 2)
    gm = traced(gemma2, *given)
    FUSE.apply(gm)
    assert BY_ROWS.apply(gm)["masks.attend_by_rows"].rewrites == 1
    torch.testing.assert_close(results(gm, given), results(gemma2, given), rtol=1e-12, atol=1e-13)


def grok(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)).to(torch.float) * SCALE
    scores = CAP * torch.tanh(scores / CAP) + added(torch.finfo(q.dtype).min, q.dtype)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def in_half_precision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * SCALE / CAP) * CAP
    scores = scores + added(torch.finfo(q.dtype).min, q.dtype, first=2)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


@pytest.mark.parametrize("function", [grok, in_half_precision])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_in_float32(function: Function, dtype: torch.dtype) -> None:
    """The operator rounds once, at the end."""
    given, wide = operands(dtype=dtype), operands()
    gm = traced(function, *given)
    FUSE.apply(gm)
    assert BY_ROWS.apply(gm)["masks.attend_by_rows"].rewrites == 1
    exact = results(
        lambda q, k, v: function(q.float(), k.float(), v.float()), [x.detach().requires_grad_() for x in wide]
    )
    found = results(gm, given)
    bound = 8 * torch.finfo(dtype).eps
    for mine, best in zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - best.double()).abs().max() <= bound * best.abs().max()


@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("fill", [-torch.inf, None])
def test_by_flex_attention(fill: float | None, kv_heads: int) -> None:
    """A softcap is part of its score_mod, before an added mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = kept() if fill is None else torch.zeros(S, S, dtype=torch.float64).masked_fill(~kept(), fill)
        return ATTEND(q, k, v, mask, scale=SCALE, enable_gqa=True, softcap=CAP)

    given = operands(kv_heads=kv_heads)
    gm = traced(attend, *given)
    RuleSet("flex", BY_ROWS, flex_rules("flex"), atomic=True).apply(gm)
    assert FLEX_ATTENTION in [node.target for node in gm.graph.nodes]
    torch.testing.assert_close(results(gm, given), results(attend, given), rtol=1e-12, atol=1e-13)


def test_is_causal_by_rows() -> None:
    """No model writes it, but the operator takes it."""
    given = operands()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTEND(q, k, v, is_causal=True, scale=SCALE, softcap=CAP)

    gm = traced(attend, *given)
    assert BY_ROWS.apply(gm)["masks.attend_by_rows"].rewrites == 1
    torch.testing.assert_close(results(gm, given), results(gemma2, given), rtol=1e-12, atol=1e-13)


def test_sinks_beside_a_softcap() -> None:
    """A sink is not bent."""
    given = [*operands(), torch.randn(B, H, S, 1, dtype=torch.float64, requires_grad=True)]

    def written(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch.cat([capped(q, k) + added(), sinks], -1).softmax(-1)[..., :-1] @ v

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return ATTEND(q, k, v, kept(), sinks, scale=SCALE, softcap=CAP)

    gm = traced(attend, *given)
    assert BY_ROWS.apply(gm)["masks.attend_by_rows"].rewrites == 1
    for function in (gm, attend):
        torch.testing.assert_close(results(function, given), results(written, given), rtol=1e-12, atol=1e-13)


REFUSED: dict[str, tuple[Function, str]] = {
    "a dropout": (
        lambda q, k, v: torch.dropout(capped(q, k).softmax(-1), 0.1, True) @ v,
        "a dropout of 0.1 draws",
    ),
    "a cap of 0": (lambda q, k, v: (torch.tanh(q @ k.mT) * 0.0).softmax(-1) @ v, "a division by 0"),
    "a softmax in float32": (
        lambda q, k, v: torch.softmax(capped(q, k), -1, dtype=torch.float32).double() @ v,
        "the softmax is in torch.float32, the operands in torch.float64",
    ),
    "no cap": (lambda q, k, v: torch.tanh(q @ k.mT).softmax(-1) @ v, "found aten::tanh"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_says_why(case: str) -> None:
    attend, why = REFUSED[case]
    gm = traced(attend, *operands())
    FUSE.apply(gm)
    assert not attentions(gm.graph.nodes)
    assert why in str(ATTENTION_UNBIASED.once().explain(gm, "attention.fuse_softcap"))


def test_what_the_operator_refuses() -> None:
    q, k, v = operands()
    with pytest.raises(NotImplementedError, match="attention with a softcap does not support dropout"):
        ATTEND(q, k, v, dropout_p=0.1, softcap=CAP)
    with pytest.raises(ValueError, match="a mask or is_causal, not both"):
        ATTEND(q, k, v, kept(), is_causal=True, softcap=CAP)


def test_graph(fx_snapshot: Any) -> None:
    check_stages(traced(gemma2, *operands()), fx_snapshot, **{"one operator": FUSE, "by rows": BY_ROWS})


def test_a_mask_of_a_wider_dtype_is_added_as_it_is() -> None:
    """A float32 mask beside bfloat16 operands: the product with the values was refused."""
    q, k, v = operands(dtype=torch.bfloat16)
    mask = added(dtype=torch.float32, fill=-65504.0)
    scores = torch.tanh(q @ k.mT * SCALE) * CAP + mask
    expected = torch.softmax(scores, -1).to(torch.bfloat16) @ v
    found = ATTEND(q, k, v, mask, scale=SCALE * CAP, softcap=CAP)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT * SCALE) * CAP + mask
        return torch.softmax(scores, -1).to(torch.bfloat16) @ v

    gm = traced(attention, q, k, v, mask)
    (rule,) = (rule for rule in FUSE.rules() if rule.id == "attention.fuse_softcap")
    assert RuleSet("fuse", rule).apply(gm).rewrites == 1
    torch.testing.assert_close(gm(q, k, v, mask), expected, rtol=2e-2, atol=2e-2)
