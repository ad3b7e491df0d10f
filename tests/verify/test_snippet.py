"""A program is written as one would write it, and computes what the graph computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.verify.compare import Difference
from fxrewrite.verify.snippet import snippet
from fxrewrite.verify.tensors import InputSpec
from tests.bench.corpus import CASES
from tests.verify.rules import execute

X, Y = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([[2.0, 5.0], [7.0, -1.0]])

EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y * 2 - x / 3": lambda x, y: x + y * 2 - x / 3,
    "(x + y) * (x - y)": lambda x, y: (x + y) * (x - y),
    "x - (y - x)": lambda x, y: x - (y - x),
    "-x ** 2": lambda x, y: -(x**2),
    "(-x) ** 2": lambda x, y: (-x) ** 2,
    "-(x + y)": lambda x, y: -(x + y),
    "(x @ y).transpose(0, 1)": lambda x, y: (x @ y).transpose(0, 1),
    "(x > y) == (y > 0.0)": lambda x, y: (x > y) == (y > 0.0),
    "torch.softmax(x, -1)": lambda x, y: torch.softmax(x, -1),
    "x.to(torch.float64)": lambda x, y: x.to(torch.float64),
    "x.unsqueeze(0).expand([3, 2, 2])": lambda x, y: x.unsqueeze(0).expand([3, 2, 2]),
    "torch.nn.functional.gelu(x)": lambda x, y: F.gelu(x),
    "torch.cat([x, y], 1)": lambda x, y: torch.cat([x, y], 1),
    "x * -1 + 0.5": lambda x, y: x * -1 + 0.5,
    "(x > 0) & ~(y > 0)": lambda x, y: (x > 0) & ~(y > 0),
}


def written(gm: fx.GraphModule) -> str:
    inputs = [(name, InputSpec((2, 2), torch.float32, data=data)) for name, data in (("x", X), ("y", Y))]
    return snippet("rule", gm, gm, inputs, Difference("value", "none"))


def overloads(function: Callable[..., Any]) -> fx.GraphModule:
    gm = make_fx(function, pre_dispatch=True)(X, Y)
    for node in gm.graph.find_nodes(op="placeholder"):
        node.target = str(node.target).partition("_")[0]
    gm.recompile()
    return gm


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("trace", [overloads, fx.symbolic_trace], ids=["overloads", "functions"])
def test_a_program_has_operators_between_operands(text: str, trace: Callable[..., fx.GraphModule]) -> None:
    gm = trace(EXPRESSIONS[text])
    program = written(gm)
    if trace is overloads:
        assert f"return ({text},)" in program or f"return {text}" in program
    ran = execute(program)
    (found,) = ran["expected"] if isinstance(ran["expected"], tuple) else (ran["expected"],)
    assert torch.equal(found, EXPRESSIONS[text](X, Y))


def test_a_call_with_every_operand_by_name_is_written() -> None:
    gm = overloads(
        lambda x, y: torch.ops.aten.expand.default(self=torch.ops.aten.mul.Tensor(self=x, other=y), size=[2, 2])
    )
    assert torch.equal(execute(written(gm))["expected"], X * Y)


@pytest.mark.parametrize("name", ["other.rotary_by_halves_wrong", "attention.to_sdpa_wrong"])
def test_a_counterexample_has_fewer_than_ten_lines(name: str) -> None:
    (rule,) = (case.rule for case in CASES if case.rule.id == name)
    counterexample = rule.verify().counterexample
    assert counterexample is not None
    lines = [line for line in counterexample.snippet.splitlines() if not line.startswith("#")]
    assert len(lines) < 10
    assert max(map(len, lines)) <= 200
    ran = execute(counterexample.snippet)
    assert not torch.allclose(ran["expected"][0], ran["found"][0])


def test_a_function_of_the_program_that_runs_is_imported_from_it() -> None:
    def double(x: Any) -> Any:
        return x * 2

    double.__module__, double.__qualname__ = "__main__", "double"
    graph = fx.Graph()
    graph.output(graph.call_function(double, (graph.placeholder("x"),)))
    program = written(fx.GraphModule(torch.nn.Module(), graph))
    assert "from __main__ import double\n" in program
    assert "v0 = double(x)\n" in program
