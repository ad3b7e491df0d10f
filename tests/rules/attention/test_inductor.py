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
from torch import fx

from fxrewrite import normalize
from fxrewrite.ops import key
from rules.attention.composite import ATTENTION_DROPOUT
from tests.dynamo import caught
from tests.rewriting import value_and_gradients

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


def one(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return torch.matmul(q, k.transpose(-2, -1)).div(3.0).softmax(-1).matmul(v)


def two(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return torch.matmul(q, k.transpose(-2, -1)).mul(0.4).softmax(-1).matmul(v)


def three(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return F.dropout(torch.matmul(q, k.transpose(-2, -1)).div(3.0).softmax(-1), p).matmul(v)


def four(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return F.dropout((q @ k.transpose(-2, -1)).mul(0.4).softmax(-1), p).matmul(v)


def five(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(E) + m, -1) @ v


def six(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    return torch.dropout(torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(E) + m, -1), p, True) @ v


def seven(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    weights = torch.dropout(torch.softmax((q @ k.transpose(-2, -1) / 3.0).to(torch.float32), -1), p, True).to(HALF)
    return weights @ v.to(weights.dtype)


def eight(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    weights = torch.softmax((q @ k.transpose(-2, -1) / 3.0).to(torch.float32), -1).to(HALF)
    return weights @ v.to(weights.dtype)


def nine(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    weights = torch.dropout(torch.softmax((q / 3.0 @ k.transpose(-2, -1)).to(torch.float32), -1), p, True).to(HALF)
    return weights @ v.to(weights.dtype)


def ten(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    weights = torch.softmax((q / 3.0 @ k.transpose(-2, -1)).to(torch.float32), -1).to(HALF)
    return weights @ v.to(weights.dtype)


def eleven(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return one(*turned(q, k, v), p=p)


def twelve(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return three(*turned(q, k, v), p=p)


def thirteen(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return torch.bmm(F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(-1), p), v)


def fourteen(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    return (torch.matmul(q, k.transpose(-2, -1)).div(3.0) + m).softmax(-1).matmul(v)


def fifteen(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    return torch.softmax(hides_zeros(m, (q @ k.transpose(-2, -1)).div(3.0)), -1) @ v


def sixteen(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    dtype = q.dtype
    q, k, v = turned(q, k, v)
    return F.dropout((torch.matmul(q, k.transpose(-2, -1)).div(3.0) + m).softmax(-1), p).to(dtype).matmul(v)


def seventeen(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    return F.dropout(torch.softmax(hides_zeros(m, (q @ k.transpose(-2, -1)).div(3.0)), -1), p) @ v


def eighteen(q: Any, k: Any, v: Any, kept: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    scores = torch.where(kept, scores.div(number(3.0, scores)), number(least(q), q))
    return F.dropout(scores.softmax(-1), p).matmul(v), k, v


def nineteen(q: Any, k: Any, v: Any, kept: Any, m: Any, *, p: float) -> Any:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    scores = torch.where(kept, scores.div(number(3.0, scores)), number(least(q), q)) + m
    return F.dropout(scores.softmax(-1).type(v.dtype), p).matmul(v)


def twenty(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    return F.dropout(torch.softmax(hides_zeros(m, q.div(3.0) @ k.transpose(-2, -1)), -1), p) @ v


def twenty_one(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    scores = (torch.matmul(q, k.permute(0, 1, 3, 2)) + m).type_as(q)
    return scores.float().softmax(-1).type_as(q).matmul(v)


def twenty_two(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    return twenty_one(q, k, v, m, p=p), *turned(k, v)


def twenty_three(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)).float().type_as(q)
    return scores.float().softmax(-1).type_as(q).matmul(v), k, v


def twenty_four(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    batch, heads, rows, size = q.shape
    flat = [x.reshape(batch * heads, -1, size) for x in (q, k, v)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(batch, heads, rows, -1) + m
    weights = F.softmax(scores.view(batch * heads, rows, -1), -1).to(q.dtype)
    return torch.bmm(weights, flat[2]).view(batch, heads, rows, size)


def twenty_five(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    return F.dropout((torch.matmul(q, k.permute(0, 1, 3, 2)) + m).float().softmax(-1).type_as(q), p).matmul(v)


def twenty_six(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    return twenty_five(q, k, v, m, p=p), *turned(k, v)


def twenty_seven(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    return F.dropout(torch.matmul(q, k.permute(0, 1, 3, 2)).float().softmax(-1).type_as(q), p).matmul(v), k, v


def twenty_eight(q: Any, k: Any, v: Any, *, p: float) -> Any:
    return four(*turned(q, k, v), p=p)


def twenty_nine(q: Any, k: Any, v: Any, m: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    scores = torch.ops.aten.mul.Scalar(q, 0.6) @ torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6) + m
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def thirty(q: Any, k: Any, v: Any, *, p: float) -> Any:
    q, k, v = turned(q, k, v)
    scores = torch.ops.aten.mul.Scalar(q, 0.6) @ torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


# the function, the layout of its heads, what masks it reads
COMPUTATIONS: dict[int, tuple[Function, str, tuple[str, ...]]] = {
    1: (one, "BHLE", ()),
    2: (two, "BHLE", ()),
    3: (three, "BHLE", ()),
    4: (four, "BHLE", ()),
    5: (five, "BHLE", ("added",)),
    6: (six, "BHLE", ("added",)),
    7: (seven, "BLHE", ()),
    8: (eight, "BLHE", ()),
    9: (nine, "BLHE", ()),
    10: (ten, "BLHE", ()),
    11: (eleven, "BLHE", ()),
    12: (twelve, "BLHE", ()),
    13: (thirteen, "(BH)LE", ()),
    14: (fourteen, "BLHE", ("added",)),
    15: (fifteen, "BLHE", ("tokens",)),
    16: (sixteen, "BLHE", ("added",)),
    17: (seventeen, "BLHE", ("tokens",)),
    18: (eighteen, "BLHE", ("kept",)),
    19: (nineteen, "BHLE", ("kept", "added")),
    20: (twenty, "BLHE", ("tokens",)),
    21: (twenty_one, "BLHE", ("added",)),
    22: (twenty_two, "BLHE", ("added",)),
    23: (twenty_three, "BLHE", ()),
    24: (twenty_four, "BHLE", ("added",)),
    25: (twenty_five, "BLHE", ("added",)),
    26: (twenty_six, "BLHE", ("added",)),
    27: (twenty_seven, "BLHE", ()),
    28: (twenty_eight, "BLHE", ()),
    29: (twenty_nine, "BLHE", ("added",)),
    30: (thirty, "BLHE", ()),
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


def count(gm: fx.GraphModule, name: str) -> int:
    return sum(key(node) == f"aten::{name}" for node in gm.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("p", [0.0, 0.25], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_inductors_attention_is_the_operator(computation: int, p: float, dtype: torch.dtype) -> None:
    function, layout, masks = COMPUTATIONS[computation]
    if computation in HALF_ONLY and dtype != HALF:
        pytest.skip("it casts weights to float16")
    args = inputs(layout, masks, dtype)
    gm, placed = caught(lambda *args: function(*args, p=p), *args)
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
