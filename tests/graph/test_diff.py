"""A diff shows what a rule changed, and nothing that merely moved."""

import copy
import time
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.diff import graph_diff


def chain(*targets: Any) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def rewritten(gm: fx.GraphModule, target: Any, *new: Any) -> fx.GraphModule:
    """A copy of `gm` in which the rule `a.rule` put the chain `new` in the place of each `target`."""
    gm = copy.deepcopy(gm)
    for node in gm.graph.find_nodes(op="call_function", target=target):
        value = node.args[0]
        with gm.graph.inserting_before(node):
            for function in new:
                value = gm.graph.call_function(function, (value,))
                value.meta["fxrewrite"] = ("a.rule",)
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    return gm


def test_equal_graphs_have_no_diff() -> None:
    gm = chain(torch.relu, torch.exp)
    assert graph_diff(gm, copy.deepcopy(gm)) == ""


def test_a_window_holds_the_change_and_the_rule_and_what_follows_is_not_in_it() -> None:
    before = chain(*[torch.relu] * 5, torch.exp, *[torch.relu] * 5)
    assert graph_diff(before, rewritten(before, torch.exp, torch.sin, torch.cos)) == (
        "...\n"
        "  %3 = torch.relu(%2)\n"
        "  %4 = torch.relu(%3)\n"
        "- %-0 = torch.exp(%4)\n"
        "- %7 = torch.relu(%-0)\n"
        "+ %5 = torch.sin(%4)  # a.rule\n"
        "+ %6 = torch.cos(%5)  # a.rule\n"
        "+ %7 = torch.relu(%6)\n"
        "  %8 = torch.relu(%7)\n"
        "  %9 = torch.relu(%8)\n"
        "..."
    )


def test_the_same_call_made_by_a_rule_is_a_change() -> None:
    before = chain(torch.relu, torch.exp)
    assert "+ %1 = torch.exp(%0)  # a.rule" in graph_diff(before, rewritten(before, torch.exp, torch.exp))


def test_another_shape_is_no_change() -> None:
    before = chain(torch.relu, torch.exp)
    after = copy.deepcopy(before)
    for gm, size in ((before, 8), (after, 4)):
        for node in gm.graph.nodes:
            node.meta["val"] = torch.ones(size)
    assert graph_diff(before, after) == ""


def test_a_model_of_many_equal_layers_is_compared_in_seconds() -> None:
    graph = fx.Graph()
    weights = [graph.placeholder(f"w{i}") for i in range(500)]
    value = graph.placeholder("x")
    for weight in weights:
        value = graph.call_function(torch.matmul, (value, weight))
        for function in (torch.relu, torch.exp, torch.sin, torch.cos, torch.neg):
            value = graph.call_function(function, (value,))
    graph.output((value,))
    before = fx.GraphModule(torch.nn.Module(), graph)
    after = rewritten(before, torch.exp, torch.sigmoid)
    start = time.perf_counter()
    diff = graph_diff(before, after)
    assert diff.count("  # a.rule") == 500
    assert time.perf_counter() - start < 5
