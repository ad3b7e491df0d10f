"""One key for every spelling, and different keys for different meanings."""

import functools
import gc
import math
import operator
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Pattern, Rule, RuleSet, cap, op, ops

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
    "aten::max_pool2d": [
        (F.max_pool2d, "x", 2),
        (F.max_pool2d, "x", 2, None, 0, 1, False, False),
        (torch.max_pool2d, "x", 2),
        (aten.max_pool2d.default, "x", [2, 2]),
    ],
    "torch.nn.functional.max_pool2d": [(F.max_pool2d, "x", 2, None, 0, 1, False, True)],
    "aten::linalg_vector_norm": [
        ("norm", "x", 2, -1),
        ("norm", "x"),
        (torch.Tensor.norm, "x", "fro", [-1]),
        (torch.norm, "x", 2, -1),
        (aten.linalg_vector_norm.default, "x", 2, [-1]),
    ],
    "torch._tensor.Tensor.norm": [("norm", "x", "nuc"), (torch.Tensor.norm, "x", "nuc")],
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
        (F.fractional_max_pool2d, "torch.nn.functional.fractional_max_pool2d"),
        (torch.ops.higher_order.cond, "higher_order::cond"),
    ],
)
def test_other_callables_keep_their_qualified_name(target, key: str) -> None:
    assert ops.key(target) == key


def scaled_by(factor):
    def scaled(x):
        return x * factor

    return scaled


class Scaled:
    """A callable object, whose class is all that it has of a name."""

    def __call__(self, x): ...

    def of(self, x): ...


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (scaled_by(2), scaled_by(2), scaled_by(3)),
        (functools.partial(torch.clamp, min=0), functools.partial(torch.clamp, min=0), functools.partial(torch.clamp)),
        (lambda x: x + 1, None, lambda x: x + 2),
        (scaled_by(one := Scaled()), scaled_by(one), scaled_by(Scaled())),
        (one, one, Scaled()),
        (one.of, one.of, Scaled().of),
        (type("Linear.<locals>", (), {}), None, type("Linear.<locals>", (), {})),
    ],
    ids=["closure", "partial", "lambda", "closure over an object", "object", "method", "class of a function"],
)
def test_callables_of_one_name_are_told_apart(one, same, other) -> None:
    rule = Rule("names.drop", Pattern((op(one, cap("x")),)), lambda x: x)
    for target, is_same in ((one, True), (other, False), (same, True)):
        if target is not None:
            assert (ops.key(target) == ops.key(one)) == is_same
            graph = fx.Graph()
            graph.output(graph.create_node("call_function", target, (graph.placeholder("x"),), name="called"))
            if hasattr(target, "__name__"):  # FX cannot write others
                assert rule.explain(fx.GraphModule({}, graph)).num_matches == is_same


def test_what_has_an_address_for_a_name_is_in_no_cache() -> None:
    def digest(target):
        return RuleSet("one", Rule("names.drop", Pattern((op(target, cap("x")),)), lambda x: x)).once().digest()

    assert digest(scaled_by(2)) == digest(scaled_by(2)) != digest(scaled_by(3))
    with pytest.warns(UserWarning, match=r"Scaled#0x\w+ in the pattern of names.drop has no identity"):
        assert digest(Scaled()) is None


@torch.library.custom_op("tests_keys::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_custom_operator_is_what_graphs_call() -> None:
    rule = Rule(
        "names.twice", Pattern((op(twice, cap("x")),)), lambda match, x: match.call(twice, match.call(twice, x))
    )
    gm = fx.symbolic_trace(lambda x: torch.relu(twice(x)))
    assert RuleSet("names", rule).apply(gm).rewrites == 1
    assert [ops.key(n) for n in gm.graph.nodes if n.op == "call_function"] == [*["tests_keys::twice"] * 2, "aten::relu"]


def test_nodes_that_call_nothing_give_their_opcode() -> None:
    graph = fx.Graph()
    x = graph.placeholder("relu")
    assert ops.key(x) == "placeholder"
    assert ops.key(graph.get_attr("relu")) == "get_attr"
    assert ops.key(graph.output(x)) == "output"


def test_a_closure_that_was_looked_at_is_not_kept() -> None:
    def added(held: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda x: x + held

    held = torch.zeros(1)
    gone = weakref.ref(held)
    closure = added(held)
    assert ops.key(closure)
    del closure, held
    gc.collect()
    assert gone() is None
