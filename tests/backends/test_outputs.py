"""What was fresh memory stays fresh, what was shared stays shared, and what was differentiable stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import Rule, rule
from fxrewrite.backends.outputs import rewrite
from fxrewrite.graph.outputs import FRESH
from tests.backends.plans import ZERO, plan

CONTIGUOUS = rule("test.contiguous", numerics="exact")(lambda x: x.contiguous())
CONTIGUOUS.replacement(lambda x: x)
RESHAPE = rule("test.reshape", numerics="exact")(lambda x: torch.flatten(x).reshape(3, 2))
RESHAPE.replacement(lambda x: x)
TWICE = rule("test.twice", numerics="exact")(lambda x: torch.neg(torch.neg(x)))
TWICE.replacement(lambda x: x)
CLONE = rule("test.clone", numerics="exact")(lambda x: x.clone())
CLONE.replacement(lambda x: x)


def traced(function: Any) -> fx.GraphModule:
    return make_fx(function, pre_dispatch=True)(FakeTensorMode().from_tensor(torch.empty(2, 3)))


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


def written(function: Any, *inputs: torch.Tensor) -> list[list[bool]]:
    """For each output: which inputs and outputs a write to it changes."""
    found: list[list[bool]] = []
    outputs = list(function(*inputs))
    for output in outputs:
        everything = [*inputs, *outputs]
        before = [value.clone() for value in everything]
        output.add_(1)
        found.append([not torch.equal(a, b) for a, b in zip(everything, before, strict=True)])
    return found


def neg_twice(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(torch.neg(x))


def two_views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = neg_twice(x)
    return a, a.t(), neg_twice(x)[1]


def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b, c = neg_twice(x).split([1, 1, 1], 1)
    return a, c.squeeze(1), b.reshape(2), x


def below_a_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = neg_twice(x[:, 1:])
    return part, part[0], part.t()


def by_address(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = neg_twice(x)
    return whole, whole.as_strided((2,), (1,), 1)


def after_a_write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.exp(x)
    row = a[0]
    row.add_(1)
    return neg_twice(a), a.t()


@pytest.mark.parametrize(
    ("it", "function", "copies"),
    [
        (CONTIGUOUS, lambda x: (x.t().contiguous(),), 1),  # a copy for these strides
        (CONTIGUOUS, lambda x: (x.contiguous(),), 0),  # the input itself, before and after
        (RESHAPE, lambda x: (x.t().flatten().reshape(3, 2),), 1),
        (CONTIGUOUS, lambda x: (torch.exp(x.contiguous()), x.t().reshape(6)), 0),  # what no rule touches, stays
        (TWICE, two_views, 2),
        (TWICE, lambda x: (neg_twice(x), neg_twice(x)), 2),
        (TWICE, lambda x: [neg_twice(x)] * 2, 1),
        (TWICE, parts, 1),
        (TWICE, below_a_part, 1),
        (TWICE, by_address, 1),
        (TWICE, lambda x: (x.view(6), neg_twice(x).t()), 1),  # the first one was the caller's memory before
        (TWICE, after_a_write, 1),
    ],
)
def test_a_write_of_the_caller_is_seen_where_it_was_seen_before(it: Rule, function: Any, copies: int) -> None:
    gm = traced(function)
    rewrite(plan(it).apply, gm, None)
    gm.graph.lint()
    x = torch.randn(2, 3)
    torch.testing.assert_close(list(gm(x)), list(function(x)), rtol=0, atol=0)
    assert written(gm, x.clone()) == written(function, x.clone())
    assert sum(node.meta.get("fxrewrite", ())[:1] == (FRESH,) for node in gm.graph.nodes) == copies


def test_views_of_what_is_copied_leave_nothing_behind() -> None:
    gm = traced(lambda x: (neg_twice(x), neg_twice(x).t(), x))
    rewrite(plan(TWICE).apply, gm, None)
    assert all(node.users or node.op in ("output", "placeholder") for node in gm.graph.nodes)


def test_an_output_that_is_a_written_input_is_that_input() -> None:
    """What is read to write it is no memory of the output."""

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [y.add_(x.clone()).t()]

    mode = FakeTensorMode()
    gm = make_fx(function)(*(mode.from_tensor(torch.empty(2, 3)) for _ in range(2)))
    report = rewrite(plan(CLONE).apply, gm, None)
    assert report.rewrites == 1
    inputs = torch.ones(2, 3), torch.ones(2, 3)
    assert written(gm, *inputs) == [[False, True, True]]
