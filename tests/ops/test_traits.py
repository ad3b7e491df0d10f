"""The table of what operators are is true of torch's operators."""

import operator
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.ops import Trait, bind, factors, filled_with, has_trait, key, operators, traits_of

aten = torch.ops.aten
X = torch.arange(24.0).reshape(2, 3, 4)
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.int64),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [6, 4]),
    "alias": aten.alias,
    "clone": aten.clone,
    "contiguous": aten.contiguous,
    "detach": aten.detach,
    "detach_copy": aten.detach_copy,
    "flatten": aten.flatten,
    "ravel": aten.ravel,
    "reshape": lambda x: aten.reshape(x, [4, 6]),
    "reshape_as": lambda x: aten.reshape_as(x, torch.zeros(12, 2)),
    "squeeze": lambda x: aten.squeeze(x[None]),
    "to": lambda x: aten.to(x, torch.int64),
    "type_as": lambda x: aten.type_as(x, torch.tensor([1])),
    "unflatten": lambda x: aten.unflatten(x, 2, [2, 2]),
    "unsqueeze": lambda x: aten.unsqueeze(x, 1),
    "view": lambda x: aten.view(x, [3, 8]),
    "view_as": lambda x: aten.view_as(x, torch.zeros(8, 3)),
}
A, B, V = torch.rand(3, 4), torch.rand(4, 5), torch.rand(4)
PRODUCTS: dict[str, tuple[torch.Tensor, ...]] = {
    "linear": (A, B.t()),
    "matmul": (A, B),
    "mm": (A, B),
    "bmm": (A[None], B[None]),
    "mv": (A, V),
    "dot": (V, V),
    "addmm": (torch.zeros(5), A, B),
    "baddbmm": (torch.zeros(1, 3, 5), A[None], B[None]),
}


def called(name: str, *args: Any) -> fx.Node:
    gm = make_fx(lambda *xs: getattr(aten, name)(*xs), pre_dispatch=True)(*args)
    return next(node for node in reversed(gm.graph.nodes) if node.op == "call_function")


@pytest.mark.parametrize("trait", get_args(Trait.__value__ if hasattr(Trait, "__value__") else Trait))
def test_every_trait_has_operators_of_torch(trait: Trait) -> None:
    assert operators(trait)
    for name in operators(trait):
        assert hasattr(aten, name.removeprefix("aten::")), name
        assert trait in traits_of(name)


@pytest.mark.parametrize("name", sorted(operators("same", "detach", "cast", "reshape", "squeeze")))
def test_entries_are_those_of_the_operand_in_their_order(name: str) -> None:
    found = CALLS[name.removeprefix("aten::")](X)
    assert torch.equal(found.flatten().double(), X.flatten().double())
    assert found.shape == X.shape or has_trait(name, "reshape", "squeeze")


@pytest.mark.parametrize("name", sorted(operators("product") - {"aten::_grouped_mm"}))
def test_a_product_is_of_its_factors_alone(name: str) -> None:
    """Twice a factor, twice the result; the first one's last dimension is summed over."""
    args = PRODUCTS[name.removeprefix("aten::")]
    node = called(name.removeprefix("aten::"), *args)
    assert key(node) == name
    first, second = factors(node) or ("", "")
    values = dict(zip(bind(node), args, strict=False))
    plain = getattr(aten, name.removeprefix("aten::"))(*args)
    for factor in (first, second):
        more = [2 * value if name_ == factor else value for name_, value in values.items()]
        assert torch.equal(getattr(aten, name.removeprefix("aten::"))(*more), 2 * plain)
    assert values[first].shape[-1] == 4
    assert 4 in values[second].shape


def test_what_is_filled_with_one_number() -> None:
    gm = make_fx(
        lambda x: (torch.zeros(2), torch.ones_like(x), torch.full((2,), 3.5), x.new_full((1,), 2), x + 1),
        pre_dispatch=True,
    )(X)
    found = [filled_with(node) for node in gm.graph.nodes if node.op == "call_function"]
    assert found == [0, 1, 3.5, 2, None]


def test_of_an_operator_that_the_table_does_not_have_nothing_is_known() -> None:
    graph = fx.Graph()
    node = graph.call_function(operator.getitem, (graph.placeholder("x"), 0))
    assert traits_of(node) == frozenset()
    assert factors(node) is None
    assert not has_trait("library::op", "same")
