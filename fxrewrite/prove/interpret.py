"""What graphs compute: every entry of a result as an expression over entries of the inputs.

Views, permutations, slices, concatenations and broadcasts change the index; arithmetic acts on entries; a product of
matrices is a sum over an index; norms, softmax and attention are what their documentation says. An operator that is in
no table of `fxrewrite.prove.meanings` is decomposed by torch's own decompositions, or is traced if it is a Python
function, or is an uninterpreted function of all that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from sympy import Integer
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.prove.arithmetic import SymbolicArithmetic, is_integer
from fxrewrite.prove.call import SymbolicCall
from fxrewrite.prove.meanings import uninterpreted
from fxrewrite.prove.meanings.entrywise import ENTRYWISE
from fxrewrite.prove.meanings.filling import FILLING, convert
from fxrewrite.prove.meanings.products import PRODUCTS
from fxrewrite.prove.meanings.sums import SUMS
from fxrewrite.prove.meanings.views import VIEWS, reshape
from fxrewrite.prove.symbolic import decomposed
from fxrewrite.prove.value import SymbolicTensor, UnknownError

_OF_ANY_DTYPE = {**VIEWS, **FILLING}
_OF_REALS = {**ENTRYWISE, **SUMS, **PRODUCTS}
_POINTWISE = frozenset(f"quantized_decomposed::{name}_per_tensor" for name in ("quantize", "dequantize"))
"""Operators that act entry by entry, without torch's tag for that."""


def interpret(nodes: Iterable[fx.Node], inputs: Sequence[Any], arithmetic: SymbolicArithmetic) -> Any:
    """Returns what a graph gives, with values for its placeholders.

    Raises:
        UnknownError: an operator writes, draws random numbers, or has a shape that data decide.
    """
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return map_arg(node.args[0], values.__getitem__)
        elif node.op == "get_attr":
            raise UnknownError(f"%{node.name} is an attribute of the graph")
        else:
            values[node] = _result(node, values, arithmetic)
    return None


def _result(node: fx.Node, values: Mapping[fx.Node, Any], arithmetic: SymbolicArithmetic) -> Any:
    """Returns the value of one call."""
    result = ops.value(node)
    if isinstance(result, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return result
    key = ops.key(node)
    if ops.mutates(node) or ops.is_virtual(key):
        raise UnknownError(f"{key} writes, or is only a placeholder")
    try:
        bound = ops.bind(node)
    except TypeError as error:
        raise UnknownError(f"{key} cannot be bound: {error}") from error
    call = SymbolicCall(
        arithmetic, key, {name: _argument(value, values) for name, value in bound.items()}, result, node
    )
    meant = _meaning(call)
    if meant is not NotImplemented:
        return meant
    if ops.may_draw(node.target) and ops.is_random(node):
        raise UnknownError(f"{key} draws random numbers")
    if arithmetic.is_real or not isinstance(node.target, torch._ops.OpOverload):
        body = decomposed(node)
        if body is not None:
            return interpret(body.graph.nodes, [values[operand] for operand in body.operands], arithmetic)
    return uninterpreted.of_operands(call)


def _argument(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return [_argument(item, values) for item in value]
    return value


def _meaning(call: SymbolicCall) -> Any:
    """Returns what the tables say of a call; NotImplemented if they do not have it."""
    if call.key == "torch.Tensor.type":
        return convert(call)
    if call.name in uninterpreted.LOSSES and call.arithmetic.is_real:
        return uninterpreted.of_losses(call)
    if call.key in ("operator.getitem", "aten::getitem"):
        items, at = call.args.values()
        return items[at] if isinstance(items, (list, tuple)) else NotImplemented
    if not call.key.startswith("aten::"):
        is_tensor = isinstance(call.result, torch.Tensor)
        return uninterpreted.of_entries(call) if is_tensor and _is_pointwise(call) else NotImplemented
    if call.name in _OF_ANY_DTYPE:
        return _OF_ANY_DTYPE[call.name](call)
    if ops.has_trait(call.key, "reshape", "squeeze"):
        is_of_bits = call.dtype != call.first.dtype  # view(dtype) reads the same bits as other numbers
        return uninterpreted.of_operands(call) if is_of_bits else reshape(call)
    if not isinstance(call.result, torch.Tensor):
        return NotImplemented
    if call.name in _OF_REALS and _is_of_reals(call):
        return _OF_REALS[call.name](call)
    return uninterpreted.of_entries(call) if _is_pointwise(call) else NotImplemented


def _is_of_reals(call: SymbolicCall) -> bool:
    """Whether the result is of real numbers and all operands are; a tensor of one integer that is known is a number."""

    def is_number(x: SymbolicTensor) -> bool:
        return all(size == 1 for size in x.shape) and is_integer(x.at([Integer(0)] * len(x.shape)))

    is_real = call.arithmetic.is_real and call.dtype.is_floating_point
    return is_real and all(x.dtype.is_floating_point or is_number(x) for x in call.operands)


def _is_pointwise(call: SymbolicCall) -> bool:
    target = call.node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or call.key in _POINTWISE
