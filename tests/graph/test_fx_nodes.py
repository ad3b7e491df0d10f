"""Nodes that enter and leave a graph by what FX keeps are those that FX itself makes and erases."""

import operator

import pytest
import torch
from torch import fx

from fxrewrite.errors import InvariantError
from fxrewrite.graph import Edit
from fxrewrite.graph.fx_nodes import insert_call, take_out


def graph_of_one_input() -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    return fx.GraphModule(torch.nn.Module(), graph), x


@pytest.mark.parametrize(
    "name",
    ["add", "x", "sum", "class", "expm1", "conv_2", "conv_02", "max_pool2d", "_unsafe_view", "a b", "2x", "__x__"],
)
def test_a_node_is_named_as_by_fx(name: str) -> None:
    (ours, x), (theirs, y) = graph_of_one_input(), graph_of_one_input()
    for _ in range(3):
        made = insert_call(ours.graph, x.next, operator.neg, (x,), {}, name)
        with theirs.graph.inserting_before(y.next):
            expected = theirs.graph.create_node("call_function", operator.neg, (y,), name=name)
        assert made.name == expected.name
    assert [node.name for node in ours.graph.nodes] == [node.name for node in theirs.graph.nodes]
    assert len(ours.graph.nodes) == len(theirs.graph.nodes) == 5
    ours.graph.lint()


def test_a_node_is_found_and_can_be_taken_out() -> None:
    gm, x = graph_of_one_input()
    function = insert_call(gm.graph, x.next, torch.add, (x,), {"other": 2}, "add")
    method = insert_call(gm.graph, function.next, "mul", (function, 3), {}, "mul")
    assert (function.op, method.op, function.kwargs) == ("call_function", "call_method", {"other": 2})
    assert gm.graph.find_nodes(op="call_function", target=torch.add) == [function]
    assert gm.graph.find_nodes(op="call_method", target="mul") == [method]
    assert [*function.users] == [method]
    told: list[fx.Node] = []
    gm._register_erase_node_hook(told.append)
    method.args, function.args, function.kwargs = (), (), {}
    take_out(gm.graph, [method, function])
    assert told == [method, function]
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "output"]
    assert len(gm.graph.nodes) == 2
    assert not gm.graph.find_nodes(op="call_function", target=torch.add)
    gm.graph.lint()


def test_hooks_are_told_of_new_nodes() -> None:
    gm, x = graph_of_one_input()
    told: list[fx.Node] = []
    gm._register_create_node_hook(told.append)
    with Edit(gm) as edit:
        made = edit.call(torch.neg, (x,), after=x)
        edit.replace_uses(x, made, [gm.graph.output_node()])
    assert told == [made]


def test_a_node_of_another_graph_is_not_erased() -> None:
    (gm, _), (other, y) = graph_of_one_input(), graph_of_one_input()
    foreign = insert_call(other.graph, y.next, torch.neg, (y,), {}, "neg")
    with pytest.raises(InvariantError, match="%neg is to be erased, and is a node of another graph"), Edit(gm) as edit:
        edit.erase(foreign)
    assert foreign.args == (y,)
    assert foreign in other.graph.nodes
    other.graph.lint()
