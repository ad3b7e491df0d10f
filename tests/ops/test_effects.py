"""What nodes do besides computing: from schemas, and from the small tables where there is none."""

import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import ops

aten = torch.ops.aten
graph = fx.Graph()
X, Y = graph.placeholder("x"), graph.placeholder("y")


def call(target, *args, **kwargs) -> fx.Node:
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, args, kwargs)


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (call("add_", X, 1), (X,)),
        (call(operator.iadd, X, Y), (X,)),
        (call(aten.copy_.default, X, Y), (X,)),
        (call(operator.setitem, X, 0, Y), (X,)),
        (call(F.relu, X, inplace=True), (X,)),
        (call(torch.add, Y, 1, out=X), (X,)),
        (call(F.dropout, X, 0.5, True, True), (X,)),
        (call(aten.batch_norm.default, X, None, None, X, Y, True, 0.1, 1e-5, False), (X, Y)),
        (call(aten.batch_norm.default, X, None, None, X, Y, False, 0.1, 1e-5, False), ()),
        (call("add", X, 1), ()),
        (call(torch.relu, X), ()),
    ],
)
def test_what_a_node_writes_to(node: fx.Node, written: tuple[fx.Node, ...]) -> None:
    assert ops.mutated(node) == written
    assert ops.mutates(node) == bool(written)
    assert not written or not ops.is_pure(node)
    assert not written or ops.may_have_effects(node.target) or "out" in node.kwargs


@pytest.mark.parametrize(
    ("node", "random"),
    [
        (call(F.dropout, X, 0.5), True),
        (call(F.dropout, X, 0.5, False), False),
        (call(F.dropout, X, 0.0), False),
        (call(aten.dropout.default, X, 0.5, True), True),
        (call(aten.native_dropout.default, X, 0.5, True), True),
        (call("bernoulli", X), True),
        (call(torch.rand_like, X), True),
        (call(F.scaled_dot_product_attention, X, X, X), False),
        (call(F.scaled_dot_product_attention, X, X, X, dropout_p=0.1), True),
        (call(F.gumbel_softmax, X), True),
        (call(torch.softmax, X, -1), False),
    ],
)
def test_what_draws_random_numbers(node: fx.Node, random: bool) -> None:
    assert ops.is_random(node) == random
    assert ops.is_pure(node) != random
    assert not random or ops.may_have_effects(node.target)


@pytest.mark.parametrize(
    ("node", "view"),
    [
        (call("view", X, 2, 3), True),
        (call("reshape", X, 2, 3), True),
        (call(operator.getitem, X, 0), True),
        (call("transpose", X, 0, 1), True),
        (call(F.dropout, X, 0.5, False), True),
        (call(torch.matmul, X, Y), False),
        (call("clone", X), False),
        (call(F.normalize, X), True),
    ],
)
def test_what_may_share_memory(node: fx.Node, view: bool) -> None:
    assert ops.is_view(node) == view


def test_changes_of_torch_state_are_barriers_and_checks_are_not() -> None:
    assert ops.mutates(call(torch._C._set_grad_enabled, False))
    check = call(aten._assert_scalar.default, X, "message")
    assert not ops.mutates(check)
    assert not ops.is_pure(check)


def test_an_unknown_callable_is_a_barrier_until_it_is_declared_pure() -> None:
    def redistribute(x): ...

    node = call(redistribute, X)
    assert ops.is_barrier(node)
    assert ops.may_have_effects(redistribute)
    assert ops.declare_pure(redistribute) is redistribute
    assert ops.is_pure(node)
    assert not ops.is_view(node)
    assert not ops.may_have_effects(redistribute)


def test_targets_without_effects_are_recognised() -> None:
    assert not ops.may_have_effects(aten.mul.Tensor)
    assert not ops.may_have_effects(torch.matmul)
    assert not ops.may_have_effects("softmax")
    assert not ops.may_have_effects(operator.getitem)
