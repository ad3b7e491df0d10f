"""How the calls of a graph are written in a program: operators between operands, methods, functions of torch."""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.graph import magic_methods
from torch.fx.node import _get_qualified_name

from fxrewrite import ops
from fxrewrite.pattern.text import literal_text

_OF_ATEN = {
    "remainder": "mod",
    "bitwise_and": "and_",
    "bitwise_or": "or_",
    "bitwise_xor": "xor",
    "bitwise_not": "invert",
    "__and__": "and_",
    "__or__": "or_",
    "__xor__": "xor",
}
"""What `operator` calls the same operation."""
_OVERLOADS = ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar")
"""Overloads that a sign calls, of a tensor and a tensor or a number."""
_METHODS = ("transpose", "permute", "unsqueeze", "squeeze", "reshape", "flatten", "masked_fill")
"""What is a function of torch too, and is rather written as a method."""


Names: TypeAlias = Mapping[fx.Node, str]
"""Expressions of the values that a program reads: a name, or the call itself."""


def call_text(node: fx.Node, names: Names, modules: dict[str, None]) -> str:
    """Returns the call of a node as Python source; adds what it needs to `modules`, see `_imports`."""
    for value in (*node.args, *node.kwargs.values()):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            modules[f"{type(value).__module__}:{type(value).__name__}"] = None
    with_sign = None if node.kwargs else _with_a_sign(node, names)
    if with_sign is not None:
        return _plain(with_sign)
    args = [text_of(argument, names) for argument in node.args]
    named = [f"{name}={text_of(value, names)}" for name, value in node.kwargs.items()]
    method = node.target if isinstance(node.target, str) else _method(node)
    if method:
        return _plain(f"({args[0]}).{method}({', '.join([*args[1:], *named])})")
    return _plain(f"{_function_text(node, modules)}({', '.join([*args, *named])})")


def _plain(expression: str) -> str:
    """Returns the expression without the parentheses that Python does not need: all operands are written in some."""
    try:
        return ast.unparse(ast.parse(expression, mode="eval"))
    except SyntaxError:  # an argument has no text in Python, as a function has none
        return expression


def is_item(node: fx.Node, names: Names) -> bool:
    """Whether it is an item of a list or tuple that has a name, which is as short as a name."""
    of = node.args[0] if node.target is operator.getitem else None
    return isinstance(of, fx.Node) and names[of].isidentifier() and isinstance(ops.value(of), (list, tuple))


def _with_a_sign(node: fx.Node, names: Names) -> str | None:
    """Returns what is written as `x + y`, `-x` or `x[0]`; None if it is not."""
    name, args = _operator_name(node), node.args
    if name == "getitem" and isinstance(args[0], fx.Node):
        return f"({names[args[0]]})[{_index_text(args[1], names)}]"
    form = magic_methods.get(name, "")
    are_operands = all(isinstance(arg, (fx.Node, bool, int, float)) for arg in args)
    if not are_operands or not args or form.count("{}") != len(args):
        return None
    return form.format(*(f"({text_of(arg, names)})" for arg in args))


def _operator_name(node: fx.Node) -> str:
    """What `operator` calls it; empty if it has no such function, or another overload would be called."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        is_plain = target.namespace == "aten" and target._overloadname in _OVERLOADS
        is_of_tensor = bool(node.args) and isinstance(node.args[0], fx.Node)
        name = target._schema.name.partition("::")[2] if is_plain and is_of_tensor else ""
        return _OF_ATEN.get(name, "" if name.endswith("_") else name)
    is_of_operator = getattr(target, "__module__", "") in ("_operator", "operator")
    return getattr(target, "__name__", "") if is_of_operator else ""


def _index_text(index: Any, names: Names) -> str:
    if isinstance(index, tuple) and index:
        return ", ".join(_index_text(item, names) for item in index) + "," * (len(index) == 1)
    if isinstance(index, slice):
        ends = ["" if end is None else text_of(end, names) for end in (index.start, index.stop, index.step)]
        return ":".join(ends if ends[2] else ends[:2])
    return text_of(index, names)


def _method(node: fx.Node) -> str:
    """The generated method of tensors that calls an overload of ATen; empty if a function is rather called."""
    name = _name_of_tensors(node)
    schema_arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    is_method = bool(name) and name in torch._C.TensorBase.__dict__ and name not in torch.Tensor.__dict__
    is_preferred = name in _METHODS or not _is_function(name)
    first = node.args[0] if node.args else None
    is_of_self = bool(schema_arguments) and schema_arguments[0].name == "self" and isinstance(first, fx.Node)
    return name if is_method and is_preferred and is_of_self else ""


def _function_text(node: fx.Node, modules: dict[str, None]) -> str:
    name = _name_of_tensors(node)
    if name and _is_function(name):
        return f"torch.{name}"
    if name and _is_functional(name):
        return f"torch.nn.functional.{name}"
    return _target_text(node.target, modules)


def _name_of_tensors(node: fx.Node) -> str:
    """The name of an overload of ATen that is called with a tensor; empty for all else."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    if target._schema.name.endswith("_") or "self" in node.kwargs or "out" in node.kwargs:
        return ""
    first = node.args[0] if node.args else None
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    return target._schema.name.partition("::")[2] if isinstance(first, fx.Node) else ""


def _is_function(name: str) -> bool:
    """Whether torch has a function of that name which is generated from the schemas of ATen."""
    generated = getattr(torch._C._VariableFunctions, name, None)  # pyright: ignore[reportAttributeAccessIssue]
    return generated is not None and getattr(torch, name, None) == generated


def _is_functional(name: str) -> bool:
    generated = getattr(torch._C._nn, name, None)  # pyright: ignore[reportAttributeAccessIssue]
    return generated is not None and getattr(torch.nn.functional, name, None) is generated


def _target_text(target: Any, modules: dict[str, None]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = _get_qualified_name(target).replace("_operator.", "operator.", 1)
    module = getattr(target, "__module__", None) or ""
    module = "operator" if module == "_operator" else module
    last = name.rpartition(".")[2]
    if name == f"torch._C._nn.{last}" and _is_functional(last):
        return f"torch.nn.functional.{last}"
    if name.startswith("torch.") or not module:
        return name
    if ops.is_virtual(target) or module == "__main__":  # by its own name, which a package may export for the module
        modules[f"{module}:{target.__name__}"] = None
        return target.__name__
    modules[module] = None
    return name


def text_of(value: Any, names: Names) -> str:
    """Returns a value as Python source; nodes by name."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items: Sequence[Any] = value
        joined = ", ".join(text_of(item, names) for item in items)
        return f"[{joined}]" if isinstance(value, list) else f"({joined}{',' * (len(items) == 1)})"
    if isinstance(value, slice):
        return f"slice({text_of(value.start, names)}, {text_of(value.stop, names)}, {text_of(value.step, names)})"
    return literal_text(value)
