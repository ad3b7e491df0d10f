"""A counterexample as a Python program: inputs, both graphs as straight torch code, both results."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from fxrewrite import ops
from fxrewrite.verify.compare import Difference
from fxrewrite.verify.tensors import InputSpec

__all__ = ["snippet"]

_PLAIN_RUN = """\
def outcome(function):
    torch.manual_seed(0)
    try:
        return function(*inputs())
    except Exception as error:
        return error
"""
_GRADIENT_RUN = """\
def outcome(function):
    torch.manual_seed(0)
    given = [x.requires_grad_() if x.is_floating_point() else x for x in inputs()]
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for result in function(*given):
        if result.is_floating_point():
            total = total + (result * torch.randn(result.shape, generator=generator, dtype=torch.float64)).sum()
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return [x.grad if x.grad is not None else torch.zeros_like(x) for x in given if x.is_floating_point()]
"""
_PRINTS = """\
expected, found = outcome(original), outcome(rewritten)
print("original: ", expected)
print("rewritten:", found)
"""
_PRINT = """\
expected = outcome(original)
print("original: ", expected)
"""


def snippet(
    title: str,
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[tuple[str, InputSpec]],
    difference: Difference,
    imports: Sequence[str] = (),
    program: str = "",
) -> str:
    """Returns Python source that sets `expected` and `found` to lists of results or gradients, or to the error.

    With `program`, "module:name", that function runs the graphs, given one and the list of inputs.
    If the rewrite itself failed there is no `found`. If a graph calls an operator of a library, the program imports
    `imports`, the modules that may define it.
    """
    is_same = difference.kind == "invalid"  # there is no rewritten graph to run
    names = [_identifier(name) for name, _ in inputs]
    made = [f"    {name} = {_tensor_text(spec.tensor())}" for name, (_, spec) in zip(names, inputs, strict=True)]
    modules: dict[str, None] = {"torch": None}
    functions = [_function("original", before, modules)]
    functions += [] if is_same else [_function("rewritten", after, modules)]
    if any(map(ops.is_of_a_library, (node.target for gm in (before, after) for node in gm.graph.nodes))):
        modules.update(dict.fromkeys(module for module in imports if module not in ("", "__main__")))
    ran = _GRADIENT_RUN if difference.kind == "gradient" else _PLAIN_RUN
    if program:
        called = program.partition(":")[2]
        modules[program] = None
        ran = ran.replace("function(*inputs())", f"{called}(function, inputs())")
        ran = ran.replace("function(*given)", f"{called}(function, given)")
    given = "\n".join([*made, f"    return [{', '.join(names)}]"])
    return "\n\n".join(
        [
            "\n".join([f"# {title}", *(f"# {line}" for line in str(difference).splitlines())]),
            _imports(modules),
            "\n".join(["", f"def inputs():\n{given}\n"]),
            "\n\n\n".join(functions) + "\n",
            ran,
            _PRINT if is_same else _PRINTS,
        ]
    )


def _function(name: str, gm: fx.GraphModule, modules: dict[str, None]) -> str:
    """Returns the graph as a function; values are named v0, v1 ... in order."""
    numbers = itertools.count()
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "output":
            lines.append(f"    return {_text(node.args[0], names)}")
        else:
            names[node] = f"v{next(numbers)}"
            lines.append(f"    {names[node]} = {_call_text(node, names, modules)}")
    parameters = ", ".join(names[node] for node in gm.graph.find_nodes(op="placeholder"))
    return "\n".join([f"def {name}({parameters}):", *lines])


def _call_text(node: fx.Node, names: Mapping[fx.Node, str], modules: dict[str, None]) -> str:
    for value in (*node.args, *node.kwargs.values()):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            modules[f"{type(value).__module__}:{type(value).__name__}"] = None
    args = [_text(argument, names) for argument in node.args]
    args_and_names = [*args, *(f"{name}={_text(value, names)}" for name, value in node.kwargs.items())]
    if node.op == "get_attr":
        raise AssertionError("samples have inputs, no attributes")
    if isinstance(node.target, str):
        return f"{args[0]}.{node.target}({', '.join(args_and_names[1:])})"
    return f"{_target_text(node.target, modules)}({', '.join(args_and_names)})"


def _target_text(target: Any, modules: dict[str, None]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = _get_qualified_name(target)
    module = getattr(target, "__module__", None) or ""
    if name.startswith("torch.") or not module:
        return name
    if ops.is_virtual(target):  # by its own name, which its package may export in place of the module
        modules[f"{module}:{target.__name__}"] = None
        return target.__name__
    modules[module] = None
    return name


def _imports(modules: Iterable[str]) -> str:
    """Returns one line for each of "module" and of the modules in "module:name"."""
    names = defaultdict[str, list[str]](list)
    for module, _, name in (entry.partition(":") for entry in modules):
        names[module] += [name] if name else []
    lines = (f"from {m} import {', '.join(sorted(of))}" if of else f"import {m}" for m, of in sorted(names.items()))
    return "\n".join(lines)


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    """Returns a value as Python source; nodes by name."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items = ", ".join(_text(item, names) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, slice):
        return f"slice({_text(value.start, names)}, {_text(value.stop, names)}, {_text(value.step, names)})"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)


def _tensor_text(tensor: torch.Tensor) -> str:
    """Returns an expression that makes this tensor, including its strides."""
    if not tensor.numel():
        return f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    base, is_expanded = tensor, False
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            base, is_expanded = base.narrow(dim, 0, 1), True
    text = f"torch.tensor({_text(base.tolist(), {})}, dtype={tensor.dtype})"
    if is_expanded:
        return f"{text}.expand({list(tensor.shape)})"
    if not tensor.is_contiguous():
        return f"torch.empty_strided({list(tensor.shape)}, {list(tensor.stride())}, dtype={tensor.dtype}).copy_({text})"
    return text


def _identifier(name: str) -> str:
    return name.replace("@", "_").replace(".", "_")
