"""How long matching and rewriting take: fxrewrite, the same rewrite written by hand, Inductor's pattern matcher.

    python -m tests.bench.engines [--sizes 1000,10000]

All work on equal copies of one graph of transformer blocks, in turn, in one process; CPU time, median of the rounds.
`recompile` is left out everywhere (nobody else's pass does it), and so is the propagation of fake values: the graphs
carry none. What is in: matching, constraints, every safety check, the transaction, metadata of new nodes.
"""

from __future__ import annotations

import argparse
import gc
import math
import operator
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._inductor.pattern_matcher import GraphPatternEntry, PatternMatcherPass, fx_to_pattern

from fxrewrite import Pattern, Plan, Rule, RuleSet, cap, op
from fxrewrite.match import Program

aten = torch.ops.aten
WEIGHTS = ("wq", "wk", "wv", "wo", "wg", "wu", "wd")


def torch_block(h, mask, wq, wk, wv, wo, wg, wu, wd):
    q, k, v = F.linear(h, wq), F.linear(h, wk), F.linear(h, wv)
    scores = torch.matmul(q, k.transpose(-1, -2)) / 8.0 + mask
    h = h + F.linear(torch.matmul(torch.softmax(scores, dim=-1), v), wo)
    n = F.layer_norm(h, (64,))
    g = F.linear(n, wg)
    return h + F.linear(g * torch.sigmoid(g) * F.linear(n, wu), wd)


def aten_block(h, mask, wq, wk, wv, wo, wg, wu, wd):
    def linear(x, w):
        return aten.view.default(
            aten.mm.default(aten.view.default(x, [16, 64]), aten.permute.default(w, [1, 0])), [2, 8, 64]
        )

    q, k, v = linear(h, wq), linear(h, wk), linear(h, wv)
    scores = aten.bmm.default(q, aten.permute.default(k, [0, 2, 1]))
    probs = aten._softmax.default(aten.add.Tensor(aten.div.Tensor(scores, 8.0), mask), -1, False)
    h = aten.add.Tensor(h, linear(aten.bmm.default(probs, v), wo))
    n = aten.native_layer_norm.default(h, [64], None, None, 1e-5)[0]
    g = linear(n, wg)
    gated = aten.mul.Tensor(aten.mul.Tensor(g, aten.sigmoid.default(g)), linear(n, wu))
    return aten.add.Tensor(h, linear(gated, wd))


class _Recorder(fx.Tracer):
    """Records calls of overloads on proxies too, which symbolic tracing by itself does."""


def make_graph(style: str, num_nodes: int) -> fx.Graph:
    """Blocks in sequence, each with weights of its own."""
    block = torch_block if style == "torch" else aten_block
    tracer = _Recorder()
    graph = fx.Graph(tracer_cls=_Recorder)
    tracer.graph, tracer.root = graph, torch.nn.Module()
    h, mask = (fx.Proxy(graph.placeholder(name), tracer) for name in ("h", "mask"))
    index = 0
    while index == 0 or len(graph.nodes) < num_nodes:
        weights = [fx.Proxy(graph.placeholder(f"{name}_{index}"), tracer) for name in WEIGHTS]
        h = block(h, mask, *weights)
        index += 1
    graph.output((h.node,))
    for node in graph.nodes:
        node.meta["stack_trace"] = 'File "model.py", line 7, in forward\n    y = f(x)'
    return graph


class Uncompiled(fx.GraphModule):
    """A graph module that does not generate code: only the graph is measured."""

    def recompile(self) -> Any:
        return None


def copy(graph: fx.Graph) -> fx.GraphModule:
    """A module with a copy of the graph; metadata is copied one level deep."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return Uncompiled(torch.nn.Module(), new)


def targets(style: str) -> tuple[Any, ...]:
    if style == "torch":
        return torch.matmul, torch.softmax, operator.add, operator.truediv, F.scaled_dot_product_attention
    attention = aten.scaled_dot_product_attention.default
    return aten.bmm.default, aten._softmax.default, aten.add.Tensor, aten.div.Tensor, attention


def by_hand(style: str) -> Callable[[fx.GraphModule], int]:
    product, softmax, add, divide, attention = targets(style)

    def run(gm: fx.GraphModule) -> int:
        graph, count = gm.graph, 0
        for node in list(graph.find_nodes(op="call_function", target=product)):
            probs = node.args[0]
            if probs.target is not softmax or len(probs.users) != 1:
                continue
            masked = probs.args[0]
            if masked.target is not add or len(masked.users) != 1:
                continue
            scaled = masked.args[0]
            if scaled.target is not divide or len(scaled.users) != 1 or scaled.args[1] != 8.0:
                continue
            scores = scaled.args[0]
            if scores.target is not product or len(scores.users) != 1:
                continue
            with graph.inserting_before(node):
                new = graph.call_function(attention, (scores.args[0], scores.args[1], node.args[1], masked.args[1]))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            for old in (node, probs, masked, scaled, scores):
                graph.erase_node(old)
            count += 1
        return count

    return run


def attention_rule(style: str, scale: float = 8.0, name: str = "attention") -> Rule:
    """One rule; with another scale than 8 it is a near miss that fails on its last literal."""
    q, k, v, mask = map(cap, ("q", "k", "v", "mask"))
    if style == "torch":
        probs = torch.softmax(torch.matmul(q, k) / scale + mask, dim=-1)
        pattern = Pattern((torch.matmul(probs, v),))  # pyright: ignore[reportArgumentType]
    else:
        probs = op("_softmax", op("add", op("div", op("bmm", q, k), scale), mask), -1, False)
        pattern = Pattern((op("bmm", probs, v),))

    def replacement(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Rule(name, pattern, replacement, numerics="approximate")


def plan_of(style: str, num_rules: int = 1, *, last: bool = False, fires: bool = True) -> Plan:
    misses = [attention_rule(style, 100.0 + i, f"miss_{i}") for i in range(num_rules - fires)]
    rules = [*misses, attention_rule(style)] if last else [attention_rule(style), *misses]
    return RuleSet("bench", *(rules if fires else misses)).once()


def ours(plan: Plan) -> Callable[[fx.GraphModule], int]:
    return lambda gm: plan.apply(gm).rewrites


def inductor(style: str) -> Callable[[fx.GraphModule], int]:
    product, softmax, add, divide, attention = targets(style)
    found = fx.Graph()
    q, k, v, mask = (found.placeholder(name) for name in ("q", "k", "v", "mask"))
    scaled = found.call_function(divide, (found.call_function(product, (q, k)), 8.0))
    masked = found.call_function(add, (scaled, mask))
    last = (masked, -1, False) if style == "aten" else (masked,)
    probs = found.call_function(softmax, last, {} if style == "aten" else {"dim": -1})
    found.output(found.call_function(product, (probs, v)))

    def handler(match: Any, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node) -> None:
        node = match.output_node()
        new = match.graph.call_function(attention, (q, k, v, mask))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        match.erase_nodes()

    matcher = PatternMatcherPass("bench")
    pattern = fx_to_pattern(fx.GraphModule(torch.nn.Module(), found), argnames=["q", "k", "v", "mask"])
    GraphPatternEntry(pattern=pattern, extra_check=lambda match: True, handler=handler).register(matcher)
    return lambda gm: matcher.apply(gm)


def cpu_seconds(runs: dict[str, Callable[[fx.GraphModule], int]], graph: fx.Graph, rounds: int) -> dict[str, float]:
    """Median CPU seconds of each way; they take turns, each on a fresh copy, and must rewrite the same number."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    counts: set[int] = set()
    for _ in range(rounds):
        for name, run in runs.items():
            gm = copy(graph)
            gc.collect()
            started = time.process_time()
            counts.add(run(gm))
            seconds[name].append(time.process_time() - started)
    assert len(counts) == 1, f"they do not rewrite the same: {counts}"
    return {name: statistics.median(times) for name, times in seconds.items()}


def peak_bytes(graph: fx.Graph, plan: Plan) -> int:
    gm = copy(graph)
    gc.collect()
    tracemalloc.start()
    plan.apply(gm)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def sizes_table(style: str, sizes: list[int], rounds: int) -> str:
    rows: list[list[str]] = []
    points: list[tuple[float, float]] = []
    for size in sizes:
        graph = make_graph(style, size)
        runs = {"hand": by_hand(style), "ours": ours(plan_of(style)), "inductor": inductor(style)}
        cpu_seconds(runs, make_graph(style, 500), 1)  # caches warm
        found = cpu_seconds(runs, graph, rounds)
        points.append((len(graph.nodes), found["ours"]))
        ms = [f"{found[name] * 1e3:.1f}" for name in ("hand", "ours", "inductor")]
        ratios = [f"{found['ours'] / found[name]:.2f}" for name in ("hand", "inductor")]
        rows.append([f"{len(graph.nodes):,}", *ms, *ratios])
    (n0, t0), (n1, t1) = points[0], points[-1]
    exponent = math.log(t1 / t0) / math.log(n1 / n0) if n1 > n0 else 1.0
    head = ["nodes", "by hand, ms", "fxrewrite, ms", "Inductor, ms", "fxrewrite / by hand", "fxrewrite / Inductor"]
    return table(head, rows) + f"\n\nGrowth of fxrewrite with the number of nodes: exponent {exponent:.2f}."


def rules_table(style: str, size: int, rounds: int) -> str:
    graph = make_graph(style, size)
    plans = {"1": plan_of(style), "100, the firing one first": plan_of(style, 100)}
    plans["100, the firing one last"] = plan_of(style, 100, last=True)
    runs = {name: ours(plan) for name, plan in plans.items()}
    cpu_seconds(runs, make_graph(style, 500), 1)
    found = cpu_seconds(runs, graph, rounds)
    silent = {"100 that never fire": ours(plan_of(style, 100, fires=False))}
    cpu_seconds(silent, make_graph(style, 500), 1)
    found |= cpu_seconds(silent, graph, rounds)
    num_nodes = len(graph.nodes)
    rows = [
        [name, f"{s * 1e3:.1f}", f"{s / found['1']:.2f}", f"{s / num_nodes * 1e6:.2f}"] for name, s in found.items()
    ]
    return table(["rules", "ms", "/ one rule", "us a node"], rows)


def compile_ms(style: str, num_rules: int) -> float:
    """Until each root operator was looked at once, which is when its function is made."""
    rules, nodes = list(plan_of(style, num_rules).rules()), make_graph(style, 500).nodes
    times: list[float] = []
    for _ in range(5):
        started = time.process_time()
        program = Program([(rule, rule.pattern) for rule in rules])
        for key, node in {key: node for node, key in program.roots(nodes)}.items():
            next(program.find(node, key), None)
        times.append(time.process_time() - started)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,50000,100000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rule-size", type=int, default=10000, help="nodes of the graph for the tables of many rules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(size) for size in options.sizes.split(",")]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}\n")
    for style, name in (("torch", "torch functions, as Dynamo gives them"), ("aten", "ATen overloads")):
        print(f"### {name}\n\n{sizes_table(style, sizes, options.rounds)}\n")
        print(f"{rules_table(style, options.rule_size, options.rounds)}\n")
        graph = make_graph(style, sizes[-1])
        num_bytes = peak_bytes(graph, plan_of(style)) / len(graph.nodes)
        print(f"Compiling 100 rules: {compile_ms(style, 100):.1f} ms.")
        print(f"Peak memory of a plan: {num_bytes:.0f} bytes a node.\n")


if __name__ == "__main__":
    main()
