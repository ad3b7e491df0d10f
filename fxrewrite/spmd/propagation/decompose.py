"""An operator without a layout rule is replaced by the operators that it is made of, where all of them have rules.

    trapezoid(y)   ->   div(sum(add(slice(y), slice(y)), [-1]), 2)

It is one that torch itself decomposes before autograd sees it (CompositeImplicitAutograd), so that the parts are what
would run anyway. Numerics: bitwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxrewrite.capture.decomposed import at_most, run_decomposed
from fxrewrite.graph.edit import Edit
from fxrewrite.ops import is_random, tensors_of, value
from fxrewrite.report import Report
from fxrewrite.spmd.layouts.rule import LayoutRules
from fxrewrite.spmd.operators.shared_nodes import size_nodes

aten = torch.ops.aten
_MOST_PARTS = 100
"""Operators that a call may consist of. A recurrent network is thousands, several for each step in time."""

_DEEPEST = 5
"""How often parts are decomposed in turn."""
_RESHAPES = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
"""A chunk need not be contiguous, as the whole value was."""


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
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        operands = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))

        def called(*values: Any) -> Any:
            given = dict(zip(operands, values, strict=True))
            filled = [given[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return run_decomposed(target, args, kwargs)

        body = self._body(called, [value(operand) for operand in operands])
        if body is None:
            return False
        results: Any = body.graph.output_node().args[0]
        if not isinstance(results, fx.Node) and not all(_is_item(user, results) for user in node.users):
            return False
        made: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
        for part in body.graph.nodes:
            if isinstance(value(part), torch.SymInt):
                made[part] = size_nodes(edit)(value(part))
            elif part.op == "call_function":
                args, kwargs = map_arg((part.args, dict(part.kwargs)), made.__getitem__)  # pyright: ignore[reportArgumentType]
                made[part] = edit.call(part.target, args, kwargs, before=node, like=node, rule=self.name)
        if isinstance(results, fx.Node):
            edit.replace_uses(node, made[results])
        else:
            for user in list(node.users):
                edit.replace_uses(user, made[results[user.args[1]]])
                edit.erase(user)
        edit.erase(node)
        return True

    def _body(self, called: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule | None:
        """The parts of a call, of which none is composite; None where one has no rule, or there are too many."""
        try:
            for _ in range(_DEEPEST):
                with at_most(_MOST_PARTS):
                    body = make_fx(called, tracing_mode="fake", pre_dispatch=True)(*values)
                for part in body.graph.nodes:
                    part.target = _RESHAPES.get(part.target, part.target)
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
