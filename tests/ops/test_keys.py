"""One key for every spelling, and different keys for different meanings."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import ops

aten = torch.ops.aten


def node(target, *args, **kwargs) -> fx.Node:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    names = {"x": x, "y": y}

    def fill(item):
        return names.get(item, item) if isinstance(item, str) else item

    args = tuple(fill(a) if not isinstance(a, (list, tuple)) else type(a)(map(fill, a)) for a in args)
    kwargs = {k: fill(v) for k, v in kwargs.items()}
    if isinstance(target, str):
        return graph.call_method(target, args, kwargs)
    return graph.call_function(target, args, kwargs)


SPELLINGS = {
    "aten::mul": [
        (operator.mul, "x", "y"),
        (torch.mul, "x", "y"),
        (torch.multiply, "x", "y"),
        (torch.Tensor.mul, "x", "y"),
        ("mul", "x", "y"),
        ("__mul__", "x", "y"),
        (aten.mul.Tensor, "x", "y"),
        (aten.mul, "x", "y"),
    ],
    "aten::relu": [(torch.relu, "x"), (F.relu, "x"), ("relu", "x"), (aten.relu.default, "x")],
    "aten::relu_": [(torch.relu_, "x"), ("relu_", "x"), (aten.relu_.default, "x")],
    "aten::softmax": [
        (torch.softmax, "x", -1),
        (F.softmax, "x", -1),
        ("softmax", "x", -1),
        (aten.softmax.int, "x", -1),
    ],
    "aten::add_": [("add_", "x", "y"), (operator.iadd, "x", "y"), (aten.add_.Tensor, "x", "y")],
    "aten::to": [("float", "x"), ("to", "x", torch.float32), (aten.to.dtype, "x", torch.float32)],
    "aten::split_with_sizes": [
        ("split", "x", [1, 2]),
        (torch.split, "x", [1, 2]),
        (aten.split.sizes, "x", [1, 2]),
        (aten.split_with_sizes.default, "x", [1, 2]),
    ],
    "aten::split": [("split", "x", 2), (torch.split, "x", 2), (aten.split.Tensor, "x", 2)],
    "aten::cross_entropy_loss": [(F.cross_entropy, "x", "y"), (aten.cross_entropy_loss.default, "x", "y")],
    "aten::clamp": [(torch.clip, "x", 0, 1), ("clamp", "x", 0, 1)],
}


@pytest.mark.parametrize("key", SPELLINGS)
def test_spellings_of_one_operator_have_one_key(key: str) -> None:
    assert {ops.key(node(*spelling)) for spelling in SPELLINGS[key]} == {key}


def test_inplace_argument_is_the_inplace_operator() -> None:
    assert ops.key(node(F.relu, "x", inplace=True)) == "aten::relu_"
    assert ops.key(node(F.relu, "x", True)) == "aten::relu_"
    assert ops.key(node(F.relu, "x", inplace=False)) == "aten::relu"


def test_a_wrapper_with_an_argument_that_aten_lacks_is_its_own_operator() -> None:
    assert ops.key(node(F.cross_entropy, "x", "y", size_average=True)) == "torch.nn.functional.cross_entropy"
    assert ops.key(node(F.embedding, "x", "y", -1)) == "torch.nn.functional.embedding"
    assert ops.key(node(F.embedding, "x", "y", 3)) == "aten::embedding"


def test_arithmetic_on_numbers_is_not_the_tensor_operator() -> None:
    sizes = node(operator.mul, "x", 2)
    assert ops.key(sizes) == "aten::mul"
    sizes.meta["val"] = 8
    assert ops.key(sizes) == "operator.mul"


def redistribute(x, source, destination): ...


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (math.sqrt, "math.sqrt"),
        (operator.getitem, "operator.getitem"),
        (redistribute, f"{__name__}.redistribute"),
        (F.normalize, "torch.nn.functional.normalize"),
        (torch.ops.higher_order.cond, "higher_order::cond"),
    ],
)
def test_other_callables_keep_their_qualified_name(target, key: str) -> None:
    assert ops.key(target) == key


def test_nodes_that_call_nothing_give_their_opcode() -> None:
    graph = fx.Graph()
    x = graph.placeholder("relu")
    assert ops.key(x) == "placeholder"
    assert ops.key(graph.get_attr("relu")) == "get_attr"
    assert ops.key(graph.output(x)) == "output"
