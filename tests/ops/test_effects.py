"""What nodes do besides computing: from schemas, and from the small tables where there is none."""

import inspect
import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import ops

aten, higher_order = torch.ops.aten, torch.ops.higher_order
graph = fx.Graph()
X, Y, Z = (graph.placeholder(name) for name in "xyz")


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
        (call(F.embedding, X, Y, max_norm=0.0), (Y,)),
        (call(torch.ops.inductor.resize_storage_bytes_.default, X, 0), (X,)),  # its name alone says so
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
        (call(aten.gru.input, X, X, [X], True, 2, 0.0, True, False, True), False),
        (call(aten.gru.input, X, X, [X], True, 2, 0.5, True, False, True), True),
        (call(aten.gru.input, X, X, [X], True, 2, 0.5, False, False, True), False),
        (call("bernoulli", X), True),
        (call(torch.rand_like, X), True),
        (call(F.scaled_dot_product_attention, X, X, X), False),
        (call(F.scaled_dot_product_attention, X, X, X, dropout_p=0.1), True),
        (call(F.gumbel_softmax, X), True),
        (call(torch.softmax, X, -1), False),
        (call(higher_order.out_dtype, aten.mm.default, torch.int32, X, Y), False),
        (call(higher_order.auto_functionalized, aten.add_.Tensor, self=X, other=Y), False),
        (call(higher_order.auto_functionalized, aten.bernoulli_.float, self=X, p=0.5), True),
        (
            call(higher_order.auto_functionalized_v2, aten.add_.Tensor, other=Y, _self_base_index=0, _all_bases=[X]),
            False,
        ),
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
        (call(higher_order.auto_functionalized, aten.add_.Tensor, self=X, other=Y), False),
    ],
)
def test_what_may_share_memory(node: fx.Node, view: bool) -> None:
    assert ops.is_view(node) == view


@torch.library.custom_op("test_effects::scaled_into", mutates_args=("out",))
def scaled_into(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out.copy_(x)
    return x * 2


@pytest.mark.parametrize(
    ("node", "viewed"),
    [
        (call("add_", X, Y), (X,)),
        (call(operator.iadd, X, Y), (X,)),
        (call(aten.add_.Tensor, X, Y), (X,)),
        (call(torch.add, X, Y, out=Z), (Z,)),
        (call(aten.add.out, X, Y, out=Z), (Z,)),
        (call(F.relu, X, inplace=True), (X,)),
        (call("view_as", X, Y), (X,)),
        (call(aten.split.Tensor, X, 2), (X,)),
        (call(operator.getitem, X, Y), (X,)),
        (call(torch.einsum, "ij,jk->ik", X, Y), (X, Y)),  # may be a view of either one
        (call(F.dropout, X, 0.5, False), (X,)),
        (call(aten.set_.source_Tensor, X, Y), (X, Y)),
        (call(higher_order.invoke_subgraph, X, Y, Z), (X, Y, Z)),
        (call(torch.matmul, X, Y), ()),
        (call(torch.ops.test_effects.scaled_into.default, X, Y), ()),
    ],
)
def test_whose_memory_a_result_may_share(node: fx.Node, viewed: tuple[fx.Node, ...]) -> None:
    assert ops.viewed(node) == viewed
    assert ops.memory_origins(node) == {node, *viewed}


def test_a_cast_to_another_dtype_is_a_copy() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, device="meta")
    same, other = graph.call_method("to", (x, torch.float32)), graph.call_method("to", (x, torch.float64))
    assert ops.is_view(other), "nothing is known of its dtype"
    same.meta["val"], other.meta["val"] = x.meta["val"], x.meta["val"].double()
    assert ops.is_view(same)
    assert not ops.is_view(other)


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


INPLACE_FUNCTIONS = sorted(
    name
    for name in dir(F)
    if inspect.isfunction(getattr(F, name)) and "inplace" in inspect.signature(getattr(F, name)).parameters
)
INPLACE_OPERATORS = sorted(
    name
    for name in dir(operator)
    if name.startswith("i") and f"__{name}__" in dir(operator) and name not in ("index", "inv", "invert")
)


def node_of(target, *more, **options) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *more), options)


@pytest.mark.parametrize("name", INPLACE_FUNCTIONS)
def test_every_function_with_an_inplace_flag_is_known_to_write(name: str) -> None:
    function = getattr(F, name)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    required = [0.5 for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    writes, reads = (node_of(function, *required, inplace=flag) for flag in (True, False))
    assert ops.may_write(function)
    assert [node.name for node in ops.mutated(writes)] == ["x"]
    assert ops.mutated(reads) == ()


@pytest.mark.parametrize("name", INPLACE_OPERATORS)
def test_every_in_place_operator_is_known_to_write(name: str) -> None:
    node = node_of(getattr(operator, name), 2)
    assert ops.may_write(node.target)
    assert [written.name for written in ops.mutated(node)] == ["x"]


def _higher_order(writes_to: str) -> fx.GraphModule:
    """A custom function whose backward has a buffer of its own, and writes to the buffer or to what it is given."""
    forward, backward, graph = fx.Graph(), fx.Graph(), fx.Graph()
    x = forward.placeholder("x")
    forward.output(((forward.call_function(aten.neg.default, (x,)),), (x,)))
    names = {name: backward.placeholder(name) for name in ("grad", "saved")}
    buffer = backward.call_function(aten.empty_like.default, (names["grad"],))
    names["view"] = backward.call_function(aten.view.default, (buffer, [-1]))
    backward.call_function(aten.neg_.default, (names[writes_to],))
    backward.output((buffer,))
    bodies = [graph.get_attr(name) for name in ("forward", "backward")]
    graph.output(graph.call_function(torch.ops.higher_order.autograd_function_apply, (*bodies, graph.placeholder("x"))))
    modules = {name: fx.GraphModule({}, body) for name, body in (("forward", forward), ("backward", backward))}
    return fx.GraphModule(modules, graph)


@pytest.mark.parametrize(("writes_to", "barrier"), [("view", False), ("saved", True)])
def test_a_body_that_fills_its_own_buffer_has_no_effects(writes_to: str, barrier: bool) -> None:
    gm = _higher_order(writes_to)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply)
    assert ops.is_barrier(call) is barrier
    assert ops.is_pure(call) is not barrier
