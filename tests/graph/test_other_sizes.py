"""A program for many sizes has no size of its trace as a number, or says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxrewrite import RefusedError, Rule, RuleSet, normalize, rule
from fxrewrite.graph import check_sizes

aten = torch.ops.aten


@torch.library.custom_op("other_sizes::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty([int(size) for size in x.shape])  # reads sizes as numbers


@rule("other.read_by_an_operator", numerics="exact")
def read_by_an_operator(x: Any) -> Any:
    return (x * 2).sum()


@read_by_an_operator.replacement
def _(x: Any) -> Any:
    """doubled(x)[:, : its length].sum()"""
    y = torch.ops.other_sizes.doubled(x)
    return aten.slice.Tensor(y, 1, 0, y.shape[1]).sum()


def _writes(target: Callable[..., Any], *args: Any) -> Rule:
    """A rule that writes the traced size as a number."""

    @rule("other.written_by_a_rule", numerics="exact")
    def written(x: Any) -> Any:
        return (x * 2).sum()

    @written.replacement
    def _(x: Any) -> Any:
        """(target(x, *args) * 2).sum()"""
        return (target(x, *args) * 2).sum()

    return written


def _graph(run: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: list[Any]) -> Any:
        found.append(normalize(gm))
        return gm

    torch._dynamo.reset()
    torch.compile(run, backend=keep, fullgraph=True, dynamic=True)(*inputs)
    return found[0]


def _sum(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (read_by_an_operator, "other_sizes::doubled gives (4, 17) where the program says (3, 16)"),
        (_writes(aten.view.default, [3, 16]), "aten::view fails: RuntimeError: shape '[3, 16]' is invalid"),
        (_writes(aten.slice.Tensor, 1, 0, 16), "aten::slice gives (2, 15) where the program says (2, 16)"),
    ],
    ids=["an operator", "a view", "a slice"],
)
def test_a_size_of_the_trace_as_a_number_is_found(made: Rule, says: str) -> None:
    gm = _graph(_sum, torch.ones(3, 16))
    check_sizes(gm)
    assert RuleSet("own", made).apply(gm).rewrites
    with pytest.raises(RefusedError) as caught:
        check_sizes(gm)
    assert says in str(caught.value)
    assert "test_other_sizes.py:" in caught.value.source
    if "view" not in says:  # which fails when it is called
        assert _called(gm, torch.ones(3, 20)) == 96, "without the check: the sum of 16 columns, and no error"


def _called(gm: fx.GraphModule, x: torch.Tensor) -> Any:
    sizes = iter(x.shape)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return gm(*(x if isinstance(value, torch.Tensor) else next(sizes) for value in values))[0]


def test_sizes_that_the_guards_admit_are_tried() -> None:
    """Guards say that 8 divides one size and that two are equal; a table and a view make use of both."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.zeros(20)[: x.shape[1]] + (x + y).view(-1, 8, x.shape[1] // 8).flatten(1)

    check_sizes(_graph(run, torch.ones(3, 16), torch.ones(3, 16)))


def test_calls_whose_shapes_data_decide_are_not_checked() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_sizes(_graph(run, torch.ones(3, 16)))


def test_a_graph_for_one_size_is_not_looked_at() -> None:
    gm = fx.symbolic_trace(_sum)
    check_sizes(gm)
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.ones(3, 16)
    check_sizes(gm)
