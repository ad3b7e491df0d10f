"""Pointwise computation on rows, as a line of text that an operator takes as an argument.

    silu(v0); mul(v2, v1)                                  silu(v0) * v1
    part(v0, 0, 8, 1); part(v0, 8, 16, 1); mul(v1, v2)     the product of the halves of v0

v0 and so on are the operands, then the result of each step; the last one is the result. A step is a pointwise operator
of ATen by its name, a cast, or a range of columns of a value. Gradients are those of autograd.

>>> import torch
>>> gate, up = torch.rand(2, 3, 4)
>>> torch.equal(run_steps("silu(v0); mul(v2, v1)", [gate, up]), torch.nn.functional.silu(gate) * up)
True
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import fx

from fxrewrite.ops import bind, dtype_name, fake_value, has_trait, is_random, key, value
from rules.layouts import LAYOUTS
from rules.layouts.pointwise import broadcast

_PART, _CAST = "part", "to"
_OWN: dict[str, Callable[..., torch.Tensor]] = {
    _PART: lambda x, *at: x[..., slice(*at)],
    _CAST: lambda x, dtype: x.to(getattr(torch, dtype)),
}
"""Steps that are not called as the operator of ATen of that name."""


@dataclass(frozen=True, slots=True)
class _Value:
    """v<index>"""

    index: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A call by name; values among its arguments are those of steps before it."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        def given(arg: Any) -> Any:
            return values[arg.index] if isinstance(arg, _Value) else arg

        function = _OWN.get(self.name) or getattr(torch.ops.aten, self.name)
        return function(*map(given, self.args), **{name: given(arg) for name, arg in self.kwargs.items()})

    @property
    def reads(self) -> list[int]:
        """The values that it reads, by index."""
        return [arg.index for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, _Value)]


def run_steps(steps: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the result of the last step, or without steps the last operand."""
    values = list(operands)
    for step in _parsed(steps):
        values.append(step.run(values))
    return values[-1]


def dtype_after(steps: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the result of steps on one operand of `dtype`."""
    dtypes = [dtype]
    for step in _parsed(steps):
        read = [dtypes[index] for index in step.reads]
        dtypes.append(getattr(torch, step.args[1]) if step.name == _CAST else reduce(torch.promote_types, read))
    return dtypes[-1]


def without_last_cast(steps: str) -> tuple[str, torch.dtype | None]:
    """Returns the steps on one operand without a cast at their end, and its dtype, or None.

    Who reads the result can cast what it reads, without the result in memory.

    >>> without_last_cast("tanh(v0); to(v1, 'float32')")
    ('tanh(v0)', torch.float32)
    """
    parsed = _parsed(steps)
    if not parsed or parsed[-1].name != _CAST or parsed[-1].reads != [len(parsed) - 1]:
        return steps, None
    return steps.rpartition(";")[0], dtype_after(steps, torch.float32)


def step_of(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The node as a step that reads values of these names; `why_no_step` is empty for it."""
    if key(node) == _ITEM or has_trait(node, "slice"):
        read, at = _part_of(node)
        return f"{_PART}({names[read]}, {at.start}, {at.stop}, {at.step})"
    if key(node) == _TO:
        return f"{_CAST}({names[node.all_input_nodes[0]]}, {dtype_name(fake_value(node).dtype)!r})"

    def written(arg: Any) -> str:
        return names[arg] if isinstance(arg, fx.Node) else repr(arg)

    arguments = [*map(written, node.args), *(f"{name}={written(arg)}" for name, arg in node.kwargs.items())]
    return f"{key(node).partition('::')[2]}({', '.join(arguments)})"


_ITEM, _TO = "operator.getitem", "aten::to"


def why_no_step(node: fx.Node) -> str:
    """Says why a call is not a step; empty if it is one. Of a node with several results, each item is a step."""
    name = key(node)
    if name == _ITEM:
        made = node.all_input_nodes[0]
        return _why_not_columns(made) if has_trait(made, "split") else f"%{made.name}, {key(made)}, is not a step"
    if has_trait(node, "slice"):
        return _why_not_columns(node)
    if name == _TO:
        before, after = fake_value(node.all_input_nodes[0]), fake_value(node)
        is_cast = after.is_floating_point() and before.is_floating_point() and after.device == before.device
        return "" if is_cast else f"%{node.name}, {name}, is not a cast between floating-point dtypes on one device"
    rule = LAYOUTS.get(name)
    if rule is None or rule.index_map is not broadcast or is_random(node):
        return f"%{node.name}, {name}, is not a pointwise operator"
    for argument, what in bind(node).items():
        if not _is_known(what, node):
            return f"%{node.name}, {name}, has {argument}={what}"
    read = [fake_value(operand).dtype for operand in node.all_input_nodes]
    made = fake_value(node).dtype
    return "" if made == reduce(torch.promote_types, read) else f"%{node.name}, {name}, gives {dtype_name(made)}"


def _is_known(argument: Any, node: fx.Node) -> bool:
    """Whether a step can have the argument: a value with the columns of the result, or a literal of Python."""
    if isinstance(argument, fx.Node):
        return _width(argument) == _width(node)
    return isinstance(argument, (int, str, type(None))) or (isinstance(argument, float) and math.isfinite(argument))


def _width(node: fx.Node) -> torch.Size | None:
    """Returns the last dimension of a tensor; None for a number."""
    made = value(node)
    return made.shape[-1:] if isinstance(made, torch.Tensor) else None


def keeps_columns(node: fx.Node) -> bool:
    """Whether the last dimension, whose size is a number, is the same before and after a call."""
    before, after = (fake_value(n).shape[-1:] for n in (node.all_input_nodes[0], node))
    return before == after and all(isinstance(size, int) for size in after)


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


@cache
def _parsed(steps: str) -> list[_Step]:
    calls: list[Any] = [statement.value for statement in ast.parse(steps).body if isinstance(statement, ast.Expr)]
    return [
        _Step(
            call.func.id,
            tuple(map(_argument, call.args)),
            {keyword.arg: _argument(keyword.value) for keyword in call.keywords},
        )
        for call in calls
    ]


def _argument(written: ast.expr) -> Any:
    return _Value(int(written.id[1:])) if isinstance(written, ast.Name) else ast.literal_eval(written)
