"""Arguments come out under their schema names, however they were passed."""

import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import ops

aten = torch.ops.aten
graph = fx.Graph()
X, Y = graph.placeholder("x"), graph.placeholder("y")


def bind(target, *args, **kwargs) -> dict:
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return ops.bind(make(target, args, kwargs))


@pytest.mark.parametrize(
    "bound",
    [
        bind("softmax", X, -1),
        bind(torch.softmax, X, dim=-1),
        bind(torch.softmax, input=X, dim=-1),
        bind(F.softmax, X, -1, _stacklevel=5),
        bind(aten.softmax.int, X, -1),
        bind(aten.softmax, X, -1),
    ],
)
def test_one_binding_for_every_spelling(bound: dict) -> None:
    assert bound == {"self": X, "dim": -1, "dtype": None}
    assert list(bound) == ["self", "dim", "dtype"]


@pytest.mark.parametrize("method", ["where", torch.Tensor.where], ids=["by_name", "function"])
def test_a_method_takes_self_first_wherever_the_schema_has_it(method) -> None:
    condition = graph.placeholder("condition")
    expected = bind(torch.where, condition, X, Y)
    assert bind(method, X, condition, Y) == bind(method, X, condition, other=Y) == expected
    assert bind(aten.where.self, condition, X, Y) == expected
    assert bind("polygamma", X, 2) == bind(torch.polygamma, 2, X) == {"n": 2, "self": X}


@pytest.mark.parametrize(
    "bound",
    [
        bind(F.max_pool2d, X, 3, 1),
        bind(F.max_pool2d, X, kernel_size=(3, 3), stride=1, return_indices=False),
        bind(F.max_pool2d, X, 3, 1, 0, 1, False),
        bind(torch.max_pool2d, X, 3, 1),
        bind(aten.max_pool2d.default, X, [3, 3], [1, 1]),
    ],
)
def test_a_function_that_torch_dispatches_by_a_flag_is_bound_as_its_operator(bound: dict) -> None:
    assert bound == {
        "self": X,
        "kernel_size": [3, 3],
        "stride": [1, 1],
        "padding": [0, 0],
        "dilation": [1, 1],
        "ceil_mode": False,
    }
    assert bind(F.max_pool2d, X, 3, None) == bind(aten.max_pool2d.default, X, [3, 3])


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (bind("view", X, 2, 3), {"self": X, "size": [2, 3]}),
        (bind("view", X, (2, 3)), {"self": X, "size": [2, 3]}),
        (bind("view", X, -1), {"self": X, "size": [-1]}),
        (bind("view", X, torch.int32), {"self": X, "dtype": torch.int32}),
        (bind("permute", X, 0, 2, 1), {"self": X, "dims": [0, 2, 1]}),
        (bind(torch.zeros, 2, 3)["size"], [2, 3]),
        (bind(torch.einsum, "ij,jk->ik", X, Y), {"equation": "ij,jk->ik", "tensors": [X, Y], "path": None}),
        (bind(torch.sum, X), {"self": X, "dtype": None}),
        (bind(torch.sum, X, axis=-1, keepdims=True), {"self": X, "dim": [-1], "keepdim": True, "dtype": None}),
        (bind(torch.max, X, 1), {"self": X, "dim": 1, "keepdim": False}),
        (bind(torch.max, X, Y), {"self": X, "other": Y}),
        (bind("split", X, [1, 2]), {"self": X, "split_sizes": [1, 2], "dim": 0}),
        (bind(aten.split.sizes, X, [1, 2]), {"self": X, "split_sizes": [1, 2], "dim": 0}),
        (bind(F.conv2d, X, Y, None, 2), bind(aten.conv2d.default, X, Y, None, [2, 2])),
        (bind(F.adaptive_avg_pool2d, X, 1), bind(aten.adaptive_avg_pool2d.default, X, [1, 1])),
        (bind(operator.pow, 2, X), {"self": 2, "exponent": X}),
        (bind(torch.add, X, Y, alpha=2), {"self": X, "other": Y, "alpha": 2}),
        (bind("float", X)["dtype"], torch.float32),
        (bind(torch.cat, [X, Y]), {"tensors": [X, Y], "dim": 0}),
        (bind("norm", X, dim=-1), bind(aten.linalg_vector_norm.default, X, 2, [-1])),
        (bind(torch.norm, X, 1, -1, True), bind(aten.linalg_vector_norm.default, X, 1, [-1], True)),
        (bind("contiguous", X)["memory_format"], torch.contiguous_format),
    ],
)  # fmt: skip
def test_overloads_spread_lists_and_renamed_keywords(bound, expected) -> None:
    assert bound == expected


def test_integers_for_floats_become_floats_only_where_they_mean_the_same() -> None:
    assert type(bind(operator.truediv, X, 8)["other"]) is float
    assert type(bind(torch.div, X, 8, rounding_mode="floor")["other"]) is int
    assert type(bind(operator.mul, X, 8)["other"]) is int
    assert type(bind(F.dropout, X, 0)["p"]) is float


def test_floats_for_multipliers_become_integers_only_where_they_mean_the_same() -> None:
    assert [type(bind(torch.add, X, Y, alpha=a)["alpha"]) for a in (2, 2.0, 0.5, -0.0)] == [int, int, float, float]
    assert [type(bind(aten.celu.default, X, a)["alpha"]) for a in (1, 1.0)] == [int, int]
    assert type(bind(torch.arange, 0, 4, 1.0)["step"]) is float  # it makes the result float32
    assert type(bind(operator.mul, X, 1.0)["other"]) is float


def test_a_python_callable_binds_by_its_signature() -> None:
    def shift(x, amount, *, wrap=True): ...

    assert bind(shift, X, amount=2) == {"x": X, "amount": 2, "wrap": True}
    with pytest.raises(ops.BindingError, match="called without"):
        bind(shift, X)


def test_the_value_of_a_node_decides_between_overloads() -> None:
    g = fx.Graph()
    x, other = g.placeholder("x"), g.placeholder("other")
    call = g.call_function(torch.max, (x, other))
    other.meta["val"] = 1
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 2)
    assert ops.bind(call) == {"self": x, "dim": other, "keepdim": False}


def test_a_call_that_fits_no_signature_says_so() -> None:
    with pytest.raises(ops.BindingError, match="aten::relu called with 2 positional arguments"):
        bind(aten.relu.default, X, Y)
    with pytest.raises(ops.BindingError, match=r"aten::to called with 1 positional arguments .* no keyword inplace"):
        bind("float", X, inplace=True)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(3), torch.nn.GroupNorm(1, 3), torch.nn.BatchNorm1d(3).eval()])
def test_a_flag_of_kernels_means_nothing_that_is_computed(norm: torch.nn.Module) -> None:
    exported = torch.export.export(norm, (torch.ones(2, 3),)).graph
    flags = [list(ops.bind(node).values())[-1] for node in exported.nodes if "norm" in str(node.target)]
    assert flags[-1] is True  # torch.export writes False, F.layer_norm and others mean True


@pytest.mark.parametrize("other_first", [True, False])
def test_arguments_of_one_kind_that_mean_different_functions_bind_differently(other_first: bool) -> None:
    calls = [
        (F.kl_div, (X, Y), {"reduction": "batchmean", "log_target": other_first}, {"reduction": "mean"}),
        (F.max_pool2d, (X, 2), {"return_indices": True, "ceil_mode": other_first}, {"return_indices": False}),
        (F.smooth_l1_loss, (X, Y), {"beta": 0.0, "reduction": "sum"}, {"beta": 1.0}),
        (torch.norm, (X,), {"p": "nuc", "keepdim": other_first}, {"p": "fro"}),
    ]
    for function, args, other, named in calls:
        for kwargs in ({**other}, {**other, **named})[:: 1 if other_first else -1]:
            node = graph.call_function(function, args, kwargs)
            is_operator = ops.key(node).startswith("aten::")
            assert is_operator == (kwargs != other)
            assert ("self" in ops.bind(node)) == is_operator


def test_what_tracing_writes_out_is_the_default() -> None:
    zeros = make_fx(lambda x: torch.zeros_like(x, device="cpu"))(torch.ones(2)).graph
    (node,) = zeros.find_nodes(op="call_function", target=aten.zeros_like.default)
    assert node.kwargs == {"device": torch.device("cpu"), "pin_memory": False}
    written = bind(torch.zeros_like, X, device="cpu")
    assert {**ops.bind(node), "self": X} == written
    assert written["pin_memory"] is None
    assert bind(torch.zeros_like, X, pin_memory=True)["pin_memory"] is True
