"""Worklists visit in order, each node once at a time; a transfer that never settles is an error."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxrewrite import FxRewriteError
from fxrewrite.flow import Worklist, solve


def _chain() -> fx.Graph:
    def run(x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x)
        return torch.add(torch.neg(a), a)

    return fx.symbolic_trace(run).graph


def test_depth_forward() -> None:
    graph = _chain()
    visits: list[str] = []

    def depth(node: fx.Node, facts: dict[fx.Node, int]) -> int:
        visits.append(node.name)
        return 1 + max((facts[n] for n in node.all_input_nodes), default=0)

    facts = solve(graph, depth)
    assert [facts[node] for node in graph.nodes] == [1, 2, 3, 4, 5]
    assert visits == [node.name for node in graph.nodes]  # in order, so nothing is visited twice


def test_liveness_backward() -> None:
    graph = _chain()
    facts = solve(graph, lambda n, f: n.op == "output" or any(f.get(u, False) for u in n.users), backward=True)
    assert all(facts.values())


def test_a_change_wakes_the_users_only() -> None:
    graph = _chain()
    facts = solve(graph, lambda n, f: 0)
    woken: list[str] = []

    def one_more(node: fx.Node, facts: dict[fx.Node, int]) -> int:
        woken.append(node.name)
        return 1

    solve(graph, one_more, facts=facts, start=[next(n for n in graph.nodes if n.name == "neg")])
    assert woken == ["neg", "add", "output"]


def test_a_transfer_that_does_not_settle_is_named() -> None:
    graph = _chain()
    node = next(iter(graph.nodes))

    def feed_back(n: fx.Node, facts: dict[fx.Node, int]) -> int:
        return facts.get(n, 0) + 1

    with pytest.raises(FxRewriteError, match="does not settle at %relu: visited"):
        solve(graph, feed_back, start=[node.next], facts={}, max_visits=0)


def test_worklist_backward_order() -> None:
    graph = _chain()
    work = Worklist(graph, backward=True)
    work.push(graph.nodes)
    work.push(graph.nodes)
    assert [node.name for node in work] == [node.name for node in reversed(graph.nodes)]
