"""What is computed of all parts of a value is computed of the whole value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx

from fxrewrite import normalize
from fxrewrite.spmd import Axis, SpmdContext
from rules.canonical.joined_parts import JOINED_PARTS, join_parts
from rules.canonical.normal_forms import NORMAL_FORMS
from tests.dynamo import caught

BATCH, LENGTH, WIDTH = 2, 11, 5
X = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % WIDTH
WEIGHT = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)
Function = Callable[[Tensor, Tensor], Any]
"""Of values [B, S, d] and ids [B, S]."""


def entropy(x: Tensor) -> Tensor:
    logps = x.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([entropy(part) for part in x.split(4, 1)], 1)


def of_labels(x: Tensor, ids: Tensor) -> Tensor:
    parts = zip(x.split(4, 1), ids.split(4, 1), strict=True)
    return torch.cat([F.cross_entropy(y.transpose(1, 2), t, reduction="none") for y, t in parts], 1)


def joined_without_gradients(x: Tensor, ids: Tensor) -> Tensor:
    made = [part.exp() for part in x.split(4, 1)]
    with torch.no_grad():
        return torch.cat(made, 1)


JOINED: dict[str, Function] = {
    "split": lambda x, ids: torch.cat([entropy(part) for part in x.split(4, 1)], 1),
    "rows": lambda x, ids: torch.cat([entropy(p) for p in x.reshape(-1, WIDTH).split(4)], 0).reshape(BATCH, -1),
    "chunk": lambda x, ids: torch.cat([F.linear(part, WEIGHT) for part in x.chunk(3, 1)], dim=-2),
    "sizes": lambda x, ids: torch.cat([part.relu() + 1 for part in x.split([2, 9], 1)], 1),
    "slices": lambda x, ids: torch.cat([x[:, :4].exp(), x[:, 4:8].exp(), x[:, 8:].exp()], 1),
    "labels too": of_labels,
    "another place": lambda x, ids: torch.cat([part.transpose(0, 1).sin() for part in x.split(4, 1)], 0),
    "read twice": lambda x, ids: torch.cat([part * part.amax(-1, keepdim=True) for part in x.split(4, 1)], 1),
    "reshapes": lambda x, ids: torch.cat(
        [p.reshape(-1, 4 * WIDTH).exp().reshape(-1, 4, WIDTH) for p in x[:, :8].split(4, 1)], 1
    ),
    "nothing between": lambda x, ids: torch.cat(x.split(4, 1), 1) * 2,
}
KEPT: dict[str, tuple[Function, str]] = {
    "other order": (lambda x, ids: torch.cat(x.split(4, 1)[::-1], 1), "does not join all parts"),
    "some": (lambda x, ids: torch.cat([p.exp() for p in x.split(4, 1)[:2]], 1), "does not join all parts"),
    **{
        name: (function, "does not join all parts")
        for name, function in {
            "slices in another order": lambda x, ids: torch.cat([x[:, 4:8].exp(), x[:, :4].exp(), x[:, 8:].exp()], 1),
            "every second": lambda x, ids: torch.cat([x[:, :8:2].exp(), x[:, 4:].exp()], 1),
            "slices of two values": lambda x, ids: torch.cat([x[:, :4].exp(), x.sin()[:, 4:].exp()], 1),
            "some slices": lambda x, ids: torch.cat([x[:, :4].exp(), x[:, 4:8].exp()], 1),
        }.items()
    },
    "another mode": (joined_without_gradients, "sets a mode, between the parts and where they are joined"),
    "one twice": (lambda x, ids: torch.cat([x.exp()] * 2, 1), "does not join all parts"),
    "other functions": (lambda x, ids: torch.cat([x[:, :4].exp(), x[:, 4:].sin()], 1), "does not join all parts"),
    "products of parts": (
        lambda x, ids: torch.cat(
            [(p @ q.mT).sum(-1) for p, q in zip(x[:, :8].split(4, 1), x[:, 3:].split(4, 1), strict=True)], 1
        ),
        "keeps no entries apart",
    ),
    "a stated length": (
        lambda x, ids: torch.cat([p[None].expand(2, -1, 4, -1).sum(0) for p in x[:, :8].split(4, 1)], 1),
        "keeps no entries apart",
    ),
    "of two parts": (
        lambda x, ids: torch.cat([p * x[:, :4] for p in x[:, :8].split(4, 1)], 1),
        "keeps no entries apart",
    ),
    "of other parts": (
        lambda x, ids: torch.cat([(p := x[:, :9].split(3, 1))[0] * p[0], p[1] * p[2], p[2] * p[1]], 1),
        "does not join all parts",
    ),
    "other numbers": (
        lambda x, ids: torch.cat([p * i for i, p in enumerate(x.split(4, 1))], 1),
        "does not join all parts",
    ),
    "elsewhere": (
        lambda x, ids: torch.cat([p.exp() for p in x[:, :10].split(5, 1)], 2),
        "does not join all parts",
    ),
    "a batch": (lambda x, ids: torch.cat([p.exp() for p in x.split(1)], 0), "a batch is in parts"),
    "a scan": (lambda x, ids: torch.cat([p.cumsum(1) for p in x.split(4, 1)], 1), "keeps no entries apart"),
    "draws": (lambda x, ids: torch.cat([F.dropout(p) for p in x.split(4, 1)], 1), "keeps no entries apart"),
    "read elsewhere": (
        lambda x, ids: ((made := [p.exp() for p in x.split(4, 1)])[0].sum(), torch.cat(made, 1)),
        "is read elsewhere",
    ),
}


def graph_of(function: Function, *, dynamic: bool = False) -> tuple[fx.GraphModule, list[Any], Tensor]:
    x, ids = X.clone().requires_grad_(), IDS.clone()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(ids, 0)
    return *caught(function, x, ids, inside=normalize), x


def rewritten(gm: fx.GraphModule) -> int:
    """How often the rule fired; a second run changes nothing."""
    (NORMAL_FORMS >> JOINED_PARTS).apply(gm, context=SpmdContext(Axis("sp", 2)))
    assert not JOINED_PARTS.apply(gm, context=SpmdContext(Axis("sp", 2))).rewrites
    return not any(str(node.target).startswith(("aten.cat", "aten.split")) for node in gm.graph.nodes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_the_whole_is_computed(name: str, dynamic: bool) -> None:
    gm, inputs, x = graph_of(JOINED[name], dynamic=dynamic)
    assert rewritten(gm)
    (found,), expected = gm(*inputs), JOINED[name](x, IDS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    given = next(value for value in inputs if isinstance(value, Tensor) and value.requires_grad)
    grads = [torch.autograd.grad(out.exp().sum(), leaf)[0] for out, leaf in ((found, given), (expected, x))]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_match_says_why(name: str) -> None:
    function, why = KEPT[name]
    gm, inputs, x = graph_of(function)
    assert not rewritten(gm)
    assert why in str(join_parts.explain(gm))
    torch.manual_seed(0)
    found = gm(*inputs)[-1]
    torch.manual_seed(0)
    expected = function(x, IDS)
    torch.testing.assert_close(found, expected[-1] if isinstance(expected, tuple) else expected)


def test_a_loop_without_gradients_stays_so() -> None:
    gm, inputs, _ = graph_of(lambda x, ids: without_gradients(x) * x.sum())
    assert rewritten(gm)
    (found,) = gm(*inputs)
    given = next(value for value in inputs if value.requires_grad)
    (grad,) = torch.autograd.grad(found.sum(), given)
    torch.testing.assert_close(grad, torch.full_like(X, without_gradients(X).sum().item()))
