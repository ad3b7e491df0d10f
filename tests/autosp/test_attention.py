"""All-to-alls go in front of the repeat of k and v, and the graph with them still computes what it did."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autosp_rules.attention import ATTENTION_RULES
from fxrewrite.spmd import Axis, Shard, SpmdContext, redistribute

K = torch.rand(2, 4, 8, 6)
SEQUENCE, HEADS = Shard(2), Shard(1)


def _graph(src: Shard = SEQUENCE, dst: Shard = HEADS, size: int = 2) -> fx.GraphModule:
    """repeat_kv, then a move between sequence and heads."""

    def repeat_kv(k: torch.Tensor) -> torch.Tensor:
        batch, heads, length, dim = k.shape
        return k.unsqueeze(2).expand(batch, heads, 3, length, dim).reshape(batch, heads * 3, length, dim).exp()

    gm = make_fx(repeat_kv, tracing_mode="fake", pre_dispatch=True)(K)
    (exp,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    with gm.graph.inserting_before(exp):
        moved = gm.graph.call_function(redistribute, (exp.args[0], src, dst, Axis("sp", size)))
    moved.meta["val"] = exp.args[0].meta["val"]
    exp.args = (moved,)
    return gm


def _run(gm: fx.GraphModule) -> torch.Tensor:
    return fx.Interpreter(gm).run(K)


def _context() -> SpmdContext:
    return SpmdContext(Axis("sp", 2))


def test_the_move_goes_first_and_the_value_is_the_same() -> None:
    gm = _graph()
    report = ATTENTION_RULES.apply(gm, context=_context())
    assert report.rewrites == 1
    order = [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op == "call_function"]
    assert order[0] == "redistribute"
    (moved,) = gm.graph.find_nodes(op="call_function", target=redistribute)
    assert tuple(moved.meta["val"].shape) == (2, 4, 8, 6)
    torch.testing.assert_close(_run(gm), _run(_graph()))
    assert ATTENTION_RULES.apply(gm, context=_context()).rewrites == 0


def test_kv_heads_that_do_not_divide_are_refused() -> None:
    gm = _graph(size=3)
    report = ATTENTION_RULES.apply(gm, context=_context())
    assert report.rewrites == 0
    (refusal,) = report.refusals
    assert str(refusal).startswith(
        "autosp.all_to_all_before_repeat_kv: 4 kv heads do not divide over axis sp (size 3) at %"
    )
    assert refusal.hint == "k and v travel after they are repeated"


def test_another_move_is_left_alone() -> None:
    assert ATTENTION_RULES.apply(_graph(Shard(2), Shard(3)), context=_context()).rewrites == 0


def test_attention_without_repeat_is_left_alone() -> None:
    gm = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q), tracing_mode="fake", pre_dispatch=True)(K)
    assert ATTENTION_RULES.apply(gm, context=_context()).rewrites == 0
