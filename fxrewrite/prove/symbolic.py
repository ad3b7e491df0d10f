"""Graphs of a rule's pattern whose sizes and numbers are symbols, and what torch assumes of these.

The only file of the package that uses torch's symbolic shapes. Every size above 1 of every input is a symbol of its
own, and so is every size and every floating-point number among a call's arguments, as far as the pattern allows it.
Torch records what the original, the match and the rewrite ask of the symbols; a rule that decides by a size or a
number is only proved for what it was told.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_arg
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from fxrewrite import ops
from fxrewrite.prove.indices import Expr, idiv, imod
from fxrewrite.verify.sample import TORCH_ERRORS


def size_expression(size: Any) -> Expr:
    """The sympy expression of a size, or of a symbolic number."""
    if isinstance(size, (torch.SymInt, torch.SymFloat)):
        return size.node.expr
    return sympy.sympify(size)


class Symbols:
    """The symbols of one case: makes inputs and literals, and knows what was asked of them.

    With `equal_sizes`, sizes that are equal in the sample are one symbol.
    """

    def __init__(self, *, equal_sizes: bool = False) -> None:
        self._equal: dict[int, Any] | None = {} if equal_sizes else None
        self.shapes = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.mode = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self.names: dict[sympy.Symbol, str] = {}
        self._parts: dict[sympy.Symbol, sympy.Expr] = {}
        """What symbols equal, of others that do not have them in turn."""
        self._seen = 0

    def size(self, hint: int, name: str) -> Any:
        """A symbol for a size; 0 and 1 stay numbers."""
        if hint < 2:
            return hint
        if self._equal is not None and hint in self._equal:
            return self._equal[hint]
        source = ConstantSource(name)
        symbol = self.shapes.create_symbol(hint, source, DimDynamic.DYNAMIC)
        made = self.shapes.create_symintnode(symbol, hint=hint, source=source)
        if isinstance(made, torch.SymInt):
            self.names[made.node.expr] = name
        if self._equal is not None:
            self._equal[hint] = made
        return made

    def number(self, hint: float, name: str) -> Any:
        """A symbol for a floating-point number."""
        source = ConstantSource(name)
        symbol = self.shapes.create_unspecified_symbol(hint, source, DimDynamic.DYNAMIC)
        made = self.shapes.create_symfloatnode(symbol, hint=hint, source=source)
        if isinstance(made, torch.SymFloat):
            self.names[made.node.expr] = name
        return made

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A contiguous fake tensor with symbols for its sizes."""
        sizes = [self.size(size, f"size({name}, {dim})") for dim, size in enumerate(shape)]
        with self.mode:
            return torch.empty(sizes, dtype=dtype)

    def run(self, node: fx.Node) -> Any:
        """What a call gives on the fake values of its operands."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), ops.value)
        with self.mode:
            return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def known(self) -> list[Expr]:
        """All conditions that were asked and found true."""
        return [self.simplified(guard.expr) for guard in self.shapes.guards]

    def simplified(self, expr: Expr) -> Expr:
        """The expression over symbols that no other replaces; a size that must be even is twice another."""
        self._read_guards()
        replaced = self._replaced(self.shapes.replace(expr) if expr.free_symbols else expr)
        for function, ours in ((FloorDiv, idiv), (Mod, imod), (PythonMod, imod)):
            replaced = replaced.replace(function, ours)
        return replaced.replace(idiv, _quotient).replace(imod, _remainder)

    def _replaced(self, expr: Expr) -> Expr:
        """The expression without the symbols that guards say what they are."""
        while known := self._parts.keys() & expr.free_symbols:
            expr = expr.xreplace({symbol: self._parts[symbol] for symbol in known})
        return expr

    def _read_guards(self) -> None:
        """Keeps the symbols that were found to be multiples of a number, as multiples of others, and those that were
        found to equal an expression which torch does not replace them by, such as `2 * (s0 // 2)`."""
        for guard in self.shapes.guards[self._seen :]:
            relation: Expr = guard.expr
            left, right = relation.args if isinstance(guard.expr, sympy.Eq) else (None, None)
            for symbol, factor in (*_multiple(left, right), *_multiple(right, left)):
                part = sympy.Symbol(f"{symbol}_by_{factor}", integer=True, positive=True)
                self._parts.setdefault(symbol, factor * part)
                self.names.setdefault(part, f"{self.names.get(symbol, symbol)}/{factor}")
            for symbol, other in ((left, right), (right, left)):
                if not (isinstance(symbol, sympy.Symbol) and isinstance(other, sympy.Expr)) or symbol in self._parts:
                    continue
                same = self._replaced(other)
                if symbol in self.names and same.atoms(FloorDiv) and symbol not in same.free_symbols:
                    self._parts[symbol] = same
        self._seen = len(self.shapes.guards)


def _multiple(left: Expr, right: Expr) -> Iterator[tuple[sympy.Symbol, Expr]]:
    """Yields a symbol and a number of which it is a multiple where the two sides are equal."""
    if isinstance(left, (Mod, PythonMod)) and right == 0 and left.args[0].is_Symbol and left.args[1].is_Integer:
        yield left.args  # pyright: ignore[reportReturnType]
    if isinstance(left, sympy.Symbol) and isinstance(right, sympy.Expr):
        for quotient in right.atoms(FloorDiv):
            if right == quotient.args[1] * quotient and quotient.args[0] == left and quotient.args[1].is_Integer:
                yield left, quotient.args[1]


def _exact_quotient(dividend: Expr, divisor: Expr) -> Expr | None:
    """The quotient if the divisor is a factor of the dividend for all sizes, which are not 0; else None."""
    quotient = sympy.cancel(dividend / divisor)
    symbols = sorted(quotient.free_symbols, key=str)
    if not symbols or not quotient.is_polynomial(*symbols):
        return None
    return quotient if all(c.is_Integer for c in sympy.Poly(quotient, *symbols).coeffs()) else None


def _quotient(dividend: Expr, divisor: Expr) -> Expr:
    found = _exact_quotient(dividend, divisor)
    return idiv(dividend, divisor) if found is None else found


def _remainder(dividend: Expr, divisor: Expr) -> Expr:
    return imod(dividend, divisor) if _exact_quotient(dividend, divisor) is None else sympy.Integer(0)


@dataclass(frozen=True, slots=True)
class Body:
    """A call as a graph of simpler calls; `operands` are arguments of the call, in the order of the placeholders."""

    graph: fx.Graph
    operands: tuple[fx.Node, ...]


@functools.cache
def _table() -> dict[Any, Any]:
    """Torch's decompositions; making the table takes longer than using it."""
    return dict(default_decompositions())


def decomposed(node: fx.Node) -> Body | None:
    """Returns what a Python function, or an operator with a decomposition, does; None if torch says nothing of it."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        table = _table()
        if target._can_decompose():
            function = target.decompose
        elif target in table:
            function = table[target]
        else:
            return None
    elif callable(target) and getattr(target, "__code__", None) is not None:
        function = target
    else:
        return None
    nodes = tuple(node.all_input_nodes)
    fakes = [ops.value(operand) for operand in nodes]

    def body(*given: Any) -> Any:
        names = dict(zip(nodes, given, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), names.__getitem__)
        return function(*args, **kwargs)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = make_fx(body, pre_dispatch=True, tracing_mode="real")(*fakes)
    except (*TORCH_ERRORS, NotImplementedError):
        return None
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    if any(n.target is target for n in calls):
        return None
    return Body(traced.graph, nodes)
