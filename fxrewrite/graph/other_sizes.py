"""Checks a program for many sizes at other sizes than those it was traced with.

Rewrites run operators without adding guards. One that reads a symbolic size as a number, `int(x.shape[1])`, then leaves
the traced size in the program, and so does a rule that writes `int(size)` into a call: at another size the result would
be wrong without an error. `check_sizes` gives the symbols larger and smaller values that the guards admit, runs each
distinct call on fake tensors of these sizes, and compares the shapes with those that the program states. Larger sizes
show a view or an operator of the traced size; smaller ones show a slice up to it.

A number that changes no shape, as in `x / 16`, is not found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxrewrite import ops
from fxrewrite.errors import Refusal, RefusedError, named_line
from fxrewrite.graph.argument_keys import identity_of
from fxrewrite.graph.bodies import nodes_of
from fxrewrite.graph.source import source_line
from fxrewrite.torch_versions import hint_of_expression

_NOT_KNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What fake tensors raise where data decide the shape, or where an operator cannot be run on them."""
_LARGEST_STEP = 1 << 16
"""Largest common multiple of the divisors in guards (entries) that other sizes are tried in steps of."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _UnknownError(Exception):
    """A value depends on data, or is not one that a fake tensor of numbers can stand for."""


def check_sizes(gm: fx.GraphModule) -> None:
    """Returns if every call of the graph and of its bodies has the shape that its node says, at other sizes too.

    Each node is checked by itself, on inputs as their nodes say, so equal calls of all layers are run once. A graph
    without symbolic sizes is not looked at; neither are calls whose shapes data decide, and higher-order operators,
    of which the bodies are.

    Raises:
        RefusedError: a call has another shape, or fails; names the node and its line.
    """
    shapes = _shapes_of(gm)
    if shapes is None:
        return
    calls = list(_distinct_calls(gm))
    for steps in ((1, 2, 3), (-1, -2, -3)):
        chosen = _other_values(shapes, steps)
        if chosen:
            _Check(shapes, chosen).run(calls)


def _distinct_calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls to check: one of those with the same values as arguments and result, as those of equal layers."""
    seen = set[Any]()
    for node in nodes_of(gm):
        if node.op in ("call_function", "call_method") and _is_checked(node):
            given = map_arg((node.args, dict(node.kwargs)), _value_or_node)  # pyright: ignore[reportArgumentType]
            call = node.target, identity_of(given), identity_of(ops.value(node))
            if call not in seen:
                seen.add(call)
                yield node


def _value_or_node(node: fx.Node) -> Any:
    found = ops.value(node)
    return node if found is ops.MISSING else found


def _shapes_of(gm: fx.GraphModule) -> Any:
    """The ShapeEnv of the graph's inputs; None if all their sizes are numbers."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = ops.value(node)
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _other_values(shapes: Any, steps: Iterable[int]) -> dict[sympy.Symbol, int]:
    """A value for every symbol that inputs have, so many steps from the traced one wherever the guards admit that.

    Empty if they admit no other value.
    """
    symbols = [symbol for symbol in shapes.var_to_sources if symbol not in shapes.replacements]
    values = {symbol: hint_of_expression(symbol, shapes, fallback=0) for symbol in symbols}
    known = values.keys()
    conditions = [_resolved(guard.expr, shapes) for guard in shapes.guards]
    conditions = [condition for condition in conditions if condition.free_symbols and condition.free_symbols <= known]
    moved = set[sympy.Symbol]()
    for together in _groups(symbols, values):
        group = [symbol for symbol in together if symbol not in moved]
        about = [condition for condition in conditions if not condition.free_symbols.isdisjoint(group)]
        for candidate in _candidates(values[group[0]], _step(about), steps) if group else ():
            tried = {**values, **dict.fromkeys(group, candidate)}
            if all(_is_in_range(candidate, symbol, shapes) for symbol in group) and _admits(about, tried):
                values, moved = tried, moved | set(group)
                break
    return values if moved else {}


def _groups(symbols: list[sympy.Symbol], values: Mapping[sympy.Symbol, int]) -> Iterator[list[sympy.Symbol]]:
    """Each symbol alone, then those of equal values: guards may tie their products, as those of the sizes of inputs."""
    yield from ([symbol] for symbol in symbols)
    for value in sorted(set(values.values())):
        yield [symbol for symbol in symbols if values[symbol] == value]


def _is_in_range(size: int, symbol: sympy.Symbol, shapes: Any) -> bool:
    bounds = shapes.var_to_range.get(symbol)
    return bounds is None or bool(bounds.lower <= size <= bounds.upper)


def _resolved(expr: Any, shapes: Any) -> Any:
    """The expression over symbols that no other replaces."""
    return shapes.replace(expr) if expr.free_symbols & shapes.replacements.keys() else expr


def _step(conditions: Iterable[sympy.Basic]) -> int:
    """The least common multiple of what sizes are divided by."""
    divisors = {
        int(call.args[1])
        for condition in conditions
        for call in condition.atoms(sympy.Function)
        if len(call.args) == 2 and isinstance(call.args[1], sympy.Integer) and call.args[1] > 1
    }
    step = math.lcm(*divisors)
    return step if step <= _LARGEST_STEP else max(divisors)


def _candidates(size: int, step: int, steps: Iterable[int]) -> Iterator[int]:
    """Other sizes: near ones, since a model may have tables of a length that guards do not mention."""
    for count in steps:
        yield from (size + count * step, size + count) if step > 1 else (size + count,)


def _admits(conditions: list[sympy.Basic], values: Mapping[sympy.Symbol, int]) -> bool:
    """Whether all conditions hold; the one that does not is put first, because it is likely to fail again."""
    numbers = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    for index, condition in enumerate(conditions):
        if condition.xreplace(numbers) != sympy.true:
            conditions.insert(0, conditions.pop(index))
            return False
    return True


class _Check:
    """The values of a graph at chosen sizes; equal tensors are one object, so equal calls are known by identity."""

    def __init__(self, shapes: Any, chosen: Mapping[sympy.Symbol, int]) -> None:
        self._shapes = shapes
        self._chosen = chosen
        self._numbers = {symbol: sympy.Integer(value) for symbol, value in chosen.items()}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._evaluated: dict[Any, Any] = {}
        self._tensors: dict[Any, torch.Tensor] = {}
        self._seen: dict[int, torch.Tensor] = {}
        """The tensors of fake values by the address of these, which the graph keeps alive."""
        self._results: dict[Any, Any] = {}
        self._kept: list[Any] = []

    def run(self, calls: Iterable[fx.Node]) -> None:
        with self._mode, torch.no_grad():
            for node in calls:
                self._check(node)

    def _check(self, node: fx.Node) -> None:
        try:
            expected = self._concrete(ops.value(node))
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._read)  # pyright: ignore[reportArgumentType]
        except _UnknownError:
            return
        same = (node.target, identity_of(args), identity_of(kwargs))
        if same not in self._results:
            self._kept.append((args, kwargs))  # identities are addresses
            self._results[same] = self._called(node, args, kwargs)
        found = self._results[same]
        if found is not None and found != _shapes(expected):
            raise self._refusal(node, f"gives {_shown(found)} where the program says {_shown(_shapes(expected))}")

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """The shapes of the results; None where data decide them."""
        function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        try:
            return _shapes(function(*args, **kwargs))
        except _NOT_KNOWN:
            return None
        except Exception as error:
            raise self._refusal(node, f"fails: {named_line(error)}") from error

    def _refusal(self, node: fx.Node, what: str) -> RefusedError:
        sizes = ", ".join(f"{symbol} = {value}" for symbol, value in self._chosen.items())
        reason = (
            f"{ops.key(node)} {what}, at the sizes {sizes}, which this program for many sizes admits: it, or what it "
            "reads, has a size of the trace as a number"
        )
        hint = (
            "use x.shape[i] without int() in operators and rules of your own; or compile a program for each size "
            "(dynamic=False)"
        )
        return RefusedError(Refusal(rule="", reason=reason, node=node.name, source=source_line(node), hint=hint), node)

    def _read(self, node: fx.Node) -> Any:
        """The value of a node, or of the parameter that it reads, at the chosen sizes."""
        found = ops.value(node)
        if found is not ops.MISSING:
            return self._concrete(found)
        if node.op != "get_attr":
            raise _UnknownError
        owner = node.graph.owning_module
        assert owner is not None, "a graph whose nodes read attributes has a module"
        return self._concrete(ops.held(owner, node))

    def _concrete(self, value: Any) -> Any:
        """The value at the chosen sizes."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._concrete, value)) if type(value) is tuple else list(map(self._concrete, value))
        if isinstance(value, _SYMBOLIC):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        if value.layout != torch.strided:
            raise _UnknownError
        shape, strides = (tuple(map(self._number, sizes)) for sizes in (value.shape, value.stride()))
        looks = (shape, strides, value.dtype, value.device)
        if looks not in self._tensors:
            self._tensors[looks] = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        self._seen[id(value)] = self._tensors[looks]
        return self._tensors[looks]

    def _number(self, size: Any) -> Any:
        if not isinstance(size, _SYMBOLIC):
            return size
        expr = size.node.expr
        if expr not in self._evaluated:
            number = _resolved(expr, self._shapes).xreplace(self._numbers)
            self._evaluated[expr] = None if number.free_symbols else number
        number = self._evaluated[expr]
        if number is None:
            raise _UnknownError
        return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(size)](number)


def _is_checked(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator) or ops.is_per_rank(node.target) or ops.sets_mode(node):
        return False
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        return False
    return ops.value(node) is not ops.MISSING and ops.value(node) is not None


def _shapes(value: Any) -> tuple[Any, ...]:
    """Shapes of tensors and whole numbers; everything else is not compared."""
    leaves = tree_leaves(value)
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf if type(leaf) is int else None for leaf in leaves
    )


def _shown(shapes: tuple[Any, ...]) -> str:
    return " and ".join(map(str, shapes)) or "nothing"
