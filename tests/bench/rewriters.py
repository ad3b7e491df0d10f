"""One rule in four rewriters: how long it takes to state it and to apply it; handlers; how long rules of norms take to
verify.

    python -m tests.bench.rewriters [--sizes 1000,10000]

fxrewrite, Inductor's matcher, `torch.fx.subgraph_rewriter.replace_pattern`, and onnxscript's rewriter where that
is installed (`pip install onnxscript`). Eager attention, five nodes, becomes one operator. The graph is that of
`engines.py`, and for onnxscript a model of ONNX operators with the same nodes in the same order. CPU time, the median
of rounds in which the ways take turns, each on a fresh copy. To state a rule is to trace or parse it, up to what can be
applied; `replace_pattern` traces it anew at each call. Only fxrewrite has something that tests a rule.

Handlers change the graph themselves (`register_graph_pattern`), by nodes or by an example: every 25th node, a relu,
becomes a clamp, under our adapter and under Inductor's matcher.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx import subgraph_rewriter
from torch.fx.experimental.proxy_tensor import make_fx

from rules.fusions.norms import NORMS
from tests.bench.engines import copy, inductor, make_graph, ours, plan_of, table

aten = torch.ops.aten
Run = Callable[[Any], int]


def replaced_by_torch_fx() -> Run:
    def pattern(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.matmul(torch.softmax(torch.matmul(q, k) / 8.0 + mask, dim=-1), v)

    def replacement(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask)

    return lambda gm: len(subgraph_rewriter.replace_pattern(gm, pattern, replacement))


def onnx_model(num_nodes: int) -> Any:
    """The blocks of `engines.torch_block` as ONNX operators."""
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]

    nodes: list[Any] = []
    inputs: list[Any] = []

    def given(name: str) -> Any:
        inputs.append(ir.val(name, shape=["b", "s", "d"], type=ir.TensorType(ir.DataType.FLOAT)))
        return inputs[-1]

    def call(kind: str, *values: Any, **attributes: Any) -> Any:
        nodes.append(ir.node(kind, inputs=list(values), attributes=attributes))
        return nodes[-1].outputs[0]

    def linear(x: Any, name: str) -> Any:
        return call("MatMul", x, given(name))

    scale = ir.Value(name="scale", const_value=ir.tensor(8.0))
    h, mask = given("h"), given("mask")
    index = 0
    while index == 0 or len(nodes) + len(inputs) < num_nodes:
        q, k, v = (linear(h, f"{name}_{index}") for name in ("wq", "wk", "wv"))
        scores = call("Add", call("Div", call("MatMul", q, call("Transpose", k, perm=[0, 2, 1])), scale), mask)
        attended = call("MatMul", call("Softmax", scores, axis=-1), v)
        h = call("Add", h, linear(attended, f"wo_{index}"))
        n = call("LayerNormalization", h, given(f"scale_{index}"))
        g = linear(n, f"wg_{index}")
        gated = call("Mul", call("Mul", g, call("Sigmoid", g)), linear(n, f"wu_{index}"))
        h = call("Add", h, linear(gated, f"wd_{index}"))
        index += 1
    graph = ir.Graph(inputs, [h], nodes=nodes, initializers=[scale], opset_imports={"": 23}, name="blocks")
    return ir.Model(graph, ir_version=10)


def onnxscript() -> Run:
    from onnxscript.rewriter import pattern  # pyright: ignore[reportMissingImports]

    def target(op: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return op.MatMul(op.Softmax(op.Add(op.Div(op.MatMul(q, k), 8.0), mask), axis=-1), v)

    def replacement(op: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return op.Attention(q, k, v, mask)

    rules = pattern.RewriteRuleSet([pattern.RewriteRule(target, replacement)])
    return lambda model: rules.apply_to_model(model)


def chain(num_nodes: int) -> fx.Graph:
    """Unary operators of ATen with fake values, of which every 25th is a relu."""

    def model(x: torch.Tensor) -> torch.Tensor:
        for i in range(1, num_nodes - 1):
            x = torch.relu(x) if i % 25 == 0 else torch.sin(x)
        return x

    return make_fx(model, tracing_mode="fake")(torch.rand(4, 4)).graph


def handlers(matcher: Any, *, by_example: bool) -> Run:
    """A pass of one handler; `matcher` is a module with the interface of Inductor's."""
    one = matcher.PatternMatcherPass()

    @matcher.register_graph_pattern(matcher.CallFunction(aten.relu.default, matcher.Arg()), pass_dict=one)
    def to_clamp(match: Any, x: fx.Node) -> None:
        if by_example:
            match.replace_by_example(lambda x: torch.clamp(x, min=0), [x])
            return
        old = match.output_node()
        with match.graph.inserting_before(old):
            new = match.graph.call_function(aten.clamp.default, (x, 0))
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        match.erase_nodes()

    return lambda gm: one.apply(gm.graph)


MATCHERS = {"fxrewrite": "fxrewrite.adapters.pattern_matcher", "Inductor's matcher": "torch._inductor.pattern_matcher"}


def print_handlers(sizes: list[int], rounds: int) -> None:
    kinds = {"by nodes": False, "by example": True}
    ways = {
        f"{name}, {kind}": handlers(importlib.import_module(path), by_example=by_example)
        for kind, by_example in kinds.items()
        for name, path in MATCHERS.items()
    }
    seconds: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in sizes}
    graphs = {size: chain(size) for size in sizes}
    for is_warm in [False] + [True] * rounds:
        for way, size in seconds:
            gm = copy(graphs[size])
            gc.collect()
            started = time.process_time()
            assert ways[way](gm) == (size - 2) // 25
            seconds[way, size] += [time.process_time() - started] * is_warm
    rows = [[way, *(f"{statistics.median(seconds[way, size]) * 1e3:.1f}" for size in sizes)] for way in ways]
    print("\n" + table(["handlers", *(f"apply to {size:,} nodes, ms" for size in sizes)], rows))


WAYS: dict[str, Callable[[], Run]] = {
    "fxrewrite": lambda: ours(plan_of("torch")),
    "Inductor's matcher": lambda: inductor("torch"),
    "replace_pattern": replaced_by_torch_fx,
    **({"onnxscript": onnxscript} if importlib.util.find_spec("onnxscript") else {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {datetime.now(UTC).date()}\n")
    states: dict[str, list[float]] = {way: [] for way in WAYS}
    applies: dict[tuple[str, int], list[float]] = {(way, size): [] for way in WAYS for size in sizes}
    graphs: dict[int, fx.Graph] = {size: make_graph("torch", size) for size in sizes}
    for is_warm in [False] + [True] * options.rounds:
        for way, state in WAYS.items():
            started = time.process_time()
            run = state()
            states[way] += [time.process_time() - started] * is_warm
            counts = set[int]()
            for size in sizes:
                graph = onnx_model(size) if way == "onnxscript" else copy(graphs[size])
                gc.collect()
                started = time.process_time()
                counts.add(run(graph))
                applies[way, size] += [time.process_time() - started] * is_warm
            assert 0 not in counts, f"{way} rewrites nothing"
    ms = {way: f"{statistics.median(found) * 1e3:.1f}" for way, found in states.items()}
    rows = [[way, ms[way], *(f"{statistics.median(applies[way, size]) * 1e3:.1f}" for size in sizes)] for way in WAYS]
    print(table(["", "state, ms", *(f"apply to {size:,} nodes, ms" for size in sizes)], rows))
    print_handlers(sizes, options.rounds)
    for rule in NORMS.rules():
        started = time.process_time()
        verdict = rule.verify()
        print(f"\nVerifying: {str(verdict).splitlines()[0]}, {time.process_time() - started:.1f} s")


if __name__ == "__main__":
    main()
