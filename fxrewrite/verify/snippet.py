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

_SEEDED_RUN = """\
def outcome(function):
    torch.manual_seed(0)
    return function(*inputs())
"""
_RAISING_RUN = """\
def outcome(function):
    try:
        return function(*inputs())
    except Exception as error:
        return error
"""
_GRADIENTS = "fxrewrite.verify:random_gradients"
"""What a program calls that shows gradients."""
_WIDTH = 120
"""Longest expression that is written where it is read."""
_WIDTH_OF_RETURN = 200
"""Longest line of a function that only returns something: a program of few lines is read first."""


def snippet(
    title: str,
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[tuple[str, InputSpec]],
    difference: Difference,
    imports: Sequence[str] = (),
    program: str = "",
) -> str:
    """Returns Python source that sets `expected` and `found` to the results or gradients, or to the error.

    With `program`, "module:name", that function runs the graphs, given one and the list of inputs.
    If the rewrite itself failed there is no `found`. If a graph calls an operator of a library, the program imports
    `imports`, the modules that may define it.
    """
    graphs = {"original": before}
    if difference.kind != "invalid":  # else there is no rewritten graph to run
        graphs["rewritten"] = after
    nodes = [node for gm in graphs.values() for node in gm.graph.nodes]
    modules: dict[str, None] = {"torch": None}
    given = [str(node.target) for node in before.graph.find_nodes(op="placeholder")]
    functions = [_function(name, gm, modules, given) for name, gm in graphs.items()]
    called = [value for node in nodes for value in (node.target, *node.args, *node.kwargs.values())]
    if any(map(ops.is_of_a_library, called)):
        modules.update(dict.fromkeys(module for module in imports if module not in ("", "__main__")))
    tensors = [_tensor_text(spec.tensor()) for _, spec in inputs]
    joined = f"def inputs(): return [{', '.join(tensors)}]"
    if len(joined) > _WIDTH_OF_RETURN:
        joined = "def inputs(): return [\n    " + ",\n    ".join(tensors) + "]"
    run = ""
    if difference.kind in ("raises", "invalid"):
        run = _RAISING_RUN
    elif any(map(ops.is_random, nodes)):
        run = _SEEDED_RUN
    calls = [f"outcome({name})" if run else f"{name}(*inputs())" for name in graphs]
    if program:
        runner = program.partition(":")[2]
        modules[program] = None
        run = run.replace("function(*inputs())", f"{runner}(function, inputs())")
        calls = calls if run else [f"{runner}({name}, inputs())" for name in graphs]
    if difference.kind == "gradient":
        modules[_GRADIENTS], run = None, ""
        given_runner = f", {program.partition(':')[2]}" if program else ""
        calls = [f"{_GRADIENTS.partition(':')[2]}({name}, inputs(){given_runner})" for name in graphs]
    shown = ["expected", "found"][: len(calls)]
    results = zip(graphs, shown, calls, strict=True)
    prints = [f'print("{name + ":":10}", {value} := {call})' for name, value, call in results]
    lines = [_imports(modules), joined, *functions, *run.splitlines()]
    comment = [f"# {title}", *(f"# {line}" for line in str(difference).splitlines())]
    return "\n".join([*comment, *lines, *prints]) + "\n"


def _function(name: str, gm: fx.GraphModule, modules: dict[str, None], given: Sequence[str]) -> str:
    """Returns the graph as a function; values that are read several times are named v0, v1 ... in order.

    `given` are its parameters, also those whose entries the module holds.
    """
    numbers = itertools.count()
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    unread = {node for node in calls if not node.users and ops.is_pure(node)}
    ordered = [node for node in calls if not ops.is_pure(node)]  # one that draws may be computed at any time
    is_any_order = not ordered or (len(ordered) == 1 and not ops.mutates(ordered[0]))
    returned = ""
    for node in gm.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and node.target in given):
            names[node] = str(node.target)
        elif node in unread:
            continue
        elif node.op == "get_attr":  # what a rule computed once
            names[node] = f"v{next(numbers)}"
            lines.append(f"    {names[node]} = {_tensor_text(ops.held(gm, node))}")
        elif node.op == "output":
            returned = f"return {_text(node.args[0], names)}"
        else:
            text = _call_text(node, names, modules)
            width = _WIDTH_OF_RETURN if any(user.op == "output" for user in node.users) else _WIDTH
            if is_any_order and len(node.users) == 1 and len(text) <= width:
                names[node] = text
            else:
                names[node] = f"v{next(numbers)}"
                lines.append(f"    {names[node]} = {text}")
    header = f"def {name}({', '.join(given)}):"
    if not lines and len(header) + len(returned) <= _WIDTH_OF_RETURN:
        return f"{header} {returned}"
    return "\n".join([header, *lines, f"    {returned}"])


def _call_text(node: fx.Node, names: Mapping[fx.Node, str], modules: dict[str, None]) -> str:
    for value in (*node.args, *node.kwargs.values()):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            modules[f"{type(value).__module__}:{type(value).__name__}"] = None
    args = [_text(argument, names) for argument in node.args]
    args_and_names = [*args, *(f"{name}={_text(value, names)}" for name, value in node.kwargs.items())]
    if isinstance(node.target, str):
        return f"{args[0]}.{node.target}({', '.join(args_and_names[1:])})"
    return f"{_target_text(node.target, modules)}({', '.join(args_and_names)})"


def _target_text(target: Any, modules: dict[str, None]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = _get_qualified_name(target).removeprefix("_")  # `_operator.mul`, as Python calls `operator.mul`
    module = (getattr(target, "__module__", None) or "").removeprefix("_")
    if name.startswith("torch.") or not module:
        return name
    if ops.is_virtual(target):  # by its own name, which its package may export in place of the module
        modules[f"{module}:{target.__name__}"] = None
        return target.__name__
    modules[module] = None
    return name


def _imports(modules: Iterable[str]) -> str:
    """Returns one line for all entries "module", and one for each of the modules in "module:name"."""
    names = defaultdict[str, list[str]](list)
    for module, _, name in (entry.partition(":") for entry in modules):
        names[module] += [name] if name else []
    plain = [module for module, of in sorted(names.items()) if not of]
    lines = [f"import {', '.join(plain)}"] if plain else []
    return "\n".join(lines + [f"from {m} import {', '.join(sorted(of))}" for m, of in sorted(names.items()) if of])


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
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops.{value}"
    return repr(value)


def _tensor_text(tensor: torch.Tensor) -> str:
    """Returns an expression that makes this tensor, including its strides."""
    if not tensor.numel():
        return f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    if tensor.storage_offset():
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = _text(tensor.as_strided((count,), (1,), 0).tolist(), {})
        place = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
        return f"torch.tensor({memory}, dtype={tensor.dtype}).as_strided({place})"
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
