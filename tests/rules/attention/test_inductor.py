"""The attentions that inductor's own pass knows, and more spellings of their kind, all become the operator.

`COMPUTATIONS` are those of https://github.com/pytorch/pytorch/blob/main/torch/_inductor/fx_passes/fuse_attention.py in
torch 2.13, by its numbers, written anew. Inductor registers each for training and for inference, except for those in
`INFERENCE_ONLY`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite import normalize
from rules.attention.composite import ATTENTION_DROPOUT
from tests.dynamo import caught
from tests.rewriting import count, traced, value_and_gradients

Function = Callable[..., Any]
B, H, L, E = 2, 3, 6, 8
HALF = torch.float16
INFERENCE_ONLY = {13, 15, 17, 18, 19, 20, 21, 22, 23, 24}


def turned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, L, H, E] -> [B, H, L, E]"""
    return tuple(x.permute(0, 2, 1, 3) for x in tensors)


def number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def least(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).min


def hides_zeros(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores, but for the keys at which the mask [B, S] is 0: DistilBERT."""
    hidden = (mask == 0).view(mask.shape[0], 1, 1, mask.shape[1]).expand_as(scores)
    return scores.masked_fill(hidden, number(-math.inf, scores))


def added(q: Any, k: Any, v: Any, m: Any, p: float) -> Any:
    return F.dropout((torch.matmul(q, k.permute(0, 1, 3, 2)) + m).float().softmax(-1).type_as(q), p).matmul(v)


def narrowed(q: Any, k: Any, v: Any, m: Any, p: float) -> Any:
    scores = (torch.matmul(q, k.permute(0, 1, 3, 2)) + m).type_as(q)
    return scores.float().softmax(-1).type_as(q).matmul(v)


def chosen(q: Any, k: Any, kept: Any) -> Any:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    return torch.where(kept, scores.div(number(3.0, scores)), number(least(q), q))


def of_one_batch(q: Any, k: Any, v: Any, m: Any, p: float) -> Any:
    batch, heads, rows, size = q.shape
    flat = [x.reshape(batch * heads, -1, size) for x in (q, k, v)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(batch, heads, rows, -1) + m
    weights = F.softmax(scores.view(batch * heads, rows, -1), -1).to(q.dtype)
    return torch.bmm(weights, flat[2]).view(batch, heads, rows, size)


def both_scaled(q: Any, k: Any) -> Any:
    return torch.ops.aten.mul.Scalar(q, 0.6) @ torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6)


# the layout of the heads, what masks it reads, and the function of q, k, v, each [B, H, L, E] or [B * H, L, E]
COMPUTATIONS: dict[int, tuple[str, tuple[str, ...], Function]] = {
    1: ("BHLE", (), lambda q, k, v, p: torch.matmul(q, k.transpose(-2, -1)).div(3.0).softmax(-1).matmul(v)),
    2: ("BHLE", (), lambda q, k, v, p: torch.matmul(q, k.transpose(-2, -1)).mul(0.4).softmax(-1).matmul(v)),
    3: ("BHLE", (), lambda q, k, v, p: F.dropout((q @ k.transpose(-2, -1)).div(3.0).softmax(-1), p).matmul(v)),
    4: ("BHLE", (), lambda q, k, v, p: F.dropout((q @ k.transpose(-2, -1)).mul(0.4).softmax(-1), p).matmul(v)),
    5: ("BHLE", ("added",), lambda q, k, v, m, p: torch.softmax(q @ k.mT / math.sqrt(E) + m, -1) @ v),
    6: (
        "BHLE",
        ("added",),
        lambda q, k, v, m, p: torch.dropout(torch.softmax(q @ k.mT / math.sqrt(E) + m, -1), p, True) @ v,
    ),
    7: (
        "BLHE",
        (),
        lambda q, k, v, p: torch.dropout(torch.softmax((q @ k.mT / 3.0).float(), -1), p, True).to(HALF) @ v.to(HALF),
    ),
    8: ("BLHE", (), lambda q, k, v, p: torch.softmax((q @ k.mT / 3.0).to(torch.float32), -1).to(HALF) @ v.to(HALF)),
    9: (
        "BLHE",
        (),
        lambda q, k, v, p: torch.dropout(torch.softmax((q / 3.0 @ k.mT).float(), -1), p, True).to(HALF) @ v.to(HALF),
    ),
    10: ("BLHE", (), lambda q, k, v, p: torch.softmax((q / 3.0 @ k.mT).to(torch.float32), -1).to(HALF) @ v.to(HALF)),
    11: ("BLHE", (), lambda q, k, v, p: torch.matmul(q, k.transpose(-2, -1)).div(3.0).softmax(-1).matmul(v)),
    12: ("BLHE", (), lambda q, k, v, p: F.dropout((q @ k.transpose(-2, -1)).div(3.0).softmax(-1), p).matmul(v)),
    13: ("(BH)LE", (), lambda q, k, v, p: torch.bmm(F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(-1), p), v)),
    14: ("BLHE", ("added",), lambda q, k, v, m, p: ((q @ k.transpose(-2, -1)).div(3.0) + m).softmax(-1).matmul(v)),
    15: ("BLHE", ("tokens",), lambda q, k, v, m, p: torch.softmax(hides_zeros(m, (q @ k.mT).div(3.0)), -1) @ v),
    16: (
        "BLHE",
        ("added",),
        lambda q, k, v, m, p: F.dropout(((q @ k.mT).div(3.0) + m).softmax(-1), p).to(q.dtype).matmul(v),
    ),
    17: (
        "BLHE",
        ("tokens",),
        lambda q, k, v, m, p: F.dropout(torch.softmax(hides_zeros(m, (q @ k.mT).div(3.0)), -1), p) @ v,
    ),
    18: ("BLHE", ("kept",), lambda q, k, v, h, p: (F.dropout(chosen(q, k, h).softmax(-1), p).matmul(v), k, v)),
    19: (
        "BHLE",
        ("kept", "added"),
        lambda q, k, v, h, m, p: F.dropout((chosen(q, k, h) + m).softmax(-1).type(v.dtype), p).matmul(v),
    ),
    20: (
        "BLHE",
        ("tokens",),
        lambda q, k, v, m, p: F.dropout(torch.softmax(hides_zeros(m, q.div(3.0) @ k.mT), -1), p) @ v,
    ),
    21: ("BLHE", ("added",), narrowed),
    22: ("BLHE", ("added",), lambda q, k, v, m, p: (narrowed(q, k, v, m, p), k, v)),
    23: (
        "BLHE",
        (),
        lambda q, k, v, p: ((q @ k.mT).float().type_as(q).float().softmax(-1).type_as(q).matmul(v), k, v),
    ),
    24: ("BHLE", ("added",), of_one_batch),
    25: ("BLHE", ("added",), added),
    26: ("BLHE", ("added",), lambda q, k, v, m, p: (added(q, k, v, m, p), k, v)),
    27: ("BLHE", (), lambda q, k, v, p: (F.dropout((q @ k.mT).float().softmax(-1).type_as(q), p).matmul(v), k, v)),
    28: ("BLHE", (), lambda q, k, v, p: F.dropout((q @ k.transpose(-2, -1)).mul(0.4).softmax(-1), p).matmul(v)),
    29: ("BLHE", ("added",), lambda q, k, v, m, p: torch.ops.aten._safe_softmax(both_scaled(q, k) + m, -1) @ v),
    30: ("BLHE", (), lambda q, k, v, p: torch.ops.aten._safe_softmax(both_scaled(q, k), -1) @ v),
}
HALF_ONLY = {7, 8, 9, 10}
"""They cast weights to float16, whatever q is."""


def inputs(layout: str, masks: tuple[str, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = {"BHLE": (B, H, L, E), "BLHE": (B, L, H, E), "(BH)LE": (B * H, L, E)}[layout]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    kept = torch.rand((B, 1, L, L), generator=generator) > 0.4
    kept[:, :, :, 0] = True
    kept[0, :, 2] = "tokens" in masks  # one row keeps no key
    drawn = {
        "added": torch.randn((B, 1, L, L), generator=generator).to(dtype),
        "kept": kept,
        "tokens": (torch.arange(L) < torch.tensor([[L], [L - 2]])).to(dtype),
    }
    return [q, k, v, *(drawn[mask] for mask in masks)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("p", [0.0, 0.25], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_inductors_attention_is_the_operator(computation: int, p: float, dtype: torch.dtype) -> None:
    layout, masks, function = COMPUTATIONS[computation]
    if computation in HALF_ONLY and dtype != HALF:
        pytest.skip("it casts weights to float16")
    args = inputs(layout, masks, dtype)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> Any:
        return function(*(turned(q, k, v) if layout == "BLHE" else (q, k, v)), *masks, p=p)

    gm, placed = caught(attention, *args)
    gm = normalize(gm)
    if p and not count(gm, "dropout"):
        pytest.skip("it has no dropout")
    torch.manual_seed(0)
    expected = value_and_gradients(gm, placed)
    report = ATTENTION_DROPOUT.apply(gm)
    assert (count(gm, "softmax"), count(gm, "scaled_dot_product_attention")) == (0, 1), str(report)
    torch.manual_seed(0)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(value_and_gradients(gm, placed), expected, **tolerance)
    assert ATTENTION_DROPOUT.apply(gm).rewrites == 0


LOW = -1e9
VARIANTS: dict[str, Function] = {
    "query by a tensor": lambda q, k, v, m, h: ((q / number(3.0, q)) @ k.mT).softmax(-1) @ v,
    "key by a number": lambda q, k, v, m, h: (q @ (k / 3.0).mT + m).softmax(-1) @ v,
    "transposed key times a number": lambda q, k, v, m, h: (q @ (k.mT * 0.5)).softmax(-1) @ v,
    "scores times a tensor": lambda q, k, v, m, h: (q @ k.mT * number(0.3, q) + m).softmax(-1) @ v,
    "scores by a root": lambda q, k, v, m, h: (q @ k.mT / torch.sqrt(number(8.0, q))).softmax(-1) @ v,
    "scores by a tensor of one dimension": lambda q, k, v, m, h: (q @ k.mT / torch.full((1,), 3.0)).softmax(-1) @ v,
    "scores by a constant": lambda q, k, v, m, h: (q @ k.mT / torch.tensor(3.0)).softmax(-1) @ v,
    "scores times a product of numbers": lambda q, k, v, m, h: (q @ k.mT * (number(0.5, q) * 0.5)).softmax(-1) @ v,
    "mask expanded": lambda q, k, v, m, h: (b := q @ k.mT, (b + m.expand_as(b)).softmax(-1) @ v)[1],
    "mask narrower": lambda q, k, v, m, h: (q @ k.mT + m.half()).softmax(-1) @ v,
    "fill of a tensor": lambda q, k, v, m, h: (q @ k.mT).masked_fill(~h, number(LOW, q)).softmax(-1) @ v,
    "fill in place": lambda q, k, v, m, h: (q @ k.mT).masked_fill_(~h, least(q)).softmax(-1) @ v,
    "fill first": lambda q, k, v, m, h: torch.where(~h, LOW, q @ k.mT).softmax(-1) @ v,
    "fill first, a tensor": lambda q, k, v, m, h: torch.where(~h, number(LOW, q), q @ k.mT).softmax(-1) @ v,
    "fill like the scores": lambda q, k, v, m, h: (
        b := q @ k.mT,
        torch.where(h, b, torch.full_like(b, LOW)).softmax(-1) @ v,
    )[1],
    "fill of the shape of the scores": lambda q, k, v, m, h: (
        b := q @ k.mT,
        torch.where(h, b, torch.full(b.shape, LOW)).softmax(-1) @ v,
    )[1],
    "fill of a constant": lambda q, k, v, m, h: torch.where(h, q @ k.mT, torch.tensor(LOW)).softmax(-1) @ v,
    "fill over a bias, dropout": lambda q, k, v, m, h: (
        F.dropout(torch.where(h, q @ k.mT + m, LOW).softmax(-1), 0.2) @ v
    ),
    "fill before the scale": lambda q, k, v, m, h: (torch.where(h, q @ k.mT, LOW) / 3.0).softmax(-1) @ v,
    "fill and bias before the scale": lambda q, k, v, m, h: (torch.where(h, q @ k.mT + m, LOW) * 0.3).softmax(-1) @ v,
    "fill and then a mask": lambda q, k, v, m, h: (torch.where(h, q @ k.mT, LOW) + m).softmax(-1) @ v,
    "fill and then a mask, dropout": lambda q, k, v, m, h: (
        F.dropout((torch.where(h, q @ k.mT, -65504.0) + m).softmax(-1), 0.2) @ v
    ),
    "fill with dropout": lambda q, k, v, m, h: F.dropout((q @ k.mT).masked_fill(~h, LOW).softmax(-1), 0.2) @ v,
    "fill expanded": lambda q, k, v, m, h: (
        b := q @ k.mT,
        b.masked_fill((~h).expand_as(b), -math.inf).softmax(-1).nan_to_num(0.0) @ v,
    )[1],
    "rows of zeros": lambda q, k, v, m, h: (q @ k.mT + torch.where(h, 0.0, -math.inf)).softmax(-1).nan_to_num() @ v,
    "safe softmax of a fill": lambda q, k, v, m, h: (
        torch.ops.aten._safe_softmax((q @ k.mT).masked_fill(~h, -math.inf), -1) @ v
    ),
    "shifted": lambda q, k, v, m, h: (b := q @ k.mT, (b - b.amax(-1, keepdim=True)).softmax(-1) @ v)[1],
    "casts that cancel": lambda q, k, v, m, h: (q @ k.mT).double().float().double().softmax(-1).float() @ v,
    "cast of scores": lambda q, k, v, m, h: ((q @ k.mT).double() * 0.3).softmax(-1).to(v.dtype) @ v,
    "cast after dropout": lambda q, k, v, m, h: F.dropout((q @ k.mT).double().softmax(-1), 0.2).type_as(v) @ v,
    "flat heads with a fill": lambda q, k, v, m, h: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
        .unflatten(0, (B, H))
        .masked_fill(~h, -math.inf)
        .nan_to_num(neginf=least(q))
        .flatten(0, 1)
        .softmax(-1),
        v.flatten(0, 1),
    ),
    "flat heads, dropout": lambda q, k, v, m, h: torch.bmm(
        F.dropout(
            ((torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, L, L) / 3.0).masked_fill(~h, LOW) + m)
            .view(B * H, L, L)
            .softmax(-1),
            0.2,
        ),
        v.flatten(0, 1),
    ),
    "baddbmm": lambda q, k, v, m, h: torch.bmm(
        torch.baddbmm(m.expand(B, H, L, L).reshape(-1, L, L), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.3)
        .view(B, H, L, L)
        .masked_fill(~h, LOW)
        .softmax(-1)
        .view(B * H, L, L),
        v.flatten(0, 1),
    ),
    "baddbmm of no bias": lambda q, k, v, m, h: torch.bmm(
        torch.baddbmm(torch.empty(1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.3).softmax(-1),
        v.flatten(0, 1),
    ),
}
LEFT = {"flat heads with a fill": "nan_to_num"}
"""Variants that are no attention of torch, and the step that `explain` names."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_zeros_by_a_softmax_in_float32(dtype: torch.dtype) -> None:
    """torch's own softmax for such rows has no backward from float16 to float32, so the scores are cast in front."""
    q, k, v = (torch.randn(B, H, L, E, dtype=dtype) for _ in range(3))
    gm = traced(lambda q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float32).nan_to_num().to(dtype) @ v, q, k, v)
    ATTENTION_DROPOUT.apply(gm)
    assert count(gm, "scaled_dot_product_attention") == 1


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_the_operator(name: str) -> None:
    function, args = VARIANTS[name], inputs("BHLE", ("added", "kept"), torch.float32)
    gm = normalize(traced(lambda *args: function(*args), *args))
    torch.manual_seed(0)
    expected = value_and_gradients(gm, args)
    ATTENTION_DROPOUT.apply(gm)
    if name in LEFT:
        assert LEFT[name] in str(ATTENTION_DROPOUT.once().explain(gm, "attention_dropout.fuse"))
        return
    assert count(gm, "scaled_dot_product_attention") == 1
    torch.manual_seed(0)
    found = value_and_gradients(gm, args)
    if any(gradient.isnan().any() for gradient in expected[1:]):  # of a softmax over -inf alone; the operator's are 0
        expected, found = expected[:1], found[:1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
