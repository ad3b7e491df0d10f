"""Heads that a model repeats for groups of queries are shared, and repeated again where no kernel takes groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import DeadCode, RuleSet
from fxrewrite.ops import bind
from rules.attention.composite import ATTENTION_UNBIASED
from rules.attention.groups import REPEAT_HEADS, SHARE_HEADS, share_heads
from rules.attention.operator import RAISE_ATTENTION, attentions
from tests.rewriting import check_left_alone, check_stages
from tests.rules.attention.cases import results

B, H, KV, S, D = 2, 6, 2, 5, 4
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
RULES = RuleSet("share", SHARE_HEADS, DeadCode())
sdpa = F.scaled_dot_product_attention


def operands(kv_heads: int = KV, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.rand(B, heads, S, D, dtype=dtype) for heads in (H, kv_heads, kv_heads))
    return [x.to(device).requires_grad_() for x in (q, k, v)]


def traced(function: Function, given: list[torch.Tensor]) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*given)
    RuleSet("one operator", ATTENTION_UNBIASED, RAISE_ATTENTION).apply(gm)
    return gm


def repeat_kv(x: torch.Tensor, times: int = H // KV) -> torch.Tensor:
    """As Hugging Face models write it out."""
    batch, heads, length, depth = x.shape
    return x[:, :, None].expand(batch, heads, times, length, depth).reshape(batch, heads * times, length, depth)


def kv_heads(node: fx.Node) -> int:
    return bind(node)["key"].meta["val"].shape[1]


def shared_by_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = repeat_kv(k), repeat_kv(v)
    return sdpa(q, k, v, is_causal=True) + sdpa(q.sin(), k, v)


def read_elsewhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = repeat_kv(k)
    return sdpa(q, k, repeat_kv(v)), k.sin()


def by_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The heads of k [B, S, KV, D] are repeated, then it is transposed, as torchtitan's Llama does."""
    k = k.transpose(1, 2)[:, :, :, None].expand(B, S, KV, H // KV, D).reshape(B, S, H, D).transpose(1, 2)
    return sdpa(q, k, repeat_kv(v), is_causal=True)


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ repeat_kv(k).transpose(2, 3) * 0.5, -1) @ repeat_kv(v)


def beside_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    both = torch.cat([q @ repeat_kv(k).transpose(2, 3) * 0.5, q[..., :1]], -1)
    return torch.softmax(both, -1)[..., :-1] @ repeat_kv(v)


SHARED: dict[str, tuple[Function, int]] = {
    "expanded": (lambda q, k, v: sdpa(q, repeat_kv(k), repeat_kv(v), is_causal=True, scale=0.3), KV),
    "interleaved": (lambda q, k, v: sdpa(q, *(x.repeat_interleave(3, dim=1) for x in (k, v)), q[..., :1]), KV),
    "by rows": (by_rows, KV),
    "one head": (lambda q, k, v: sdpa(q, k.expand(-1, H, -1, -1), repeat_kv(v, H)), 1),
    "one value": (lambda q, k, v: sdpa(q, repeat_kv(k), repeat_kv(k)), KV),
    "two attentions": (shared_by_two, KV),
    "read elsewhere": (read_elsewhere, KV),
    "written out": (written_out, KV),
    "beside sinks": (beside_sinks, KV),
}


@pytest.mark.parametrize("name", SHARED)
def test_repeats_are_shared(name: str) -> None:
    function, heads = SHARED[name]
    given = operands(heads)
    gm = traced(function, given)
    assert RULES.apply(gm).rewrites
    assert {kv_heads(node) for node in attentions(gm.graph.nodes)} == {heads}
    assert not RULES.apply(gm).rewrites
    torch.testing.assert_close(results(gm, given), results(function, given), rtol=1e-12, atol=1e-13)


def test_graph(fx_snapshot: Any) -> None:
    check_stages(traced(SHARED["expanded"][0], operands()), fx_snapshot, after=RULES)


LEFT: dict[str, Function] = {
    "keys alone": lambda q, k, v: sdpa(q, repeat_kv(k), v.repeat(1, 3, 1, 1)),
    "copies of all heads": lambda q, k, v: sdpa(q, *(x.repeat(1, 3, 1, 1) for x in (k, v))),
    "heads between rows": lambda q, k, v: sdpa(
        q, *(x.unsqueeze(2).expand(B, KV, 3, S, D).reshape(B, S, H, D).transpose(1, 2) for x in (k, v))
    ),
    "other numbers of heads": lambda q, k, v: sdpa(q, repeat_kv(k), repeat_kv(v[:, :1], H)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_repeat_of_both_is_left_alone(name: str) -> None:
    why = "k and v are not repeats of the same number of heads" if name == "other numbers of heads" else ""
    check_left_alone(RULES, share_heads.id, traced(LEFT[name], operands()), operands(), why)


REPEATED: dict[str, tuple[torch.dtype, bool, str, int]] = {
    "float32": (torch.float32, False, "meta", H),
    "a mask": (torch.bfloat16, True, "meta", H),
    "half precision without a mask": (torch.bfloat16, False, "meta", KV),
    "on the CPU": (torch.float32, True, "cpu", KV),
}


@pytest.mark.parametrize("name", REPEATED)
def test_heads_are_repeated_where_no_kernel_takes_groups(name: str) -> None:
    dtype, is_masked, device, heads = REPEATED[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, q[..., :1] if is_masked else None, enable_gqa=True)

    gm = traced(attend, operands(dtype=dtype, device=device))
    REPEAT_HEADS.apply(gm)
    (node,) = attentions(gm.graph.nodes)
    assert (kv_heads(node), bool(bind(node).get("enable_gqa"))) == (heads, heads == KV)
    assert not REPEAT_HEADS.apply(gm).rewrites


def test_the_kernel_for_cpus_takes_groups() -> None:
    """What the rule says of it: no scores are held, and the results are those of repeated heads, bit by bit."""
    q, k, v = operands()
    out, expected = sdpa(q, k, v, enable_gqa=True), sdpa(q, repeat_kv(k), repeat_kv(v))
    assert "FlashAttentionForCpu" in str(out.grad_fn)
    assert torch.equal(out, expected)
