"""A copy has the names of the original, and rewriting it leaves the original as it is."""

import torch

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
