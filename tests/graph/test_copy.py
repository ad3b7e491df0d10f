"""A copy has the names of the original, and rewriting it leaves the original as it is."""

import torch
from torch import fx

from fxrewrite import RuleSet, rule
from fxrewrite.graph import copy_module


def test_nodes_keep_their_names_also_those_of_builtins() -> None:
    program = torch.export.export(torch.nn.Sequential(torch.nn.ReLU()), (torch.rand(2),))
    copied = copy_module(program.graph_module)
    assert [node.name for node in copied.graph.nodes] == ["input", "relu", "output"]
    (x,) = copied.graph.find_nodes(op="placeholder")
    with copied.graph.inserting_after(x):
        assert copied.graph.call_function(torch.relu, (x,)).name == "relu_1"
    copied.recompile()
    torch.testing.assert_close(copied(torch.tensor([-1.0, 2.0])), (torch.tensor([0.0, 2.0]),))
    assert len(program.graph_module.graph.nodes) == 3


def test_a_body_under_two_names_is_one_copy_under_both() -> None:
    """As in `torch.cond(p, f, f, (x,))`."""
    inner = fx.symbolic_trace(lambda x: torch.relu(x))
    graph = fx.Graph()
    p, x = graph.placeholder("p"), graph.placeholder("x")
    branches = graph.get_attr("t"), graph.get_attr("e")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (p, *branches, (x,))))
    root = torch.nn.Module()
    root.t = root.e = inner
    gm = fx.GraphModule(root, graph)
    clamp = rule("test.clamp", numerics="exact")(lambda x: torch.relu(x))
    clamp.replacement(lambda x: torch.clamp_min(x, 0))
    new, report = RuleSet("s", clamp).once().applied(gm)
    assert report.rewrites == 1
    assert gm.t is gm.e is inner
    assert new.t is new.e
    called = [[n.target for n in body.graph.nodes if n.op == "call_function"] for body in (inner, new.t)]
    assert called == [[torch.relu], [torch.clamp_min]]
