"""Pointwise computation on rows, as a line of text that an operator takes as an argument, with its gradients.

    silu(v0); mul(v2, v1)                                  silu(v0) * v1
    part(v0, 0, 8, 1); part(v0, 8, 16, 1); mul(v1, v2)     the product of the halves of v0

v0 and so on are the operands, then the result of each step; the last one is the result. A step is a pointwise operator
of the table below, a cast, or a range of columns of a value. Gradients use the same operators as autograd.
Source: PyTorch, tools/autograd/derivatives.yaml.

>>> import torch
>>> gate, up = torch.rand(2, 3, 4)
>>> values = run_steps("silu(v0); mul(v2, v1)", [gate, up])
>>> torch.equal(values[-1], torch.nn.functional.silu(gate) * up)
True
>>> of_gate, of_up = grads_of_steps("silu(v0); mul(v2, v1)", values, torch.ones(3, 4))
>>> torch.equal(of_up, values[2])
True
"""

# ruff: noqa: ARG005  # all gradients have the same signature, and most read few of the arguments

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fxrewrite.ops import bind, dtype_name, fake_value, has_trait, key, signature_of, value
from fxrewrite.torch_versions import CLAMP_PASSES_AT_BOUNDS

__all__ = ["dtype_after", "grads_of_steps", "reads_result", "run_steps", "step_of", "why_no_step", "without_last_cast"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Kind:
    """A pointwise operator.

    Attributes:
        arguments: names of the supported arguments in the schema; any other must have its default value.
        run: computes the result from the arguments.
        back: computes the gradient of each tensor argument from the result's gradient, the result and the arguments.
        num_tensors: how many of the first arguments may be tensors, of one shape; the others are numbers or strings.
    """

    arguments: tuple[str, ...]
    run: Callable[..., torch.Tensor]
    back: Callable[..., tuple[Any, ...]]
    num_tensors: int = 1


def _of_product(grad: torch.Tensor, out: torch.Tensor, a: torch.Tensor, b: Any) -> tuple[Any, ...]:
    return grad * b, grad * a if isinstance(b, torch.Tensor) else None


def _of_quotient(grad: torch.Tensor, out: torch.Tensor, a: torch.Tensor, b: Any) -> tuple[Any, ...]:
    return grad / b, -grad * out / b if isinstance(b, torch.Tensor) else None


def _of_power(grad: torch.Tensor, x: torch.Tensor, n: float) -> torch.Tensor:
    return grad * (n * x.pow(n - 1)) if n else torch.zeros_like(grad)  # 0 * x**-1 is NaN where x is 0


def _of_clamp(grad: torch.Tensor, out: torch.Tensor, x: torch.Tensor, low: Any, high: Any) -> tuple[torch.Tensor]:
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    inside = (x >= low) & (x <= high) if CLAMP_PASSES_AT_BOUNDS else (x > low) & (x < high)
    return (torch.where(inside, grad, 0),)


def _of_part(grad: torch.Tensor, out: torch.Tensor, x: torch.Tensor, *at: int) -> tuple[torch.Tensor]:
    of_x = torch.zeros_like(x)
    of_x[..., slice(*at)] = grad
    return (of_x,)


_TWO = ("self", "other")
_KINDS = {
    "aten::add": _Kind(_TWO, torch.add, lambda g, y, a, b: (g, g), 2),
    "aten::clamp": _Kind(("self", "min", "max"), torch.clamp, _of_clamp),
    "aten::div": _Kind(_TWO, torch.div, _of_quotient, 2),
    "aten::gelu": _Kind(
        ("self", "approximate"),
        lambda x, how: aten.gelu(x, approximate=how),
        lambda g, y, x, how: (aten.gelu_backward(g, x, approximate=how),),
    ),
    "aten::leaky_relu": _Kind(
        ("self", "negative_slope"),
        aten.leaky_relu,
        lambda g, y, x, slope: (aten.leaky_relu_backward(g, x, slope, False),),
    ),
    "aten::mish": _Kind(("self",), aten.mish, lambda g, y, x: (aten.mish_backward(g, x),)),
    "aten::mul": _Kind(_TWO, torch.mul, _of_product, 2),
    "aten::neg": _Kind(("self",), torch.neg, lambda g, y, x: (-g,)),
    "aten::pow": _Kind(("self", "exponent"), torch.pow, lambda g, y, x, n: (_of_power(g, x, n),)),
    "aten::relu": _Kind(("self",), torch.relu, lambda g, y, x: (aten.threshold_backward(g, y, 0),)),
    "aten::sigmoid": _Kind(("self",), torch.sigmoid, lambda g, y, x: (aten.sigmoid_backward(g, y),)),
    "aten::silu": _Kind(("self",), aten.silu, lambda g, y, x: (aten.silu_backward(g, x),)),
    "aten::softplus": _Kind(
        ("self", "beta", "threshold"),
        aten.softplus,
        lambda g, y, x, beta, threshold: (aten.softplus_backward(g, x, beta, threshold),),
    ),
    "aten::square": _Kind(("self",), torch.square, lambda g, y, x: (g * (2 * x),)),
    "aten::sub": _Kind(_TWO, torch.sub, lambda g, y, a, b: (g, -g), 2),
    "aten::tanh": _Kind(("self",), torch.tanh, lambda g, y, x: (aten.tanh_backward(g, y),)),
}
_PART, _CAST = "part", "to"
_BY_NAME = {
    **{name.partition("::")[2]: kind for name, kind in _KINDS.items()},
    _CAST: _Kind(("self",), lambda x, dtype: x.to(getattr(torch, dtype)), lambda g, y, x, dtype: (g.to(x.dtype),)),
    _PART: _Kind(("self",), lambda x, *at: x[..., slice(*at)], _of_part),
}


@dataclass(frozen=True, slots=True)
class _Value:
    """v<index>"""

    index: int


def run_steps(steps: str, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the operands, then the result of each step; the last one is the result of all steps."""
    values = list(operands)
    for kind, arguments in _parsed(steps):
        values.append(kind.run(*_filled(arguments, values)))
    return values


def grads_of_steps(steps: str, values: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Returns the gradients of the operands, given the result's gradient and the `values` that `run_steps` returned.

    Every operand must be read by a step, or be the result itself.
    """
    parsed = _parsed(steps)
    grads: list[Any] = [None] * (len(values) - 1) + [grad]
    for index in range(len(values) - 1, len(values) - 1 - len(parsed), -1):
        kind, arguments = parsed[index - len(values)]
        made = kind.back(grads.pop(), values[index], *_filled(arguments, values))
        for argument, of_argument in zip(arguments, made, strict=False):
            if isinstance(argument, _Value):
                before = grads[argument.index]
                grads[argument.index] = of_argument if before is None else before + of_argument
    return grads


def dtype_after(steps: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the result of steps on one operand of `dtype`."""
    dtypes = [dtype]
    for kind, arguments in _parsed(steps):
        read = [dtypes[argument.index] for argument in arguments if isinstance(argument, _Value)]
        is_cast = kind is _BY_NAME[_CAST]
        dtypes.append(getattr(torch, arguments[1]) if is_cast else functools.reduce(torch.promote_types, read))
    return dtypes[-1]


def without_last_cast(steps: str) -> tuple[str, torch.dtype | None]:
    """Returns the steps on one operand without a cast at their end, and its dtype, or None.

    Who reads the result can cast what it reads, without the result in memory.

    >>> without_last_cast("tanh(v0); to(v1, 'float32')")
    ('tanh(v0)', torch.float32)
    """
    parsed = _parsed(steps)
    if not parsed or parsed[-1][0] is not _BY_NAME[_CAST] or parsed[-1][1][0] != _Value(len(parsed) - 1):
        return steps, None
    return steps.rpartition(";")[0], dtype_after(steps, torch.float32)


def reads_result(steps: str) -> bool:
    """Whether `grads_of_steps` reads the entries of the result; false if the last step is a cast, or without steps."""
    parsed = _parsed(steps)
    return bool(parsed) and parsed[-1][0] is not _BY_NAME[_CAST]


def step_of(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The node as a step that reads values of these names; `why_no_step` is empty for it."""
    if key(node) == _ITEM or has_trait(node, "slice"):
        read, at = _part_of(node)
        return f"{_PART}({names[read]}, {at.start}, {at.stop}, {at.step})"
    if key(node) == _TO:
        return f"{_CAST}({names[node.all_input_nodes[0]]}, {dtype_name(fake_value(node).dtype)!r})"
    given = bind(node)
    written = (given[name] for name in _KINDS[key(node)].arguments)
    arguments = (names[argument] if isinstance(argument, fx.Node) else repr(argument) for argument in written)
    return f"{key(node).partition('::')[2]}({', '.join(arguments)})"


_ITEM, _TO = "operator.getitem", "aten::to"


def why_no_step(node: fx.Node) -> str:
    """Says why a call is not a step; empty if it is one. Of a node with several results, each item is a step."""
    name = key(node)
    if name == _ITEM:
        made = node.all_input_nodes[0]
        return _why_not_columns(made) if has_trait(made, "split") else f"%{made.name}, {key(made)}, is no step"
    if has_trait(node, "slice"):
        return _why_not_columns(node)
    if name == _TO:
        before, after = fake_value(node.all_input_nodes[0]), fake_value(node)
        is_cast = after.is_floating_point() and before.is_floating_point() and after.device == before.device
        return "" if is_cast else f"%{node.name}, {name}, is not a cast between floating-point dtypes on one device"
    kind = _KINDS.get(name)
    if kind is None:
        return f"%{node.name}, {name}, is not in the table of pointwise operators"
    signature = signature_of(node.target, node.args, node.kwargs)
    given = signature.bind(node.args, node.kwargs)
    for argument, what in given.items():
        if argument not in kind.arguments:
            is_known = what == signature.defaults.get(argument)
        elif isinstance(what, fx.Node):
            is_known = argument in kind.arguments[: kind.num_tensors] and _width(what) == _width(node)
        else:
            is_known = argument != "self" and (not isinstance(what, float) or math.isfinite(what))
        if not is_known:
            return f"%{node.name}, {name}, has {argument}={what}"
    return ""


def _width(node: fx.Node) -> torch.Size | None:
    """Returns the last dimension of a tensor; None for a number."""
    made = value(node)
    return made.shape[-1:] if isinstance(made, torch.Tensor) else None


def _why_not_columns(node: fx.Node) -> str:
    """Says why a node does not select columns of its operand; empty if it does."""
    read = fake_value(node.all_input_nodes[0])
    if bind(node)["dim"] % read.dim() != read.dim() - 1 or not isinstance(read.shape[-1], int):
        return f"%{node.name}, {key(node)}, does not select columns"
    return ""


def _part_of(node: fx.Node) -> tuple[fx.Node, slice]:
    """Returns the value whose columns the node selects, and which columns."""
    made = node.all_input_nodes[0]
    if key(node) == _ITEM:
        sizes = [part.shape[-1] for part in value(made)]
        item: Any = node.args[1]
        index = item % len(sizes)
        return made.all_input_nodes[0], slice(sum(sizes[:index]), sum(sizes[: index + 1]), 1)
    given, width = bind(node), fake_value(made).shape[-1]
    if key(node) == "aten::narrow":
        start = given["start"] % width if width else 0
        return made, slice(start, start + given["length"], 1)
    return made, slice(*slice(given["start"], given["end"], given.get("step", 1)).indices(width))


def _filled(arguments: Sequence[Any], values: Sequence[torch.Tensor]) -> list[Any]:
    return [values[argument.index] if isinstance(argument, _Value) else argument for argument in arguments]


@cache
def _parsed(steps: str) -> list[tuple[_Kind, tuple[Any, ...]]]:
    """Parses the text into the kinds of the steps and their arguments."""
    calls: list[Any] = [statement.value for statement in ast.parse(steps).body if isinstance(statement, ast.Expr)]
    return [(_BY_NAME[call.func.id], tuple(map(_argument, call.args))) for call in calls]


def _argument(written: ast.expr) -> Any:
    return _Value(int(written.id[1:])) if isinstance(written, ast.Name) else ast.literal_eval(written)
