"""Attention written out and the operator are one function: values, every gradient, and what must stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxrewrite import Report, RuleSet, normalize
from fxrewrite.ops import key
from rules.attention.composite import ATTENTION, ATTENTION_DROPOUT, ATTENTION_UNBIASED
from tests.dynamo import caught
from tests.rewriting import check_stages, count, value_and_gradients

Function = Callable[..., torch.Tensor]
B, H, L, E = 2, 4, 6, 8
SCALE = E**-0.5
LEAST = torch.finfo(torch.float64).min


def tensors(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v of this shape, a mask to add, and which keys are kept: in every row its own, and some others."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    mask = torch.randn((B, 1, L, L), generator=generator, dtype=torch.float64).to(dtype)
    kept = (torch.rand((B, 1, L, L), generator=generator) > 0.4) | torch.eye(L, dtype=torch.bool)
    return [q, k, v, mask, kept]


def traced(function: Function, args: list[torch.Tensor], mode: str = "fake") -> tuple[fx.GraphModule, list[Any]]:
    """Pre-dispatch ATen, and its inputs."""
    return make_fx(lambda *a: function(*a), tracing_mode=mode, pre_dispatch=True)(*args), args


def dynamo(function: Function, args: list[torch.Tensor]) -> tuple[fx.GraphModule, list[Any]]:
    """The torch functions that Dynamo sees, and the inputs that it uses."""
    return caught(function, *args)


def symbolic(function: Function, args: list[torch.Tensor]) -> tuple[fx.GraphModule, list[Any]]:
    """torch.fx's own tracer, with fake values propagated."""
    gm = fx.symbolic_trace(function)
    FakeTensorProp(gm).propagate(*args)
    return gm, args


def fired(report: Report) -> set[str]:
    return {entry.rule.partition(".")[2] for entry in report.rules if entry.rewrites}


# 4 dimensions, batch and heads: f(q, k, v, mask, kept)
MATMUL: dict[str, tuple[str, Function]] = {
    "no scale": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.transpose(-1, -2), -1) @ v),
    "dims from the front": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.transpose(2, 3), 3) @ v),
    "permute": ("fuse", lambda q, k, v, m, h: F.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)), dim=-1) @ v),
    "mT": ("fuse", lambda q, k, v, m, h: (q @ k.mT).softmax(-1) @ v),
    "keys that come transposed": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k[..., :L], -1) @ v),
    "times a number": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT * SCALE, -1) @ v),
    "a number times": ("fuse", lambda q, k, v, m, h: torch.softmax(2 * (q @ k.mT), -1) @ v),
    "by a number": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT / math.sqrt(E), -1) @ v),
    "negative scale": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT * -0.5, -1) @ v),
    "mask": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT * SCALE + m, -1) @ v),
    "mask in front": ("fuse", lambda q, k, v, m, h: torch.softmax(m + q @ k.mT * SCALE, -1) @ v),
    "mask of two dimensions": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT + m[0, 0], -1) @ v),
    "bias and mask": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT * SCALE + m[:, :, :1] + m, -1) @ v),
    "scaled bias": ("fuse_scaled_bias", lambda q, k, v, m, h: torch.softmax((q @ k.mT + m) / math.sqrt(E), -1) @ v),
    "scaled bias and mask": (
        "fuse_scaled_bias",
        lambda q, k, v, m, h: torch.softmax((q @ k.mT + m[:, :, :1]) * SCALE + m, -1) @ v,
    ),
    "masked_fill": (
        "fuse_filled",
        lambda q, k, v, m, h: (q @ k.mT * SCALE).masked_fill(~h, float("-inf")).softmax(-1) @ v,
    ),
    "masked_fill over a bias": (
        "fuse_filled",
        lambda q, k, v, m, h: (q @ k.mT * SCALE + m).masked_fill(~h, LEAST).softmax(-1) @ v,
    ),
    "where": ("fuse_filled", lambda q, k, v, m, h: torch.where(h, q @ k.mT / 3.0, -1e9).softmax(-1) @ v),
    "where, fill first": ("fuse_filled", lambda q, k, v, m, h: torch.where(~h, -torch.inf, q @ k.mT).softmax(-1) @ v),
    "dtype": ("fuse", lambda q, k, v, m, h: F.softmax(q @ k.mT + m, -1, dtype=torch.float64).to(q.dtype) @ v),
    "type_as": ("fuse", lambda q, k, v, m, h: F.softmax((q @ k.mT).double(), -1).type_as(q) @ v),
    "type": ("fuse", lambda q, k, v, m, h: F.softmax(q @ k.mT, -1).type(v.dtype) @ v),
    "dropout of nothing": ("fuse", lambda q, k, v, m, h: F.dropout(torch.softmax(q @ k.mT, -1), 0.0) @ v),
    "dropout in evaluation": (
        "fuse",
        lambda q, k, v, m, h: F.dropout(torch.softmax(q @ k.mT, -1), 0.3, training=False) @ v,
    ),
    "keys and values of one head": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k[:, :1].mT, -1) @ v[:, :1]),
    "wider values": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT, -1) @ torch.cat([v, v], -1)),
    "einsum": (
        "fuse",
        lambda q, k, v, m, h: torch.einsum(
            "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE + m, -1), v
        ),
    ),
    "einsum with heads behind": (
        "fuse",
        lambda q, k, v, m, h: torch.einsum(
            "bhij,bjhd->bihd",
            torch.softmax(torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2)) / 3.0, -1),
            v.transpose(1, 2),
        ),
    ),
    "einsum of scores alone": ("fuse", lambda q, k, v, m, h: torch.einsum("bhqd,bhkd -> bhqk", q, k).softmax(-1) @ v),
}
# 3 dimensions: batch times heads in front
BMM: dict[str, tuple[str, Function]] = {
    "matmul": ("fuse", lambda q, k, v, m, h: torch.softmax(q @ k.mT * SCALE + m[0], -1) @ v),
    "bmm": ("fuse", lambda q, k, v, m, h: torch.bmm(torch.softmax(torch.bmm(q, k.mT) / 3.0 + m[0], -1), v)),
    "baddbmm": (
        "fuse",
        lambda q, k, v, m, h: torch.bmm(torch.softmax(torch.baddbmm(m[0], q, k.mT, beta=0.5, alpha=SCALE), -1), v),
    ),
    "bloom": (
        "fuse",
        lambda q, k, v, m, h: torch.bmm(
            F.softmax(
                torch.baddbmm(m[0].expand(B * H, L, L), q, k.mT, alpha=SCALE).view(B, H, L, -1) + m,
                dim=-1,
                dtype=torch.float64,
            )
            .to(q.dtype)
            .view(B * H, L, -1),
            v,
        ),
    ),
    "split heads": (
        "fuse",
        lambda q, k, v, m, h: torch.bmm(
            torch.softmax(torch.bmm(q * SCALE, k.mT).reshape(-1, H, L, L), -1).reshape(B * H, L, L), v
        ),
    ),
}
SPELLINGS = {**dict.fromkeys(MATMUL, (B, H, L, E)), **{f"{name}, 3d": (B * H, L, E) for name in BMM}}


def spelling(name: str) -> tuple[str, Function, list[torch.Tensor]]:
    rule, function = MATMUL[name] if name in MATMUL else BMM[name.removesuffix(", 3d")]
    args = tensors(*SPELLINGS[name])
    if name == "keys that come transposed":
        args[1] = args[1].transpose(-2, -1).contiguous()
    return rule, function, args


@pytest.mark.parametrize("trace", [traced, dynamo, symbolic])
@pytest.mark.parametrize("name", SPELLINGS)
def test_is_the_operator(name: str, trace: Any) -> None:
    rule, function, args = spelling(name)
    gm, inputs = trace(function, args)
    expected = value_and_gradients(gm, inputs)
    assert rule in fired(ATTENTION.apply(gm))
    assert (count(gm, "softmax"), count(gm, "scaled_dot_product_attention")) == (0, 1)
    assert count(gm, "einsum") == 0
    torch.testing.assert_close(value_and_gradients(gm, inputs), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(expected[0], function(*args), rtol=1e-12, atol=1e-13)
    code = gm.code
    assert ATTENTION.apply(gm).rewrites == 0
    assert gm.code == code


def test_every_length_that_a_graph_admits() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        k, v = k[:, :1], v[:, :1]
        return torch.softmax(q @ k.transpose(-2, -1) * SCALE + m, -1) @ v

    gm, _ = traced(attention, tensors(B, H, L, E), mode="symbolic")
    assert ATTENTION.apply(gm)["attention.fuse"].rewrites == 1
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((3, 2, 5, E), generator=generator, dtype=torch.float64) for _ in range(3))
    args = [q, k, v, torch.randn((3, 1, 5, 5), generator=generator, dtype=torch.float64), torch.ones(3, 1, 5, 5) > 0]
    torch.testing.assert_close(value_and_gradients(gm, args), value_and_gradients(attention, args))


# function, which rule was nearest, what it says; f(q, k, v, mask, kept)
KEPT: dict[str, tuple[Function, str, str]] = {
    "softcap": (
        lambda q, k, v, m, h: torch.softmax(torch.tanh(q @ k.mT / 50.0) * 50.0 + m, -1) @ v,
        "fuse",
        "found aten::tanh",
    ),
    "sink": (
        lambda q, k, v, m, h: (
            torch.softmax(torch.cat([q @ k.mT, m[:, :1, :, :1].expand(B, H, L, 1)], -1), -1)[..., :-1] @ v
        ),
        "fuse",
        "found aten::slice",
    ),
    "softmax over queries": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT, -2) @ v,
        "fuse",
        "expected the literal -1 at root.self.dim, found -2",
    ),
    "scale that is a tensor": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT * m[0, 0, 0, 0], -1) @ v,
        "fuse",
        "expected a Python value at root.self.self.other",
    ),
    "mask of one dimension": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT + m[0, 0, 0], -1) @ v,
        "fuse",
        "the mask has rank 1, the scores have 4",
    ),
    "bias of one dimension": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT + m[0, 0, 0] + m, -1) @ v,
        "fuse",
        "the mask has rank 1, the scores have 4",
    ),
    "scaled bias of one dimension": (
        lambda q, k, v, m, h: torch.softmax((q @ k.mT + m[0, 0, 0]) / 3.0, -1) @ v,
        "fuse_scaled_bias",
        "the mask has rank 1, the scores have 4",
    ),
    "bmm with a mask of one dimension": (
        lambda q, k, v, m, h: torch.bmm((torch.bmm(q[0], k[0].mT) + m[0, 0, 0]).softmax(-1), v[0]),
        "fuse",
        "the mask has rank 1, the scores have 3",
    ),
    "baddbmm times infinity": (
        lambda q, k, v, m, h: torch.bmm(torch.baddbmm(m[0], q[0], k[0].mT, alpha=math.inf).softmax(-1), v[0]),
        "write_out_baddbmm",
        "inf is not a finite number",
    ),
    "query by zero": (
        lambda q, k, v, m, h: F.scaled_dot_product_attention(q / 0.0, k, v),
        "fold_query_scale",
        "a division by 0",
    ),
    "mask of no dimension": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT + m[0, 0, 0, 0], -1) @ v,
        "fuse",
        "the mask has rank 0, the scores have 4",
    ),
    "mask of a larger batch": (
        lambda q, k, v, m, h: torch.softmax(q[:1] @ k[:1].mT + m, -1) @ v[:1],
        "fuse",
        "the mask has shape (2, 1, 6, 6), the scores have (1, 4, 6, 6)",
    ),
    "mask of a wider dtype": (
        lambda q, k, v, m, h: torch.softmax(q.float() @ k.float().mT + m, -1).float() @ v.float(),
        "fuse",
        "the mask is in torch.float64, the operands in torch.float32",
    ),
    "kept keys of one dimension": (
        lambda q, k, v, m, h: torch.where(h[0, 0, 0], q @ k.mT, -torch.inf).softmax(-1) @ v,
        "fuse_filled",
        "the mask has rank 1, the scores have 4",
    ),
    "fill that does not hide": (
        lambda q, k, v, m, h: (q @ k.mT).masked_fill(~h, -100.0).softmax(-1) @ v,
        "fuse_filled",
        "a score may be as low as -100.0",
    ),
    "queries of one head": (
        lambda q, k, v, m, h: torch.softmax(q[:, :1] @ k.mT, -1) @ v,
        "fuse",
        "batch and heads of k are (2, 4), of q (2, 1)",
    ),
    "values without a batch": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT, -1) @ v[0],
        "fuse",
        "the ranks are 4, 4, 3",
    ),
    "two dimensions": (
        lambda q, k, v, m, h: torch.softmax(q[0, 0] @ k[0, 0].mT, -1) @ v[0, 0],
        "fuse",
        "the ranks are 2, 2, 2",
    ),
    "softmax narrower than its operands": (
        lambda q, k, v, m, h: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(v.dtype) @ v,
        "fuse",
        "the softmax is in torch.float32, the operands in torch.float64",
    ),
    "scores made narrower": (
        lambda q, k, v, m, h: F.softmax((q @ k.mT).float(), -1).to(v.dtype) @ v,
        "fuse",
        "the softmax is in torch.float32, the operands in torch.float64",
    ),
    "values of another dtype": (
        lambda q, k, v, m, h: F.softmax(q @ k.mT, -1).float() @ v.float(),
        "fuse",
        "dtypes are float64, float64, float32",
    ),
    "integers": (
        lambda q, k, v, m, h: F.softmax(q.long() @ k.long().mT, -1, dtype=torch.float64).long() @ v.long(),
        "fuse",
        "q has dtype int64",
    ),
    "infinite scale": (
        lambda q, k, v, m, h: torch.softmax(q @ k.mT * math.inf, -1) @ v,
        "fuse",
        "inf is not a finite number",
    ),
    "division by zero": (lambda q, k, v, m, h: torch.softmax(q @ k.mT / 0.0, -1) @ v, "fuse", "a division by 0"),
    "einsum with rows of two indices": (
        lambda q, k, v, m, h: torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).softmax(-1).sum(),
        "einsum_to_matmul",
        "bhqd,bkd->bhqk is not a product of matrices: its rows are h, q",
    ),
    "einsum that sums over one operand": (
        lambda q, k, v, m, h: torch.einsum("bhqd,bhkd->bqk", q, k).sum() + torch.einsum("bhqe,bhkd->bhqk", q, k).sum(),
        "einsum_to_matmul",
        "bhqe,bhkd->bhqk sums over an index of one operand",
    ),
    "einsum that repeats an operand": (
        lambda q, k, v, m, h: torch.einsum("bhqd,bhkd->bhqk", q[..., :1], k).sum(),
        "einsum_to_matmul",
        "index d has sizes 1 and ",
    ),
    "einsum of two dtypes": (
        lambda q, k, v, m, h: torch.einsum("bhqd,bhkd->bhqk", q[..., :1].long(), k[..., :1] > 0).sum(),
        "einsum_to_matmul",
        "same_dtype(x, y)",
    ),
    "einsum with an ellipsis": (
        lambda q, k, v, m, h: torch.einsum("...qd,...kd->...qk", q, k).sum(),
        "einsum_to_matmul",
        "...qd,...kd->...qk is not two operands of distinct indices and a result",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_leaves_alone(case: str) -> None:
    function, rule, reason = KEPT[case]
    gm, _ = traced(function, tensors(B, H, L, E))
    code = gm.code
    respelled = fired(ATTENTION.apply(gm))
    assert respelled <= {"softmax_casts", "bmm_to_matmul"}
    assert respelled or gm.code == code
    assert reason in str(ATTENTION.once().explain(gm, f"attention.{rule}"))


def test_weights_that_are_used_elsewhere_stay() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(q @ k.mT, -1)
        return weights @ v, weights

    gm, _ = traced(attention, tensors(B, H, L, E)[:3])  # pyright: ignore[reportArgumentType]
    assert ATTENTION.apply(gm).rewrites == 0
    assert "no user of root.self outside the match" in str(ATTENTION.once().explain(gm, "attention.fuse"))


def test_a_graph_without_values_says_so() -> None:
    gm = fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
    assert ATTENTION.apply(gm).rewrites == 0
    assert "%q has no value in its metadata" in str(ATTENTION.once().explain(gm, "attention.fuse"))


SPLITS: dict[str, tuple[Function, str, str]] = {
    "view that splits something else": (
        lambda q, k, v, m: torch.bmm(torch.softmax(torch.bmm(q, k.mT).view(4, 2, 12, 3), -1).view(8, 6, 6), v),
        "split_scores",
        "the view makes [4, 2, 12, 3] of [8, 6, 6]",
    ),
    "bias that is broadcast": (
        lambda q, k, v, m: torch.bmm(
            torch.softmax(torch.baddbmm(q[:1, :, :6], q, k.mT).view(2, 4, 6, 6), -1).view(8, 6, 6), v
        ),
        "split_scores",
        "the bias has 1 entries in the first dimension, the scores have 8",
    ),
    "mask of one dimension": (
        lambda q, k, v, m: torch.bmm(
            torch.softmax(torch.bmm(q, k.mT).view(2, 4, 6, 6) + q[0, 0, :6], -1).view(8, 6, 6), v
        ),
        "fuse",
        "the mask has rank 1, the scores have 4",
    ),
    "mask that is larger than the scores": (
        lambda q, k, v, m: torch.bmm(torch.softmax((torch.bmm(q, k.mT).view(1, 8, L, L) + m).view(8, 2 * L, L), -1), v),
        "softmax_before_merge",
        "the view makes [8, 12, 6] of [2, 8, 6, 6]",
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_refuses_a_view(case: str) -> None:
    function, rule, reason = SPLITS[case]
    gm, _ = traced(function, tensors(B * H, L, E)[:4])
    rewritten, _ = ATTENTION.once().applied(gm)
    assert count(rewritten, "scaled_dot_product_attention") == 0
    explained = rewritten if rule == "fuse" else gm
    assert reason in str(ATTENTION.once().explain(explained, f"attention.{rule}"))


def no_keys(args: list[torch.Tensor]) -> torch.Tensor:
    """Which rows keep no key; afterwards the second row of each batch does not."""
    kept = args[4]
    kept[:, :, 1] = False
    return ~kept.any(-1, keepdim=True)


@pytest.mark.parametrize("fill", [LEAST, -65504.0])
@pytest.mark.parametrize("name", ["fill", "fill over a bias"])
def test_a_row_without_keys_attends_to_all_alike_where_the_fill_is_finite(name: str, fill: float) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * SCALE if name == "fill" else q @ k.mT * SCALE + m
        return scores.masked_fill(~h, fill).softmax(-1) @ v

    args = tensors(B, H, L, E)
    rows = no_keys(args)
    gm, _ = traced(attention, args)
    assert ATTENTION.apply(gm)["attention.fuse_filled"].rewrites == 1
    expected, found = value_and_gradients(attention, args), value_and_gradients(gm, args)
    torch.testing.assert_close(expected[0][:, :, 1:2], args[2].mean(-2, keepdim=True))
    assert rows.sum() == B
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_bias_that_hides_what_is_kept() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT + m).masked_fill(~h, LEAST).softmax(-1) @ v

    args = tensors(B, H, L, E)
    args[3][:, :, 2] = -torch.inf
    args[4][:, :, 2, 0] = False
    gm, _ = traced(attention, args)
    assert ATTENTION.apply(gm)["attention.fuse_filled"].rewrites == 1
    torch.testing.assert_close(gm(*args), attention(*args))


@pytest.mark.parametrize("name", ["masked_fill", "mask"])
def test_a_row_of_minus_infinity_is_zero_instead_of_nan(name: str) -> None:
    _, function, args = spelling(name)
    rows = no_keys(args)
    if name == "mask":
        args[3] = args[3].masked_fill(~args[4], -torch.inf)
    gm, _ = traced(function, args)
    ATTENTION.apply(gm)
    expected, found = function(*args), gm(*args)
    assert expected[:, :, 1].isnan().all()
    assert (found[:, :, 1] == 0).all()
    others = ~rows.expand_as(expected)
    torch.testing.assert_close(found[others], expected[others])
    assert all(gradient.isfinite().all() for gradient in value_and_gradients(gm, args) if gradient is not None)


BIASED = {
    *("mask", "mask in front", "mask of two dimensions", "bias and mask", "scaled bias", "scaled bias and mask"),
    *("masked_fill over a bias", "dtype", "einsum"),
}


@pytest.mark.parametrize("name", [name for name in MATMUL if name not in BIASED])
def test_without_a_bias_every_row_is_equal(name: str) -> None:
    _, function, args = spelling(name)
    if "inf" not in str(traced(function, args)[0].code):
        no_keys(args)
    gm, _ = traced(function, args)
    assert fired(ATTENTION_UNBIASED.apply(gm)) & {"fuse_unbiased", "fuse_unbiased_filled"}
    assert (count(gm, "softmax"), count(gm, "scaled_dot_product_attention")) == (0, 1)
    torch.testing.assert_close(
        value_and_gradients(gm, args), value_and_gradients(function, args), rtol=1e-12, atol=1e-13
    )
    assert ATTENTION_UNBIASED.apply(gm).rewrites == 0


@pytest.mark.parametrize("name", sorted(BIASED))
def test_a_bias_may_hide_whole_rows(name: str) -> None:
    _, function, args = spelling(name)
    gm, _ = traced(function, args)
    ATTENTION_UNBIASED.apply(gm)
    assert (count(gm, "softmax"), count(gm, "scaled_dot_product_attention")) == (1, 0)


def scores_and(mask: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """Attention with a mask that is made from the sizes of the scores; the masks that are given are not read."""

    def attention(q: Any, k: Any, v: Any, m: Any, h: Any) -> torch.Tensor:
        scores = q @ k.mT * SCALE
        return torch.softmax(scores + mask(scores), -1) @ v

    return attention


def distances(scores: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(scores.shape[-1])
    return positions[:, None] - positions


def within(window: int, low: float = LEAST) -> Callable[[torch.Tensor], torch.Tensor]:
    def mask(scores: torch.Tensor) -> torch.Tensor:
        by = distances(scores)
        return torch.zeros_like(by, dtype=scores.dtype).masked_fill((by < 0) | (by >= window), low)

    return mask


OWN_KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "triu": lambda s: torch.full(s.shape[-2:], -torch.inf, dtype=s.dtype).triu(1),
    "triu like the scores": lambda s: torch.full_like(s, -torch.inf).triu(1),
    "causal": within(L),
    "window": within(3),
    "window by -1e9": within(3, -1e9),
    "distances": lambda s: (distances(s) * -0.5).to(s.dtype) + within(L)(s),
    "triangle of ones": lambda s: (torch.ones_like(s).tril() - 1) * 1e9,
}
NO_KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own key hidden": lambda s: torch.full(s.shape[-2:], -1e9, dtype=s.dtype).triu(0),
    "later keys only": lambda s: torch.full_like(s, LEAST).tril(0),
    "some rows": lambda s: torch.zeros_like(distances(s), dtype=s.dtype).masked_fill(distances(s) < 2, LEAST),
}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", [*OWN_KEYS, *NO_KEYS])
def test_a_bias_with_own_keys_hides_no_whole_row(name: str, mode: str) -> None:
    """Values and gradients are those of the original; whether each row keeps its own key is read from the graph."""
    function = scores_and({**OWN_KEYS, **NO_KEYS}[name])
    args = tensors(B, H, L, E)
    gm, _ = traced(function, args, mode)
    report = ATTENTION_UNBIASED.apply(gm)
    assert report["attention.fuse_causal_bias"].rewrites == (name in OWN_KEYS)
    assert count(gm, "softmax") == (name in NO_KEYS)
    torch.testing.assert_close(
        value_and_gradients(gm, args), value_and_gradients(function, args), rtol=1e-12, atol=1e-13
    )


def test_what_keeps_own_keys_for_one_batch_size_may_not_for_another() -> None:
    """Of 6 keys, 8 sequences hide none; 7 hide the first one, which is all that row 0 has."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(L)
        hidden = (positions[:, None] < positions) | ((positions + q.shape[0]) % 7 == 0)
        return torch.softmax(q @ k.mT + torch.zeros(L, L).double().masked_fill(hidden, LEAST), -1) @ v

    args = [torch.randn(8, H, L, E, dtype=torch.float64) for _ in range(3)]
    for x in args:
        torch._dynamo.mark_dynamic(x, 0)
    found, _ = caught(attention, *args, inside=lambda gm: ATTENTION_UNBIASED.apply(normalize(gm)))
    assert found["attention.fuse_causal_bias"].rewrites == 0
    still, _ = caught(attention, *map(torch.clone, args), inside=lambda gm: ATTENTION_UNBIASED.apply(normalize(gm)))
    assert still["attention.fuse_causal_bias"].rewrites == 1, "of 8 sequences alone"


DRAWING: dict[str, Function] = {
    "fuse": lambda q, k, v, m, h: F.dropout(torch.softmax(q @ k.mT * SCALE, -1), 0.25) @ v,
    "fuse_scaled_bias": lambda q, k, v, m, h: F.dropout(torch.softmax((q @ k.mT + m) / 3.0, -1), 0.25) @ v,
    "fuse_filled": lambda q, k, v, m, h: F.dropout(torch.where(h, q @ k.mT, -torch.inf).softmax(-1), 0.25) @ v,
}


@pytest.mark.parametrize("rule", DRAWING)
def test_a_dropout_that_draws_is_refused_unless_asked_for(rule: str) -> None:
    args = tensors(B, H, L, E)
    gm, _ = traced(DRAWING[rule], args)
    report = ATTENTION.apply(gm)
    assert report.rewrites == 0
    (refusal,) = report[f"attention.{rule}"].refusals
    assert refusal.reason == ("its draws differ: aten::dropout before, aten::scaled_dot_product_attention after")
    assert ATTENTION_DROPOUT.apply(gm)[f"attention_dropout.{rule}"].rewrites == 1
    whole, _ = traced(DRAWING[rule], args)
    for node in whole.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default):
        node.update_arg(1, 0.0)
    whole.recompile()
    args[2] = torch.eye(L, E, dtype=torch.float64).expand(B, H, L, E)  # the value is the weights themselves
    kept, weights = gm(*args)[..., :L], whole(*args)[..., :L]
    drawn = weights > 0
    share = (kept[drawn] / weights[drawn]).round(decimals=9)
    assert set(share.tolist()) == {0.0, round(1 / 0.75, 9)}
    assert 0.15 < (share == 0).double().mean() < 0.35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, m, h: F.softmax(q @ k.mT * SCALE + m, -1, dtype=torch.float32).to(q.dtype) @ v,
        lambda q, k, v, m, h: F.softmax((q @ k.mT * SCALE + m).float(), -1).type_as(v) @ v,
    ],
    ids=["dtype", "float"],
)
def test_is_nearer_to_the_real_number_in_half_precision(function: Function, dtype: torch.dtype) -> None:
    args = tensors(B, H, L, E, dtype=dtype)
    gm, _ = traced(function, args)
    assert ATTENTION.apply(gm)["attention.fuse"].rewrites == 1
    real = torch.softmax(args[0].double() @ args[1].double().mT * SCALE + args[3].double(), -1) @ args[2].double()
    before, after = (function(*args).double() - real).abs(), (gm(*args).double() - real).abs()
    assert after.mean() < before.mean()


SCALED: dict[str, tuple[set[str], Function]] = {
    "query": ({"fold_query_scale"}, lambda q, k, v: torch.softmax((q * 0.5) @ k.mT, -1) @ v),
    "query by": ({"fold_query_scale"}, lambda q, k, v: torch.softmax((q / 3.0) @ k.mT * 2.0, -1) @ v),
    "key": ({"fold_key_scale"}, lambda q, k, v: torch.softmax(q @ (k * 0.5).mT, -1) @ v),
    "both": ({"fold_query_scale", "fold_key_scale"}, lambda q, k, v: torch.softmax((q * 0.5) @ (0.5 * k).mT, -1) @ v),
    "of the operator itself": ({"fold_query_scale"}, lambda q, k, v: F.scaled_dot_product_attention(q * 0.5, k, v)),
    "causal": (
        {"fold_key_scale"},
        lambda q, k, v: F.scaled_dot_product_attention(q, k / 4.0, v, is_causal=True, scale=2.0),
    ),
}


@pytest.mark.parametrize("case", SCALED)
def test_scales_of_queries_and_keys_join_the_operators(case: str) -> None:
    folds, function = SCALED[case]
    args = tensors(B, H, L, E)[:3]
    gm, _ = traced(function, args)
    assert fired(ATTENTION.apply(gm)) - {"fuse", "untranspose_key"} == folds
    assert count(gm, "mul") + count(gm, "div") == 0
    torch.testing.assert_close(
        value_and_gradients(gm, args), value_and_gradients(function, args), rtol=1e-12, atol=1e-13
    )
    assert ATTENTION.apply(gm).rewrites == 0


def test_a_scale_that_is_a_tensor_stays_on_the_query() -> None:
    gm, _ = traced(lambda q, k, v: torch.softmax((q * v[0, 0, 0, 0]) @ k.mT, -1) @ v, tensors(B, H, L, E)[:3])
    assert fired(ATTENTION.apply(gm)) == {"fuse", "untranspose_key"}
    assert count(gm, "mul") == 1


def _times(number: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    return lambda q, k, v, m, h: torch.softmax(q @ k.mT * number(q), -1) @ v


# whether the scale of the scores is folded, and the function: only the number that the tensor holds is
TENSORS_OF_NUMBERS: dict[str, tuple[bool, Function]] = {
    "literal": (True, _times(lambda q: torch.tensor(0.1, dtype=q.dtype))),
    "root of a literal": (True, _times(lambda q: torch.sqrt(torch.tensor(0.1, dtype=q.dtype)))),
    "beyond float32": (True, _times(lambda q: torch.full((), 1e60, dtype=q.dtype) * 1e-60)),
    "rounded to float32": (False, _times(lambda q: torch.full((), 0.1, dtype=torch.float32))),
    "rounded to an integer": (False, _times(lambda q: torch.full((), 2.5, dtype=torch.int64))),
    "rounded to a bool": (False, _times(lambda q: torch.full((), 3, dtype=torch.bool))),
    "rounded like another": (False, _times(lambda q: torch.full_like(q[:1, :1, :1, :1], 2.5, dtype=torch.int32))),
    "input": (False, lambda q, k, v, m, h: torch.softmax(q @ k.mT * m[0, 0, 0, 0].detach(), -1) @ v),
}


@pytest.mark.parametrize("name", TENSORS_OF_NUMBERS)
def test_a_tensor_is_the_number_that_it_holds(name: str) -> None:
    is_folded, function = TENSORS_OF_NUMBERS[name]
    gm, inputs = dynamo(function, tensors(B, H, L, E))
    gm = normalize(gm)
    expected = value_and_gradients(gm, inputs)
    ATTENTION.apply(gm)
    assert count(gm, "scaled_dot_product_attention") == is_folded
    torch.testing.assert_close(value_and_gradients(gm, inputs), expected, rtol=1e-12, atol=1e-13)


def test_an_attribute_that_is_no_literal_may_change() -> None:
    gm, inputs = traced(lambda q, k, v, m, h: torch.softmax(q @ k.mT / m[0, 0, 0, 0], -1) @ v, tensors(B, H, L, E))
    last = next(node for node in gm.graph.nodes if key(node) == "aten::div").args[1]
    gm.scale = torch.tensor(3.0, dtype=torch.float64)
    with gm.graph.inserting_before(last):
        read = gm.graph.create_node("get_attr", "scale")
    read.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(read)
    gm.recompile()
    ATTENTION.apply(gm)
    before = gm(*inputs)
    gm.scale.fill_(0.5)
    assert not torch.equal(gm(*inputs), before)


def test_no_keys_at_all() -> None:
    q, _, _, _, _ = tensors(B, H, L, E)
    nothing, kept = q[:, :, :0], torch.ones(B, 1, L, 0, dtype=torch.bool)
    gm, _ = traced(lambda q, k, v, h: (q @ k.mT).masked_fill(~h, LEAST).softmax(-1) @ v, [q, nothing, nothing, kept])
    assert ATTENTION.apply(gm)["attention.fuse_filled"].rewrites == 1
    assert torch.equal(gm(q, nothing, nothing, kept), torch.zeros_like(q))


def test_integers_times_a_number_keep_their_scale() -> None:
    gm, _ = traced(
        lambda q, k, v: F.scaled_dot_product_attention(q.long() * 0.5, k.float(), v.float()), tensors(B, H, L, E)[:3]
    )
    assert ATTENTION.apply(gm).rewrites == 0
    why = str(ATTENTION.once().explain(gm, "attention.fold_query_scale"))
    assert "dtypes are int64, float32" in why


def test_keys_that_are_transposed_for_others_too() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        transposed = k.transpose(-2, -1)
        return torch.softmax(q @ transposed, -1) @ v, transposed * 2

    args = tensors(B, H, L, E)[:3]
    gm, _ = traced(attention, args)  # pyright: ignore[reportArgumentType]
    assert fired(ATTENTION.apply(gm)) == {"fuse", "untranspose_key"}
    assert count(gm, "transpose") == 1
    torch.testing.assert_close(gm(*args), attention(*args))


def test_transposes_elsewhere_stay() -> None:
    gm, _ = traced(lambda q, k, v: k.transpose(1, 2).transpose(2, 3) * 2, tensors(B, H, L, E)[:3])
    assert ATTENTION.apply(gm).rewrites == 0
    assert "output uses it" in str(ATTENTION.once().explain(gm, "attention.untranspose_key"))


@pytest.mark.parametrize("rules", [ATTENTION, ATTENTION_DROPOUT, ATTENTION_UNBIASED], ids=lambda rules: rules.name)
def test_the_rules_have_a_digest(rules: RuleSet) -> None:
    assert rules.once().digest() is not None


SNAPSHOTS = {
    "mask": "mask",
    "filled": "masked_fill over a bias",
    "einsum": "einsum with heads behind",
    "baddbmm": "baddbmm, 3d",
    "bloom": "bloom, 3d",
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_before_and_after(name: str, fx_snapshot: Any) -> None:
    _, function, args = spelling(SNAPSHOTS[name])
    check_stages(traced(function, args)[0], fx_snapshot, after=ATTENTION)


def test_a_mask_of_fewer_digits_keeps_them_in_rows_that_keep_no_key() -> None:
    """A fill of -65504 is added to it, and subtracted again: in float32, three digits of the mask were left."""
    q, k, v, mask, kept = tensors(B, H, L, E)
    kept[:, :, 1] = False

    def attention(q: Any, k: Any, v: Any, mask: Any, kept: Any) -> torch.Tensor:
        return torch.softmax(torch.where(kept, q @ k.transpose(-2, -1), -65504.0) + mask, -1) @ v

    args = [q, k, v, mask.float(), kept]
    gm, _ = traced(attention, args)
    assert "fuse_filled_mask" in fired(ATTENTION.apply(gm))
    torch.testing.assert_close(gm(*args), attention(*args), rtol=1e-9, atol=1e-9)
