"""Walks reach each node once, and operands before what reads them."""

import operator

from torch import fx

from fxrewrite.graph import operands_first, reached


def _diamond() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(operator.neg, (x,), name="a")
    b = graph.call_function(operator.pos, (x,), name="b")
    c = graph.call_function(operator.add, (a, b), name="c")
    graph.output(c)
    return graph, {node.name: node for node in graph.nodes}


def test_each_node_is_reached_once() -> None:
    _, nodes = _diamond()
    walk = [node.name for node in reached([nodes["c"], nodes["a"]])]
    assert sorted(walk) == ["a", "b", "c", "x"]


def test_a_walk_ends_where_the_edges_say_so_and_may_go_down() -> None:
    _, nodes = _diamond()
    assert set(reached([nodes["c"]], lambda n: n.all_input_nodes if n is nodes["c"] else ())) == {
        nodes[name] for name in "abc"
    }
    assert set(reached([nodes["x"]], lambda n: n.users)) == {*nodes.values()}


def test_a_walk_is_lazy() -> None:
    _, nodes = _diamond()
    asked: list[str] = []

    def edges(node: fx.Node) -> list[fx.Node]:
        asked.append(node.name)
        return node.all_input_nodes

    assert next(reached([nodes["c"]], edges)) is nodes["c"]
    assert not asked


def test_operands_come_first_in_an_order_that_edges_alone_decide() -> None:
    graph, nodes = _diamond()
    before = [node.name for node in operands_first(nodes["c"])]
    nodes["b"].append(nodes["a"])  # a moves behind b
    graph.lint()
    assert [node.name for node in operands_first(nodes["c"])] == before
    assert {before[0], before[-1]} == {"x", "c"}


def test_long_chains_need_no_stack() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(5000):
        node = graph.call_function(operator.neg, (node,))
    assert sum(1 for _ in operands_first(node)) == 5001
