"""Canonical text of a graph: equal graphs give equal text, in every process, whatever the names of their values.

    %ids: i64[2, s0] = input
    %embed.weight: f32[256, 64] = input
    %0: f32[2, s0, 64] = aten.embedding(%embed.weight, %ids)  # S(1)
    %1: f32[2, s0, 64] = _c10d_functional.all_reduce(%0, 'sum', sp)  # P(sum)
    return (%1,)

Inputs keep their names; names of parameters from Dynamo are shortened. Values are numbered in order, and so are
symbolic sizes, subgraphs of higher-order ops (`@0`, printed after the graph) and process groups without a known mesh
axis (`group0`).
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import re
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from fxrewrite.graph.bodies import body_of
from fxrewrite.graph.canonical_order import in_canonical_order
from fxrewrite.graph.facts import facts_of
from fxrewrite.graph.inputs import input_name
from fxrewrite.ops import dtype_name, held

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}
_END = 2**63 - 1  # ATen writes this for "to the end" in a slice
_SYMBOL = re.compile(r"\b([a-z]+)\d+\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def graph_text(
    gm: fx.GraphModule,
    *,
    rules: bool = False,
    without: Collection[fx.Node] = (),
    canonical_order: bool = False,
) -> str:
    """Returns the graph as text, one value per line with the facts about it, and optionally the rules that made it.

    Nodes in `without` are omitted, such as those that a transaction is going to erase. In `canonical_order`, graphs
    that differ in the order of independent operators have one text.
    """
    writer = GraphWriter(gm, rules=rules, without=without, canonical_order=canonical_order)
    return "\n".join(line for _, line in writer.lines())


def graph_digest(gm: fx.GraphModule) -> str:
    """Returns the sha256 of the graph's canonical text, which is equal in every process for equal graphs.

    Parameters and constants of more than eight elements count by name, type and shape, not by content.
    """
    return hashlib.sha256(graph_text(gm).encode()).hexdigest()


class GraphWriter:
    """Names every value of a graph and of its subgraphs once, and writes nodes with these names."""

    def __init__(
        self,
        gm: fx.GraphModule,
        *,
        facts: bool = True,
        rules: bool = False,
        without: Collection[fx.Node] = (),
        canonical_order: bool = False,
    ) -> None:
        self._facts, self._rules = facts, rules
        self._groups: dict[str, str] = {}
        self._names: dict[fx.Node, str] = {}
        self._symbols: dict[str, str] = {}
        self._without = without
        self._canonical_order = canonical_order
        self._nodes: list[list[fx.Node]] = []
        """Of each graph, in order."""
        self._graphs = [gm]
        self._num_values = 0
        for graph in self._graphs:  # grows: naming a graph finds its subgraphs
            self._name_values(graph)

    def lines(self) -> Iterator[tuple[fx.Node | None, str]]:
        """Yields each line with the node that it shows; None for the headings of subgraphs."""
        for index, gm in enumerate(self._graphs):
            if index:
                yield None, f"@{index - 1}:"
            for node in self._nodes[index]:
                if not self._is_body(gm, node) and node not in self._without:
                    yield node, ("  " if index else "") + self.line(gm, node)

    def line(self, gm: fx.GraphModule, node: fx.Node) -> str:
        """Returns the line of one node, with the comments that were requested."""
        value = node.meta.get("val", node.meta.get("example_value"))
        kind = "" if value is None else f": {self._type(value)}"
        text = self._call(gm, node) if node.op == "output" else f"{self._names[node]}{kind} = {self._call(gm, node)}"
        comments = [
            self._facts_of(node) if self._facts else "",
            ", ".join(node.meta.get("fxrewrite", ())) if self._rules else "",
        ]
        comment = "; ".join(filter(None, comments))
        return f"{text}  # {comment}" if comment else text

    def _facts_of(self, node: fx.Node) -> str:
        known = [values[node] for fact, values in facts_of(node.graph).items() if fact.shown and node in values]
        return ", ".join(self._literal(value) for value in known)

    def _name_values(self, gm: fx.GraphModule) -> None:
        taken: set[str] = set()
        self._nodes.append(in_canonical_order(gm.graph) if self._canonical_order else list(gm.graph.nodes))
        for node in self._nodes[-1]:
            body = body_of(gm, node)
            if body is not None and body not in self._graphs:
                self._graphs.append(body)
            if body is not None and node.op == "get_attr":
                self._names[node] = self._name_of_body(body)
            elif node.op == "placeholder" and node not in self._without:
                name = self._input_name(node)
                self._names[node] = f"%{node.name if name in taken else name}"
                taken.add(name)
            elif node.op != "output" and node not in self._without:
                self._names[node] = f"%{self._num_values}"
                self._num_values += 1

    def _input_name(self, node: fx.Node) -> str:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            return self._size(value)
        return input_name(node)

    @staticmethod
    def _is_body(gm: fx.GraphModule, node: fx.Node) -> bool:
        return node.op == "get_attr" and body_of(gm, node) is not None

    def _name_of_body(self, body: fx.GraphModule) -> str:
        return f"@{self._graphs.index(body) - 1}"

    def _call(self, gm: fx.GraphModule, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "input"
        if node.op == "output":
            return f"return {self._argument(node.args[0])}"
        if node.op == "get_attr":
            computed = "fxrewrite" in node.meta  # once, by a rule: its entries depend on weights, and on the machine
            return f"self.{node.target}{'' if computed else _small_constant(held(gm, node))}"
        arguments = self._arguments(node)
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        called = body_of(gm, node)
        if called is not None:
            return f"{self._name_of_body(called)}({', '.join(arguments)})"
        target = f"self.{node.target}" if node.op == "call_module" else _target_name(node.target)
        return f"{target}({', '.join(arguments)})"

    def _arguments(self, node: fx.Node) -> list[str]:
        if isinstance(node.target, torch._ops.OpOverload):
            keys = [argument.name for argument in node.target._schema.arguments]
        else:
            keys = list(inspect.signature(node.target).parameters) if isinstance(node.target, FunctionType) else []
        named = [(keys[i] if i < len(keys) else "", value) for i, value in enumerate(node.args)]

        def write(key: str, value: Any) -> str:
            return self._group(node, value) if key == "group_name" and isinstance(value, str) else self._argument(value)

        positional = [write(key, value) for key, value in named]
        return positional + [f"{key}={write(key, value)}" for key, value in sorted(node.kwargs.items())]

    def _group(self, node: fx.Node, name: str) -> str:
        if "axis" in node.meta:
            return str(node.meta["axis"])
        return self._groups.setdefault(name, f"group{len(self._groups)}")

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, cast('list[Any]', value)))}]"
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            items = [self._argument(item) for item in cast("tuple[Any, ...]", value)]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return "{" + ", ".join(f"{self._argument(k)}: {self._argument(v)}" for k, v in items) + "}"
        if isinstance(value, slice):
            start, stop, step = (
                "" if part is None else self._argument(part) for part in (value.start, value.stop, value.step)
            )
            return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value)
        if isinstance(value, torch.dtype):
            return _dtype_name(value)
        if isinstance(value, (torch.layout, torch.memory_format)):
            return str(value).removeprefix("torch.")
        if value is Ellipsis:
            return "..."
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, int) and value == _END:
            return "end"
        if isinstance(value, (str, int, float, complex)) or value is None:
            return repr(value)
        if callable(value):
            return _target_name(value)
        text = _ADDRESS.sub("", str(value))
        return _SYMBOL.sub(lambda match: self._symbols.get(match[0], match[0]), text)

    def _type(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_dtype_name(value.dtype)}[{', '.join(map(self._size, value.shape))}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self._type, cast('list[Any]', value)))})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value)
        return type(value).__name__

    def _size(self, size: Any) -> str:
        """Returns the size with its symbols numbered in order of appearance, per kind (s: input, u: read from data)."""
        if not hasattr(size, "node"):
            return str(size)
        expr = size.node.expr
        new = {
            symbol: sympy.Symbol(self._symbol(symbol.name), **symbol.assumptions0)
            for symbol in sorted(expr.free_symbols, key=lambda symbol: symbol.name)
        }
        return str(expr.xreplace(new))

    def _symbol(self, name: str) -> str:
        if name not in self._symbols:
            kind = name.rstrip("0123456789")
            self._symbols[name] = f"{kind}{sum(known.startswith(kind) for known in self._symbols)}"
        return self._symbols[name]


def _small_constant(value: Any) -> str:
    """Returns the elements of a lifted constant such as `torch.tensor(0.5)`; empty for parameters and large tensors."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.numel() > 8:
        return ""
    return "" if type(value) is not torch.Tensor else f" {value.tolist()}"


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, dtype_name(dtype))


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, type):
        return f"{target.__module__}.{target.__qualname__}"
    return _get_qualified_name(target).removeprefix("_operator.").removeprefix("torch.ops.")
