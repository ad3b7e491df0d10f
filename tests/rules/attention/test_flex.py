"""Flex attention in a graph is scaled_dot_product_attention with the whole mask, and its arguments are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from fxrewrite import FxRewriteError, RefusedError, RuleSet
from fxrewrite.ops import key
from rules.attention.by_rows import ATTENTION_BY_ROWS, BY_ROWS
from rules.attention.flex import _why_too_large, flex_rules
from rules.attention.flex_operator import FLEX_ATTENTION
from rules.attention.operator import RAISE_ATTENTION
from tests.dynamo import caught
from tests.rules.attention.cases import LOW, B, S, dense_values
from tests.rules.attention.test_by_rows import (
    READABLE,
    added,
    alibi,
    attend_with,
    causal,
    check_equal,
    data,
    near,
    operands,
    positions,
    traced,
)
from tests.rules.attention.test_sinks import RULES as SINKS, column, joined, operands as operands_with_sinks
from tests.versions import flex_text

FLEX = RuleSet("flex", RAISE_ATTENTION, BY_ROWS, flex_rules("flex"), atomic=True)
HIDES = ("added", "one less it, times a number")
"""Masks that hide by a finite number."""
DYNAMIC = ("causal and padding", "window", "documents", "prefix", "alibi")


@pytest.mark.parametrize(
    ("name", "mode"), [(n, "fake") for n in READABLE if n not in HIDES] + [(n, "symbolic") for n in DYNAMIC]
)
def test_a_mask_is_a_function_of_an_entry(name: str, mode: str) -> None:
    attend = attend_with(READABLE[name])
    gm = traced(attend, [*operands(), *data()], mode)
    assert FLEX.apply(gm)["masks.attend_by_flex"].rewrites == 1
    assert not FLEX.apply(gm).rewrites
    assert not dense_values(gm)
    check_equal(gm, attend)


@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize("fill", [None, -torch.inf])
def test_rows_that_keep_no_key(fill: float | None, width: int) -> None:
    def mask(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = near(x, 3) & (positions(x)[1] > 1) & (positions(x)[0] != 5)
        return kept if fill is None else added(kept, fill)

    attend = attend_with(mask)
    gm = traced(attend, [*operands(width), *data()])
    FLEX.apply(gm)
    check_equal(gm, attend, width)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -torch.inf])
def test_sinks(fill: float) -> None:
    """In float32, as the logsumexp is; rows in front of 2 keep no key."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(S)[:, None], torch.arange(S)
        mask = torch.where((columns <= rows) & (columns > 1), 0.0, fill).to(q.dtype)
        both = torch.cat([q @ k.transpose(-2, -1) * 0.5 + mask, column(sinks).to(q.dtype)], -1)
        return torch.softmax(both, -1)[..., :-1] @ v

    wide = operands_with_sinks(6)
    given = [x.detach().float().requires_grad_() for x in wide]
    gm = make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*given)
    SINKS.apply(gm)
    assert flex_rules("flex").apply(gm).rewrites == 1
    assert FLEX_ATTENTION in [node.target for node in gm.graph.nodes]
    weights = torch.arange(wide[2].numel()).reshape(wide[2].shape).sin()
    found, expected = gm(*given), attend(*wide)
    grads = torch.autograd.grad((found * weights).sum(), given)
    wanted = torch.autograd.grad((expected * weights).sum(), wide)
    for mine, theirs in zip((found, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def wide_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return torch.softmax(joined(q, k, sinks), -1)[..., :-1] @ v


def test_what_is_refused() -> None:
    for name in HIDES:
        gm = traced(attend_with(READABLE[name]), [*operands(), *data()])
        with pytest.raises(RefusedError, match=r"the mask adds -?1.8e\+308, and a row of it alone attends to all keys"):
            FLEX.apply(gm)
    gm = make_fx(wide_sinks, tracing_mode="fake", pre_dispatch=True)(*operands_with_sinks())
    SINKS.apply(gm)
    with pytest.raises(RefusedError, match="and the logsumexp, which sinks need, float32"):
        RuleSet("flex", flex_rules("flex"), atomic=True).apply(gm)


def test_a_leaf_that_hides_by_a_number_is_an_error() -> None:
    """What the expression does not say is found when the mask is looked at."""
    attend = attend_with(lambda x, y: added(causal(x), -torch.inf) + (x < 2).double()[:, None, None] * LOW)
    gm = traced(attend, [*operands(), *data()])
    FLEX.apply(gm)
    with pytest.raises(FxRewriteError, match="may hide keys by a finite number"):
        gm(*operands(), *data())


def test_on_the_cpu_it_stays_by_rows() -> None:
    gm = traced(attend_with(READABLE["causal"]), [*operands(), *data()])
    rules = RuleSet("auto", BY_ROWS, flex_rules("auto"))
    rules.apply(gm)
    assert ATTENTION_BY_ROWS in [node.target for node in gm.graph.nodes]
    assert "q is on cpu" in str(rules.once().explain(gm, "masks.attend_by_flex"))


ON_CUDA: dict[str, tuple[int, torch.dtype, float | None, str]] = {
    "narrow heads": (8, torch.bfloat16, None, "heads of 8 are narrower than 16"),
    "float64": (16, torch.float64, None, "q is torch.float64"),
    "a number that hides": (16, torch.bfloat16, torch.finfo(torch.bfloat16).min, "the mask adds -3.4e+38, and a row"),
}


def on_cuda(case: str) -> fx.GraphModule:
    """Attention on fake values of a device that need not be there."""
    width, dtype, fill, _ = ON_CUDA[case]
    with FakeTensorMode():
        qkv = [torch.empty(2, heads, 300, width, device="cuda", dtype=dtype) for heads in (4, 2, 2)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(300, device="cuda")
        kept = columns <= columns.unsqueeze(1)
        mask = kept if fill is None else torch.where(kept, 0.0, fill).to(dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    gm = make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*qkv)
    RAISE_ATTENTION.apply(gm)
    return gm


@pytest.mark.parametrize("case", ON_CUDA)
def test_what_stays_by_rows_on_cuda_says_why(case: str) -> None:
    gm, rules = on_cuda(case), RuleSet("auto", BY_ROWS, flex_rules("auto"), atomic=True)
    rules.apply(gm)
    assert ATTENTION_BY_ROWS in [node.target for node in gm.graph.nodes]
    assert ON_CUDA[case][-1] in str(rules.once().explain(gm, "masks.attend_by_flex"))


def test_graph(fx_snapshot: Any) -> None:
    for name in ("causal and padding", "alibi"):
        gm = traced(attend_with(READABLE[name]), [*operands(), *data()])
        FLEX.apply(gm)
        assert flex_text(gm) == fx_snapshot(name=name)


@pytest.mark.parametrize("name", ["causal and padding", "alibi"])
def test_compiled(name: str) -> None:
    """At two lengths by one program, and with checkpointing; an added mask reads tensors in what autograd traces."""
    attend = attend_with(READABLE[name])

    def checkpointed(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]

    torch._dynamo.reset()
    plan = FLEX.once().expect("masks.attend_by_flex")
    compiled = torch.compile(checkpointed, backend=plan.backend("aot_eager"), dynamic=True, fullgraph=True)
    check_equal(compiled, attend)


def compiled_by_inductor(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    plan = FLEX.once().expect("masks.attend_by_flex")
    return torch.compile(attend, backend=plan.backend("inductor"), fullgraph=True)


def long_operands(device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, heads, 300, 16, generator=generator).to(device, dtype) for heads in (4, 2, 2)]
    ids = torch.arange(300).repeat(2, 1) // torch.tensor([[70], [150]])
    return qkv, ids.to(device), torch.arange(300, device=device)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")
def test_tiles_lead_a_kernel() -> None:
    """Inductor's for the CPU, forward only: tiles that are hidden, kept in part and kept all."""
    qkv, ids, order = long_operands("cpu", torch.float32)
    attend = attend_with(lambda x, y: (x[:, None, :, None] == x[:, None, None]) & (y[:, None] - y < 200))
    with torch.no_grad():
        found, expected = compiled_by_inductor(attend)(*qkv, ids, order), attend(*qkv, ids, order)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["documents in a window", "alibi"])
def test_on_cuda(name: str, dtype: torch.dtype) -> None:
    """One kernel forward and one backward, against the whole mask in float64."""

    def documents(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(x.shape[1], device=x.device).unsqueeze(dim) for dim in (1, 0))
        kept = (columns <= rows) & (columns > rows - 200)
        return kept & (x[:, None, :, None] == x[:, None, None])

    def biased(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(x.shape[1], device=x.device).unsqueeze(dim) for dim in (1, 0))
        slopes = 2.0 ** -torch.arange(1, 5, device=x.device)
        return ((columns - rows) * slopes[:, None, None]).masked_fill(columns > rows, -torch.inf)

    mask = documents if name != "alibi" else biased
    qkv, ids, order = long_operands("cuda", dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = mask(x, y)
        made = made if made.dtype == torch.bool else made.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, made, enable_gqa=True)

    given = [x.requires_grad_() for x in qkv]
    wide = [x.detach().double().requires_grad_() for x in qkv]
    found, expected = compiled_by_inductor(attend)(*given, ids, order), attend(*wide, ids, order)
    grads = torch.autograd.grad(found.float().square().sum(), given)
    wanted = torch.autograd.grad(expected.square().sum(), wide)
    bound = 2e-2 if dtype == torch.bfloat16 else 5e-3  # products may be in TF32
    for mine, theirs in zip((found, *grads), (expected, *wanted), strict=True):
        assert (mine.double() - theirs).abs().max() <= bound * theirs.abs().max()


def test_the_arguments_are_those_that_dynamo_makes() -> None:
    """Fails where torch lays out flex attention otherwise."""
    (theirs,) = [node for node in _dynamo_graph().graph.nodes if node.target is FLEX_ATTENTION]
    gm = traced(attend_with(alibi), [*operands(), *data()])
    FLEX.apply(gm)
    (mine,) = [node for node in gm.graph.nodes if node.target is FLEX_ATTENTION]
    assert key(theirs) == "higher_order::flex_attention"
    assert _form(mine.args[:7]) == _form(theirs.args[:7])
    assert [type(leaves) for leaves in mine.args[7:]] == [type(leaves) for leaves in theirs.args[7:]] == [tuple, tuple]
    assert mine.args[6] == theirs.args[6], "options of the kernel"
    for node in (mine, theirs):
        score_mod, mask_mod = node.args[3], node.args[4][-1]
        assert _num_arguments(score_mod) == 5 + len(node.args[7])
        assert _num_arguments(mask_mod) == 4 + len(node.args[8])


def _dynamo_graph() -> fx.GraphModule:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> Any:
        tiles = create_block_mask(lambda b, h, q, k: k <= q, B, None, S, S, device="cpu")
        options: Any = {"BACKEND": "TRITON"}
        return flex_attention(
            q, k, v, lambda s, b, h, q, k: s + slopes[h], tiles, enable_gqa=True, kernel_options=options
        )

    return caught(attend, *(x.detach() for x in operands()), data()[1])[0]


def _form(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_form, argument))
    return "a value" if isinstance(argument, fx.Node) else type(argument)


def _num_arguments(body: fx.Node) -> int:
    gm = body.graph.owning_module
    assert gm is not None
    return len(gm.get_submodule(str(body.target)).graph.find_nodes(op="placeholder"))


def test_what_reaches_beyond_32_bits_is_no_flex_attention() -> None:
    near, far = (torch.empty(1, 32, length, 128, device="meta") for length in (4096, 2**20))
    assert not _why_too_large(near, near, near)
    assert "4,294,967,295 entries, and offsets have 32 bits" in _why_too_large(near, far, near)
