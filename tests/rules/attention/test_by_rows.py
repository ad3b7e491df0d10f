"""Attention by rows is scaled_dot_product_attention with the whole mask, which never exists."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autosp_rules.attention.ring_kernel import ring_attention, ring_attention_backward
from fxrewrite import RuleSet
from fxrewrite.spmd.operators.send_rows import SEND_ROWS
from rules.attention import blocks as sizes, by_rows as module
from rules.attention.blocks import kept_tiles
from rules.attention.by_rows import (
    ATTENTION_BY_ROWS,
    BY_ROWS,
    attention_by_rows,
    attention_by_rows_backward,
)
from rules.attention.kernels import attend_block
from rules.attention.operator import RAISE_ATTENTION
from rules.masks.expressions import MaskExpression
from rules.masks.tiles import MASK_TILES
from tests.rewriting import check_left_alone, check_stages
from tests.rules.attention.cases import LOW, B, H, S, dense_values, results as results_of

pytestmark = pytest.mark.usefixtures("three_rows_a_block")
KV = 2
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mask of integers [B, S] and slopes [H]."""


def positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.arange(x.shape[1])
    return columns[:, None], columns


def causal(x: torch.Tensor) -> torch.Tensor:
    rows, columns = positions(x)
    return columns <= rows


def near(x: torch.Tensor, window: int) -> torch.Tensor:
    rows, columns = positions(x)
    return causal(x) & (columns > rows - window)


def added(kept: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.zeros(kept.shape, dtype=torch.float64).masked_fill(~kept, fill)


def alibi(x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    rows, columns = positions(x)
    return (columns - rows) * slopes[:, None, None] + added(causal(x), -torch.inf)


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 1)


READABLE: dict[str, Mask] = {
    "causal": lambda x, y: causal(x),
    "causal and padding": lambda x, y: causal(x) & (x > 0)[:, None, None],
    "window": lambda x, y: near(x, 3),
    "chunks": lambda x, y: causal(x) & (positions(x)[1] // 3 == positions(x)[0] // 3),
    "documents": lambda x, y: (x[:, None, :, None] == x[:, None, None]) & causal(x),
    "prefix": lambda x, y: causal(x) | (positions(x)[1] < 3),
    "either": lambda x, y: torch.logical_or(x[:, None, None] > 2, x[:, None, :, None] > 2),
    "added": lambda x, y: added(causal(x), LOW),
    "added by where": lambda x, y: torch.where(causal(x), 0.0, -torch.inf).double()[None, None],
    "one less it, times a number": lambda x, y: (1.0 - (causal(x) & (x < 3)[:, None, None]).double()) * LOW,
    "alibi": alibi,
    "a view of a batch of masks": lambda x, y: ((x[:, :, None] == x[:, None]) & causal(x))[:, None],
    "more dimensions": lambda x, y: (x[:, :, None] == x[:, None]).view(B, 1, S, S),
    "transposed": lambda x, y: causal(x).transpose(0, 1).expand(B, 1, S, S),
    "another order": lambda x, y: (x[:, :, None, None] >= x[:, None, :, None]).permute(0, 3, 1, 2),
    "rows of a longer one": lambda x, y: twice(x)[:, None, :, None].ge(x[:, None, None])[:, :, 3 : 3 + S],
    "every other column": lambda x, y: x[:, None, :, None].ge(twice(x)[:, None, None])[..., ::2],
    "the first of a batch of one": lambda x, y: (x[:1, None, :, None] >= x[:1, None, None])[0],
    "tril": lambda x, y: torch.ones(S, S, dtype=torch.bool).tril() & (x > 0)[:, None, None],
    "tril of numbers": lambda x, y: torch.tril(torch.ones(S, S)).view(1, 1, S, S) == 1,
    "band": lambda x, y: torch.triu(torch.tril(torch.ones(S, S), 1), -2).bool(),
    "triu, added": lambda x, y: torch.triu(torch.full((S, S), -torch.inf, dtype=torch.float64), diagonal=1),
    "rows of a longer triangle": lambda x, y: torch.ones(2 * S, 2 * S).tril().bool()[None, None, 3 : 3 + S, :S],
    "of numbers": lambda x, y: torch.ones(S, S, dtype=torch.bool) & (x > 0)[:, None, None],
}


def operands(width: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, S, 4), (B, KV, S, 4), (B, KV, S, width)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def data(*, learned: bool = False) -> list[torch.Tensor]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64)
    return [torch.tensor([[0, 0, 1, 1, 2, 2, 2], [1, 1, 1, 2, 3, 3, 0]]), slopes.requires_grad_(learned)]


def attend_with(mask: Mask, **options: Any) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(x, y), **{"enable_gqa": True, **options})

    return attend


def traced(attend: Callable[..., Any], given: list[torch.Tensor], mode: str = "fake") -> fx.GraphModule:
    """The graph with its one operator of attention; its inputs say, as Dynamo's do, whether they need a gradient."""
    gm = make_fx(attend, tracing_mode=mode, pre_dispatch=True)(*given)
    RAISE_ATTENTION.apply(gm)
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["example_value"] = node.meta["val"].detach().requires_grad_(tensor.requires_grad)
    return gm


def results(function: Callable[..., torch.Tensor], width: int = 4) -> Any:
    return results_of(lambda *qkv: function(*qkv, *data()), operands(width))


def check_equal(found: Callable[..., torch.Tensor], expected: Callable[..., torch.Tensor], width: int = 4) -> None:
    torch.testing.assert_close(results(found, width), results(expected, width), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", READABLE)
def test_a_mask_that_is_read(name: str, mode: str) -> None:
    if mode == "symbolic" and name in ("more dimensions", "rows of a longer one", "every other column"):
        pytest.skip("a shape that is stated as a number")
    attend = attend_with(READABLE[name])
    gm = traced(attend, [*operands(), *data()], mode)
    assert BY_ROWS.apply(gm)["masks.attend_by_rows"].rewrites == 1
    assert not BY_ROWS.apply(gm).rewrites
    assert not dense_values(gm)
    check_equal(gm, attend)


KINDS = ("bool", "-inf", "the lowest number")


@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_keep_no_key(kind: str, width: int) -> None:
    """As the operator has them, with its kernel for the CPU (a width of 4), and with products of matrices."""

    def mask(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = near(x, 3) & (positions(x)[1] > 1) & (positions(x)[0] != 5)
        return kept if kind == "bool" else added(kept, LOW if kind == "the lowest number" else -torch.inf)

    attend = attend_with(mask)
    gm = traced(attend, [*operands(width), *data()])
    assert BY_ROWS.apply(gm).rewrites
    check_equal(gm, attend, width)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "an input": (attend_with(lambda x, y: x[0, 0] + y[:1] + torch.eye(S)), "aten::eye, has rows and columns"),
    "a product": (attend_with(lambda x, y: (x.T @ x) > 3), "aten::matmul, has rows and columns"),
    "a reshape": (attend_with(lambda x, y: (x.flatten()[:, None] > x[:1]).view(2, S, S)[:, None]), "reshapes rows and"),
    "no number": (attend_with(lambda x, y: added(causal(x), torch.nan)), "has the argument nan"),
    "a mode": (
        attend_with(lambda x, y: torch.div(x[0], x[0][:, None], rounding_mode="floor") > 0),
        "aten::div, has rows",
    ),
    "a gradient": (attend_with(alibi), "needs a gradient"),
    "dropout": (attend_with(READABLE["causal"], dropout_p=0.1), "dropout draws in the scores"),
    "a float mask": (
        attend_with(lambda x, y: added(causal(x), -1.0).float()),
        "the mask is torch.float32, q torch.float64",
    ),
    "no rows": (attend_with(lambda x, y: (x > 1)[:, None, None]), "the mask has no rows and columns"),
    "no heads": (
        lambda q, k, v, x, y: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], causal(x)),
        "q has rank 3",
    ),
    "one key for all": (
        lambda q, k, v, x, y: F.scaled_dot_product_attention(q[:, :KV], k[:1], v[:1], causal(x)),
        "k has a batch of 1, q of 2",
    ),
    "other heads of values": (
        lambda q, k, v, x, y: F.scaled_dot_product_attention(q, k, v[:, :1], causal(x), enable_gqa=True),
        "v has 1 heads, k 2",
    ),
    "too long": (attend_with(lambda x, y: repeated(causal(x), 12)), "it is too long an expression"),
}


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x & x
    return x


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_says_why(case: str) -> None:
    attend, why = REFUSED[case]
    given = [*operands(), *data(learned=case == "a gradient")]
    check_left_alone(BY_ROWS, "masks.attend_by_rows", traced(attend, given), given, why)


def test_graph(fx_snapshot: Any) -> None:
    gm = traced(attend_with(READABLE["causal and padding"]), [*operands(), *data()])
    check_stages(gm, fx_snapshot, after=BY_ROWS)


def arguments(dtype: torch.dtype = torch.float64, softcap: float = 0.0) -> tuple[Any, ...]:
    x, _ = data()
    rows, columns = positions(x)
    leaves = [columns, rows, x[:, None, None] > 0]
    return *operands(dtype=dtype), leaves, "bitwise_and(le(x0, x1), x2)", 0.5, softcap, None, None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.15's own
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_the_operator_is_one_for_torch(softcap: float) -> None:
    """Schema, fake values, gradients, static and dynamic shapes under AOTAutograd."""
    torch.library.opcheck(ATTENTION_BY_ROWS, arguments(softcap=softcap))


def test_the_sums_have_no_gradient() -> None:
    out, lse = attention_by_rows(*arguments())
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    given = arguments(dtype)
    q, k, v, (columns, rows, kept), _, scale, *_ = given
    out, lse = attention_by_rows(*given)
    mask = (columns <= rows) & kept
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    bound = 4 * torch.finfo(dtype).eps
    grads = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, expected)]
    torch.testing.assert_close((out, grads[0]), (expected, grads[1]), rtol=bound, atol=4 * bound)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and columns of each block of the forward and the backward."""
    seen: list[tuple[int, int]] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            q, k = args[:2] if function is attend_block else args[1:3]
            seen.append((q.shape[2], k.shape[2]))
            return function(*args)

        return run

    for name in ("attend_block", "attend_block_backward"):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return seen


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal", [(3, 3), (3, 6), (1, 7)]),
        ("window", [(3, 3), (3, 5), (1, 3)]),
        ("alibi", [(3, 3), (3, 6), (1, 7)]),
        ("added", [(3, 3), (3, 6), (1, 7)]),
        ("prefix", [(3, 3), (3, 6), (1, 7)]),
        ("transposed", [(3, 7), (3, 4), (1, 1)]),
    ],
)
def test_columns_that_a_block_of_rows_hides_are_left_out(
    name: str, expected: list[tuple[int, int]], blocks: list[tuple[int, int]]
) -> None:
    gm = traced(attend_with(READABLE[name]), [*operands(), *data()])
    BY_ROWS.apply(gm)
    results(gm)
    assert blocks == expected * 2


def test_rows_that_keep_the_same_columns_are_one_block_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, bool]] = []

    def watched(q: Any, k: Any, v: Any, mask: Any, *how: Any) -> Any:
        seen.append((q.shape[2], k.shape[2], mask is None))
        return attend_block(q, k, v, mask, *how)

    monkeypatch.setattr(module, "attend_block", watched)
    attend = attend_with(lambda x, y: (positions(x)[1] < 4) | ((positions(x)[0] >= 6) & (positions(x)[1] < 6)))
    gm = traced(attend, [*operands(), *data()])
    BY_ROWS.apply(gm)
    results(gm)
    assert seen == [(6, 4, True), (1, 6, True)]
    check_equal(gm, attend)


def test_a_cuda_graph_does_not_record_an_operator_that_waits_for_the_device() -> None:
    operators = [ATTENTION_BY_ROWS, MASK_TILES, SEND_ROWS]
    custom = [attention_by_rows_backward, kept_tiles, ring_attention, ring_attention_backward]
    for operator in operators + [operator._opoverload for operator in custom]:
        assert torch.Tag.cudagraph_unsafe in operator.tags


FAR: dict[str, tuple[Mask, int]] = {
    "window": (lambda x, y: near(x, 8), 64 * (8 + 8)),
    "window, added": (lambda x, y: added(near(x, 8), LOW), 64 * (8 + 8)),
    "window, added -inf": (lambda x, y: added(near(x, 8), -torch.inf), 64 * (8 + 8)),
    "documents": (
        lambda x, y: (positions(x)[0] // 16 == positions(x)[1] // 16) & causal(x),
        4 * (16 * 16) * 3 // 4,
    ),
    "documents of ids": (
        lambda x, y: (x[:, None, :, None] == x[:, None, None]) & causal(x),
        (8 * 8 + 40 * 40 + 16 * 16),
    ),
    "a window and a prefix": (lambda x, y: near(x, 8) | (causal(x) & (positions(x)[1] < 4)), 64 * (8 + 8 + 4)),
}
"""Masks of 64 tokens, and how many scores they may cost where tiles are 8 x 4."""


@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize("name", FAR)
def test_what_is_hidden_is_not_computed(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, blocks: list[tuple[int, int]]
) -> None:
    """Neither scores nor the mask: what is evaluated of it is at most twice what is attended to."""
    monkeypatch.setattr(sizes, "_MOST_ROWS", 8)
    monkeypatch.setattr(sizes, "_COLUMNS", 4)
    evaluated: list[int] = []
    part = MaskExpression.part

    def watched(*args: Any) -> torch.Tensor:
        found = part(*args)
        evaluated.append(found.shape[-2] * found.shape[-1])
        return found

    mask, most = FAR[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, 64, 4), (B, KV, 64, 4), (B, KV, 64, width)]
    qkv = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    ids = torch.arange(3).repeat_interleave(torch.tensor([8, 40, 16])).repeat(B, 1)
    attend = attend_with(mask)
    gm = traced(attend, [*qkv, ids, data()[1]])
    assert BY_ROWS.apply(gm).rewrites
    monkeypatch.setattr(MaskExpression, "part", watched)
    out, expected = gm(*qkv, ids, data()[1]), attend(*qkv, ids, data()[1])
    grads = [torch.autograd.grad(y.sin().sum(), qkv) for y in (out, expected)]
    torch.testing.assert_close((out, grads[0]), (expected, grads[1]), rtol=1e-12, atol=1e-13)
    assert sum(rows * columns for rows, columns in blocks) <= 2 * most
    assert sum(evaluated) <= 2 * sum(rows * columns for rows, columns in blocks)


def test_no_block_of_the_mask_outlives_the_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even until garbage is collected."""
    alive: list[Callable[[], Any]] = []
    part = MaskExpression.part

    def watched(*args: Any) -> torch.Tensor:
        assert sum(block() is not None for block in alive) < 2
        found = part(*args)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(MaskExpression, "part", watched)
    gc.disable()
    try:
        attention_by_rows(*arguments())
    finally:
        gc.enable()
    assert len(alive) == 3


def test_blocks_are_smaller_where_scores_are_held(
    monkeypatch: pytest.MonkeyPatch, blocks: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(sizes, "_MOST_ENTRIES", 2 * B * H * S)
    gm = traced(attend_with(READABLE["of numbers"]), [*operands(6), *data()])
    BY_ROWS.apply(gm)
    results(gm, 6)
    assert {rows for rows, _ in blocks} == {2, 1}
    blocks.clear()
    results(gm, 4)
    assert {rows for rows, _ in blocks} == {3, 1}


@pytest.mark.parametrize(("width", "rows"), [(4, [7]), (6, [2, 2, 2, 1])])
def test_without_a_mask_rows_are_in_blocks_where_scores_are_held(
    width: int, rows: list[int], monkeypatch: pytest.MonkeyPatch, blocks: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(sizes, "_MOST_ENTRIES", 2 * B * H * S)

    def by_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        return attention_by_rows(q, k, v, [], "", 0.5, 0.0, None, None)[0]

    check_equal(by_rows, lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True), width)
    assert blocks == [(n, S) for n in rows] * 2


def test_gradients_that_are_parts_of_sums_come_in_the_dtype_of_the_sums() -> None:
    q, k, v = (x.detach() for x in operands(6, torch.bfloat16))
    out, lse = attention_by_rows(q, k, v, [], "", 0.5, 0.0, None, None)
    dout = torch.ones_like(out)
    given = (dout, q, k, v, out, lse, [], "", 0.5, 0.0)
    wide, narrow = (attention_by_rows_backward(*given, dtype=dtype) for dtype in (torch.float32, None))
    torch.testing.assert_close(tuple(grad.bfloat16() for grad in wide), narrow, rtol=0, atol=0)
    assert all((grad != grad.bfloat16()).any() for grad in wide)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """At two lengths by one program, and with checkpointing."""
    attend = attend_with(READABLE["causal and padding"])

    def checkpointed(*args: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(attend, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]

    torch._dynamo.reset()
    plan = RuleSet("rows", RAISE_ATTENTION, BY_ROWS).once().expect("masks.attend_by_rows")
    compiled = torch.compile(checkpointed, backend=plan.backend(backend), dynamic=True, fullgraph=True)
    check_equal(compiled, attend)
