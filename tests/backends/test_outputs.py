"""What was fresh memory stays fresh, what was shared stays shared, and what was differentiable stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.backends.outputs import rewrite
from tests.backends.plans import ZERO, plan


def traced(function: Any) -> fx.GraphModule:
    return make_fx(function)(FakeTensorMode().from_tensor(torch.empty(2, 3)))


def copied(function: Any) -> list[bool]:
    """For each output, whether it is a copy after `+ 0` is gone; the results are those of the function."""
    gm = traced(function)
    rewrite(plan(ZERO).apply, gm, None)
    gm.graph.lint()
    x = torch.randn(2, 3)
    torch.testing.assert_close(list(gm(x)), list(function(x)))
    return [node.target is torch.ops.aten.clone.default for node in gm.graph.output_node().args[0]]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: (x + 0,), [True]),  # it would be the input
        (lambda x: ((x + 0).view(6),), [True]),  # a view of the input
        (lambda x: (x, x.view(6)), [False, False]),  # both were the input before
        (lambda x: (torch.exp(x) + 0,), [False]),  # exp is fresh as well
        (lambda x: (x + 0, x), [True, False]),
        (lambda x: _twice(torch.exp(x)), [True, False, False]),  # the other two share memory, and must go on
        (lambda x: (x + 0, x + 0), [True, True]),
    ],
)
def test_outputs_are_copied_where_they_came_to_share_memory(function: Any, expected: list[bool]) -> None:
    assert copied(function) == expected


def _twice(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y + 0, y, y.view(6)


def test_the_copy_says_where_the_fresh_value_came_from() -> None:
    gm = traced(lambda x: (x + 0,))
    add = next(node for node in gm.graph.nodes if node.op == "call_function")
    add.meta["stack_trace"] = "model.py:41"
    rewrite(plan(ZERO).apply, gm, None)
    (clone,) = gm.graph.output_node().args[0]
    assert clone.meta["stack_trace"] == "model.py:41"
    assert tuple(clone.meta["val"].shape) == (2, 3)


def test_a_value_that_required_gradients_still_says_so() -> None:
    """invoke_subgraph reads it, from the metadata of its body's outputs, and cuts the gradient otherwise."""
    gm = traced(lambda x: (x + 1,))
    x, add = [node for node in gm.graph.nodes if node.op != "output"]
    add.meta["val"].requires_grad_()

    def replace(gm: fx.GraphModule, context: object) -> None:
        with gm.graph.inserting_after(add):
            new = gm.graph.call_function(torch.ops.aten.sub.Tensor, (x, -1))
        new.meta["val"] = add.meta["val"].detach()
        add.replace_all_uses_with(new)
        gm.graph.erase_node(add)

    rewrite(replace, gm, None)
    assert gm.graph.output_node().args[0][0].meta["val"].requires_grad


def test_a_plan_that_finds_nothing_changes_nothing() -> None:
    gm = traced(lambda x: (torch.exp(x), x, x.view(6)))
    nodes, code = list(gm.graph.nodes), gm.code
    assert rewrite(plan().apply, gm, None).rewrites == 0
    assert (list(gm.graph.nodes), gm.code) == (nodes, code)
