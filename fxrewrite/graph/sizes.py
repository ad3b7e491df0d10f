"""Symbolic sizes: compares and divides them without adding guards, and writes them as graph nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.functions import Max
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxrewrite.torch_versions import hint_of_expression, hint_of_size

Size: TypeAlias = "int | torch.SymInt"
Create: TypeAlias = "Callable[[Callable[..., Any], tuple[Any, ...], fx.Node], fx.Node]"
_GUESS = 1024
"""The hint of a size that is read from data (entries)."""
_LARGE: WeakKeyDictionary[Any, dict[tuple[sympy.Expr, int], int]] = WeakKeyDictionary()
"""Hints of `size_hint(size, at_least)` by shape environment: costs ask for few of them often, and sympy is slow."""
_PROOFS: WeakKeyDictionary[Any, _Proofs] = WeakKeyDictionary()
"""What is known of sizes by shape environment: equal layers ask the same, and sympy is slow."""


def is_same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every length that the graph admits; never adds a guard."""
    if not (isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt)):
        return statically_known_true(a == b)  # pyright: ignore[reportArgumentType]  # numbers, which may be floats
    return _is_known("equal", a, b, lambda: a == b)


def is_same_stride(a: Size, b: Size) -> bool:
    """Whether two strides are equal wherever their tensors have entries; never adds a guard.

    torch writes `Max(1, n)` where a contiguous tensor of n entries may have none, and then strides say nothing.
    """
    if is_same_size(a, b):
        return True
    first, second = (
        stride.node.expr.replace(Max, _without_one) if isinstance(stride, torch.SymInt) else stride for stride in (a, b)
    )
    return bool(first == second)


def _without_one(*sizes: sympy.Expr) -> Any:
    return Max(*(size for size in sizes if size != 1))


def is_same_view(a: torch.Tensor, b: torch.Tensor, from_a: Size = 0, from_b: Size = 0) -> bool:
    """Whether two tensors have their entries at the same places, counted from these offsets in their memories.

    Never adds a guard.
    """
    sizes_a = (*a.shape, *a.stride(), a.storage_offset() - from_a)
    sizes_b = (*b.shape, *b.stride(), b.storage_offset() - from_b)
    return a.ndim == b.ndim and a.dtype == b.dtype and all(map(is_same_size, sizes_a, sizes_b))


@dataclass
class _Proofs:
    """Relations of sizes, as expressions. What is true stays true, and what is not known may become so by a guard."""

    true: set[Any] = field(default_factory=set[Any])
    unknown: set[Any] = field(default_factory=set[Any])
    guards: Any = None
    """The state of the shape environment in which relations were not known."""


def _is_known(relation: str, a: Size, b: Size, condition: Callable[[], Any]) -> bool:
    """Whether two sizes, of which one is symbolic, are in a relation for every length; never adds a guard."""
    symbolic: Any = a if isinstance(a, torch.SymInt) else b
    shapes = getattr(symbolic.node, "shape_env", None)
    if shapes is None:  # sizes of nested tensors
        return statically_known_true(condition())
    claim = (relation, *(size.node.expr if isinstance(size, torch.SymInt) else size for size in (a, b)))
    if relation == "equal" and claim[1] == claim[2]:
        return True
    proofs = _PROOFS.get(shapes)
    if proofs is None:
        proofs = _PROOFS[shapes] = _Proofs()
    if claim in proofs.true:
        return True
    guards = shapes._version_counter, len(shapes.guards)
    if guards != proofs.guards:
        proofs.guards = guards
        proofs.unknown.clear()
    if claim in proofs.unknown:
        return False
    holds = statically_known_true(condition())
    (proofs.true if holds else proofs.unknown).add(claim)
    return holds


def is_always(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes is true for every length that the graph admits; never adds a guard."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def is_read_from_data(size: Size | torch.SymFloat | torch.Tensor) -> bool:
    """Whether a size, or one of a tensor, is only known when the graph runs, as the number of nonzero elements."""
    return bool(free_unbacked_symbols(size))


def new_data_size(mode: Any) -> torch.SymInt:
    """A size that data decide, 0 or more, of the graph whose fake tensor mode this is.

    Compilers that trace the graph again under this mode may read such sizes from now on, as Dynamo lets them where it
    captures full graphs.
    """
    mode.allow_scalar_outputs = True
    with mode.shape_env.ignore_fresh_unbacked_symbols():  # they belong to a node that is made, and not run
        size = mode.shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    return size


def is_broadcast(size: Size, to: Size) -> bool:
    """Whether a dimension of `size` is broadcast to `to`; the two are assumed to be compatible."""
    return is_same_size(size, 1) and not is_same_size(to, 1)


def divide_exactly(a: Size, b: Size) -> Size | None:
    """Returns `a / b` if b divides a for every length that the graph admits, else None; never adds a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if isinstance(b, int) and b == 1:
        return a
    dividend: Any = a  # torch's stubs say that a quotient may be a float
    return dividend // b if _is_known("divided", a, b, lambda: dividend // b * b == a) else None


def written_factor(size: Size) -> int:
    """The integer that a size is written as a multiple of: 4 of `4 * s0`, 1 of `s0`, though a guard may divide it."""
    return size if isinstance(size, int) else int(size.node.expr.as_coeff_Mul()[0])


def product(sizes: Iterable[Size]) -> Size:
    """Returns the product of sizes; 1 if there are none."""
    number, result = 1, None  # numbers are cheap to multiply, and symbolic sizes are not
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            result = size if result is None else result * size
    if result is None:
        return number
    return result if number == 1 else result * number


def quotient(size: Size, by: Size) -> Size:
    """Returns `size // by`; of 1, which most runs and chunks are divided by, the size itself."""
    dividend: Any = size  # torch's stubs say that a quotient may be a float
    return size if isinstance(by, int) and by == 1 else dividend // by


def size_hint(size: Size, at_least: int = 0) -> int:
    """The size that the traced inputs have, for messages and costs; adds no guard. A guess where data decide it.

    Args:
        size: a static size is itself.
        at_least: for decisions that stay with a program whatever it is called with. Where a size grows with symbolic
            dimensions of inputs, the largest of these is taken to have at least so many entries. The first dimension
            of an input, which is a batch's, and every other symbol are as at hand.
    """
    if isinstance(size, int):
        return size
    if not at_least:
        return hint_of_size(size, fallback=_GUESS)
    shapes, expr = size.node.shape_env, size.node.expr
    known = _LARGE.setdefault(shapes, {})
    if (expr, at_least) not in known:
        known[expr, at_least] = _large_hint(expr, shapes, at_least)
    return known[expr, at_least]


def _large_hint(expr: sympy.Expr, shapes: Any, at_least: int) -> int:
    hints = {symbol: hint_of_expression(symbol, shapes, fallback=_GUESS) for symbol in expr.free_symbols}
    inner = [symbol for symbol in hints if _is_inner(symbol, shapes)]
    largest = max(inner, key=lambda symbol: (hints[symbol], str(symbol)), default=None)
    values = {} if largest is None else {largest: sympy.Integer(max(hints[largest], at_least))}
    return hint_of_expression(expr.xreplace(values), shapes, fallback=_GUESS)


def _is_inner(symbol: sympy.Basic, shapes: Any) -> bool:
    """Whether a symbol is the size of an input in a dimension that is not the first."""
    return any(getattr(source, "idx", 0) for source in shapes.var_to_sources.get(symbol, ()))


def require_divisible(size: Size, by: int) -> bool:
    """Whether `by` divides the traced size. A symbolic size gets a guard, so that a length for which the answer
    differs is compiled anew instead of running the wrong graph."""
    if not isinstance(size, int) and _is_known("multiple", size, by, lambda: size % by == 0):
        return True  # by a guard that exists
    return bool(size % by == 0)


def is_divided_by(size: Size, by: int) -> bool:
    """Whether `by` divides the traced size. A symbolic size gets a guard only if it does: a program for sizes that are
    not divisible also serves those that are."""
    return size_hint(size) % by == 0 and require_divisible(size, by)


def _symbols_of_inputs(graph: fx.Graph) -> dict[sympy.Symbol, tuple[fx.Node, int | None]]:
    """Where the symbols of a graph are read: from an input that is a size, or else from a dimension of a tensor."""
    found: dict[sympy.Symbol, tuple[fx.Node, int | None]] = {}
    inputs = [(node, node.meta.get("val")) for node in graph.find_nodes(op="placeholder")]
    sizes = [(node, None, value) for node, value in inputs]
    sizes += [(node, dim, n) for node, x in inputs if isinstance(x, torch.Tensor) for dim, n in enumerate(x.shape)]
    for node, dim, size in sizes:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):  # not one that was unified
            found.setdefault(size.node.expr, (node, dim))
    return found


class SizeReader:
    """Reads sizes that are functions of the symbols of a graph's inputs from actual inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        inputs = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._places = {symbol: (inputs[node], dim) for symbol, (node, dim) in _symbols_of_inputs(graph).items()}

    def __call__(self, size: Size, inputs: Sequence[Any]) -> int:
        """Returns the size as a number for these inputs of the graph."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        return int(expr.xreplace({symbol: sympy.Integer(self._read(symbol, inputs)) for symbol in expr.free_symbols}))

    def _read(self, symbol: Any, inputs: Sequence[Any]) -> int:
        position, dim = self._places[symbol]
        return int(inputs[position] if dim is None else inputs[position].shape[dim])


class SizeNodes:
    """Graph nodes that hold sizes, computed from the graph's inputs only, shared, and placed before all other nodes.

    Inputs keep their global shape whatever happens to the values between, so a size that is a function of the inputs
    does not change its meaning when a value is sharded.

    `create(target, args, before)` makes a call_function node; the default writes to the graph at once. Symbols are read
    from integer inputs, and with `of_tensors` also from the shapes of inputs.
    """

    def __init__(self, graph: fx.Graph, create: Create | None = None, *, of_tensors: bool = True) -> None:
        self._graph = graph
        self._front: list[fx.Node] = []
        self._tracer = _SizeTracer(self, graph, create or _write(graph))
        read = _symbols_of_inputs(graph)
        self._symbols = {symbol: place for symbol, place in read.items() if of_tensors or place[1] is None}
        self._nodes: dict[sympy.Expr, fx.Node] = {}

    @property
    def anchor(self) -> fx.Node:
        """The node before which sizes are written: after the front nodes that exist, before all others."""
        while self._front and not is_there(self._front[-1]):
            self._front.pop()
        if self._front:
            return self._front[-1].next
        return next(node for node in self._graph.nodes if node.op != "placeholder")

    def add_last(self, node: fx.Node) -> fx.Node:
        """Adds `node`, which was written before `anchor`, as the last front node, and returns it."""
        self._front.append(node)
        return node

    def add_first(self, node: fx.Node) -> fx.Node:
        """Adds `node`, which was written before all others, as the first front node, and returns it."""
        self._front.insert(0, node)
        return node

    def can_express(self, size: Size) -> bool:
        """Whether the size is a function of the graph's inputs."""
        return isinstance(size, int) or size.node.expr.free_symbols <= self._symbols.keys()

    def __call__(self, size: Size) -> int | fx.Node:
        """Returns the int itself, or a node that computes `size` before any tensor is touched."""
        if isinstance(size, int) or size.node.expr.is_Integer:
            return int(size)
        expr = size.node.expr
        if expr not in self._nodes or not is_there(self._nodes[expr]):
            env = {symbol: fx.Proxy(self._symbol(symbol), self._tracer) for symbol in expr.free_symbols}
            node = sympy_interp(PythonReferenceAnalysis, env, expr).node
            node.meta["val"] = size
            self._nodes[expr] = node
        return self._nodes[expr]

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        node, dim = self._symbols[symbol]
        if dim is None:
            return node
        if symbol not in self._nodes or not is_there(self._nodes[symbol]):
            read = self._tracer.create_node("call_function", torch.ops.aten.sym_size.int, (node, dim), {})
            self._nodes[symbol] = read
        return self._nodes[symbol]


def is_there(node: fx.Node) -> bool:
    """Whether a node is still in its graph; nodes that a transaction undid or erased are not."""
    return node.next.prev is node and bool(node.args)


class _SizeTracer(GraphAppendingTracer):
    """Inserts the result of Python arithmetic on proxies before the anchor."""

    def __init__(self, sizes: SizeNodes, graph: fx.Graph, create: Create) -> None:
        super().__init__(graph)
        self._sizes, self._create = sizes, create

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> fx.Node:  # pyright: ignore[reportIncompatibleMethodOverride]
        node = self._sizes.add_last(self._create(target, args, self._sizes.anchor))
        node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
        return node


def _write(graph: fx.Graph) -> Create:
    def create(target: Callable[..., Any], args: tuple[Any, ...], before: fx.Node) -> fx.Node:
        with graph.inserting_before(before):
            return graph.call_function(target, args)

    return create


def hoist_sizes(graph: fx.Graph) -> None:
    """Makes every integer node a function of the inputs only; an unbacked size, read from data, stays."""
    nodes = SizeNodes(graph)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.SymInt) and nodes.can_express(value):
            size = nodes(value)
            if size is not node:
                node.replace_all_uses_with(size) if isinstance(size, fx.Node) else inline_value(node, size)
                graph.erase_node(node)


def inline_value(node: fx.Node, value: Any) -> None:
    """Makes all that reads the node read a value that is no node."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: value if n is node else n)
