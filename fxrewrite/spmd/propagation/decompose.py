"""A call is replaced by the operators that it is made of, where these run on shards and the call does not.

    trapezoid(y)   ->   div(sum(add(slice(y), slice(y)), [-1]), 2)             it has no layout rule; its parts have

Such an operator is one that torch itself decomposes before autograd sees it (CompositeImplicitAutograd), so that the
parts are what would run anyway. Numerics: bitwise.

    var(x, [0])    ->   m = sum(x, [0], True) / n; sum((x - m)^2, [0]) / (n - 1)    x sharded on dimension 0

The parts of such an operator are what its layout rule says (`LayoutRule.parts`), and propagation writes them where an
operand is sharded on a dimension that the operator needs whole. Numerics: reassociates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxrewrite.capture.decomposed import at_most, run_decomposed
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import is_same_size
from fxrewrite.ops import bind, is_random, key, tensors_of, value
from fxrewrite.report import Report
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules
from fxrewrite.spmd.operators.shared_nodes import size_nodes
from fxrewrite.spmd.operators.traced import operators_of

_MOST_PARTS = 100
"""Operators that a call may consist of. A recurrent network is thousands, several for each step in time."""

_DEEPEST = 5
"""How often parts are decomposed in turn."""


class DecomposeUnknown:
    """The step that decomposes what has no layout rule; what cannot be decomposed is gathered later."""

    def __init__(self, name: str, layouts: LayoutRules) -> None:
        self.name, self.layouts = name, layouts

    def run(self, edit: Edit, context: object, report: Report) -> int:
        return sum(self._decompose(edit, node) for node in edit.nodes() if self._is_composite(node))

    def text(self) -> str:
        return "an operator without a layout rule, of parts that have rules, is these parts"

    def _is_composite(self, node: fx.Node) -> bool:
        """Whether no layout rule says how the node runs in chunks, and torch can say what it is made of."""
        target = node.target
        return (
            isinstance(target, OpOverload)
            and not target._schema.is_mutable
            and target._can_decompose()
            and bool(tensors_of(node))  # sizes and other numbers are what they are
            and not is_random(node)
            and self.layouts.of(node)[2] is None
        )

    def _decompose(self, edit: Edit, node: fx.Node) -> bool:
        """Replaces the call by its parts, and says whether it could."""
        target = cast(OpOverload, node.target)
        operands, called = _of_operands(
            lambda *args, **kwargs: run_decomposed(target, args, kwargs), node.args, node.kwargs
        )
        body = self._body(called, [value(operand) for operand in operands])
        return body is not None and _replace(edit, node, body, operands, self.name)

    def _body(self, called: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule | None:
        """The parts of a call, of which none is composite; None where one has no rule, or there are too many."""
        try:
            for _ in range(_DEEPEST):
                with at_most(_MOST_PARTS):
                    body = operators_of(called, values, pre_dispatch=True)
                composite = set(filter(self._is_composite, body.graph.nodes))
                if not composite:
                    return body if all(map(self._is_known, body.graph.nodes)) else None
                called = _InParts(body, composite).run
        except Exception:  # noqa: BLE001  # for whatever reason, the call stays, and the report says that it is gathered
            pass
        return None

    def _is_known(self, part: fx.Node) -> bool:
        """Whether a part is a size, or something that has a layout rule."""
        if part.op in ("placeholder", "output") or isinstance(value(part), torch.SymInt):
            return True
        if part.op != "call_function":
            return False
        return part.target is operator.getitem or self.layouts.of(part)[2] is not None


def write_parts(edit: Edit, node: fx.Node, rule: LayoutRule) -> bool:
    """Replaces a call by the parts that its layout rule says it has, and says whether the rule knows these of it.

    Raises:
        RuleDefinitionError: the rule's function raised, gave other shapes or dtypes than the call has, or parts that
            the rule would write in parts again, without end.
    """
    where = f"layout rule {rule.id}: its parts of {key(node)} at %{node.name}"
    operands, called = _of_operands(lambda **given: rule.parts[key(node)](given), (), bind(node))
    try:
        body = operators_of(called, [value(operand) for operand in operands], pre_dispatch=True)
    except _UnknownParts:
        return False
    except Exception as error:
        raise RuleDefinitionError(f"{where} raised {type(error).__name__}: {error}") from error
    again = next((key(part) for part in body.graph.nodes if part.op == "call_function" and key(part) in rule.parts), "")
    if again:
        raise RuleDefinitionError(f"{where} have {again}, which the rule writes in parts itself")
    results = pytree.tree_leaves(body.graph.output_node().args[0])
    expected, found = tensors_of(node), [value(result) for result in results if isinstance(result, fx.Node)]
    if len(expected) != len(found) or not all(map(_looks_as, found, expected)):
        looks = [" and ".join(f"{x.dtype} {list(x.shape)}" for x in of) for of in (found, expected)]
        raise RuleDefinitionError(f"{where} give {looks[0]}, and the call gives {looks[1]}")
    return _replace(edit, node, body, operands, rule.id)


class _UnknownParts(Exception):  # noqa: N818  # not an error: how a function says that it does not know
    """Ends the trace of a function that returned NotImplemented."""


def _looks_as(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.dim() == b.dim() and all(map(is_same_size, a.shape, b.shape))


def _of_operands(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[fx.Node], Callable[..., Any]]:
    """The operands among these arguments, and the function of them alone."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    operands = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))

    def called(*values: Any) -> Any:
        given = dict(zip(operands, values, strict=True))
        filled = [given[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        found = function(*args, **kwargs)
        if found is NotImplemented:
            raise _UnknownParts
        return found

    return operands, called


def _replace(edit: Edit, node: fx.Node, body: fx.GraphModule, operands: Sequence[fx.Node], by: str) -> bool:
    """Writes the operators of a body in the place of a call, unless something reads a list of its results."""
    results: Any = body.graph.output_node().args[0]
    if not isinstance(results, fx.Node) and not all(_is_item(user, results) for user in node.users):
        return False
    made: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    for part in body.graph.nodes:
        if isinstance(value(part), torch.SymInt):
            made[part] = size_nodes(edit)(value(part))
        elif part.op == "call_function":
            args, kwargs = map_arg((part.args, dict(part.kwargs)), made.__getitem__)  # pyright: ignore[reportArgumentType]
            made[part] = edit.call(part.target, args, kwargs, before=node, like=node, rule=by)
    if isinstance(results, fx.Node):
        edit.replace_uses(node, made[results])
    else:
        for user in list(node.users):
            edit.replace_uses(user, made[results[user.args[1]]])
            edit.erase(user)
    edit.erase(node)
    return True


def _is_item(user: fx.Node, results: Sequence[Any]) -> bool:
    """Whether a user of a list reads one of its values."""
    at: Any = user.args[1] if user.target is operator.getitem else None
    return isinstance(at, int) and isinstance(results[at], fx.Node)


class _InParts(fx.Interpreter):
    """Runs a graph, of which these nodes run as what they are made of."""

    def __init__(self, gm: fx.GraphModule, composite: set[fx.Node]) -> None:
        super().__init__(gm)
        self._composite = composite

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._composite:
            return super().run_node(n)
        return run_decomposed(cast(OpOverload, n.target), *self.fetch_args_kwargs_from_env(n))
