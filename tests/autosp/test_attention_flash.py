"""Flash attention of a package, and torch's own, is exact over 2, 3 and 4 ranks, and sharded where it is attention.

Their kernels are for cards; `tests.autosp.flash_attn` has ones with their names for CPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.nn.attention.varlen import varlen_attn

from autosp_rules import AutoSPConfig, dry_run
from autosp_rules.events import AttentionCallLeft, AttentionRuns, MaskedAttention
from autosp_rules.parallelism import AUTOSP
from fxrewrite.spmd import Parallelism, Shard, param
from fxrewrite.testing import simulate
from rules.attention.flash_kernels import FlashCall, is_flash_forward
from tests.autosp.attention_layer import BATCH, HEAD_DIM, IDS, LENGTH, VALUE_DIM, Attend, Layer, LayerOnOneDevice, check
from tests.autosp.flash_attn import flash_attn_func

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by Dynamo, of a custom function

_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's function has it: from 2.12 on."""


class Documents(Layer):
    """With where documents begin, in all rows of the batch, once for queries and twice for keys."""

    def __init__(self, *args: Any, batch: int = BATCH, **options: Any) -> None:
        super().__init__(*args, **options)
        starts = [0, 5, LENGTH, LENGTH, 20, BATCH * LENGTH][: None if batch == BATCH else 3]
        others = [0, 4, LENGTH, 15, 20, BATCH * LENGTH][: None if batch == BATCH else 3]
        for name, of in (("starts", starts), ("same", starts), ("others", others)):
            self.register_buffer(name, torch.tensor(of, dtype=torch.int32))


def _called(m: Layer, function: Callable[..., torch.Tensor], *heads_first: torch.Tensor) -> torch.Tensor:
    """A function that has rows before heads, and values as deep as keys."""
    q, k, v = (x[..., :HEAD_DIM].transpose(1, 2) for x in heads_first)
    return F.pad(function(q, k, v).transpose(1, 2), (0, VALUE_DIM - HEAD_DIM))


def rows(**options: Any) -> Attend:
    """The package's function on rows of a batch."""
    return lambda m, x, *qkv: _called(m, lambda q, k, v: flash_attn_func(q, k, v, **options), *qkv)


def _with_sinks(m: Layer, x: Any, *qkv: torch.Tensor) -> torch.Tensor:
    """The package gives sinks no gradient."""
    return rows(causal=True, s_aux=m.slopes)(m, x, *qkv)


def documents(keys: str = "same", **options: Any) -> Attend:
    """The package's function on documents; Dynamo does not take one tensor twice."""

    def function(m: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_func(*flat, m.starts, getattr(m, keys), **options).unflatten(0, q.shape[:2])

    return lambda m, x, *qkv: _called(m, lambda q, k, v: function(m, q, k, v), *qkv)


def of_torch(window: tuple[int, int] = (-1, -1), **options: Any) -> Attend:
    """torch's function on documents."""

    def function(m: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        if not _TAKES_GROUPS:
            k, v = (x.repeat_interleave(m.heads // m.kv_heads, 2) for x in (k, v))
        flat = (x.flatten(0, 1) for x in (q, k, v))
        grouped = {"enable_gqa": True} if _TAKES_GROUPS else {}
        out: Any = varlen_attn(*flat, m.starts, m.starts, LENGTH, LENGTH, window_size=window, **grouped, **options)
        return out.unflatten(0, q.shape[:2])

    return lambda m, x, *qkv: _called(m, lambda q, k, v: function(m, q, k, v), *qkv)


RAISED: dict[str, tuple[Attend, str]] = {
    "all keys": (rows(), ""),
    "causal": (rows(causal=True), "causal"),
    "window": (rows(causal=True, window_size=(3, 3), softmax_scale=0.3), "causal and window 4"),
    "window to both sides": (rows(window_size=(2, 1)), "a condition on positions"),
    "keys up to a later one": (rows(window_size=(-1, 2)), "a condition on positions"),
    "keys before": (rows(window_size=(2, -1)), "window 3"),
    "softcap": (rows(causal=True, softcap=2.0), "causal"),
    "sinks": (_with_sinks, "causal"),
    "documents": (documents(), "documents"),
    "causal documents": (documents(causal=True), "documents and order of given positions"),
    "documents of keys": (documents("others", causal=True, window_size=(2, 0)), "documents and "),
    "torch's": (of_torch(), "documents"),
    "torch's, causal": (of_torch((-1, 0)), "documents and causal"),
    "torch's, window": (of_torch((3, 0), scale=0.3), "documents and causal and window 4"),
}
"""What becomes attention with a mask, and what the report calls it; "" if there is none."""


def _with_lse(m: Layer, x: Any, *qkv: torch.Tensor) -> torch.Tensor:
    def function(q: Any, k: Any, v: Any) -> torch.Tensor:
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        return out * lse.detach().transpose(1, 2).unsqueeze(-1)

    return _called(m, function, *qkv)


def _with_slopes(m: Layer, x: Any, *qkv: torch.Tensor) -> torch.Tensor:
    return rows(causal=True, alibi_slopes=m.slopes.detach())(m, x, *qkv)


LEFT: dict[str, tuple[Attend, str]] = {
    "slopes": (_with_slopes, "it has alibi_slopes"),
    "logsumexp": (_with_lse, "its logsumexp is read"),
    "bent gradients": (rows(factor=0.5), "its custom function also calls aten::mul"),
}
"""What stays a call of the package, and why."""


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.some(5)
def test_attention_with_a_mask(name: str) -> None:
    """6 heads are sharded over 3 ranks; 4 gather keys and values, which have 2 heads."""
    attend, mask = RAISED[name]
    for kv_heads, ranks, dynamic in ((6, 3, False), (2, 4, True)):
        report = check(Documents(attend, kv_heads=kv_heads), ranks=(ranks,), dynamic=dynamic)[ranks]
        assert report.events_of(AttentionRuns)
        assert not report.events_of(AttentionCallLeft)
    said = [event.mask for event in report.events_of(MaskedAttention) if event.computed == "rows"]
    assert all(text.startswith(mask) for text in said)


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_runs_whole(name: str) -> None:
    attend, why = LEFT[name]
    (event,) = check(Documents(attend), strict=False, ranks=(3,))[3].events_of(AttentionCallLeft)
    assert event.why == why
    assert "stand_in_flash_attn::_flash_attn_forward" in str(event)


def test_more_keys_than_queries() -> None:
    """The last query reads up to the last key."""
    for window in ((5, 0), (-1, -1)):
        check(Documents(rows(causal=True, window_size=window), cross=True), ranks=(3, 4))


def test_one_row_of_documents() -> None:
    """No index of a batch is in the way of a ring."""
    for attend in (documents(causal=True), of_torch((-1, 0))):
        check(Documents(attend, batch=1), ranks=(2, 4), ids=IDS[:1], attention="ring")


def test_heads_over_another_axis() -> None:
    class Named(Documents):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids, ids)

    by_heads = {param(name): Shard(0) for name in ("q.*", "k.*", "v.*")} | {param("o.weight"): Shard(1)}
    heads = Parallelism("heads", axis="tp", place=by_heads)
    for plan, mesh in ((heads, {"tp": 2}), (AUTOSP | heads, {"sp": 3, "tp": 2})):
        found = simulate(Named(documents()), {"ids": IDS}, plan, mesh)
        assert found.loss_error < 1e-12
        assert found.grad_error < 1e-9
        assert "all_gather" not in found.sent["tp"]


def test_evaluation() -> None:
    """Without gradients Dynamo writes the kernel itself."""
    model = Documents(rows(causal=True)).requires_grad_(False)
    model.o.requires_grad_()
    report = LayerOnOneDevice(model).report(3, AutoSPConfig(strict=True))
    assert report.events_of(AttentionRuns)


def test_dropout() -> None:
    """Numbers drawn differ from those of kernels, which have no generator that ranks share."""
    _, report = dry_run(Documents(rows(causal=True, dropout_p=0.5)), {"ids": IDS, "memory": IDS}, num_ranks=3)
    assert report.events_of(AttentionRuns)


def _with_narrow_keys(m: Layer, x: Any, *qkv: torch.Tensor) -> torch.Tensor:
    return _called(m, lambda q, k, v: flash_attn_func(q, k.float(), v), *qkv)


class Twice(torch.autograd.Function):
    """Attention of what was attended, in one function."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, _ = torch.ops.stand_in_flash_attn._flash_attn_forward(
                q, k, v, 0.0, 0.5, False, -1, -1, 0.0, None, None, False
            )
        return q

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, grad, grad


@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (lambda m, x, *qkv: _called(m, Twice.apply, *qkv), "its custom function calls 2 kernels"),
        (rows(dropout_p=0.5, softcap=2.0), "it has a softcap and dropout"),
        (_with_narrow_keys, "keys have dtype torch.float32, queries torch.float64"),
    ],
)
def test_what_attention_cannot_do_is_left(attend: Attend, why: str) -> None:
    _, report = dry_run(Documents(attend), {"ids": IDS, "memory": IDS}, num_ranks=3)
    assert [event.why for event in report.events_of(AttentionCallLeft)] == [why]


def test_a_kernel_is_read_by_the_names_of_its_arguments() -> None:
    graph = fx.Graph()
    q, starts, sinks = map(graph.placeholder, ("q", "starts", "sinks"))
    fwd = torch.ops.stand_in_flash_attn.fwd.default
    given = (q, q, q, None, starts, starts, 8, None, 0.5, False, 4, 2, 0, 3.0, True, sinks)
    call = graph.call_function(fwd, given)
    assert FlashCall.of(call) == FlashCall(q, q, q, starts, starts, 0.5, False, 4, 2, 3.0, sinks)
    causal = graph.call_function(fwd, (q, q, q, None, None, None, None, q, None, True, 4, 2))
    read = FlashCall.of(causal)
    assert (read.causal, read.left, read.right, read.others) == (True, 4, 0, {"q_descale"})


def test_a_kernel_with_other_arguments_is_not_read() -> None:
    library = torch.library.Library("packed_flash_attn", "FRAGMENT")
    library.define("fwd(Tensor qkv) -> Tensor")
    graph = fx.Graph()
    assert not is_flash_forward(graph.call_function(torch.ops.packed_flash_attn.fwd.default, (graph.placeholder("x"),)))
