"""Dead code goes; effects and draws stay, and what they read."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import DeadCode, RuleSet
from fxrewrite.ops import key


def test_only_what_nothing_reads_and_nothing_feels_goes() -> None:
    def function(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        unread = (x * 2).exp()
        (unread + 1).sum()
        buffer.add_(x.cos())
        return x.sin()

    gm = make_fx(function, tracing_mode="fake")(torch.ones(2), torch.ones(2))
    report = RuleSet("clean", DeadCode()).apply(gm)
    left = [key(node) for node in gm.graph.nodes if node.op == "call_function"]
    assert left == ["aten::rand", "aten::cos", "aten::add_", "aten::sin"]
    assert report["dead_code"].rewrites == 4
    assert RuleSet("clean", DeadCode()).apply(gm).rewrites == 0
