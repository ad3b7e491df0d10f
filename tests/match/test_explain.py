"""A non-match names the first test that fails, at the place that came nearest."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.match import explain
from fxrewrite.pattern import Literal, each, op, trace


def attention(q, k, v, scale: Literal):
    return torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v


def why(pattern, function) -> str:
    return str(explain(trace(pattern), fx.symbolic_trace(function).graph.nodes))


def test_nearest_miss_first() -> None:
    def model(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -3) * 0.5, -1) @ (q @ v)

    text = why(attention, model)
    assert "0 of 3 nodes aten::matmul match" in text
    assert "at %matmul_2: 13 of 18 conditions hold" in text.splitlines()[2]
    assert "the literal -1 at root.self.self.self.other.dim1, found -3" in text


def test_other_operator() -> None:
    text = why(lambda x: torch.relu(torch.neg(x)), lambda x: torch.relu(torch.exp(x)))
    assert "expected operator aten::neg at root.self, found aten::exp (%exp)" in text


def test_other_arguments() -> None:
    text = why(lambda x: torch.softmax(x, -1), lambda x: F.softmax(x, -1, dtype=torch.half))
    assert "expected no arguments but self, dim at root, found self=x, dim=-1, dtype=torch.float16" in text


def test_outside_user() -> None:
    def model(x):
        s = torch.sigmoid(x)
        return s * x, s

    text = why(lambda x: x * torch.sigmoid(x), model)
    assert (
        "expected no user of root.self outside the match, found %output uses %sigmoid; allow the other user with"
        in text
    )


def test_missing_output() -> None:
    text = why(lambda x: (torch.sin(x), torch.cos(x)), lambda x: torch.sin(x))
    assert "expected output 2, aten::cos, on the same values, found none" in text


def test_no_anchor_at_all() -> None:
    text = why(lambda x: torch.relu(x), lambda x: torch.exp(x))
    assert "the graph has no node aten::relu" in text


def test_a_graph_that_calls_modules_has_not_what_they_do() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(2)
    function = trace(lambda x, w, b: F.linear(x, w, b))
    module = trace(lambda x: op(torch.nn.Linear, x))
    called = str(explain(function, fx.symbolic_trace(model).graph.nodes))
    assert "it calls modules, as torch.nn.modules.linear.Linear, and operators in them are not in this graph" in called
    traced = str(explain(module, make_fx(model)(x).graph.nodes))
    assert "only graphs of fx.symbolic_trace call modules, others have the functions that modules call" in traced
    assert "others have" not in why(lambda x: op(torch.nn.Conv1d, x), model)


def test_a_graph_that_writes_in_place_says_where_it_would_not() -> None:
    text = why(lambda x: x * torch.sigmoid(x), lambda x: (y := x.clone()).mul_(torch.sigmoid(y)))
    assert 'it has aten::mul_, which writes: normalize(gm), plan.backend(..., graph="aten") and the slots' in text


def test_a_function_that_calls_operators_is_not_in_a_graph_of_overloads() -> None:
    pattern = trace(lambda x: F.softsign(x))
    assert "F.softsign" not in str(explain(pattern, fx.symbolic_trace(lambda x: torch.relu(x)).graph.nodes))
    text = str(explain(pattern, make_fx(lambda x: F.softsign(x))(torch.ones(2)).graph.nodes))
    assert (
        "it has ATen overloads, and torch.nn.functional.softsign is not an operator but calls some: write these" in text
    )


def test_a_list_stands_in_a_graph_of_overloads_as_its_parts() -> None:
    def parts(x):
        return torch.cat(torch.split(x, 1))

    def each_part(x, n: Literal):
        split = torch.split(x, n)

        def part(i: Literal):
            return split[i]

        return torch.cat(each(part))

    nodes = list(make_fx(parts)(torch.ones(3)).graph.nodes)
    assert "found [getitem, getitem_1, getitem_2]; to match the parts of a list, write each(" in str(
        explain(trace(parts), nodes)
    )
    assert explain(trace(each_part), nodes).num_matches == 1


def test_same_value() -> None:
    text = why(lambda x: x - torch.relu(x), lambda x, y: x - torch.relu(y))
    assert "expected the same value at root.other.self as at root.self, found placeholder (%y)" in text


def test_source_line_is_given() -> None:
    gm = fx.symbolic_trace(lambda x: torch.relu(x))
    relu = next(n for n in gm.graph.nodes if n.op == "call_function")
    relu.meta["stack_trace"] = '  File "/home/me/model.py", line 41, in forward\n    x\n'
    assert "at %relu (model.py:41): 2 of" in str(explain(trace(lambda x: torch.relu(torch.neg(x))), gm.graph.nodes))
