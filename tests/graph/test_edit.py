"""A transaction ends committed and valid, or with the graph exactly as before."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fxrewrite.errors import InvariantError
from fxrewrite.graph.edit import Edit
from fxrewrite.ops.memory import memory_written
from tests.dynamo import caught

aten = torch.ops.aten


def traced(mode: str = "symbolic") -> fx.GraphModule:
    gm = make_fx(lambda x, y: torch.sigmoid(x) * y + x, tracing_mode=mode)(torch.rand(2, 3), torch.rand(2, 3))
    named(gm, "mul").meta.update(stack_trace='  File "/home/me/model.py", line 41, in f\n', recompute=2)
    return gm


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def state(gm: fx.GraphModule) -> list:
    names = gm.graph._graph_namespace
    return [
        (gm.code, sorted(names._used_names)),
        *((n, n.name, n.args, n.kwargs, dict(n.meta), set(n.users)) for n in gm.graph.nodes),
    ]


def silu(edit: Edit, gm: fx.GraphModule) -> fx.Node:
    old = named(gm, "mul")
    new = edit.call(aten.silu.default, (old.args[1],), before=old, like=old, rule="act.silu")
    edit.replace_uses(old, new)
    edit.erase(old)
    edit.set_meta(new, "note", 1)
    edit.set_meta(named(gm, "add"), "note", 1)
    return new


def test_a_new_node_has_value_source_rule_and_checkpoint_tag() -> None:
    gm = traced()
    with Edit(gm) as edit:
        new = silu(edit, gm)
    gm.graph.lint()
    assert new.meta["val"].shape == named(gm, "add").meta["val"].shape
    assert new.meta["fxrewrite"] == ("act.silu",)
    assert new.meta["recompute"] == 2
    assert "model.py" in new.meta["stack_trace"]
    assert "mul" not in [node.name for node in gm.graph.nodes]
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    assert torch.equal(gm(x, y), torch.nn.functional.silu(y) + x)


def test_calls_are_the_nodes_of_the_graph_by_what_they_call() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    relu = [graph.call_function(torch.relu, (x,)), graph.call_function(torch.relu, (x,))]
    methods = [graph.call_method("sin", (relu[0],)), graph.call_method("cos", (relu[0],))]
    module = graph.call_module("layer", (x,))
    graph.output((*relu, *methods, module))
    relu[0].target = torch.abs
    layer = torch.nn.Module()
    layer.layer = torch.nn.Linear(2, 2)
    with Edit(fx.GraphModule(layer, graph)) as edit:
        old = relu[1]
        new = edit.call(torch.neg, (x,), before=old, val=None)
        edit.replace_uses(old, new)
        edit.erase(old)
        found = {(op, target): list(nodes) for op, target, nodes in edit.calls()}
        calls = [node for node in edit.nodes() if node.op.startswith("call_")]
    assert sorted(node for nodes in found.values() for node in nodes) == calls
    assert all((node.op, node.target) == what for what, nodes in found.items() for node in nodes)
    assert found["call_function", torch.abs] == [relu[0]]
    assert not found["call_function", torch.relu]


def test_rules_that_built_on_each_other_are_all_named() -> None:
    gm = traced()
    with Edit(gm) as edit:
        first = silu(edit, gm)
        second = edit.call(aten.relu.default, (first,), after=first, like=first, rule="act.relu")
    assert second.meta["fxrewrite"] == ("act.relu", "act.silu")


def test_values_of_new_nodes_add_no_guards() -> None:
    gm = traced()
    shape_env = named(gm, "mul").meta["val"].fake_mode.shape_env
    before = len(shape_env.guards)
    with Edit(gm) as edit:
        old = named(gm, "mul")
        flat = edit.call(aten.view.default, (old, [-1, 3]), after=old, rule="test")
        assert flat.meta["val"].ndim == 2
    assert len(shape_env.guards) == before


def test_an_exception_leaves_the_graph_exactly_as_before() -> None:
    gm = traced()
    before = state(gm)
    with pytest.raises(KeyError), Edit(gm) as edit:  # noqa: PT012
        silu(edit, gm)
        raise KeyError
    assert state(gm) == before
    with Edit(gm) as edit:
        name = silu(edit, gm).name
    assert name == "silu_default", "an undone node leaves its name free"


def test_a_savepoint_undoes_only_its_own_part() -> None:
    gm = traced()
    with Edit(gm) as edit:
        new = silu(edit, gm)
        with pytest.raises(KeyError), edit.savepoint():  # noqa: PT012
            again = edit.call(aten.relu.default, (new,), after=new, rule="test")
            edit.replace_uses(new, again)
            edit.erase(named(gm, "sigmoid"))
            edit.set_meta(new, "note", 2)
            raise KeyError
        assert new.meta["note"] == 1
        assert [user.name for user in new.users] == ["add"]
        assert named(gm, "sigmoid") not in edit.erased
    gm.graph.lint()
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["sigmoid", "silu_default", "add"]


def test_a_body_is_attached_and_taken_away_again() -> None:
    gm = traced()
    before = state(gm)
    body = fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(KeyError), Edit(gm) as edit:  # noqa: PT012
        assert edit.attach(body, "body").target == "body"
        assert edit.attach(body, "body").target == "body_1"
        raise KeyError
    assert state(gm) == before
    assert not list(gm.children())
    with Edit(gm) as edit:
        edit.attach(body, "body")
    gm.graph.lint()
    assert gm.body is body


def test_undo_costs_what_was_changed() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(2000):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    gm = fx.GraphModule({}, graph)
    touched: list[str] = []
    with Edit(gm) as edit:
        node = next(n for n in graph.nodes if n.name == "relu_1000")
        with pytest.raises(KeyError), edit.savepoint():  # noqa: PT012
            edit.replace_uses(node, node.args[0])
            touched += [record[1].name for record in edit._journal]
            raise KeyError
        assert edit.num_changes == 0
    assert touched == ["relu_1001"]


def test_using_a_node_before_it_is_defined_is_refused_and_undone() -> None:
    gm = traced()
    before = state(gm)
    with pytest.raises(InvariantError, match="%sigmoid reads %mul, which is defined after it"), Edit(gm) as edit:
        edit.set_args(named(gm, "sigmoid"), (named(gm, "mul"),))
    assert state(gm) == before


def test_a_node_is_moved_to_where_it_is_valid_or_not_at_all() -> None:
    gm = make_fx(lambda x: torch.exp(x) + torch.sin(x).cos())(torch.rand(2))
    before = state(gm)
    for node, where in (("exp", "output"), ("cos", "exp")):  # behind its user; in front of what it reads
        with pytest.raises(InvariantError, match="reads"), Edit(gm) as edit:
            edit.move(named(gm, node), named(gm, where))
        assert state(gm) == before
    with Edit(gm) as edit:
        edit.move(named(gm, "exp"), named(gm, "add"))
    assert [node.name for node in gm.graph.nodes][1:4] == ["sin", "cos", "exp"]


def test_erasing_a_used_node_is_refused() -> None:
    gm = traced()
    with pytest.raises(InvariantError, match="%mul cannot be erased: it is used by %add"), Edit(gm) as edit:
        edit.erase(named(gm, "mul"))


def test_reading_an_erased_node_is_refused() -> None:
    gm = traced()
    before = state(gm)
    with pytest.raises(InvariantError, match=r"use it|not in the graph any more"), Edit(gm) as edit:  # noqa: PT012
        old = named(gm, "mul")
        silu(edit, gm)
        edit.set_args(named(gm, "add"), (old, old))
    assert state(gm) == before


def test_replacing_uses_leaves_the_wrapping_node_alone() -> None:
    gm = traced()
    with Edit(gm) as edit:
        old = named(gm, "mul")
        wrapped = edit.call(aten.relu.default, (old,), after=old, rule="test")
        edit.replace_uses(old, wrapped)
    assert wrapped.args == (old,)
    assert list(old.users) == [wrapped]


def test_behind_a_placeholder_is_behind_all_of_them() -> None:
    gm = traced()
    with Edit(gm) as edit:
        new = edit.call(aten.relu.default, (named(gm, "x_1"),), after=named(gm, "x_1"), rule="test")
        edit.replace_uses(named(gm, "x_1"), new)
    assert [n.op for n in gm.graph.nodes][:2] == ["placeholder", "placeholder"]
    gm.graph.lint()


def test_a_graph_without_values_gets_none_and_parameters_are_faked() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3))

        def forward(self, x):
            return x * self.weight

    gm = fx.symbolic_trace(Scale())
    with Edit(gm) as edit:
        assert edit.fake_mode is None
        mul = named(gm, "mul")
        assert "val" not in edit.call(torch.relu, (mul,), after=mul, rule="test").meta
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        named(gm, "x").meta["val"] = torch.empty(2, 3)
    with Edit(gm) as edit:
        weight = named(gm, "weight")
        new = edit.call(torch.neg, (weight,), after=weight, rule="test")
    assert new.meta["val"].shape == (3,)


def test_a_transaction_without_changes_does_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced()
    compiled: list[int] = []
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: compiled.append(1))
    with Edit(gm):
        pass
    assert compiled == []
    with Edit(gm) as edit:
        silu(edit, gm)
        silu_again = next(n for n in gm.graph.nodes if n.name == "silu_default")
        edit.set_meta(silu_again, "note", 3)
    assert compiled == [1]


def test_arguments_that_are_values_of_ours_stay_as_they_are() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Shard:
        dim: int

    def redistribute(x, source, destination):
        return x

    gm = traced()
    with Edit(gm) as edit:
        mul = named(gm, "mul")
        new = edit.call(redistribute, (mul, Shard(0), Shard(1)), after=mul, rule="test", val=mul.meta["val"])
        assert new.args == (mul, Shard(0), Shard(1))
        edit.erase(new)


def test_which_memory_is_written_is_known_while_an_item_is_erased() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    halves = graph.call_function(aten.split.Tensor, (x, 1))
    first, second = (graph.call_function(operator.getitem, (halves, i)) for i in range(2))
    graph.output(graph.call_function(aten.add_.Tensor, (first, 1)))
    edit = Edit(fx.GraphModule(torch.nn.Module(), graph))
    edit.erase(second)
    assert second not in memory_written(edit.graph)
    assert {x, halves, first} <= memory_written(edit.graph)


def test_what_a_higher_order_operator_saves_is_not_known() -> None:
    """Its bodies are not traced for autograd, so it may save all that it reads and gives."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False)

    gm, _ = caught(function, torch.rand(4, requires_grad=True))
    (node,) = (one for one in gm.graph.nodes if isinstance(one.target, torch._ops.HigherOrderOperator))
    assert Edit(gm).values.saved_for_backward(node) == [node, *node.all_input_nodes]
