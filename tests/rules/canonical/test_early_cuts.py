"""Rows that are cut off are not multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx

from fxrewrite import normalize
from fxrewrite.ops import has_trait
from rules.canonical.early_cuts import EARLY_CUTS, cut_early
from rules.canonical.normal_forms import NORMAL_FORMS
from tests.dynamo import caught

BATCH, LENGTH, WIDTH = 2, 11, 4
X = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
HEAD = torch.linspace(-1, 1, 28, dtype=torch.float64).reshape(7, WIDTH)
BIAS = torch.linspace(0, 1, 7, dtype=torch.float64)
Function = Callable[[Tensor], Any]
"""Of hidden states [B, S, d]."""


def head(x: Tensor) -> Tensor:
    return F.linear(x, HEAD, BIAS)


CUT: dict[str, tuple[Function, int]] = {
    "the last": (lambda x: head(x)[:, -3:], 3),
    "before the last": (lambda x: head(x)[:, -4:-1].log_softmax(-1), 3),
    "the first": (lambda x: head(x)[:, :5], 5),
    "twice": (lambda x: head(x)[:, :-1][:, -3:] / 0.7, 3),
    "before and after": (lambda x: head(x[:, -4:])[:, :-1], 3),
    "scaled between": (lambda x: (torch.tanh(head(x)[:, 1:] / 30.0) * 30)[:, 2:5], 3),
    "a cast between": (lambda x: head(x).float()[:, -3:], 3),
    "rows of a matrix": (lambda x: (x[0] @ HEAD.t())[2:4], 2),
    "two products": (lambda x: (F.linear(head(x).relu(), HEAD.t()) + 1)[:, :2], 2),
    "sequence first": (lambda x: head(x).transpose(0, 1)[-3:], 3),
}
"""With the number of rows that are left."""


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(x)
    return logits[:, -3:], logits.logsumexp(-1)


def behind(x: Tensor) -> Tensor:
    logits = head(x)
    with torch.no_grad():
        return logits[:, -3:] * 2


LEFT: dict[str, tuple[Function, str]] = {
    "read elsewhere": (beside, "%linear is read elsewhere"),
    "no product": (lambda x: x.exp()[:, -3:], "no product is computed of its rows"),
    "classes": (lambda x: head(x)[..., :3], "no product is computed of its rows"),
    "two sums of rows": (lambda x: (head(x) + head(x.sin()))[:, -3:], "no product is computed of its rows"),
    "a scan": (lambda x: head(x).cumsum(1)[:, -3:], "no product is computed of its rows"),
    "every second": (lambda x: head(x)[:, ::2], ""),
    "every second, then some": (lambda x: head(x)[:, ::2][:, 1:], "no product is computed of its rows"),
    "draws": (lambda x: F.dropout(head(x))[:, -3:], "no product is computed of its rows"),
    "a square": (lambda x: ((y := x @ x.mT) @ y)[:, :3], "no product is computed of its rows"),
    "a stated length": (lambda x: head(x).reshape(2, 11, 7, 1)[:, -3:], "no product is computed of its rows"),
    "rows of a batch": (lambda x: head(x).flatten(0, 1)[3:], "no product is computed of its rows"),
    "another mode": (behind, "writes, or sets a mode, between the product and the slice"),
}


def graph_of(function: Function, *, dynamic: bool = False) -> tuple[fx.GraphModule, list[Any], Tensor]:
    x = X.clone().requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    return *caught(function, x, inside=normalize), x


def rewritten(gm: fx.GraphModule) -> int:
    """How often the rule fired; a second run changes nothing."""
    NORMAL_FORMS.apply(gm)
    fired = EARLY_CUTS.apply(gm).rewrites
    assert not EARLY_CUTS.apply(gm).rewrites
    return fired


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_a_product_reads_what_is_left(name: str, dynamic: bool) -> None:
    function, left = CUT[name]
    gm, inputs, x = graph_of(function, dynamic=dynamic)
    assert rewritten(gm)
    for node in gm.graph.nodes:
        assert not has_trait(node, "product") or left in node.meta["val"].shape
    slices = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert len(slices) == 1, "slices of slices are one"
    (found,), expected = gm(*inputs), function(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    given = next(value for value in inputs if isinstance(value, Tensor) and value.requires_grad)
    grads = [torch.autograd.grad(out.sin().sum(), leaf)[0] for out, leaf in ((found, given), (expected, x))]
    tolerance = 1e-6 if found.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LEFT)
def test_what_does_not_match_says_why(name: str) -> None:
    function, why = LEFT[name]
    gm, _, _ = graph_of(function)
    assert not rewritten(gm)
    assert why in str(cut_early.explain(gm))
